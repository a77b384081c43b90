# SPDX-License-Identifier: Apache-2.0
"""The section "How this merge was made" of a model card."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergekit import merge_methods
from mergekit.common import ModelPath
from mergekit.config import MergeConfiguration
from tqdm import tqdm

from mergekit_ace.coefficients.file import load_coefficients
from mergekit_ace.files import write_text
from mergekit_ace.headers import read_file_header
from mergekit_ace.methods.peers import PEERS
from mergekit_ace.methods.report import versions
from mergekit_ace.planning import RIDGE_METHODS, read_merge_config
from mergekit_ace.report.errors import ReportError
from mergekit_ace.report.lines import Line, read_lines
from mergekit_ace.report.pictures import save_pictures
from mergekit_ace.report.summary import relative_sizes, summarize
from mergekit_ace.report.tables import Report

BEGIN, END = "<!-- mergekit-ace: begin -->", "<!-- mergekit-ace: end -->"
CITATIONS = {
    "ace": """@inproceedings{xu2026ace,
  title     = {{ACE-Merging}: Data-Free Model Merging with Adaptive Covariance Estimation},
  author    = {Xu, Bo and Wu, Haotian and Lin, Hehai and Huang, Weiquan and Zhu, Beier and
               Shu, Yao and Qin, Chengwei},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2026},
  note      = {arXiv:2603.02945}
}""",
    "statsmerging": """@article{statsmerging,
  title   = {{StatsMerging}: Statistics-Guided Model Merging via Task-Specific Teacher
             Distillation},
  journal = {arXiv:2506.04567},
  year    = {2025}
}""",
}
CITATIONS["ace_relative"] = CITATIONS["ace"]
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")


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
    if not (folder / "mergekit_config.yml").is_file():
        raise ReportError(f"{folder} holds no mergekit_config.yml: is it what mergekit wrote?")
    config, _ = read_merge_config(folder / "mergekit_config.yml")
    found = read_lines(lines)
    _check_same_merge(folder, config, found)
    report = Report(found)
    try:
        pictures = save_pictures(report, folder)
    except ImportError:
        pictures = {}
    hashes = hash_models(config, folder, quiet=quiet)
    section = _section(report, config, pictures, hashes, seed)
    text = _without_section(card.read_text(encoding="utf-8"))
    write_text(card, f"{text.rstrip()}\n\n{section}\n")
    return card


def _without_section(text: str) -> str:
    return re.sub(f"\n*{re.escape(BEGIN)}.*?{re.escape(END)}\n*", "\n", text, flags=re.DOTALL)


def _check_same_merge(folder: Path, config: MergeConfiguration, lines: Sequence[Line]) -> None:
    models = {str(model) for model in config.referenced_models()}
    strange = {model for line in lines for model in line["models"]} - models
    if strange:
        raise ReportError(
            f"the report is of another merge: {folder} was not made from {', '.join(strange)}"
        )
    held = {n for path in folder.glob("*.safetensors") for n in read_file_header(path)}
    foreign = [line["tensor"] for line in lines if held and line["tensor"] not in held]
    if foreign:
        raise ReportError(f"the report is of another merge: {folder} has no tensor {foreign[0]}")


def hash_models(
    config: MergeConfiguration, folder: Path, *, quiet: bool = False
) -> dict[str, str | None]:
    """SHA-256 of every input: of the digests of its weight files in the order of their names.

    Args:
        config: of the merge.
        folder: of the result; relative names are looked for beside it, too.
        quiet: no progress bar.

    Returns:
        By model; None for what is not here.
    """
    parts = [
        part
        for model in sorted(config.referenced_models(), key=str)
        for part in (model.model, model.lora)
        if part is not None
    ]
    places = {str(part): _place(part, folder) for part in parts}
    files = {
        name: sorted(file for kind in WEIGHT_FILES for file in place.glob(kind)) if place else []
        for name, place in places.items()
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


def _place(part: ModelPath, folder: Path) -> Path | None:
    path = Path(part.path).expanduser()
    for place in (path, folder.parent / path):
        if place.is_dir():
            return place
    return None


def _section(
    report: Report,
    config: MergeConfiguration,
    pictures: Mapping[str, str],
    hashes: Mapping[str, str | None],
    seed: int | None,
) -> str:
    spec = merge_methods.get(config.merge_method).spec
    name = spec.pretty_name or spec.name
    linked = f"[{name}]({spec.reference_url})" if spec.reference_url else name
    parts = [
        BEGIN,
        "## How this merge was made",
        f"By {linked}, with [mergekit](https://github.com/arcee-ai/mergekit) and mergekit-ace; the "
        "configuration is above.",
        "\n".join(f"* {sentence}" for sentence in summarize(report)["sentences"]),
        _share_table(report),
        *(f"![{title}]({file})" for file, title in pictures.items()),
        _provenance(report, config, hashes, seed),
    ]
    if spec.name in CITATIONS:
        parts.append(f"```bibtex\n{CITATIONS[spec.name]}\n```")
    return "\n\n".join([*parts, END])


def _share_table(report: Report) -> str:
    total = sum(norm**2 for norm in report.norms) or 1.0
    weights = _weights(report)
    sizes = relative_sizes(report)
    rows = ["| expert | weight | size of its change | share of all change |", "|---|---|---|---|"]
    for t, model in enumerate(report.models):
        size = f"{sizes[t]:.2%} of the base" if sizes[t] is not None else f"{report.norms[t]:.3g}"
        rows.append(f"| {model} | {weights[t]} | {size} | {report.norms[t] ** 2 / total:.0%} |")
    return "\n".join(rows)


def _weights(report: Report) -> list[str]:
    """Range of the weights or coefficients that each expert had over all tensors."""
    columns: list[list[float]] = [[] for _ in report.models]
    for row in report.rows:
        values = row.line.get("coefficients") or row.matrix["weight"]
        for t, value in enumerate(report.spread(row.line, values)):
            if value is not None:
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
    used = report.versions or versions()
    listed = ", ".join(f"{name} {number}" for name, number in used.items())
    rows = ["| | |", "|---|---|", f"| versions | {listed} |", f"| seed | {_seed(config, seed)} |"]
    for model, digest in hashes.items():
        text = f"SHA-256 `{digest}`" if digest else "not on the machine that wrote this"
        rows.append(f"| {model} | {text} |")
    return "\n".join(rows)


def _seed(config: MergeConfiguration, seed: int | None) -> str:
    if seed is not None:
        return str(seed)
    if config.merge_method in (*RIDGE_METHODS, *PEERS):
        return "none needed: the method draws no random numbers"
    source = (config.parameters or {}).get("coefficients")
    if config.merge_method == "statsmerging" and isinstance(source, str):
        trained = _trained_with(source)
        return f"{trained} (of the training of the coefficients)" if trained is not None else "none"
    return "none given"


def _trained_with(path: str) -> Any:
    try:
        return load_coefficients(path).contents.config.get("training", {}).get("seed")
    except (ValueError, OSError):
        return None
