# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace card`: what `mergekit-yaml` left out of a result, and how it was made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import click
from mergekit import merge_methods
from mergekit.config import MergeConfiguration

from mergekit_ace.check.loading import verify_model
from mergekit_ace.files.checkpoints import add_model_files, config_donor, find_model_file
from mergekit_ace.files.saving import write_text
from mergekit_ace.merge_config import read_merge_config
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.naming import ConfigError
from mergekit_ace.report.summary import Report, read_records, summarize

BEGIN, END = "<!-- mergekit-ace: begin -->", "<!-- mergekit-ace: end -->"
# What Markdown reads as markup; within a word an underscore is only that.
_MARKUP = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_+|_+(?![^\W_])|^[-+#=]|(?<=^\d)[.)]")


def markdown_text(text: str) -> str:
    """Return text as Markdown that shows it, on one line: in a list, or in a cell of a table."""
    return _MARKUP.sub(lambda match: "\\" + "\\".join(match[0]), " ".join(text.split()))


def update_card(folder: Path, lines: Path | None) -> None:
    """`mergekit-ace card`: write the card's section, complete the files, and check the tensors."""
    source, card = folder / "mergekit_config.yml", folder / "README.md"
    if not source.is_file():
        raise ConfigError(f"there is no {source}; merge by mergekit, without --no-write-model-card")
    config = read_merge_config(source)
    if lines is not None:
        report = Report(read_records(lines))
        _check_same_merge(folder, config, report)
        known = card.read_text(encoding="utf-8")
        text = re.sub(f"\n*{BEGIN}.*?{END}\n*", "\n", known, flags=re.DOTALL).rstrip()
        section = "\n\n".join([BEGIN, *_section(report, config), END])
        write_text(card, f"{text}\n\n{section}\n")
        click.echo(str(card))
    beside = folder.parent  # where relative names of models may start
    added = add_model_files(config, folder, beside=beside)
    for name, model in added.items():
        click.echo(f"added {name} of {model}")
    donor, problem = find_model_file(config_donor(config).model, "config.json", beside=beside), ""
    if donor is None:
        said = f"{config_donor(config)} is not to be found from here"
        click.echo(f"warning: {said}; whether {folder} is whole was not checked", err=True)
    else:
        if not added:
            click.echo(f"{folder} has all files that its models have beside their weights")
        # weights of the base may be gone, an architecture may have code of its own
        with suppress(OSError, RuntimeError, ValueError):
            problem = verify_model(folder, donor.parent, trust_remote_code=False)
    if problem:
        raise ConfigError(
            f"{folder} is no model that transformers loads whole: {problem}. Merge again with "
            "`mergekit-ace merge --unplanned merge` or `--unplanned base`"
        )


def _check_same_merge(folder: Path, config: MergeConfiguration, report: Report) -> None:
    experts = {str(model) for model in config.referenced_models()} - {str(config.base_model)}
    if report.name != config.merge_method or set(report.models) != experts:
        raise ConfigError(
            f"the report is of another merge: by {report.name} of {', '.join(report.models)}, and "
            f"{folder} was made by {config.merge_method} of {', '.join(sorted(experts))}"
        )


def _section(report: Report, config: MergeConfiguration) -> Iterator[str]:
    """Yield the paragraphs of the section."""
    method = merge_methods.get(config.merge_method)
    own = method if isinstance(method, TaskVectorMethod) else None
    url = method.spec.reference_url
    does = f" {own.spec.pretty_name} {own.summary[0].lower()}{own.summary[1:]}" if own else ""
    yield "## How this merge was made"
    yield (
        f"By {f'[{report.title}]({url})' if url else report.title}, with "
        "[mergekit](https://github.com/arcee-ai/mergekit) and mergekit-ace; the configuration is "
        f"above.{does}"
    )
    yield "\n".join(f"* {markdown_text(text)}" for text in summarize(report))
    yield markdown_table(_experts(report))
    versions = ", ".join(map(" ".join, report.records[0].versions.items()))
    yield f"Versions: {markdown_text(versions)}."
    yield from (f"```bibtex\n{citation}\n```" for citation in report.citations)


def _experts(report: Report) -> list[Sequence[str]]:
    """Return what the card says of each expert, below the names of the columns."""
    total = sum(norm**2 for norm in report.norms) or 1.0
    moved = report.shares[report.shares.tau > 0]
    weights = moved.groupby("expert").weight.agg(["min", "max"]).reindex(report.experts).fillna(0)
    rows: list[Sequence[str]] = [("expert", "weight", "size of its change", "share of all change")]
    for model, norm, size, (low, high) in zip(
        report.models, report.norms, report.relative_sizes, weights.to_numpy(), strict=True
    ):
        weight = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        moved_by = f"{norm:.3g}" if math.isnan(size) else f"{size:.2%} of the base"
        rows.append((markdown_text(model), weight, moved_by, f"{norm**2 / total:.0%}"))
    return rows


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
