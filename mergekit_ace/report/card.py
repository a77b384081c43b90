# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace card`: what `mergekit-yaml` left out of a result, and how it was made.

Files are added, tensors that are gone are named, and the model card gets the section "How this
merge was made".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from mergekit import merge_methods
from mergekit.common import ModelPath
from mergekit.config import MergeConfiguration
from tqdm import tqdm

from mergekit_ace.check.loading import NotLoadedError, merged_model, verify_model
from mergekit_ace.files.checkpoints import adapter_files, weight_files
from mergekit_ace.files.headers import DamagedFileError, read_file_header
from mergekit_ace.files.model_files import add_model_files, config_donor
from mergekit_ace.files.saving import package_versions, sha256, write_text
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.methods.report_lines import REPORTED_PACKAGES, Record
from mergekit_ace.planning import read_merge_config
from mergekit_ace.report.markdown import citation_blocks, markdown_text, method_link
from mergekit_ace.report.record import Report, ReportError, read_records
from mergekit_ace.report.summary import summarize

BEGIN, END = "<!-- mergekit-ace: begin -->", "<!-- mergekit-ace: end -->"


def update_card(
    folder: Path, lines: Path | None, *, seed: int | None = None, quiet: bool = False
) -> None:
    """`mergekit-ace card`: write the card's section, complete the files, and check the tensors.

    Args:
        folder: that mergekit wrote.
        lines: the report of this merge, by itself or by `inspect`; None to leave the card as it is.
        seed: of `mergekit-yaml --random-seed`, which mergekit does not write down.
        quiet: no progress bar.

    Raises:
        ReportError: there is no card, no config, the report is of another merge, or tensors are
            missing.
    """
    card = folder / "README.md"
    if lines is not None and not card.is_file():
        raise ReportError(f"there is no model card {card}; merge without --no-write-model-card")
    if not (folder / "mergekit_config.yml").is_file():
        raise ReportError(f"{folder} holds no mergekit_config.yml: is it what mergekit wrote?")
    config, _ = read_merge_config(folder / "mergekit_config.yml")
    if lines is not None:
        records = read_records(lines)
        _check_same_merge(folder, config, records)
        hashes = _hash_models(config, folder, quiet=quiet)
        _write_section(card, "\n\n".join(_section(Report(records), config, hashes, seed)))
        click.echo(str(card))
    added = add_model_files(config, folder, beside=folder.parent)
    for name, model in added.items():
        click.echo(f"added {name} of {model}")
    if not added:
        click.echo(f"{folder} has all files that its models have beside their weights")
    problem = _problem(config, folder)
    if problem:
        raise ReportError(
            f"{folder} is no model that transformers loads whole: {problem}. Merge again with "
            "`mergekit-ace merge --unplanned merge` or `--unplanned base`"
        )


def _problem(config: MergeConfiguration, folder: Path) -> str:
    """Return what is wrong with the weights; empty where the base is not here to compare with."""
    donor = _find(config_donor(config).model, folder)
    if donor is None:
        return ""
    try:
        return verify_model(folder, merged_model(donor), donor, trust_remote_code=False)
    except (NotLoadedError, OSError, RuntimeError, ValueError):
        return ""  # weights of the base that are gone, an architecture with code of its own


def _find(part: ModelPath, folder: Path) -> Path | None:
    """Return the folder of a model or an adapter; relative names may be beside the result, too."""
    path = Path(part.path).expanduser()
    return next((place for place in (path, folder.parent / path) if place.is_dir()), None)


def _write_section(card: Path, section: str) -> None:
    """Write the section behind what the card says, or in the place of an earlier one."""
    try:
        known = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{card} cannot be read: {error}; save it as UTF-8") from error
    text = re.sub(f"\n*{BEGIN}.*?{END}\n*", "\n", known, flags=re.DOTALL)
    write_text(card, f"{text.rstrip()}\n\n{BEGIN}\n\n{section}\n\n{END}\n")


def _check_same_merge(folder: Path, config: MergeConfiguration, records: Sequence[Record]) -> None:
    other = next(_other_parts(folder, config, records), None)
    if other:
        raise ReportError(
            f"the report is of another merge: {other}; give the report of this merge, or of "
            "`mergekit-ace inspect` with its config"
        )


def _other_parts(
    folder: Path, config: MergeConfiguration, records: Sequence[Record]
) -> Iterator[str]:
    """Yield what in a report is not of the merge in a folder."""
    if records[0].method != config.merge_method:
        yield f"by {records[0].method}, and {folder} was made by {config.merge_method}"
    models = {str(model) for model in config.referenced_models()}
    named = {model for record in records for model in record.models}
    if named - models:
        yield f"{folder} was not made from {', '.join(sorted(named - models))}"
    lost = models - named - {str(config.base_model)}
    if lost:
        yield f"{folder} was made from {', '.join(sorted(lost))} too"
    files = [path for path in weight_files(folder) if path.suffix == ".safetensors"]
    headers = {name: h for path in files for name, h in read_file_header(path).items()}
    for record in records if headers else ():
        if record.name not in headers:
            yield f"{folder} has no tensor {record.name}"
        elif not record.skipped and record.shape[1:] != headers[record.name].shape[1:]:
            # the first axis may be longer, by tokens
            shape = headers[record.name].shape
            yield f"{record.name} has the shape {shape} in {folder}, and {record.shape} there"


def _hash_models(
    config: MergeConfiguration, folder: Path, *, quiet: bool = False
) -> dict[str, str | None]:
    """Return SHA-256 of every input: of its weight files' digests in the order of their names.

    Returns:
        By model; None for what is not here.
    """
    files: dict[str, list[Path]] = {}
    for model in sorted(config.referenced_models(), key=str):
        files[str(model.model)] = _files_of(model.model, folder)
        if model.lora is not None:
            files[str(model.lora)] = _files_of(model.lora, folder, adapter=True)
    bar = tqdm([f for group in files.values() for f in group], "hashing inputs", disable=quiet)
    digests = {file: bytes.fromhex(sha256(file)) for file in bar}
    return {
        name: hashlib.sha256(b"".join(digests[file] for file in group)).hexdigest()
        if group else None
        for name, group in files.items()
    }  # fmt: skip


def _files_of(part: ModelPath, folder: Path, *, adapter: bool = False) -> list[Path]:
    """Return the weight files of a model or an adapter; none where they are not all here."""
    place = _find(part, folder)
    if place is None:
        return []
    try:
        files = adapter_files(place) if adapter else weight_files(place)
    except DamagedFileError:
        return []
    return files if all(file.is_file() for file in files) else []


def _section(
    report: Report, config: MergeConfiguration, hashes: dict[str, str | None], seed: int | None
) -> Iterator[str]:
    """Yield the paragraphs of the section."""
    method = merge_methods.get(config.merge_method)
    own = method if isinstance(method, TaskVectorMethod) else None
    does = f" {own.spec.pretty_name} {own.summary[0].lower()}{own.summary[1:]}" if own else ""
    yield "## How this merge was made"
    yield (
        f"By {method_link(method)}, with [mergekit](https://github.com/arcee-ai/mergekit) and "
        f"mergekit-ace; the configuration is above.{does}"
    )
    yield "\n".join(f"* {markdown_text(text)}" for text in summarize(report)["sentences"])
    yield _table(
        ["expert", "weight", "size of its change", "share of all change"], _experts(report)
    )
    versions = next((r.versions for r in report.records), package_versions(*REPORTED_PACKAGES))
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    told = own.seed(config.parameters or {}) if own else "none given"
    rows = [
        ("versions", markdown_text(listed)),
        ("seed", markdown_text(told) if seed is None else str(seed)),
    ]
    for name, digest in hashes.items():
        text = f"SHA-256 `{digest}`" if digest else "not on the machine that wrote this"
        rows.append((markdown_text(name), text))
    yield _table(["", ""], rows)
    yield from citation_blocks(method)


def _experts(report: Report) -> Iterator[tuple[str, ...]]:
    """Yield what the card says of each expert."""
    total = sum(norm**2 for norm in report.norms) or 1.0
    moved = report.shares[report.shares.tau > 0]
    weights = moved.groupby("expert").weight.agg(["min", "max"]).reindex(report.experts).fillna(0)
    sizes = zip(report.norms, report.relative_sizes, strict=True)
    for model, (norm, size), low, high in zip(
        report.models, sizes, weights["min"], weights["max"], strict=True
    ):
        yield (
            markdown_text(model),
            f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}",
            f"{norm:.3g}" if size is None else f"{size:.2%} of the base",
            f"{norm**2 / total:.0%}",
        )


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
