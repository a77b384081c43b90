# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace adapter`: adapters in, one adapter out, with its model card."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import click
import torch
import yaml
from mergekit.common import dtype_from_name
from mergekit.options import MergeOptions
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.adapters.adapter_merge import AdapterMerge, MergedChange
from mergekit_ace.adapters.adapter_plan import AdapterPlan, plan_adapters
from mergekit_ace.adapters.peft_adapter import Change
from mergekit_ace.adapters.writing import check_together, write_adapter
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.model_files import TOKENIZER_FILES
from mergekit_ace.files.models import headers_only
from mergekit_ace.files.saving import package_versions, write_text
from mergekit_ace.merge_config import Finding, check_config, check_settings, shown_errors
from mergekit_ace.methods.base import flush_notices
from mergekit_ace.methods.report_lines import REPORTED_PACKAGES, append_report
from mergekit_ace.naming import in_bytes, in_time, listed, same_name
from mergekit_ace.planning import ConfigError, read_merge_config
from mergekit_ace.report.markdown import citation_blocks, markdown_text, method_link

# Up to this sum of ranks a product of factors takes less time than its threads take to meet.
SMALL_RANK = 256
# What a result is made of; nobody's is replaced unasked.
_PARTS = (
    "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "README.md",
    "mergekit_config.yml", *TOKENIZER_FILES,
)  # fmt: skip


@dataclass
class Summary:
    """What came out.

    Attributes:
        energy: ‖X‖² of what was kept.
        lost: that of what was cut off.
        worst: the largest share that a tensor has lost, and which.
        tau: ‖Δ_t‖² of every expert over all tensors.
    """

    ranks: list[int] = field(default_factory=list)
    energy: float = 0.0
    lost: float = 0.0
    worst: tuple[float, str] = (0.0, "")
    tau: tuple[float, ...] = ()
    whole: int = 0
    seconds: float = 0.0

    def add(self, merged: MergedChange) -> None:
        """Count a tensor."""
        if merged.full is not None:
            self.whole += 1
        if merged.delta is None:
            return
        self.ranks.append(merged.delta.rank)
        self.energy += merged.energy
        self.lost += merged.lost
        self.worst = max(self.worst, (merged.lost_share, merged.change.name))
        before = self.tau or (0.0,) * len(merged.tau)
        self.tau = tuple(a + b for a, b in zip(before, merged.tau, strict=True))

    @property
    def lost_share(self) -> float:
        """The share of ‖X‖² over all tensors that was cut off."""
        return self.lost / (self.energy + self.lost) if self.lost else 0.0


def merge_adapters(
    path: Path,
    out: Path,
    options: MergeOptions,
    *,
    rank: int | None = None,
    overwrite: bool = False,
    as_json: bool = False,
) -> None:
    """Merge the adapters of a config into one.

    Args:
        rank: of every module, at most.

    Raises:
        ConfigError: the config merges something other than adapters of one base, or by a method
            whose result is none.
        DamagedFileError: what is wrong with an adapter.
        ValueError, RuntimeError, OSError: a tensor cannot be merged or written; the message names
            it.
    """
    start, programs = time.perf_counter(), sys.stdout if as_json else None
    config, source = read_merge_config(path)
    _check(check_config(config, source), quiet=options.quiet)
    with redirect_stdout(sys.stderr):  # programs get nothing that libraries print
        plan = plan_adapters(config, source, options)
    _check_folder(out, plan, overwrite)
    check_together(plan.adapters)
    merge, summary = AdapterMerge(plan, rank, options.device or "cpu"), Summary()
    base, revision = _published_base(plan)
    with headers_only(plan.checkpoints), _few_threads(plan):
        merge.check()
        _check(check_settings(plan.merge), quiet=options.quiet)
        merged = _merged(plan, merge, summary, programs, quiet=options.quiet or as_json)
        write_adapter(out, plan.adapters, merged, base, _dtype(plan), revision)
    _add_files(out, plan)
    write_text(out / "README.md", _card_text(out.name, plan, summary))
    write_text(out / "mergekit_config.yml", source)
    flush_notices()
    summary.seconds = time.perf_counter() - start
    _tell(out, summary, programs, quiet=options.quiet)


@contextmanager
def _few_threads(plan: AdapterPlan) -> Iterator[None]:
    """Let torch work with one thread on small factors, where several only wait for each other.

    With two, three adapters of rank 16 of an 8B model take 21 s, with one 13 s; eight of rank 64
    gain a little from the second (`examples/benchmark/adapters.py`).
    """
    before = torch.get_num_threads()
    ranks = [sum(change.rank or 0 for change in tensor.known) for tensor in plan.tensors]
    if max(ranks, default=0) <= SMALL_RANK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(findings: Iterable[Finding], *, quiet: bool) -> None:
    errors = shown_errors(findings, quiet=quiet)
    if errors:
        raise ConfigError(errors)


def _check_folder(out: Path, plan: AdapterPlan, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give the name of a folder")
    if (out / "config.json").exists():
        raise ConfigError(f"{out} holds a model; choose another folder")
    for adapter in plan.adapters:
        if out.exists() and out.samefile(adapter.folder):
            raise ConfigError(
                f"{out} is the adapter {adapter.name}, which is merged; choose another folder"
            )
    there = [name for name in _PARTS if (out / name).exists()]
    if there and not overwrite:
        raise ConfigError(f"{out} holds {listed(there, 3)}; --overwrite replaces what is there")


def _dtype(plan: AdapterPlan) -> torch.dtype:
    """Return the dtype of the result: the config's, or else the widest of the adapters."""
    config = plan.merge.config
    named = dtype_from_name(config.out_dtype or config.dtype)
    if named is not None:
        return named
    held = sorted((d for adapter in plan.adapters for d in adapter.file.dtypes), key=str)
    return reduce(torch.promote_types, held)


def _merged(
    plan: AdapterPlan, merge: AdapterMerge, summary: Summary, programs: Any, *, quiet: bool
) -> Iterator[tuple[Change, LowRank | Tensor]]:
    """Merge one tensor after the other, tell of each, and yield what is to be written."""
    for tensor in tqdm(plan.tensors, "merging", unit="tensor", disable=quiet, leave=False):
        start = time.perf_counter()
        merged = merge.merge(tensor)
        seconds = time.perf_counter() - start
        if merged.record is not None and merged.settings.recorded:
            append_report(plan.merge.method.spec.name, merged.settings, merged.record, seconds)
        summary.add(merged)
        if programs is not None:
            click.echo(json.dumps(_event(merged, seconds)), file=programs)
        made = merged.full if merged.delta is None else merged.delta
        if made is not None:
            yield merged.change, made


def _event(merged: MergedChange, seconds: float) -> dict[str, Any]:
    product = merged.delta
    return {
        "event": "tensor",
        "tensor": merged.change.name,
        "rank": product.rank if product is not None else None,
        "energy": product.energy if product is not None else None,
        "lost": merged.lost_share if product is not None else None,
        "seconds": round(seconds, 6),
    }


def _add_files(out: Path, plan: AdapterPlan) -> None:
    """Copy the tokenizer of the first adapter that carries one; that of an earlier result goes."""
    out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        (out / name).unlink(missing_ok=True)
    for adapter in plan.adapters:
        if (adapter.folder / "tokenizer_config.json").is_file():
            files = (adapter.folder / name for name in TOKENIZER_FILES)
            for file in filter(Path.is_file, files):
                shutil.copyfile(file, out / file.name)
            return


def _tell(out: Path, summary: Summary, programs: Any, *, quiet: bool) -> None:
    size = sum(file.stat().st_size for file in out.glob("adapter_model.*"))
    if programs is not None:
        event = {
            "event": "complete",
            "out": str(out),
            "modules": len(summary.ranks),
            "whole": summary.whole,
            "ranks": [min(summary.ranks, default=0), max(summary.ranks, default=0)],
            "lost": summary.lost_share,
            "bytes": size,
            "seconds": round(summary.seconds, 3),
        }
        click.echo(json.dumps(event), file=programs)
    elif not quiet:
        whole = f" and {summary.whole} whole tensors" if summary.whole else ""
        click.echo(
            f"{out}: {len(summary.ranks)} modules of rank {_span(summary.ranks)}{whole}, "
            f"{in_bytes(size)}, in {in_time(summary.seconds)}"
        )
        share, name = summary.worst
        if share > 1e-9:
            click.echo(
                f"cut off: {summary.lost_share:.2%} of ‖X‖², at most {share:.2%} of a module "
                f"({name})"
            )


def _span(ranks: Sequence[int]) -> str:
    """Return ranks in words: `16`, or `8 to 16`."""
    return " to ".join(map(str, sorted({min(ranks, default=0), max(ranks, default=0)})))


def _published_base(plan: AdapterPlan) -> tuple[str, str | None]:
    """Return the name and the revision of the base, as others know it where that can be told.

    A folder is known on this machine alone; if all adapters name one model of the Hub that ends
    like the folder, that is it.
    """
    path, revision = plan.base.model.path, plan.base.model.revision
    told = {(a.config.base_model_name_or_path, a.config.revision) for a in plan.adapters}
    if Path(path).expanduser().is_dir() and len(told) == 1:
        ((name, other),) = told
        if name and not Path(name).expanduser().exists() and same_name(name, path):
            return name, other
    return path, revision


def _card_text(name: str, plan: AdapterPlan, summary: Summary) -> str:
    base, _ = _published_base(plan)
    head = {
        "base_model": base,
        "library_name": "peft",
        "tags": ["mergekit", "mergekit-ace", "merge", "lora", "peft"],
    }
    method = plan.merge.method
    versions = package_versions(*REPORTED_PACKAGES, "peft")
    packages = ", ".join(f"{package} {number}" for package, number in versions.items())
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False).strip()}\n---",
        f"# {markdown_text(name)}",
        f"A LoRA adapter of {markdown_text(base)}, merged from {len(plan.adapters)} adapters by "
        f"{method_link(method)}, within the span of their factors. {_result(summary)}",
        _table(plan, summary.tau),
        f"Made by `mergekit-ace adapter` ({markdown_text(packages)}) from this configuration:",
        f"```yaml\n{plan.merge.source.strip()}\n```",
        *citation_blocks(method),
    ]
    return "\n\n".join(parts) + "\n"


def _result(summary: Summary) -> str:
    if not summary.ranks:
        return ""
    text = f"Its {len(summary.ranks)} modules have rank {_span(summary.ranks)}."
    if summary.lost_share > 1e-9:
        share = f"{summary.lost_share:.2%}"
        text += f" That cuts off {share} of the merged change (of its squared norm)."
    return text


def _table(plan: AdapterPlan, tau: Sequence[float]) -> str:
    total = sum(tau) or 1.0
    rows = ["| adapter | rank | share of all change |", "|---|---|---|"]
    for t, adapter in enumerate(plan.adapters_of.values()):
        if adapter is not None:
            ranks = [change.rank for change in adapter.changes.values() if change.rank]
            share = f"{tau[t] / total:.0%}" if tau else ""
            held = _span(ranks) if ranks else ""
            rows.append(f"| {markdown_text(adapter.name)} | {held} | {share} |")
    return "\n".join(rows)
