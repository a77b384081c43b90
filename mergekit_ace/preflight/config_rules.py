# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a merge as it is planned: its coefficients, and what is seldom meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import click

from mergekit_ace.coefficients.file import CoefficientFileError
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.naming import without_numbers
from mergekit_ace.planning import PlannedMerge

Level = Literal["error", "warning"]
MOST_LISTED = 6


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes:
        level: ``error`` or ``warning``.
        subject: what it is about: ``config``, ``tensors``, ``tokenizers``, …
        message: what was found.
        remedy: what to do.
    """

    level: Level
    subject: str
    message: str
    remedy: str = ""

    @classmethod
    def error(cls, subject: str, message: str, remedy: str = "") -> Finding:
        """Return something because of which the merge fails, or is not what the config says."""
        return cls("error", subject, message, remedy)

    @classmethod
    def warning(cls, subject: str, message: str, remedy: str = "") -> Finding:
        """Return something that may not be what is wanted."""
        return cls("warning", subject, message, remedy)

    @property
    def text(self) -> str:
        """All of it, for people."""
        remedy = f"\n    → {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.subject}: {self.message}{remedy}"


def shown_errors(findings: Iterable[Finding], *, quiet: bool) -> str:
    """Show warnings, unless `quiet`, and return all errors with their remedies; empty if none."""
    errors = []
    for finding in findings:
        if finding.level == "error":
            errors.append(finding.text.removeprefix("error: "))
        elif not quiet:
            click.echo(finding.text, err=True)
    return "\n".join(errors)


def listed(names: Sequence[str], most: int = MOST_LISTED) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def check_coefficients(plan: PlannedMerge) -> Iterator[Finding]:
    """Say what a merge would when it comes to the first tensor whose coefficients do not fit.

    And, where they do fit, whether the components have changed under them by weights of experts.
    """
    method, weighted = plan.method, []
    for tensor in plan.tensors if isinstance(method, TaskVectorMethod) else ():
        try:
            known = method.learned_coefficients(tensor.settings)
        except CoefficientFileError as error:
            yield Finding.error("coefficients", str(error))
            return
        if known is not None and len(set(tensor.settings.weights)) > 1:
            weighted.append(tensor.name)
    if weighted:
        yield Finding.warning(
            "coefficients",
            f"experts have different weights in {listed(weighted)}; the coefficients were learned "
            "for equal ones",
            "leave `weight` out, or expect another merge than the one that was trained",
        )


def check_doubts(
    plan: PlannedMerge, rows_per_column: Mapping[str, float | None]
) -> Iterator[Finding]:
    """Find settings that are allowed, but seldom meant; what a method knows of its own.

    Args:
        plan: the merge.
        rows_per_column: T·o/i of tensors, by name, see `TensorEstimate`.
    """
    method = plan.method
    if not isinstance(method, TaskVectorMethod):
        return
    found: dict[tuple[str, str], list[str]] = {}
    for tensor in plan.tensors:
        for doubt in method.doubts(tensor.settings, rows_per_column.get(tensor.name)):
            found.setdefault(doubt, []).append(tensor.name)
    for (message, remedy), names in found.items():
        kinds = list(dict.fromkeys(without_numbers(name) for name in names))
        where = "" if len(names) == len(plan.tensors) else f": {listed(kinds)}"
        yield Finding.warning("config", message + where, remedy)
