# SPDX-License-Identifier: Apache-2.0
"""A report's lines as rows in depth order, and what they say of the model as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from mergekit import merge_methods

from mergekit_ace.algebra.inspection import PairTable
from mergekit_ace.methods.base import SHARED_RULES, TaskVectorMethod, matrices_in
from mergekit_ace.methods.reference import known_methods
from mergekit_ace.naming import layer_of, natural_order, relative_depths, short_names
from mergekit_ace.report.jsonl import Line, MatrixLine

Values = list[float | None]


@dataclass(frozen=True)
class Row:
    """One matrix, or one tensor that is none.

    Attributes:
        label: the tensor's name; of a stack with the matrix' number.
        layer: number of the layer in its stack; None outside of layers.
    """

    label: str
    layer: int | None
    line: Line
    matrix: MatrixLine

    @property
    def columns(self) -> int:
        """The number of a matrix' inputs."""
        if self.line.layout == "flattened":
            return math.prod(self.line.shape[1:])
        return self.line.shape[-2 if self.line.layout == "transposed" else -1]

    @property
    def rows_per_column(self) -> float | None:
        """T·o/i of a matrix that was merged by a ridge regression; None of others."""
        found = matrices_in(self.line.shape, self.line.layout)
        if found is None or self.matrix.ridge is None:
            return None
        outputs, inputs = found[1:]
        if self.matrix.side == "outputs":
            outputs, inputs = inputs, outputs
        return sum(w > 0 for w in self.matrix.weight) * outputs / inputs

    @property
    def own_cosines(self) -> list[float]:
        """The cosines between estimates and the measured covariances of their own tasks."""
        table = self.matrix.agreement.cosine if self.matrix.agreement else ()
        return [value for t, values in enumerate(table) if (value := values[t]) is not None]

    @property
    def other_cosines(self) -> list[float]:
        """The cosines between estimates and the measured covariances of other tasks."""
        table = self.matrix.agreement.cosine if self.matrix.agreement else ()
        return [
            value
            for t, values in enumerate(table)
            for s, value in enumerate(values)
            if s != t and value is not None
        ]


def title_of(name: str) -> str:
    """Return a merge method's name for people, or its plain name if mergekit does not know it."""
    titles = {m.spec.name: m.spec.pretty_name for m in merge_methods.registered_methods()}
    return titles.get(name) or name


class Report:
    """All rows of a report.

    Args:
        lines: of all tensors, in any order, all of one merge.

    Attributes:
        lines: of the tensors that were compared, in depth order.
        skipped: the others.
        name: the merge method of the config; empty where nothing was compared.
        stands_in: the method whose decisions are shown in the place of the merge's own, or None.
        method: the merge method, if it is one of ours.
        models: the experts, in their order; one that is absent somewhere is listed all the same.
    """

    def __init__(self, lines: Sequence[Line]):
        self.skipped = [line for line in lines if line.skipped]
        kept = [line for line in lines if not line.skipped]
        depths = relative_depths([line.name for line in kept])
        self.lines = sorted(kept, key=lambda line: (depths[line.name], natural_order(line.name)))
        self.name = next((line.method for line in kept), "")
        self.stands_in = next((line.decisions_of for line in kept if line.decisions_of), None)
        self.method: TaskVectorMethod | None = known_methods().get(self.name)
        longest = max((line.models for line in self.lines), key=len, default=())
        others = (model for line in self.lines for model in line.models)
        self.models = list(dict.fromkeys([*longest, *others]))

    @property
    def title(self) -> str:
        """The merge method's name for people."""
        return title_of(self.name)

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
        method = known_methods().get(self.stands_in or self.name)
        return dict(method.rules if method else SHARED_RULES)

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that wrote the report; empty if it does not say."""
        return self.lines[-1].versions if self.lines else {}

    @property
    def experts(self) -> list[str]:
        """Short names of the models, see `short_names`."""
        return short_names(self.models)

    @cached_property
    def rows(self) -> list[Row]:
        """A row per matrix, in depth order."""
        return [
            Row(
                line.name if len(line.matrices) == 1 else f"{line.name}[{number}]",
                layer_of(line.name),
                line,
                matrix,
            )
            for line in self.lines
            for number, matrix in enumerate(line.matrices)
        ]

    def rows_with(self, field: str) -> list[Row]:
        """Return the rows whose matrices have a field of `MatrixLine`."""
        return [row for row in self.rows if getattr(row.matrix, field) is not None]

    @cached_property
    def solved(self) -> list[Row]:
        """The matrices whose experts were tested for heterogeneity."""
        return self.rows_with("statistic")

    @cached_property
    def looked_at(self) -> list[Line]:
        """Lines that `inspect` wrote; a merge's own report knows less."""
        return [line for line in self.lines if line.comparison]

    def coefficients(self, line: Line) -> list[Any]:
        """Return λ of all experts in a line that has coefficients, without a refinement's."""
        return self.spread(line, (line.coefficients or ())[: len(line.models)])

    def spread(self, line: Line, values: Sequence[Any]) -> list[Any]:
        """Return values of a line's experts at the places of all; None for an absent one."""
        known = dict(zip(line.models, values, strict=True))
        return [known.get(model) for model in self.models]

    def _spread_pairs(self, line: Line, table: PairTable) -> np.ndarray:
        """Return a T × T table at the places of all experts; NaN for what it does not know."""
        places = [self.models.index(model) for model in line.models]
        spread = np.full((len(self.models), len(self.models)), np.nan)
        spread[np.ix_(places, places)] = np.array(table, dtype=float).reshape(len(places), -1)
        return spread

    @cached_property
    def squares(self) -> np.ndarray:
        """‖Δ_t‖² per line and expert, from τ_t."""
        return self._totals("tau")

    def _totals(self, field: str) -> np.ndarray:
        totals = np.zeros((len(self.lines), len(self.models)))
        for row, line in zip(totals, self.lines, strict=True):
            for matrix in line.matrices:
                values = getattr(matrix, field) or (0.0,) * len(line.models)
                row += [value or 0.0 for value in self.spread(line, values)]
        return totals

    @property
    def norms(self) -> list[float]:
        """‖Δ_t‖ of whole experts, over all tensors of the report."""
        return np.sqrt(self.squares.sum(axis=0)).tolist()

    @property
    def relative_sizes(self) -> Values:
        """‖Δ_t‖/‖W0‖ over the whole model; None if nobody has read the base."""
        norms = [line.comparison.base_norm or 0.0 for line in self.looked_at if line.comparison]
        base = math.hypot(*norms)
        return [norm / base if base else None for norm in self.norms]

    @cached_property
    def cosines(self) -> list[Values]:
        """Cosine of whole task vectors, T × T; None where one is zero, or nobody looked."""
        products = np.zeros((len(self.models), len(self.models)))
        for line in self.looked_at:
            norm = np.array(self.spread(line, line.comparison.norm), dtype=float)
            cosine = self._spread_pairs(line, line.comparison.cosine)
            products += np.nan_to_num(cosine * np.outer(norm, norm))
        squares = products.diagonal()
        return _quotient(products, np.sqrt(np.outer(squares, squares)))

    def mean_overlap(self, side: str) -> list[Values]:
        """Return the mean overlap of leading subspaces, `inputs` or `outputs`, over matrices."""
        rows = self.rows_with("subspaces")
        tables = [self._spread_pairs(r.line, getattr(r.matrix.subspaces, side)) for r in rows]
        stack = np.array(tables).reshape(-1, len(self.models), len(self.models))
        return _quotient(np.nansum(stack, axis=0), (~np.isnan(stack)).sum(axis=0))

    @property
    def unchanged(self) -> Values:
        """Share of all entries that an expert left as they were; None if nobody looked."""
        shares = np.array(
            [self.spread(line, line.comparison.unchanged) for line in self.looked_at], dtype=float
        ).reshape(-1, len(self.models))
        entries = np.array([[math.prod(line.shape)] for line in self.looked_at]).reshape(-1, 1)
        known = entries * ~np.isnan(shares)
        return _quotient(np.nansum(shares * entries, axis=0), known.sum(axis=0))

    @cached_property
    def layer_squares(self) -> dict[int, np.ndarray]:
        """‖Δ_t‖² per layer and expert, for tensors inside of layers, by the layer's number."""
        return self._by_layer(self.squares)

    def _by_layer(self, values: np.ndarray) -> dict[int, np.ndarray]:
        layers: dict[int, np.ndarray] = {}
        for line, own in zip(self.lines, values, strict=True):
            layer = layer_of(line.name)
            if layer is not None:
                layers[layer] = layers.get(layer, 0.0) + own
        return dict(sorted(layers.items()))


def _quotient(above: np.ndarray, below: np.ndarray) -> Any:
    """Return a quotient as lists, with None where the divisor is 0."""
    quotient = np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)
    return np.where(np.isnan(quotient), None, quotient).tolist()
