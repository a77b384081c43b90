# SPDX-License-Identifier: Apache-2.0
"""A report's lines as rows in depth order, and what they say of the model as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from mergekit_ace.naming import layer_of, relative_depths
from mergekit_ace.report.lines import Line, matrices_of
from mergekit_ace.report.selection import kind_of, natural

Values = list[float | None]


@dataclass(frozen=True)
class Row:
    """One matrix, or one tensor that is none.

    Attributes:
        label: the tensor's name; of a stack with the matrix' number.
        layer: number of the layer in its stack; None outside of layers.
        kind: the name without numbers.
        line: of the tensor.
        matrix: what the line says of this matrix.
    """

    label: str
    layer: int | None
    kind: str
    line: Mapping[str, Any]
    matrix: Mapping[str, Any]

    @property
    def is_solved(self) -> bool:
        """Whether `ace`'s closed form was used."""
        return self.matrix["rule"] == "ace"


class Report:
    """All rows of a report.

    Args:
        lines: of all tensors, in any order, all of one merge.
    """

    def __init__(self, lines: Sequence[Line]):
        self.skipped = [line for line in lines if "skipped" in line]
        kept = [line for line in lines if "skipped" not in line]
        names = [str(line["tensor"]) for line in kept]
        depths = relative_depths(names)
        self.lines = sorted(
            kept, key=lambda line: (depths[str(line["tensor"])], natural(str(line["tensor"])))
        )

    @cached_property
    def models(self) -> list[str]:
        """The experts, in their order; one that is absent somewhere is listed all the same."""
        longest = max((line["models"] for line in self.lines), key=len, default=[])
        others = (model for line in self.lines for model in line["models"])
        return list(dict.fromkeys([*longest, *others]))

    @cached_property
    def versions(self) -> dict[str, str]:
        """Of the packages that wrote the report; the last line's, empty if it does not say."""
        return self.lines[-1].get("versions", {}) if self.lines else {}

    @cached_property
    def experts(self) -> list[str]:
        """Short names: the last part of a path, where that tells them apart."""
        short = [PurePath(model).name or model for model in self.models]
        return short if len(set(short)) == len(short) else list(self.models)

    @cached_property
    def rows(self) -> list[Row]:
        """A row per matrix, in depth order."""
        rows = []
        for line in self.lines:
            name = str(line["tensor"])
            matrices = matrices_of(line)
            for number, matrix in enumerate(matrices):
                label = name if len(matrices) == 1 else f"{name}[{number}]"
                rows.append(Row(label, layer_of(name), kind_of(name), line, matrix))
        return rows

    @cached_property
    def solved(self) -> list[Row]:
        """The matrices that `ace`'s closed form merged."""
        return [row for row in self.rows if row.is_solved]

    @cached_property
    def looked_at(self) -> list[Line]:
        """Lines that `inspect` wrote; a merge's own report knows less."""
        return [line for line in self.lines if "cosine" in line]

    def spread(self, line: Mapping[str, Any], values: Sequence[Any]) -> list[Any]:
        """Values of the experts of a line at the places of all experts; None for an absent one."""
        known = dict(zip(line["models"], values, strict=True))
        return [known.get(model) for model in self.models]

    @cached_property
    def squares(self) -> list[list[float]]:
        """‖Δ_t‖² per line and expert, from τ_t."""
        result = []
        for line in self.lines:
            totals = [0.0] * len(line["models"])
            for matrix in matrices_of(line):
                totals = [a + b for a, b in zip(totals, matrix["tau"], strict=True)]
            result.append([value or 0.0 for value in self.spread(line, totals)])
        return result

    @cached_property
    def norms(self) -> list[float]:
        """‖Δ_t‖ of whole experts, over all tensors of the report."""
        columns = zip(*self.squares, strict=True)
        return [math.sqrt(math.fsum(column)) for column in columns]

    @cached_property
    def base_norm(self) -> float:
        """‖W0‖ over all tensors that were looked at."""
        return math.sqrt(math.fsum(line["base_norm"] ** 2 for line in self.looked_at))

    @cached_property
    def cosines(self) -> list[Values]:
        """Cosine of whole task vectors, T × T; None where one is zero, or nobody looked."""
        count = len(self.models)
        products = [[0.0] * count for _ in range(count)]
        squares = [0.0] * count
        for line in self.looked_at:
            norm = [value or 0.0 for value in self.spread(line, line["norm"])]
            places = [self.models.index(model) for model in line["models"]]
            for a, row in zip(places, line["cosine"], strict=True):
                squares[a] += norm[a] ** 2
                for b, cosine in zip(places, row, strict=True):
                    products[a][b] += (cosine or 0.0) * norm[a] * norm[b]
        return [
            [
                products[a][b] / math.sqrt(squares[a] * squares[b])
                if squares[a] and squares[b]
                else None
                for b in range(count)
            ]
            for a in range(count)
        ]

    def mean_overlap(self, side: str) -> list[Values]:
        """Mean over all matrices of the overlap of leading subspaces, `inputs` or `outputs`."""
        count = len(self.models)
        sums = [[0.0] * count for _ in range(count)]
        numbers = [[0] * count for _ in range(count)]
        for row in self.rows:
            if "subspaces" not in row.matrix:
                continue
            places = [self.models.index(model) for model in row.line["models"]]
            for a, values in zip(places, row.matrix["subspaces"][side], strict=True):
                for b, value in zip(places, values, strict=True):
                    if value is not None:
                        sums[a][b] += value
                        numbers[a][b] += 1
        return [
            [sums[a][b] / numbers[a][b] if numbers[a][b] else None for b in range(count)]
            for a in range(count)
        ]

    @cached_property
    def unchanged(self) -> Values:
        """Share of all entries that an expert left as they were; None if nobody looked."""
        equal = [0.0] * len(self.models)
        total = [0] * len(self.models)
        for line in self.looked_at:
            entries = math.prod(line["shape"])
            for t, share in enumerate(self.spread(line, line["unchanged"])):
                if share is not None:
                    equal[t] += share * entries
                    total[t] += entries
        return [a / b if b else None for a, b in zip(equal, total, strict=True)]

    @cached_property
    def layer_squares(self) -> dict[int, list[float]]:
        """‖Δ_t‖² per layer and expert, for tensors inside of layers, by the layer's number."""
        layers: dict[int, list[float]] = {}
        for line, squares in zip(self.lines, self.squares, strict=True):
            layer = layer_of(str(line["tensor"]))
            if layer is not None:
                known = layers.setdefault(layer, [0.0] * len(self.models))
                layers[layer] = [a + b for a, b in zip(known, squares, strict=True)]
        return dict(sorted(layers.items()))
