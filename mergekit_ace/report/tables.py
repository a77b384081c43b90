# SPDX-License-Identifier: Apache-2.0
"""A report's lines as rows in depth order, and what they say of the model as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from mergekit import merge_methods

from mergekit_ace.algebra.ridge_floor import rows_per_column
from mergekit_ace.methods.base import SHARED_RULES, TaskVectorMethod, matrices_in
from mergekit_ace.methods.reference import known_methods
from mergekit_ace.naming import layer_of, natural_order, relative_depths
from mergekit_ace.report.jsonl import Line, matrices_of

Values = list[float | None]


@dataclass(frozen=True)
class Row:
    """One matrix, or one tensor that is none.

    Attributes:
        label: the tensor's name; of a stack with the matrix' number.
        layer: number of the layer in its stack; None outside of layers.
        matrix: what the line says of this matrix.
    """

    label: str
    layer: int | None
    line: Mapping[str, Any]
    matrix: Mapping[str, Any]

    @property
    def is_solved(self) -> bool:
        """Whether a statistic of heterogeneity decided how it is merged."""
        return "statistic" in self.matrix

    @property
    def columns(self) -> int:
        """The number of a matrix' inputs."""
        rows, columns = self.line["shape"][-2:]
        return rows if self.line["layout"] == "transposed" else columns

    @property
    def rows_per_column(self) -> float | None:
        """T·o/i of a matrix that was merged by a ridge regression; None of others."""
        found = matrices_in(self.line["shape"], self.line["layout"])
        if found is None or "ridge" not in self.matrix:
            return None
        return rows_per_column(*found[1:], sum(w > 0 for w in self.matrix["weight"]))


def title_of(name: str) -> str:
    """Return a merge method's name for people, or its plain name if mergekit does not know it."""
    titles = {m.spec.name: m.spec.pretty_name for m in merge_methods.registered_methods()}
    return titles.get(name) or name


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
            kept, key=lambda line: (depths[str(line["tensor"])], natural_order(str(line["tensor"])))
        )

    @cached_property
    def name(self) -> str | None:
        """The merge method of the config; None where a report does not tell.

        Lines of earlier versions do not name it, but a rule bears the name of its method.
        """
        named = [line["method"] for line in self.lines if "method" in line]
        rules = {matrix["rule"] for line in self.lines for matrix in matrices_of(line)}
        return next((name for name in (*named, *(rules & known_methods().keys()))), None)

    @cached_property
    def stands_in(self) -> str | None:
        """The method whose decisions are shown in the place of the merge's own."""
        return next((line["decisions_of"] for line in self.lines if "decisions_of" in line), None)

    @cached_property
    def method(self) -> TaskVectorMethod | None:
        """The merge method, if it is one of ours."""
        return known_methods().get(self.name or "")

    @property
    def title(self) -> str:
        """The merge method's name for people."""
        return title_of(self.name) if self.name else "A merge"

    @property
    def about(self) -> str:
        """What the method does; empty for one that is not ours."""
        return self.method.about if self.method else ""

    @property
    def citations(self) -> list[str]:
        """BibTeX of the papers behind the method; none for one that is not ours."""
        return [citation.bibtex for citation in self.method.citations] if self.method else []

    @property
    def words(self) -> dict[str, str]:
        """What is done with tensors, by the rules of the method that decided."""
        method = known_methods().get(self.stands_in or self.name or "")
        return dict(method.rules if method else SHARED_RULES)

    @cached_property
    def models(self) -> list[str]:
        """The experts, in their order; one that is absent somewhere is listed all the same."""
        longest = max((line["models"] for line in self.lines), key=len, default=[])
        others = (model for line in self.lines for model in line["models"])
        return list(dict.fromkeys([*longest, *others]))

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that wrote the report; empty if it does not say."""
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
                rows.append(Row(label, layer_of(name), line, matrix))
        return rows

    @cached_property
    def solved(self) -> list[Row]:
        """The matrices whose experts were tested for heterogeneity."""
        return [row for row in self.rows if row.is_solved]

    @cached_property
    def looked_at(self) -> list[Line]:
        """Lines that `inspect` wrote; a merge's own report knows less."""
        return [line for line in self.lines if "cosine" in line]

    def coefficients(self, line: Mapping[str, Any]) -> list[Any] | None:
        """Return λ of all experts in a line; None where it has no coefficients.

        A refinement's, which follows them, is left out.
        """
        given = line.get("coefficients")
        return None if given is None else self.spread(line, given[: len(line["models"])])

    def spread(self, line: Mapping[str, Any], values: Sequence[Any]) -> list[Any]:
        """Return values of a line's experts at the places of all; None for an absent one."""
        known = dict(zip(line["models"], values, strict=True))
        return [known.get(model) for model in self.models]

    @cached_property
    def squares(self) -> list[list[float]]:
        """‖Δ_t‖² per line and expert, from τ_t."""
        return [self._totals(line, "tau") for line in self.lines]

    @cached_property
    def noise(self) -> list[list[float]]:
        """ν_t², the energy of rounding noise in Δ_t, per line and expert; 0 if nobody looked."""
        return [self._totals(line, "noise") for line in self.lines]

    def _totals(self, line: Line, key: str) -> list[float]:
        totals = [0.0] * len(line["models"])
        for matrix in matrices_of(line):
            if key in matrix:
                totals = [a + b for a, b in zip(totals, matrix[key], strict=True)]
        return [value or 0.0 for value in self.spread(line, totals)]

    @cached_property
    def norms(self) -> list[float]:
        """‖Δ_t‖ of whole experts, over all tensors of the report."""
        columns = zip(*self.squares, strict=True)
        return [math.sqrt(math.fsum(column)) for column in columns]

    @cached_property
    def base_norm(self) -> float:
        """‖W0‖ over all tensors that were looked at; 0 where nobody has read it."""
        return math.sqrt(math.fsum((line["base_norm"] or 0.0) ** 2 for line in self.looked_at))

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
        """Return the mean overlap of leading subspaces, `inputs` or `outputs`, over matrices."""
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
        return self._by_layer(self.squares)

    @cached_property
    def layer_noise(self) -> dict[int, list[float]]:
        """ν_t² per layer and expert, for tensors inside of layers, by the layer's number."""
        return self._by_layer(self.noise)

    def _by_layer(self, values: Sequence[Sequence[float]]) -> dict[int, list[float]]:
        layers: dict[int, list[float]] = {}
        for line, own in zip(self.lines, values, strict=True):
            layer = layer_of(str(line["tensor"]))
            if layer is not None:
                known = layers.setdefault(layer, [0.0] * len(self.models))
                layers[layer] = [a + b for a, b in zip(known, own, strict=True)]
        return dict(sorted(layers.items()))
