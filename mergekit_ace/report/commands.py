# SPDX-License-Identifier: Apache-2.0
"""What the commands on reports do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from mergekit.options import MergeOptions

from mergekit_ace.planning import PlannedMerge, plan_merge, read_merge_config
from mergekit_ace.report.card import write_card
from mergekit_ace.report.inspect import inspect_merge
from mergekit_ace.report.lines import read_lines
from mergekit_ace.report.output import write_page, write_summary


def run_inspection(
    config: Path,
    folder: Path,
    flags: Mapping[str, Any],
    *,
    tensors: Sequence[str] = (),
    sample: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """`mergekit-ace inspect`: write `report.jsonl`, `summary.json` and `report.html`.

    Args:
        config, folder: of the merge, and for the report.
        flags: fields of mergekit's `MergeOptions`.
        tensors, sample, overwrite, quiet: see `inspect_merge`.
    """
    merge, source = read_merge_config(config)
    plan = plan_merge(merge, source, MergeOptions(**flags, quiet=True))
    lines = inspect_merge(
        plan, folder, filters=tensors, sample=sample, overwrite=overwrite, quiet=quiet
    )
    summary = write_summary(lines, folder / "summary.json")
    title, subtitle = describe_merge(plan, len(lines))
    write_page(lines, folder / "report.html", title, subtitle)
    for sentence in summary["sentences"]:
        click.echo(f"* {sentence}")
    click.echo(f"\n{folder / 'report.html'}")


def describe_merge(plan: PlannedMerge, looked_at: int) -> tuple[str, str]:
    """Title and subtitle of a page."""
    spec = plan.method.spec
    name = spec.pretty_name or spec.name
    part = "" if looked_at == len(plan.tensors) else f", {looked_at} of them looked at"
    models = [str(model) for model in plan.tensors[0].experts]
    return (
        f"{name}: {', '.join(models)}",
        f"Base model {plan.config.base_model}; {len(plan.tensors)} tensors{part}. "
        "Seen before the merge, by mergekit-ace inspect.",
    )


def show_report(lines: Path, out: Path) -> None:
    """`mergekit-ace report`: a page from the JSON lines of a merge."""
    found = read_lines(lines)
    models = ", ".join(found[0]["models"])
    write_page(found, out, f"ACE-Merging: {models}", f"From {lines.name}, written by the merge.")
    click.echo(str(out))


def update_card(folder: Path, lines: Path, *, seed: int | None = None, quiet: bool = False) -> None:
    """`mergekit-ace card`: the section of a model card, and its pictures."""
    card = write_card(folder, lines, seed=seed, quiet=quiet)
    if find_spec("matplotlib") is None:
        click.echo("without pictures, which need: pip install 'mergekit-ace[plots]'")
    click.echo(str(card))
