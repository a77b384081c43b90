# SPDX-License-Identifier: Apache-2.0
"""A report: the records of all tensors of one merge, read from a file, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mergekit import merge_methods
from pydantic import ValidationError

from mergekit_ace.algebra.inspection import MatrixInspection, PairTable
from mergekit_ace.methods.base import SHARED_RULES, TaskVectorMethod
from mergekit_ace.methods.report_lines import Record
from mergekit_ace.naming import layer_of, natural_order, relative_depths, short_names

Values = list[float | None]


class ReportError(ValueError):
    """Something in the config, the models or the folder is wrong; the message says what to do."""


def read_records(path: Path) -> list[Record]:
    """Return the last record of each tensor in a report, and all of tensors without a name.

    Raises:
        ReportError: the file is missing, empty, or no report of one merge; the message names the
            line and the field.
    """
    try:
        texts = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
    records: dict[str | int, Record] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            record = Record.model_validate_json(text)
        except ValidationError as error:
            raise ReportError(
                f"line {number} of {path} is not the line of a report: {_problem(error)}; remove "
                "it, or give the file that `report:` of a merge, or `mergekit-ace inspect`, wrote"
            ) from error
        records[number if record.tensor is None else record.tensor] = record
    if not records:
        raise ReportError(
            f"{path} has no lines: no tensor was merged; give the report of a finished merge"
        )
    # Counters of batches are copied, and skipped: their method is not that of the merge.
    methods = sorted({record.method for record in records.values() if not record.skipped})
    if len(methods) > 1:
        raise ReportError(
            f"{path} holds lines of several merges, by {' and '.join(methods)}; keep those of one"
        )
    return list(records.values())


def _problem(error: ValidationError) -> str:
    """Return the first thing that is wrong in a line, with the name of its field."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])).removeprefix("matrices.0.")
    return f"{field}: {first['msg']}" if field else first["msg"]


def title_of(name: str) -> str:
    """Return a merge method's name for people, or its plain name if mergekit does not know it."""
    method = find_merge_method(name)
    return method.spec.pretty_name or name if method else name


def find_merge_method(name: str) -> Any:
    """Return a merge method of mergekit's or of ours by its name; None if there is no such one."""
    methods = {method.spec.name: method for method in merge_methods.registered_methods()}
    return methods.get(name)


class Report:
    """The records of one merge in the order of depth, and what they say of whole models.

    Args:
        records: of all tensors, in any order.

    Attributes:
        records: of the tensors that were compared.
        skipped: the others.
        name: the merge method of the config.
        stands_in: the method whose decisions are shown in the place of the merge's own, or None.
        method: the merge method, if it is one of ours.
        models: the experts, in their order; one that is absent somewhere is listed all the same.
        experts: their short names.
    """

    def __init__(self, records: Sequence[Record]):
        self.skipped = [record for record in records if record.skipped]
        compared = [record for record in records if not record.skipped]
        depths = relative_depths([record.name for record in compared])
        self.records = sorted(compared, key=lambda r: (depths[r.name], natural_order(r.name)))
        self.name = next((record.method for record in [*compared, *records]), "")
        self.stands_in = next((r.decisions_of for r in compared if r.decisions_of), None)
        method = find_merge_method(self.name)
        self.method = method if isinstance(method, TaskVectorMethod) else None
        longest = max((record.models for record in self.records), key=len, default=())
        others = (model for record in self.records for model in record.models)
        self.models = list(dict.fromkeys([*longest, *others]))
        self.experts = short_names(self.models)

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
    def rules(self) -> dict[str, str]:
        """Words for what is done with tensors, by the rules of the method that decided."""
        decided = find_merge_method(self.stands_in or self.name)
        return decided.rules if isinstance(decided, TaskVectorMethod) else SHARED_RULES

    @property
    def looked_at(self) -> list[Record]:
        """Records that `inspect` wrote; a merge's own report knows less."""
        return [record for record in self.records if record.norm is not None]

    @cached_property
    def matrices(self) -> pd.DataFrame:
        """A row per matrix, or tensor that is none: the fields of both, `label` and `layer`.

        The label is the tensor's name, of a stack with the number of the matrix. The layer is None
        outside of layers.
        """
        rows = [
            {
                **vars(record),
                **vars(matrix),
                "tensor": record.name,
                "label": record.name if len(record.matrices) == 1 else f"{record.name}[{n}]",
                "layer": layer_of(record.name),
            }
            for record in self.records
            for n, matrix in enumerate(record.matrices)
        ]
        own = (field.name for field in fields(MatrixInspection))
        columns = [*Record.model_fields, *own, "label", "layer"]
        return pd.DataFrame(rows, columns=columns, dtype=object)

    def having(self, field: str) -> pd.DataFrame:
        """Return the rows of `matrices` that have a field."""
        return self.matrices[self.matrices[field].notna()]

    @cached_property
    def shares(self) -> pd.DataFrame:
        """A row per matrix and expert, with the place of the matrix in `matrices` as `row`."""
        frame = pd.DataFrame(self._shares(), columns=["row", "tensor", "label", "layer", *_SHARES])
        return frame.astype(dict.fromkeys(_SHARES[1:], float))

    def _shares(self) -> Iterator[tuple[Any, ...]]:
        names = dict(zip(self.models, self.experts, strict=True))
        for number, row in enumerate(self.matrices.itertuples()):
            nothing = [None] * len(row.models)
            columns = zip(
                map(names.get, row.models),
                row.tau,
                row.changed,
                row.coefficients or row.weight,  # without that of a refinement, which comes last
                row.relative_size or nothing,
                row.subspaces.stable_rank if row.subspaces else nothing,
                [row.agreement.cosine[t][t] for t in range(len(nothing))]
                if row.agreement else nothing,
                strict=False,
            )  # fmt: skip
            for values in columns:
                yield (number, row.tensor, row.label, row.layer, *values)

    @cached_property
    def norms(self) -> list[float]:
        """‖Δ_t‖ of whole experts, over all tensors of the report."""
        squares = self.shares.groupby("expert").tau.sum().reindex(self.experts)
        return squares.pow(0.5).tolist()

    @property
    def relative_sizes(self) -> Values:
        """‖Δ_t‖/‖W0‖ over the whole model; None if nobody has read the base."""
        base = math.hypot(*(record.base_norm or 0.0 for record in self.looked_at))
        return [norm / base if base else None for norm in self.norms]

    @property
    def unchanged(self) -> Values:
        """Share of all entries that an expert left as they were; None if nobody looked."""
        rows = [dict(zip(r.models, r.unchanged, strict=True)) for r in self.looked_at]
        shares = pd.DataFrame(rows, columns=self.models, dtype=float)
        entries = pd.Series([math.prod(r.shape) for r in self.looked_at], dtype=float)
        whole = shares.notna().mul(entries, axis=0).sum()
        return _quotient(shares.mul(entries, axis=0).sum().to_numpy(), whole.to_numpy())

    @cached_property
    def cosines(self) -> list[Values]:
        """Cosine of whole task vectors, T × T; None where one is zero, or nobody looked."""
        products = np.zeros((len(self.models), len(self.models)))
        for record in self.looked_at:
            table = self._spread(record.models, record.cosine)
            norms = self._spread(record.models, np.outer(record.norm, record.norm))
            products += np.nan_to_num(table * norms)
        squares = products.diagonal()
        return _quotient(products, np.sqrt(np.outer(squares, squares)))

    def overlaps(self, side: str) -> list[Values]:
        """Return the mean overlap of leading subspaces, `inputs` or `outputs`, over matrices."""
        rows = self.having("subspaces")
        pairs = zip(rows.models, rows.subspaces, strict=True)
        tables = [self._spread(models, getattr(spaces, side)) for models, spaces in pairs]
        stack = np.array(tables).reshape(-1, len(self.models), len(self.models))
        return _quotient(np.nansum(stack, axis=0), (~np.isnan(stack)).sum(axis=0))

    def _spread(self, models: Sequence[str], table: PairTable | np.ndarray) -> np.ndarray:
        """Return a table over some experts at the places of all; NaN for what it does not know."""
        places = [self.models.index(model) for model in models]
        spread = np.full((len(self.models), len(self.models)), np.nan)
        spread[np.ix_(places, places)] = np.array(table, dtype=float)
        return spread


# The columns of `Report.shares` that differ between experts.
_SHARES = (
    "expert", "tau", "changed", "weight", "relative_size", "stable_rank", "agreement",
)  # fmt: skip


def _quotient(above: np.ndarray, below: np.ndarray) -> Any:
    """Return a quotient as lists, with None where the divisor is 0."""
    quotient = np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)
    return np.where(np.isnan(quotient), None, quotient).tolist()
