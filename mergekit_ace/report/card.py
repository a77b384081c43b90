# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace card`: what `mergekit-yaml` left out of a result, and how it was made.

Files are added, tensors that are gone are named; the section "How this merge was made" of the model
card has pictures if matplotlib is there.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from mergekit import merge_methods
from mergekit.common import ModelPath
from mergekit.config import MergeConfiguration
from tqdm import tqdm

from mergekit_ace.check.loading import NotLoadedError, merged_model, verify_model
from mergekit_ace.files.checkpoints import adapter_files, weight_files
from mergekit_ace.files.headers import DamagedFileError, TensorHeader, read_file_header
from mergekit_ace.files.model_files import add_model_files, config_donor
from mergekit_ace.files.saving import package_versions, sha256, write_text
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.methods.report_lines import REPORTED_PACKAGES
from mergekit_ace.planning import read_merge_config
from mergekit_ace.report.figures import (
    Picture,
    draw_heterogeneity,
    draw_similarity,
    draw_strength,
)
from mergekit_ace.report.jsonl import Line, ReportError, read_lines
from mergekit_ace.report.markdown import citation_blocks, markdown_text, method_link
from mergekit_ace.report.summary import summarize
from mergekit_ace.report.tables import Report

BEGIN, END = "<!-- mergekit-ace: begin -->", "<!-- mergekit-ace: end -->"


def update_card(
    folder: Path, lines: Path | None, *, seed: int | None = None, quiet: bool = False
) -> None:
    """`mergekit-ace card`: complete the files, and write the card's section with its pictures.

    Args:
        folder: that mergekit wrote.
        lines: the report of this merge, by itself or by `inspect`; None to leave the card as it is.
        seed: of `mergekit-yaml --random-seed`, which mergekit does not write down.
        quiet: no progress bar.

    Raises:
        ReportError: there is no card, no config, the report is of another merge, or tensors are
            missing.
    """
    if lines is not None:
        _write_section(folder, lines, seed=seed, quiet=quiet)
    _complete_result(folder)


def _complete_result(folder: Path) -> None:
    """Add the files that a result lacks, say which, and check that transformers loads it whole.

    Raises:
        ReportError: there is no config, or tensors are missing.
    """
    config = _merged_config(folder)
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


def _merged_config(folder: Path) -> MergeConfiguration:
    """Return the config that a result was made from.

    Raises:
        ReportError: there is none.
    """
    if not (folder / "mergekit_config.yml").is_file():
        raise ReportError(f"{folder} holds no mergekit_config.yml: is it what mergekit wrote?")
    return read_merge_config(folder / "mergekit_config.yml")[0]


def _problem(config: MergeConfiguration, folder: Path) -> str:
    """Return what is wrong with the weights; empty where the base is not here to compare with."""
    path = Path(config_donor(config).model.path).expanduser()
    donor = next((place for place in (path, folder.parent / path) if place.is_dir()), None)
    if donor is None:
        return ""
    try:
        return verify_model(folder, merged_model(donor), donor, trust_remote_code=False)
    except (NotLoadedError, OSError, RuntimeError, ValueError):
        return ""  # weights of the base that are gone, an architecture with code of its own


def _write_section(folder: Path, lines: Path, *, seed: int | None, quiet: bool) -> None:
    card = folder / "README.md"
    if not card.is_file():
        raise ReportError(f"there is no model card {card}; merge without --no-write-model-card")
    try:
        known = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{card} cannot be read: {error}; save it as UTF-8") from error
    config = _merged_config(folder)
    found = read_lines(lines)
    _check_same_merge(folder, config, found)
    report = Report(found)
    try:
        pictures = save_pictures(report, folder)
    except ImportError:
        pictures = {}
        click.echo("without pictures, which need: pip install matplotlib")
    hashes = hash_models(config, folder, quiet=quiet)
    section = _section(report, config, pictures, hashes, seed)
    text = re.sub(f"\n*{BEGIN}.*?{END}\n*", "\n", known, flags=re.DOTALL)
    write_text(card, f"{text.rstrip()}\n\n{section}\n")
    click.echo(str(card))


def _check_same_merge(folder: Path, config: MergeConfiguration, lines: Sequence[Line]) -> None:
    other = _another_merge(folder, config, lines)
    if other:
        raise ReportError(
            f"the report is of another merge: {other}; give the report of this merge, or of "
            "`mergekit-ace inspect` with its config"
        )


def _another_merge(folder: Path, config: MergeConfiguration, lines: Sequence[Line]) -> str:
    """Return what in a report is not of the merge in a folder; empty if all is."""
    method = Report(lines).name
    if method and method != config.merge_method:
        return f"by {method}, and {folder} was made by {config.merge_method}"
    models = {str(model) for model in config.referenced_models()}
    named = {model for line in lines for model in line.models}
    if named - models:
        return f"{folder} was not made from {', '.join(sorted(named - models))}"
    lost = models - named - {str(config.base_model)}
    if lost:
        return f"{folder} was made from {', '.join(sorted(lost))} too"
    held = _tensors_in(folder)
    for line in lines if held else ():
        if line.name not in held:
            return f"{folder} has no tensor {line.name}"
        shape = held[line.name].shape
        if not line.skipped and line.shape[1:] != shape[1:]:  # more tokens may be
            return f"{line.name} has the shape {shape} in {folder}, and {line.shape} there"
    return ""


def _tensors_in(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of a result in safetensors; none of one in pickles."""
    files = [path for path in weight_files(folder) if path.suffix == ".safetensors"]
    return {name: header for path in files for name, header in read_file_header(path).items()}


def hash_models(
    config: MergeConfiguration, folder: Path, *, quiet: bool = False
) -> dict[str, str | None]:
    """Return SHA-256 of every input: of its weight files' digests in the order of their names.

    Args:
        folder: of the result; relative names are looked for beside it, too.

    Returns:
        By model; None for what is not here.
    """
    files = {
        str(part): _files_of(part, folder, find)
        for model in sorted(config.referenced_models(), key=str)
        for part, find in ((model.model, weight_files), (model.lora, adapter_files))
        if part is not None
    }
    total = sum(file.stat().st_size for group in files.values() for file in group)
    hashes: dict[str, str | None] = {}
    bar = tqdm(total=total, desc="hashing inputs", unit="B", unit_scale=True, disable=quiet)
    with bar:
        for name, group in files.items():
            whole = hashlib.sha256()
            for file in group:
                whole.update(bytes.fromhex(sha256(file)))
                bar.update(file.stat().st_size)
            hashes[name] = whole.hexdigest() if group else None
    return hashes


def _files_of(part: ModelPath, folder: Path, find: Callable[[Path], list[Path]]) -> list[Path]:
    """Return the weight files of a model or an adapter; none where they are not all here."""
    path = Path(part.path).expanduser()
    for place in (path, folder.parent / path):
        if place.is_dir():
            try:
                files = find(place)
            except DamagedFileError:
                return []
            return files if all(file.is_file() for file in files) else []
    return []


def _section(
    report: Report,
    config: MergeConfiguration,
    pictures: Mapping[str, str],
    hashes: Mapping[str, str | None],
    seed: int | None,
) -> str:
    method = merge_methods.get(config.merge_method)
    does = ""
    if isinstance(method, TaskVectorMethod):
        does = f" {method.spec.pretty_name} {method.summary[0].lower()}{method.summary[1:]}"
    parts = [
        BEGIN,
        "## How this merge was made",
        f"By {method_link(method)}, with [mergekit](https://github.com/arcee-ai/mergekit) and "
        f"mergekit-ace; the configuration is above.{does}",
        "\n".join(f"* {markdown_text(text)}" for text in summarize(report)["sentences"]),
        _share_table(report),
        *(f"![{title}]({file})" for file, title in pictures.items()),
        _provenance(report, config, hashes, seed),
        *citation_blocks(method),
        END,
    ]
    return "\n\n".join(parts)


def _share_table(report: Report) -> str:
    total = sum(norm**2 for norm in report.norms) or 1.0
    weights = _weights(report)
    sizes = report.relative_sizes
    rows = ["| expert | weight | size of its change | share of all change |", "|---|---|---|---|"]
    for t, model in enumerate(report.models):
        size = f"{sizes[t]:.2%} of the base" if sizes[t] is not None else f"{report.norms[t]:.3g}"
        share = f"{report.norms[t] ** 2 / total:.0%}"
        rows.append(f"| {markdown_text(model)} | {weights[t]} | {size} | {share} |")
    return "\n".join(rows)


def _weights(report: Report) -> list[str]:
    """Return the range of weights or coefficients that each expert had where it moved a tensor."""
    columns: list[list[float]] = [[] for _ in report.models]
    for row in report.rows:
        given = row.line.coefficients is not None
        values = (
            report.coefficients(row.line) if given else report.spread(row.line, row.matrix.weight)
        )
        moved = report.spread(row.line, row.matrix.tau)
        for t, value in enumerate(values):
            if value is not None and moved[t]:
                columns[t].append(value)
    texts = []
    for values in columns:
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        texts.append(f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}")
    return texts


def _provenance(
    report: Report,
    config: MergeConfiguration,
    hashes: Mapping[str, str | None],
    seed: int | None,
) -> str:
    used = report.versions or package_versions(*REPORTED_PACKAGES)
    listed = markdown_text(", ".join(f"{name} {number}" for name, number in used.items()))
    rows = [
        "| | |",
        "|---|---|",
        f"| versions | {listed} |",
        f"| seed | {markdown_text(_seed(config, seed))} |",
    ]
    for model, digest in hashes.items():
        text = f"SHA-256 `{digest}`" if digest else "not on the machine that wrote this"
        rows.append(f"| {markdown_text(model)} | {text} |")
    return "\n".join(rows)


def _seed(config: MergeConfiguration, seed: int | None) -> str:
    if seed is not None:
        return str(seed)
    method = merge_methods.get(config.merge_method)
    if isinstance(method, TaskVectorMethod):
        return method.seed(config.parameters or {})
    return "none given"


def save_pictures(report: Report, folder: Path) -> dict[str, str]:
    """Write two pictures of the report; return what they show by the names of their files.

    Raises:
        ImportError: there is no matplotlib.
    """
    from matplotlib.figure import Figure

    chosen = {
        "merge_task_vectors.png": draw_strength(report),
        "merge_experts.png": draw_similarity(report) or draw_heterogeneity(report),
    }
    saved = {}
    for file, picture in chosen.items():
        if picture is not None:
            figure = Figure(figsize=(8, 4), layout="constrained")
            (_redraw_maps if picture.name == "similarity" else _redraw_points)(picture, figure)
            figure.suptitle(picture.title)
            (folder / file).unlink(missing_ok=True)  # from the Hub's cache it may be a link
            figure.savefig(folder / file, dpi=120)
            saved[file] = picture.title
    return saved


def _redraw_points(picture: Picture, figure: Any) -> None:
    """Draw plotly's points by depth with matplotlib."""
    axes, layout = figure.subplots(), picture.figure.layout
    for trace in picture.figure.data:
        known = [(x, y) for x, y in zip(trace.x, trace.y, strict=True) if y]
        if known:
            label = _plain(trace.name)
            axes.scatter(*zip(*known, strict=True), s=9, color=trace.marker.color, label=label)
    axes.set(yscale="log", xlabel=layout.xaxis.title.text, ylabel=layout.yaxis.title.text)
    axes.set_xticks(layout.xaxis.tickvals, layout.xaxis.ticktext)
    axes.legend()


def _redraw_maps(picture: Picture, figure: Any) -> None:
    """Draw the first two of plotly's heatmaps with matplotlib."""
    titles = [button.label for button in picture.figure.layout.updatemenus[0].buttons]
    for trace, title, axes in zip(picture.figure.data, titles, figure.subplots(1, 2), strict=False):
        names = [_plain(name) for name in trace.x]
        colors = "RdBu_r" if trace.zmin < 0 else "Blues"
        image = axes.imshow(np.array(trace.z, dtype=float), vmin=trace.zmin, vmax=1, cmap=colors)
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.set_title(title)
        figure.colorbar(image, ax=axes, shrink=0.8)


def _plain(name: str) -> str:
    """Return a name as matplotlib shows it, which takes dollars for formulas."""
    return html.unescape(name).replace("$", r"\$")
