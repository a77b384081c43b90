# SPDX-License-Identifier: Apache-2.0
"""What a report says, in words."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mergekit_ace.files.saving import write_text
from mergekit_ace.methods.report_lines import finite
from mergekit_ace.naming import module_of, without_numbers
from mergekit_ace.report.jsonl import Line
from mergekit_ace.report.tables import Report, Row, title_of

# An expert "barely differs" outside of the layers that hold this share of its change …
MOST = 0.95
# … if those are at most this share of all layers.
FEW_LAYERS = 0.6
ALIKE, OPPOSED = 0.9, -0.1
WEAK = 0.1  # of the strongest expert's norm
FAR = 0.3  # ‖Δ‖/‖W0‖ at which an expert is hardly a fine-tune of this base
ADAPTER = 0.3  # share of unchanged entries that is worth a word
LARGE = 2.5  # ‖X‖² / Σ ‖Δ_t‖² of a merge that follows noise
NEAR_THRESHOLD = (0.8, 1.25)  # T·o/i where the rows of all experts just determine X
MOSTLY = 0.9  # share of matrices that is worth the names of their modules
CROWDED = 3.0  # times the overlap of random subspaces


def write_summary(lines: Sequence[Line], path: Path) -> dict[str, Any]:
    """Write `summary.json`, and return its content."""
    summary = summarize(Report(lines))
    write_text(path, json.dumps(finite(summary), indent=1, ensure_ascii=False) + "\n")
    return summary


def summarize(report: Report) -> dict[str, Any]:
    """Return numbers, and the sentences that the page begins with: what `summary.json` holds."""
    rules = Counter(row.matrix.rule for row in report.rows)
    exceeding = [row for row in report.solved if row.matrix.heterogeneous]
    ridges = report.rows_with("ridge")
    return {
        "method": report.name,
        "about": report.about,
        "citations": report.citations,
        "experts": report.models,
        "tensors": len(report.lines),
        "matrices": dict(rules),
        "skipped": [line.tensor for line in report.skipped],
        "norm": report.norms,
        "relative_size": report.relative_sizes,
        "unchanged": report.unchanged,
        "cosine": report.cosines,
        "heterogeneous": len(exceeding),
        "heterogeneous_by_unit": len([row for row in exceeding if by_unit_alone(row)]),
        "refined": len([row for row in report.solved if row.matrix.refined]),
        "largest_ridge": _largest(report, "ridge"),
        "largest_amplification": _largest(report, "amplification"),
        "near_threshold": {
            without_numbers(row.line.name): row.rows_per_column
            for row in ridges
            if NEAR_THRESHOLD[0] <= (row.rows_per_column or 0) <= NEAR_THRESHOLD[1]
        },
        "agreement": agreement_by_kind(report),
        "sentences": list(sentences(report)),
    }


def _largest(report: Report, field: str) -> float | None:
    rows = report.rows_with(field)
    return max((getattr(row.matrix, field) for row in rows), default=None)


def by_unit_alone(row: Row) -> bool:
    """Return whether γ calls a matrix heterogeneous though the experts' log τ hardly spread.

    γ divides by the squared mean of log τ, which vanishes where τ is close to 1.
    """
    matrix = row.matrix
    return matrix.statistic == "gamma" and matrix.log_variance <= matrix.threshold


def sentences(report: Report) -> Iterator[str]:
    """Yield the summary, most important first."""
    yield _overview(report)
    if report.stands_in:
        yield (
            f"{report.title} is a method of mergekit, which tells nothing of its decisions: rules, "
            f"and what is computed from a merge, are what {title_of(report.stands_in)} would make "
            "of these experts with its defaults."
        )
    yield from _experts(report)
    yield from _left_out(report)
    yield from _pairs(report)
    yield from _branches(report)
    yield from _ridges(report)
    if report.skipped:
        yield (
            f"{_count(len(report.skipped), 'tensor')} cannot be compared: "
            f"{_listed([line.name for line in report.skipped])}."
        )
    yield from _agreement(report)


def _overview(report: Report) -> str:
    rules = Counter(row.matrix.rule for row in report.rows)
    words = report.words | {rule: f"by the rule {rule!r}" for rule in rules - report.words.keys()}
    parts = [f"{rules[rule]} {text}" for rule, text in words.items() if rules[rule]]
    return (
        f"{_count(len(report.lines), 'tensor')} of {_count(len(report.models), 'expert')}: "
        f"{_listed(parts)}."
    )


def _experts(report: Report) -> Iterator[str]:
    strongest = max(report.norms, default=0.0)
    sizes, shares = report.relative_sizes, report.unchanged
    for t, name in enumerate(report.experts):
        norm, size, unchanged = report.norms[t], sizes[t], shares[t]
        if norm == 0:
            yield f"{name} does not differ from the base at all: is it the right checkpoint?"
            continue
        if size is not None and size > FAR:
            yield (
                f"{name} is {size:.0%} of the base's size away from it: was it really fine-tuned "
                "from this base?"
            )
        if norm < WEAK * strongest:
            yield (
                f"{name} has moved {strongest / norm:.0f} times less than the strongest expert; "
                "what it learned is easily lost in a merge."
            )
        span = changed_layers(report, t)
        if span is not None:
            yield f"{name} barely differs from the base outside layers {span[0]}–{span[1]}."
        if unchanged is not None and unchanged > ADAPTER:
            yield (
                f"{name} left {unchanged:.0%} of all entries exactly as they were (frozen layers, "
                "or an adapter)."
            )


def _left_out(report: Report) -> Iterator[str]:
    """Tell of experts that are the base in another precision."""
    for t, name in enumerate(report.experts):
        tensors = {row.line.name for row in report.rows if _is_base(report, row, t)}
        if tensors:
            yield (
                f"{name} is left out of {_count(len(tensors), 'tensor')}, where it is the base, "
                "saved in another precision."
            )


def _is_base(report: Report, row: Row, expert: int) -> bool:
    tau, changed = (report.spread(row.line, v) for v in (row.matrix.tau, row.matrix.changed))
    return bool(tau[expert]) and changed[expert] == 0


def changed_layers(report: Report, expert: int) -> tuple[int, int] | None:
    """Return the shortest run of layers with most of an expert's change in layers, if short."""
    layers = list(report.layer_squares)
    change = [report.layer_squares[layer][expert] for layer in layers]
    total = math.fsum(change)
    if total == 0 or len(layers) < 3:
        return None
    best: tuple[int, int] | None = None
    for start in range(len(layers)):
        held = 0.0
        for end in range(start, len(layers)):
            held += change[end]
            if held >= MOST * total:
                if best is None or end - start < best[1] - best[0]:
                    best = (start, end)
                break
    if best is None or best[1] - best[0] + 1 > FEW_LAYERS * len(layers):
        return None
    return layers[best[0]], layers[best[1]]


def _pairs(report: Report) -> Iterator[str]:
    cosines, names = report.cosines, report.experts
    pairs = [(a, b) for a in range(len(names)) for b in range(a)]
    known = [(value, b, a) for a, b in pairs if (value := cosines[a][b]) is not None]
    for value, a, b in sorted(known, reverse=True):
        if value > ALIKE:
            yield (
                f"{names[a]} and {names[b]} learned nearly the same (cosine {value:.2f}): together "
                "they count double."
            )
        elif value < OPPOSED:
            yield f"{names[a]} and {names[b]} pull in opposite directions (cosine {value:.2f})."
    if known:
        value, a, b = max(known)
        if OPPOSED <= value <= ALIKE:
            yield (
                f"The most similar experts are {names[a]} and {names[b]}, with a cosine of "
                f"{value:.2f} between their task vectors."
            )
    overlap, chance = input_overlap(report)
    if overlap is not None and overlap > CROWDED * chance:
        yield (
            f"Two experts share {overlap:.0%} of their leading input directions on average, where "
            f"random ones would share {chance:.0%}: they answer to the same inputs, and averaging "
            "would blur them."
        )


def input_overlap(report: Report) -> tuple[float | None, float]:
    """Return the mean overlap of leading input directions over all pairs, and that of chance."""
    means, rows = report.mean_overlap("inputs"), report.rows_with("subspaces")
    pairs = [means[a][b] for a in range(len(means)) for b in range(a)]
    values = [value for value in pairs if value is not None]
    sizes = [(row.matrix.subspaces.size, row.columns) for row in rows]
    if not values:
        return None, 0.0
    chances = [min(1.0, size / max(1, columns)) for size, columns in sizes]
    return math.fsum(values) / len(values), math.fsum(chances) / len(chances)


def _branches(report: Report) -> Iterator[str]:
    solved = report.solved
    if not solved:
        return
    exceeding = [row for row in solved if row.matrix.heterogeneous]
    statistic = "γ" if solved[0].matrix.statistic == "gamma" else "The variance of log τ"
    if not exceeding:
        yield (
            f"{statistic} stays below the threshold in all {len(solved)} matrices: the experts "
            "differ little in scale, and nothing is normalised or refined unless you ask for it."
        )
        return
    alone = [row for row in exceeding if by_unit_alone(row)]
    text = f"{statistic} exceeds the threshold in {len(exceeding)} of {len(solved)} matrices"
    if alone:
        how_many = "all" if len(alone) == len(exceeding) else str(len(alone))
        text += (
            f", in {how_many} of them only because τ is close to 1; `heterogeneity: log_variance` "
            "does not depend on that"
        )
    yield text + "."
    spectra = [row.matrix.spectrum for row in report.rows_with("spectrum")]
    refined = [spectrum for spectrum in spectra if spectrum.alignment is not None]
    if refined:
        before = math.fsum(spectrum.share_before for spectrum in refined) / len(refined)
        after = math.fsum(spectrum.share_after for spectrum in refined) / len(refined)
        yield (
            f"The refinement of {_count(len(refined), 'matrix', 'matrices')} changes the share of "
            f"the energy in the top 5 % of singular values from {before:.0%} to {after:.0%}."
        )


def _ridges(report: Report) -> Iterator[str]:
    """Tell of which side covariances are, and where the ridge was raised, or should have been."""
    ridges = report.rows_with("ridge")
    outputs = [row for row in ridges if row.matrix.side == "outputs"]
    if outputs:
        yield (
            f"The covariances of {_count(len(outputs), 'matrix', 'matrices')} are estimated at the "
            "outputs, by ΔΔᵀ, as `side` has it."
        )
    large = [row for row in ridges if row.matrix.amplification > LARGE]
    if large:
        worst = sorted(large, key=lambda row: -row.matrix.amplification)[:3]
        named = [f"{row.matrix.amplification:.3g} in {row.label}" for row in worst]
        yield (
            f"The merge is larger than what the experts hold in {_part(large, ridges)}: "
            f"‖X‖² / Σ ‖Δ_t‖² is {_listed(named)}. A ridge that is too small amplifies noise "
            "there; leave `epsilon_scale` out, or raise `epsilon` for these tensors by a filter."
        )


def _part(rows: Sequence[Row], whole: Sequence[Row]) -> str:
    """Return how many of the matrices these are, in which modules they mostly lie, and T·o/i."""
    modules = Counter(module_of(row.line.name) for row in rows)
    shown: list[str] = []
    for module, _ in modules.most_common():
        if sum(modules[name] for name in shown) < MOSTLY * len(rows):
            shown.append(module)
    known = [row.rows_per_column for row in rows if module_of(row.line.name) in shown]
    ratios = sorted(ratio for ratio in known if ratio is not None)
    span = " to ".join(dict.fromkeys(f"{ratio:.3g}" for ratio in (ratios[0], ratios[-1])))
    mostly = "" if len(shown) == len(modules) else "mostly "
    return f"{len(rows)} of {len(whole)} matrices, {mostly}{_listed(shown)} (T·o/i = {span})"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _listed(parts: list[str], most: int = 6) -> str:
    shown = parts if len(parts) <= most else [*parts[:most], f"{len(parts) - most} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _overlaps(row: Row) -> list[float]:
    """Return the overlaps of leading subspaces, the mean squared cosines of their angles."""
    known = (angles for angles in row.matrix.agreement.angles if angles is not None)
    return [_mean([math.cos(math.radians(a)) ** 2 for a in angles]) for angles in known]


def agreement_by_kind(report: Report) -> dict[str, dict[str, Any]]:
    """Return means over experts and layers by kind of tensor; empty if nothing was measured.

    Each has `own` and `others`, the mean cosines with the covariance of the own and of the other
    tasks (None without any), and `overlap` of the leading subspaces, with what random ones have as
    `chance`.
    """
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in report.rows_with("agreement"):
        if row.own_cosines:
            kinds[without_numbers(row.line.name)].append(row)
    return {
        kind: {
            "own": _mean([value for row in rows for value in row.own_cosines]),
            "others": _mean([value for row in rows for value in row.other_cosines]),
            "overlap": _mean([value for row in rows for value in _overlaps(row)]),
            "chance": rows[0].matrix.agreement.size / rows[0].columns,
        }
        for kind, rows in kinds.items()
    }


def _agreement(report: Report) -> Iterator[str]:
    """Yield how far the estimates agree with what was measured."""
    kinds = agreement_by_kind(report)
    if not kinds:
        return
    own = _mean([kind["own"] for kind in kinds.values()])
    others = _mean([kind["others"] for kind in kinds.values() if kind["others"] is not None])
    best = max(kinds, key=lambda kind: kinds[kind]["own"])
    worst = min(kinds, key=lambda kind: kinds[kind]["own"])
    beside = f", and {others:.2f} with those of the other tasks" if others is not None else ""
    yield (
        f"Estimates ΔᵀΔ have a cosine of {own:.2f} with the measured covariances of their own "
        f"tasks{beside}; {kinds[best]['own']:.2f} in {best}, {kinds[worst]['own']:.2f} in {worst}."
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
