# SPDX-License-Identifier: Apache-2.0
"""A report: the records of all tensors of one merge, as tables, and in about a dozen sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mergekit import merge_methods
from pydantic import ValidationError

from mergekit_ace.methods.report_lines import Record
from mergekit_ace.naming import (
    ConfigError,
    layer_of,
    listed,
    natural_order,
    relative_depths,
    short_names,
)

# An expert "barely differs" outside of the middle layers that hold MOST of its change, if those are
# at most FEW_LAYERS of all.
MOST, FEW_LAYERS = 0.95, 0.6
ALIKE, OPPOSED = 0.9, -0.1  # cosines
WEAK = 0.1  # of the strongest expert's norm
FAR = 0.3  # ‖Δ‖/‖W0‖ at which an expert is hardly a fine-tune of this base
LARGE = 2.5  # ‖X‖² / Σ ‖Δ_t‖² of a merge that follows noise


def read_records(path: Path) -> list[Record]:
    """Return the last record of each tensor in a report, and all of tensors without a name."""
    records: dict[str | int, Record] = {}
    number = 0
    try:
        lines = path.read_text("utf-8-sig", errors="replace").split("\n")
        for number, text in enumerate(lines, start=1):
            if text.strip():
                record = Record.model_validate_json(text)
                records[number if record.tensor is None else record.tensor] = record
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])).removeprefix("matrices.0.")
        what = f"{f'{field}: ' if field else ''}{first['msg']}"
        raise ConfigError(
            f"line {number} of {path} is not the line of a report: {what}; remove it, or give the "
            "file that `report:` of a merge, or `mergekit-ace inspect`, wrote"
        ) from error
    return list(records.values())


class Report:
    """The records of one merge, and what they say of whole models.

    Attributes:
        records: of the tensors, in the order of depth.
        looked_at: those that `inspect` wrote of all experts; a merge's own report knows less.
        stands_in: the title of the method whose decisions are shown in the place of the merge's.
        models, experts: paths and short names of the experts.
    """

    def __init__(self, records: Sequence[Record]):
        methods = sorted({record.method for record in records})
        if not methods:
            raise ConfigError("no tensor was compared: give the report of a finished merge")
        if len(methods) > 1:
            said = f"the report is of several merges, by {' and '.join(methods)}; keep those of one"
            raise ConfigError(said)
        depths = relative_depths([record.name for record in records])
        self.records = sorted(records, key=lambda r: (depths[r.name], natural_order(r.name)))
        method = merge_methods.get(methods[0])
        other = next((record.decisions_of for record in records if record.decisions_of), None)
        self.name, self.title = method.spec.name, method.spec.pretty_name or method.spec.name
        self.stands_in = merge_methods.get(other).spec.pretty_name if other else None
        self.about: str = getattr(method, "about", "")
        self.citations = list(getattr(method, "citations", ()))
        self.rules: dict[str, str] = getattr(merge_methods.get(other or self.name), "rules", {})
        by_length = sorted(self.records, key=lambda record: -len(record.models))
        self.models = list(dict.fromkeys(model for r in by_length for model in r.models))
        self.experts = short_names(self.models)
        self.looked_at = [r for r in self.records if r.norm and list(r.models) == self.models]

    @cached_property
    def matrices(self) -> Any:
        """A row per matrix: its fields, its tensor's, `label` and `layer` (None outside of layers).

        The label is the tensor's name, of a stack with the number of the matrix.
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
        return pd.DataFrame(rows, dtype=object)

    def having(self, field: str) -> Any:
        """Return the rows of `matrices` that have a field."""
        return self.matrices[self.matrices[field].notna()]

    @cached_property
    def shares(self) -> Any:
        """A row per matrix and expert, with the place of the matrix in `matrices` as `row`."""
        names = dict(zip(self.models, self.experts, strict=True))
        rows = [
            {
                "row": number,
                **{name: row[name] for name in ("tensor", "label", "layer")},
                "expert": names[model],
                "tau": row["tau"][t],
                "changed": row["changed"][t],
                "weight": (row["coefficients"] or row["weight"])[t],
            }
            for number, row in enumerate(self.matrices.to_dict("records"))
            for t, model in enumerate(row["models"])
        ]
        return pd.DataFrame(rows).astype({"tau": float, "weight": float, "layer": "Int64"})

    @cached_property
    def norms(self) -> list[float]:
        """‖Δ_t‖ of whole experts, over all tensors of the report."""
        squares = self.shares.groupby("expert").tau.sum().reindex(self.experts)
        return squares.pow(0.5).tolist()

    @property
    def relative_sizes(self) -> list[float]:
        """‖Δ_t‖/‖W0‖ over the whole model; NaN if nobody has read the base."""
        base = math.hypot(*(record.base_norm or 0.0 for record in self.records)) or math.nan
        return [norm / base for norm in self.norms]

    @cached_property
    def cosines(self) -> np.ndarray:
        """Cosine of whole task vectors, T × T; NaN where one is zero, or nobody looked."""
        products = np.zeros((len(self.models), len(self.models)))
        for record in self.looked_at:
            cosines = np.nan_to_num(np.array(record.cosine, dtype=float))
            products += cosines * np.outer(record.norm or (), record.norm or ())
        lengths = np.sqrt(products.diagonal())
        with np.errstate(invalid="ignore"):
            return products / np.outer(lengths, lengths)


def summarize(report: Report) -> Iterator[str]:
    """Yield what a report says in words, most important first."""
    rules = report.matrices.rule.value_counts().items()
    parts = [f"{count} {report.rules.get(rule, rule)}" for rule, count in rules]
    experts = _count(len(report.models), "expert")
    yield f"{_count(len(report.records), 'tensor')} of {experts}: {listed(parts)}."
    if report.stands_in:
        yield (
            f"{report.title} tells nothing of its decisions: those shown are what "
            f"{report.stands_in} would make of these experts with its defaults."
        )
    yield from _of_experts(report)
    yield from _decisions(report)


def _of_experts(report: Report) -> Iterator[str]:
    """Tell of experts that are the base, no fine-tune of it, weak, nearly the same or opposed."""
    strongest = max(report.norms)
    for name, norm, size in zip(report.experts, report.norms, report.relative_sizes, strict=True):
        if norm == 0:
            yield f"{name} takes no part: it is the base itself, or its weight is 0."
        elif norm < WEAK * strongest:
            less = f"{strongest / norm:.0f} times less than the strongest expert"
            yield f"{name} has moved {less}: a merge easily loses what it learned."
        if size > FAR:
            yield f"{name} is {size:.0%} of the base's size away from it: is it a fine-tune of it?"
    layers = report.shares.dropna(subset="layer")
    squares = layers.pivot_table("tau", "layer", "expert", "sum").reindex(columns=report.experts)
    for (name, change), norm in zip(squares.fillna(0.0).items(), report.norms, strict=True):
        within = change.cumsum() / (norm**2 or 1.0)
        first, last = (within.searchsorted(share) for share in ((1 - MOST) / 2, (1 + MOST) / 2))
        if len(change) >= 3 and last < len(change) and last - first < FEW_LAYERS * len(change):
            span = f"{squares.index[first]}–{squares.index[last]}"
            yield f"{name} barely differs from the base outside layers {span}."
    rounded = report.shares[(report.shares.tau > 0) & (report.shares.changed == 0)]
    for name, count in rounded.groupby("expert").tensor.nunique().items():
        yield (
            f"{name} is left out of {_count(count, 'tensor')}, where it is the base, saved in "
            "another precision."
        )
    for (a, one), (b, other) in combinations(enumerate(report.experts), 2):
        cosine = report.cosines[a, b]
        if cosine > ALIKE:
            yield f"{one} and {other} learned nearly the same (cosine {cosine:.2f}): counted twice."
        elif cosine < OPPOSED:
            yield f"{one} and {other} pull in opposite directions (cosine {cosine:.2f})."


def _decisions(report: Report) -> Iterator[str]:
    """Tell how many matrices are heterogeneous, and where the ridge should have been larger."""
    solved = report.having("statistic")
    if len(solved):
        count = solved.heterogeneous.sum()
        statistic = "γ" if solved.statistic.iloc[0] == "gamma" else "The variance of log τ"
        if count:
            yield f"{statistic} exceeds the threshold in {count} of {len(solved)} matrices."
        else:
            below = f"{statistic} stays below the threshold in all {len(solved)} matrices"
            yield f"{below}: nothing is normalised or refined unless you ask for it."
    ridges = report.having("amplification").sort_values("amplification", ascending=False)
    large = ridges[ridges.amplification > LARGE]
    if len(large):
        names = large.tensor.str.removesuffix(".weight").str.rpartition(".")[2]
        modules = [*names.value_counts().index]
        worst = zip(large.amplification[:3], large.label, strict=False)
        named = [f"{amplification:.3g} in {label}" for amplification, label in worst]
        remedy = "Lower lambda there by a filter."
        if any(p.name == "epsilon" for p in merge_methods.get(report.name).spec.parameters):
            remedy = "Leave epsilon_scale out, or raise epsilon there by a filter."
        yield (
            f"The merge is larger than what the experts hold in {len(large)} of {len(ridges)} "
            f"matrices, of {listed(modules)}: ‖X‖² / Σ ‖Δ_t‖² is {listed(named)}. {remedy}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else noun + 's'}"
