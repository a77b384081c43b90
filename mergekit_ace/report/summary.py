# SPDX-License-Identifier: Apache-2.0
"""What a report says in words, about a dozen sentences, and the numbers behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic_core import to_json

from mergekit_ace.files.saving import write_text
from mergekit_ace.naming import module_of, without_numbers
from mergekit_ace.report.record import Report, title_of

# An expert "barely differs" outside of the layers that hold this share of its change …
MOST = 0.95
# … if those are at most this share of all layers.
FEW_LAYERS = 0.6
ALIKE, OPPOSED = 0.9, -0.1  # cosines
WEAK = 0.1  # of the strongest expert's norm
FAR = 0.3  # ‖Δ‖/‖W0‖ at which an expert is hardly a fine-tune of this base
LARGE = 2.5  # ‖X‖² / Σ ‖Δ_t‖² of a merge that follows noise


def write_summary(report: Report, path: Path) -> dict[str, Any]:
    """Write `summary.json`, and return its content."""
    summary = summarize(report)
    write_text(path, to_json(summary, indent=1, inf_nan_mode="strings").decode() + "\n")
    return summary


def summarize(report: Report) -> dict[str, Any]:
    """Return numbers, and the sentences that the page begins with: what `summary.json` holds."""
    return {
        "method": report.name,
        "about": report.about,
        "citations": report.citations,
        "experts": report.models,
        "tensors": len(report.records),
        "matrices": dict(Counter(report.matrices.rule)),
        "skipped": [record.tensor for record in report.skipped],
        "norm": report.norms,
        "relative_size": report.relative_sizes,
        "unchanged": report.unchanged,
        "cosine": report.cosines,
        "heterogeneous": sum(report.having("heterogeneous").heterogeneous),
        "refined": sum(report.having("refined").refined),
        "largest_ridge": max(report.having("ridge").ridge, default=None),
        "largest_amplification": max(report.having("amplification").amplification, default=None),
        "agreement": agreement_by_kind(report),
        "sentences": list(_sentences(report)),
    }


def agreement_by_kind(report: Report) -> dict[str, dict[str, float | None]]:
    """Return means over experts and layers by kind of tensor; empty if nothing was measured.

    Each has `own` and `others`, the mean cosines with the covariance of the own and of the other
    tasks (None without any), and `overlap` of the leading subspaces, with what random ones have as
    `chance`.
    """
    rows = []
    for row in report.having("agreement").itertuples():
        cosines = np.array(row.agreement.cosine, dtype=float)
        own = np.eye(len(cosines), dtype=bool)
        angles = np.radians([a for a in row.agreement.angles if a is not None])
        rows.append({
            "kind": without_numbers(row.tensor),
            "own": pd.Series(cosines[own]).mean(),
            "others": pd.Series(cosines[~own]).mean(),
            "overlap": pd.Series((np.cos(angles) ** 2).ravel()).mean(),
            "chance": row.agreement.size / row.shape[0 if row.layout == "transposed" else 1],
        })  # fmt: skip
    if not rows:
        return {}
    means = pd.DataFrame(rows).groupby("kind", sort=False).mean().dropna(subset="own")
    return means.astype(object).where(means.notna(), None).to_dict("index")


def _sentences(report: Report) -> Iterator[str]:
    """Yield the summary, most important first."""
    yield _overview(report)
    if report.stands_in:
        yield (
            f"{report.title} is a method of mergekit, which tells nothing of its decisions: rules, "
            f"and what is computed from a merge, are what {title_of(report.stands_in)} would make "
            "of these experts with its defaults."
        )
    yield from _odd_experts(report)
    yield from _changed_layers(report)
    yield from _left_out(report)
    yield from _pairs(report)
    yield from _branches(report)
    yield from _large_merges(report)
    if report.skipped:
        names = [record.name for record in report.skipped]
        yield f"{_count(len(names), 'tensor')} cannot be compared: {_listed(names)}."
    yield from _agreement(report)


def _overview(report: Report) -> str:
    rules = Counter(report.matrices.rule)
    words = {**report.rules, **{r: f"by the rule {r!r}" for r in rules if r not in report.rules}}
    parts = [f"{rules[rule]} {text}" for rule, text in words.items() if rules[rule]]
    return (
        f"{_count(len(report.records), 'tensor')} of {_count(len(report.models), 'expert')}: "
        f"{_listed(parts)}."
    )


def _odd_experts(report: Report) -> Iterator[str]:
    """Tell of experts that are the base, no fine-tune of it, or weak."""
    strongest = max(report.norms, default=0.0)
    for name, norm, size in zip(report.experts, report.norms, report.relative_sizes, strict=True):
        if norm == 0:
            yield f"{name} does not differ from the base at all: is it the right checkpoint?"
        elif size is not None and size > FAR:
            yield (
                f"{name} is {size:.0%} of the base's size away from it: was it really fine-tuned "
                "from this base?"
            )
        if 0 < norm < WEAK * strongest:
            yield (
                f"{name} has moved {strongest / norm:.0f} times less than the strongest expert; "
                "what it learned is easily lost in a merge."
            )


def _changed_layers(report: Report) -> Iterator[str]:
    """Tell of experts that changed few layers."""
    layers = report.shares.dropna(subset="layer")
    squares = layers.pivot_table("tau", "layer", "expert", "sum").reindex(columns=report.experts)
    for name, change in squares.fillna(0.0).items():
        span = _shortest_run(change.to_numpy())
        if len(change) >= 3 and span and span[1] - span[0] + 1 <= FEW_LAYERS * len(change):
            first, last = (squares.index[n] for n in span)
            yield f"{name} barely differs from the base outside layers {first}–{last}."


def _shortest_run(change: np.ndarray) -> tuple[int, int] | None:
    """Return the first and the last of the fewest layers in a row that hold `MOST` of a change."""
    sums = np.concatenate([[0.0], np.cumsum(change)])
    if not sums[-1] > 0:
        return None
    runs = [
        (int(np.searchsorted(sums, start + MOST * sums[-1])) - 1 - first, first)
        for first, start in enumerate(sums[:-1])
        if sums[-1] - start >= MOST * sums[-1]
    ]
    length, first = min(runs)
    return first, first + length


def _left_out(report: Report) -> Iterator[str]:
    """Tell of experts that are the base in another precision."""
    rounded = report.shares[(report.shares.tau > 0) & (report.shares.changed == 0)]
    for name, count in rounded.groupby("expert").tensor.nunique().items():
        yield (
            f"{name} is left out of {_count(count, 'tensor')}, where it is the base, saved in "
            "another precision."
        )


def _pairs(report: Report) -> Iterator[str]:
    """Tell which experts are nearly the same or opposed; if none are, which are nearest."""
    names, cosines = report.experts, report.cosines
    pairs = [(a, b) for a in range(len(names)) for b in range(a)]
    known = [(value, names[b], names[a]) for a, b in pairs if (value := cosines[a][b]) is not None]
    for value, one, other in sorted(known, reverse=True):
        if value > ALIKE:
            yield (
                f"{one} and {other} learned nearly the same (cosine {value:.2f}): together they "
                "count double."
            )
        elif value < OPPOSED:
            yield f"{one} and {other} pull in opposite directions (cosine {value:.2f})."
    if known and OPPOSED <= max(known)[0] <= ALIKE:
        value, one, other = max(known)
        yield (
            f"The most similar experts are {one} and {other}, with a cosine of {value:.2f} between "
            "their task vectors."
        )


def _branches(report: Report) -> Iterator[str]:
    """Tell how many matrices are heterogeneous, and what their refinement changed."""
    solved = report.having("statistic")
    if solved.empty:
        return
    count = solved.heterogeneous.sum()
    statistic = "γ" if solved.statistic.iloc[0] == "gamma" else "The variance of log τ"
    if not count:
        yield (
            f"{statistic} stays below the threshold in all {len(solved)} matrices: the experts "
            "differ little in scale, and nothing is normalised or refined unless you ask for it."
        )
        return
    yield f"{statistic} exceeds the threshold in {count} of {len(solved)} matrices."
    refined = [s for s in report.having("spectrum").spectrum if s.alignment is not None]
    if refined:
        before, after = (
            np.mean([getattr(s, field) for s in refined])
            for field in ("share_before", "share_after")
        )
        yield (
            f"The refinement of {_count(len(refined), 'matrix', 'matrices')} changes the share of "
            f"the energy in the top 5 % of singular values from {before:.0%} to {after:.0%}."
        )


def _large_merges(report: Report) -> Iterator[str]:
    """Tell where the ridge should have been larger."""
    ridges = report.having("amplification").sort_values("amplification", ascending=False)
    large = ridges[ridges.amplification > LARGE]
    if large.empty:
        return
    modules = [module for module, _ in Counter(map(module_of, large.tensor)).most_common()]
    worst = large.head(3)
    named = [
        f"{a:.3g} in {label}" for a, label in zip(worst.amplification, worst.label, strict=True)
    ]
    yield (
        f"The merge is larger than what the experts hold in {len(large)} of {len(ridges)} "
        f"matrices, of {_listed(modules)}: ‖X‖² / Σ ‖Δ_t‖² is {_listed(named)}. A ridge that is "
        "too small amplifies noise there; leave `epsilon_scale` out, or raise `epsilon` for these "
        "tensors by a filter."
    )


def _agreement(report: Report) -> Iterator[str]:
    """Tell how far the estimates agree with what was measured."""
    kinds = agreement_by_kind(report)
    if not kinds:
        return
    means = pd.DataFrame(kinds.values(), index=kinds).astype(float)
    own, others = means.own, means.others.mean()
    beside = "" if np.isnan(others) else f", and {others:.2f} with those of the other tasks"
    yield (
        f"Estimates ΔᵀΔ have a cosine of {own.mean():.2f} with the measured covariances of their "
        f"own tasks{beside}; {own.max():.2f} in {own.idxmax()}, {own.min():.2f} in {own.idxmin()}."
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _listed(parts: Sequence[str], most: int = 6) -> str:
    shown = [*parts] if len(parts) <= most else [*parts[:most], f"{len(parts) - most} more"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
