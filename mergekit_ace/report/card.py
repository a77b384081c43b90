# SPDX-License-Identifier: Apache-2.0
"""The section "How this merge was made" of a model card, with pictures if matplotlib is there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from mergekit import merge_methods
from mergekit.common import ModelPath
from mergekit.config import MergeConfiguration
from tqdm import tqdm

from mergekit_ace.checkpoint_files import adapter_files, weight_files
from mergekit_ace.files import package_versions, write_text
from mergekit_ace.headers import DamagedFileError, TensorHeader, read_file_header
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.methods.report_lines import REPORTED_PACKAGES
from mergekit_ace.report.completion import complete_result, merged_config
from mergekit_ace.report.figures import COLORS
from mergekit_ace.report.jsonl import Line, ReportError, read_lines
from mergekit_ace.report.markdown import markdown_text
from mergekit_ace.report.summary import relative_sizes, summarize
from mergekit_ace.report.tables import Report, title_of

BEGIN, END = "<!-- mergekit-ace: begin -->", "<!-- mergekit-ace: end -->"
PICTURES = {
    "merge_task_vectors.png": "How far each expert moved, by depth",
    "merge_experts.png": "How alike the experts are",
}


def write_card(folder: Path, lines: Path, *, seed: int | None = None, quiet: bool = False) -> Path:
    """Add the section to a merge's model card, or renew it there.

    Args:
        folder: that mergekit wrote.
        lines: the report of this merge, by itself or by `inspect`.
        seed: of `mergekit-yaml --random-seed`, which mergekit does not write down.
        quiet: no progress bar while inputs are hashed.

    Returns:
        The card.

    Raises:
        ReportError: there is no card, no config, or the report is of another merge.
    """
    card = folder / "README.md"
    if not card.is_file():
        raise ReportError(f"there is no model card {card}; merge without --no-write-model-card")
    try:
        known = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{card} cannot be read: {error}; save it as UTF-8") from error
    config = merged_config(folder)
    found = read_lines(lines)
    _check_same_merge(folder, config, found)
    report = Report(found)
    try:
        pictures = save_pictures(report, folder)
    except ImportError:
        pictures = {}
    hashes = hash_models(config, folder, quiet=quiet)
    section = _section(report, config, pictures, hashes, seed)
    text = _without_section(known)
    write_text(card, f"{text.rstrip()}\n\n{section}\n")
    return card


def _without_section(text: str) -> str:
    return re.sub(f"\n*{re.escape(BEGIN)}.*?{re.escape(END)}\n*", "\n", text, flags=re.DOTALL)


def _check_same_merge(folder: Path, config: MergeConfiguration, lines: Sequence[Line]) -> None:
    """Raise a `ReportError` unless a report is of the merge in a folder."""
    other = _another_merge(folder, config, lines)
    if other:
        raise ReportError(
            f"the report is of another merge: {other}; give the report of this merge, or of "
            "`mergekit-ace inspect` with its config"
        )


def _another_merge(folder: Path, config: MergeConfiguration, lines: Sequence[Line]) -> str:
    """Return what in a report is not of the merge in a folder; empty if all is."""
    method = Report(lines).name
    if method not in (None, config.merge_method):
        return f"by {method}, and {folder} was made by {config.merge_method}"
    models = {str(model) for model in config.referenced_models()}
    named = {model for line in lines for model in line["models"]}
    if named - models:
        return f"{folder} was not made from {', '.join(sorted(named - models))}"
    lost = models - named - {str(config.base_model)}
    if lost:
        return f"{folder} was made from {', '.join(sorted(lost))} too"
    held = _tensors_in(folder)
    for line in lines if held else ():
        name, shape = line["tensor"], line.get("shape")
        if name not in held:
            return f"{folder} has no tensor {name}"
        if shape is not None and tuple(shape[1:]) != held[name].shape[1:]:  # more tokens may be
            return f"{name} has the shape {held[name].shape} in {folder}, and {tuple(shape)} there"
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
        config: of the merge.
        folder: of the result; relative names are looked for beside it, too.
        quiet: no progress bar.

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
                with open(file, "rb") as content:
                    digest = hashlib.sha256()
                    while block := content.read(2**22):
                        digest.update(block)
                        bar.update(len(block))
                whole.update(digest.digest())
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
    ours = isinstance(method, TaskVectorMethod)
    name, url = title_of(config.merge_method), method.spec.reference_url
    linked = f"[{name}]({url})" if url else name
    does = f" {name} {method.summary[0].lower()}{method.summary[1:]}" if ours else ""
    parts = [
        BEGIN,
        "## How this merge was made",
        f"By {linked}, with [mergekit](https://github.com/arcee-ai/mergekit) and mergekit-ace; the "
        f"configuration is above.{does}",
        "\n".join(f"* {markdown_text(text)}" for text in summarize(report)["sentences"]),
        _share_table(report),
        *(f"![{title}]({file})" for file, title in pictures.items()),
        _provenance(report, config, hashes, seed),
    ]
    if ours:
        parts += [f"```bibtex\n{citation.bibtex}\n```" for citation in method.citations]
    return "\n\n".join([*parts, END])


def _share_table(report: Report) -> str:
    total = sum(norm**2 for norm in report.norms) or 1.0
    weights = _weights(report)
    sizes = relative_sizes(report)
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
        values = report.coefficients(row.line) or report.spread(row.line, row.matrix["weight"])
        moved = report.spread(row.line, row.matrix["tau"])
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


def update_card(
    folder: Path, lines: Path | None, *, seed: int | None = None, quiet: bool = False
) -> None:
    """`mergekit-ace card`: complete the files, and write the card's section with its pictures.

    Args:
        folder: that mergekit wrote.
        lines: the report of the merge; None to leave the card as it is.
        seed: of `mergekit-yaml --random-seed`.
        quiet: no progress bar.
    """
    if lines is not None:
        _update_section(folder, lines, seed=seed, quiet=quiet)
    complete_result(folder)


def _update_section(folder: Path, lines: Path, *, seed: int | None, quiet: bool) -> None:
    card = write_card(folder, lines, seed=seed, quiet=quiet)
    if find_spec("matplotlib") is None:
        click.echo("without pictures, which need: pip install matplotlib")
    click.echo(str(card))


def save_pictures(report: Report, folder: Path) -> dict[str, str]:
    """Write two pictures; return what they show by the names of their files.

    Raises:
        ImportError: there is no matplotlib.
    """
    from matplotlib.figure import Figure

    names = list(PICTURES)
    figure = Figure(figsize=(8, 4), layout="constrained")
    _strength_picture(report, figure.add_subplot())
    _save(figure, folder / names[0])
    saved = {names[0]: PICTURES[names[0]]}
    figure = Figure(figsize=(8, 4), layout="constrained")
    if report.looked_at and len(report.models) > 1:
        _similarity_picture(report, figure)
        saved[names[1]] = PICTURES[names[1]]
    elif report.solved:
        _heterogeneity_picture(report, figure.add_subplot())
        saved[names[1]] = "How much the experts differ in scale, by depth"
    else:
        return saved
    _save(figure, folder / names[1])
    return saved


def _save(figure, path: Path) -> None:
    path.unlink(missing_ok=True)  # in a folder from the Hub's cache it may be a link
    figure.savefig(path, dpi=120)


def _labels(report: Report) -> list[str]:
    """Return the experts as matplotlib shows them, which takes dollars for formulas."""
    return [name.replace("$", r"\$") for name in report.experts]


def _strength_picture(report: Report, axes) -> None:
    rows = [row for row in report.rows if any(row.matrix["tau"])]
    for t, name in enumerate(_labels(report)):
        points = [(n, report.spread(row.line, row.matrix["tau"])[t]) for n, row in enumerate(rows)]
        points = [(n, value) for n, value in points if value]
        color = COLORS[t % len(COLORS)]
        axes.scatter(*zip(*points, strict=True), s=9, color=color, label=name) if points else None
    axes.set(yscale="log", xlabel="tensor, from input to output", ylabel="τ = ‖Δ‖²")
    axes.set_title("How far each expert moved")
    axes.legend()


def _heterogeneity_picture(report: Report, axes) -> None:
    for number, (key, name) in enumerate((("gamma", "γ"), ("log_variance", "variance of log τ"))):
        values = [(n, row.matrix[key]) for n, row in enumerate(report.solved) if row.matrix[key]]
        if values:
            axes.scatter(*zip(*values, strict=True), s=9, color=COLORS[number], label=name)
    axes.set(yscale="log", xlabel="matrix, from input to output", ylabel="no unit")
    axes.set_title("How much the experts differ in scale")
    axes.legend()


def _similarity_picture(report: Report, figure) -> None:
    views = (
        ("cosine of task vectors", report.cosines, -1, "RdBu_r"),
        ("overlap of leading inputs", report.mean_overlap("inputs"), 0, "Blues"),
    )
    places = range(len(report.experts))
    for axes, (title, values, low, colors) in zip(figure.subplots(1, 2), views, strict=True):
        numbers = [[float("nan") if v is None else v for v in row] for row in values]
        image = axes.imshow(numbers, vmin=low, vmax=1, cmap=colors)
        axes.set_xticks(places, _labels(report), rotation=45, ha="right")
        axes.set_yticks(places, _labels(report))
        axes.set_title(title)
        figure.colorbar(image, ax=axes, shrink=0.8)
