# SPDX-License-Identifier: Apache-2.0
"""The rows of the table: merge methods at their published defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# W0 + λ (merged − W0), the same values for every method.
SCALES = (0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
# Eight decades for `ace`, and for `ace_relative`, whose ε counts in mean eigenvalues.
ACE_EPSILONS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
RELATIVE_EPSILONS = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 10.0)
# What the paper chooses (GPT-2, RoBERTa, the others) and what its implementation has.
PUBLISHED_EPSILONS = (1e-5, 2e-4, 1e-2, 4e-2)


@dataclass(frozen=True)
class Row:
    """One method with its parameters.

    Attributes:
        name: in the table.
        method: `merge_method`.
        parameters: of it; those of experts are the same for all of them.
        published: λ of the published defaults; with it the row scales the merged task vector.
        with_base: whether the base is one of the inputs.
        origin: parameters of the merge that λ = 0 stands for; None: the base itself.
        group: of rows that are compared by themselves; "table" for the main one, where λ is tuned.
    """

    name: str
    method: str
    parameters: dict[str, Any] = field(default_factory=dict)
    published: float = 1.0
    with_base: bool = True
    origin: dict[str, Any] | None = None
    group: str = "table"


def ace_rows() -> list[Row]:
    """`ace` with the paper's ε, and the rows of its ablation at the default one."""
    off = {"spectral_refinement": "never"}
    rows = [Row(f"ace, ε = {e:g}", "ace", {"epsilon": e}) for e in PUBLISHED_EPSILONS]
    rows += [
        Row(
            "ace E1 (ridge only)",
            "ace",
            {"adaptive_normalization": "never", "structural_prior": False, **off},
        ),
        Row("ace E2 (+ normalisation)", "ace", {"structural_prior": False, **off}),
        Row("ace E3 (+ prior)", "ace", off),
    ]
    return rows


TABLE = [
    Row("linear (mean)", "linear", {"weight": 1.0}, with_base=False),
    Row("task_arithmetic", "task_arithmetic", {"weight": 1.0}, published=0.4),
    Row("ties", "ties", {"weight": 1.0, "density": 0.2}),
    Row("dare_ties", "dare_ties", {"weight": 1.0, "density": 0.3}),
    Row("sce", "sce", {"select_topk": 0.1}),
    Row("karcher", "karcher", with_base=False),
    Row("model_stock", "model_stock"),
    Row("tsv_m", "tsv_m"),
    Row("iso_c", "iso_c"),
    Row("iso_cts", "iso_cts"),
    Row("wudi (Adam)", "wudi"),
    Row("wudi (exact)", "wudi", {"solver": "exact"}),
    Row("cart", "cart", origin={"lambda": 0.0}),
    Row("consensus_ta", "consensus_ta", {"lambda": 1.0}, published=0.4),
    Row("lines", "lines"),
    *ace_rows(),
    Row("ace_relative", "ace_relative"),
]

SWEEPS = [
    *(Row(f"ace at ε = {e:g}", "ace", {"epsilon": e}, group="ace over ε") for e in ACE_EPSILONS),
    *(
        Row(
            f"ace by log variance at ε = {e:g}",
            "ace",
            {"epsilon": e, "heterogeneity": "log_variance"},
            group="ace by log variance over ε",
        )
        for e in ACE_EPSILONS
    ),
    *(
        Row(
            f"ace_relative{suffix} at ε = {e:g}",
            "ace_relative",
            {"epsilon": e, **parameters},
            group=f"ace_relative{suffix} over ε",
        )
        for suffix, parameters in (
            ("", {}),
            (", centred", {"centred": True}),
            (", prior", {"structural_prior": True}),
            (", centred, prior", {"centred": True, "structural_prior": True}),
        )
        for e in RELATIVE_EPSILONS
    ),
]
