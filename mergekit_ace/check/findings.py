# SPDX-License-Identifier: Apache-2.0
"""Findings: what a check says, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import click

Level = Literal["error", "warning"]
MOST_LISTED = 6


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes:
        subject: what it is about: ``config``, ``tensors``, ``tokenizers``, …
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
