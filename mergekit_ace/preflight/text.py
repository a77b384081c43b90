# SPDX-License-Identifier: Apache-2.0
"""A check's result for people."""

from __future__ import annotations

from collections.abc import Iterator

from mergekit_ace.preflight.check import Preflight, in_bytes
from mergekit_ace.preflight.estimate import Estimate


def to_text(result: Preflight) -> str:
    """Lines for a terminal."""
    return "\n".join(_lines(result))


def _lines(result: Preflight) -> Iterator[str]:
    for model in result.models:
        yield (
            f"{model['role']:>6}  {model['model']}: {model['tensors']} tensors, "
            f"{in_bytes(model['bytes'])}, {', '.join(model['dtypes']) or 'unknown dtype'}"
            + (f", vocabulary {model['vocabulary']}" if model["vocabulary"] else "")
        )
    if result.estimate is not None:
        yield ""
        yield from _estimate(result.estimate, result.tensors or 0)
    yield ""
    for finding in result.findings:
        yield f"{finding.level}: {finding.subject}: {finding.message}"
        if finding.remedy:
            yield f"    → {finding.remedy}"
    errors = sum(finding.level == "error" for finding in result.findings)
    warnings = len(result.findings) - errors
    yield (
        f"{errors} errors, {warnings} warnings"
        if result.findings
        else "nothing to complain about: mergekit-yaml may start"
    )


def _estimate(estimate: Estimate, tensors: int) -> Iterator[str]:
    rules = ", ".join(f"{count} {rule}" for rule, count in sorted(estimate.rules.items()))
    yield f" rules  {tensors} tensors: {rules}"
    if estimate.forms:
        forms = ", ".join(f"{count} {form}" for form, count in sorted(estimate.forms.items()))
        yield f" forms  {forms} (should no matrix be refined)"
    low, high = (operations / 1e12 for operations in estimate.operations)
    work = f"{low:.3g} Tflop" if low == high else f"{low:.3g} to {high:.3g} Tflop"
    yield f"  work  {work}"
    if estimate.seconds is not None:
        fast, slow = (in_time(seconds) for seconds in estimate.seconds)
        yield f"  time  about {fast}" + (f", {slow} if all is refined" if slow != fast else "")
    device = estimate.device_memory
    yield f"memory  about {in_bytes(estimate.memory)}" + (
        f", and {in_bytes(device)} on the device" if device is not None else ""
    )
    yield f"  disk  reads {in_bytes(estimate.read)}, writes {in_bytes(estimate.written)}"


def in_time(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 6000:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
