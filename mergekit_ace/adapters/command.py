# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace adapter`: adapters in, one adapter out, with its model card."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path

import click
import torch
import yaml
from mergekit.common import dtype_from_name
from mergekit.options import MergeOptions
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.adapters.merge import (
    MergedProduct,
    execute,
    leaves_span,
    merge_products,
    merges_task_vectors,
)
from mergekit_ace.adapters.plan import AdapterPlan, ChangedTensor, names_in_memory, plan_adapters
from mergekit_ace.adapters.read import MERGE_MODELS, Change
from mergekit_ace.adapters.write import write_adapter
from mergekit_ace.algebra.linalg import leading_directions
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.model_files import TOKENIZER_FILES
from mergekit_ace.files.models import headers_only
from mergekit_ace.files.saving import package_versions, write_text
from mergekit_ace.merge_config import Finding, check_config, check_settings, shown_errors
from mergekit_ace.methods.base import first_that_fits, flush_notices
from mergekit_ace.methods.report_lines import REPORTED_PACKAGES, append_report
from mergekit_ace.naming import in_bytes, in_time, listed, same_name
from mergekit_ace.planning import ConfigError, PlannedTensor, read_merge_config
from mergekit_ace.report.card import markdown_text

# What a result is made of; nobody's is replaced unasked.
_PARTS = (
    "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "README.md",
    "mergekit_config.yml", *TOKENIZER_FILES,
)  # fmt: skip


@dataclass
class AdapterSummary:
    """What came out.

    Attributes:
        energy: ‖X‖² of what was kept.
        lost: that of what was cut off.
        whole: tensors of saved modules.
    """

    ranks: list[int] = field(default_factory=list)
    energy: float = 0.0
    lost: float = 0.0
    whole: int = 0

    @property
    def lost_share(self) -> float:
        """The share of ‖X‖² over all tensors that was cut off."""
        return self.lost / (self.energy + self.lost) if self.lost else 0.0

    @property
    def rank(self) -> str:
        """Ranks in words: `16`, or `8 to 16`."""
        return _span(self.ranks)


def merge_adapters(
    path: Path,
    out: Path,
    options: MergeOptions,
    *,
    rank: int | None = None,
    overwrite: bool = False,
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
    start = time.perf_counter()
    config, source = read_merge_config(path)
    _check(check_config(config, source), quiet=options.quiet)
    with redirect_stdout(sys.stderr):  # programs get nothing that libraries print
        plan = plan_adapters(config, source, options)
    _check_folder(out, plan, overwrite)
    summary = AdapterSummary()
    base, revision = _published_base(plan)
    with headers_only(plan.checkpoints):
        _check_tensors(plan, rank)
        _check(check_settings(plan.merge), quiet=options.quiet)
        merged = _merge_tensors(plan, rank, summary)
        torch.set_num_threads(1)  # factors are small: two threads take twice as long
        write_adapter(out, plan.adapters, merged, base, _dtype(plan), revision)
    _copy_tokenizer(out, plan)
    write_text(out / "README.md", _card_text(out.name, plan, summary, base))
    write_text(out / "mergekit_config.yml", source)
    flush_notices()
    if not options.quiet:
        _tell(out, summary, time.perf_counter() - start)


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


def _check_tensors(plan: AdapterPlan, rank: int | None) -> None:
    """Raise where the result is no adapter, before anything is merged."""
    for tensor in plan.tensors:
        ways = {f"{change.kind} {change.shape}" for change in tensor.known}
        if len(ways) > 1:
            raise ConfigError(
                f"{tensor.planned.name} is {' and '.join(sorted(ways))} in the adapters, which "
                f"cannot be one adapter; {MERGE_MODELS}"
            )
        if tensor.known[0].kind == "saved":
            continue
        reason, cuttable = leaves_span(tensor.planned), merges_task_vectors(tensor.planned.method)
        if reason and not (rank and cuttable):
            remedy = ", or give --rank to cut the full change of every tensor to a rank"
            raise ConfigError(
                f"merge_method: {plan.merge.config.merge_method} makes no adapter: {reason}; merge "
                f"full models by mergekit-yaml{remedy if cuttable else ''}"
            )


def _merge_tensors(
    plan: AdapterPlan, rank: int | None, summary: AdapterSummary
) -> Iterator[tuple[Change, LowRank | Tensor]]:
    """Merge one tensor after the other, while mergekit sees headers, and yield what is written."""
    quiet = plan.merge.options.quiet
    device = torch.device(plan.merge.options.device or "cpu")
    for tensor in tqdm(plan.tensors, "merging", unit="tensor", disable=quiet, leave=False):
        start, planned, change = time.perf_counter(), tensor.planned, tensor.known[0]
        if change.kind == "saved":
            summary.whole += 1
            yield change, _merge_saved(plan, tensor)
            continue
        deltas = list(map(tensor.product, planned.experts))
        work = partial(_merge_on, planned, change, deltas, rank)
        merged = first_that_fits(device, work, planned.method.spec.name, planned.name)
        if merged.record and merged.settings and merged.settings.recorded:
            seconds = time.perf_counter() - start
            append_report(planned.method.spec.name, merged.settings, merged.record, seconds)
        if merged.delta is not None:
            summary.ranks.append(merged.delta.rank)
            summary.energy += merged.delta.energy
            summary.lost += merged.lost
            yield change, merged.delta


def _merge_on(
    planned: PlannedTensor,
    change: Change,
    factors: Sequence[LowRank | None],
    rank: int | None,
    device: torch.device,
) -> MergedProduct:
    deltas = [delta and delta.to(device) for delta in factors]
    if not leaves_span(planned):
        return merge_products(planned, deltas, rank)
    assert rank is not None  # see `_check_tensors`
    return _merge_dense(planned, change, deltas, rank)


def _merge_dense(
    planned: PlannedTensor, change: Change, deltas: Sequence[LowRank | None], rank: int
) -> MergedProduct:
    """Merge the full task vectors of one tensor, and cut the result to the rank."""
    zero = torch.zeros(change.shape, device=next(filter(None, deltas)).left.device)
    full = [delta.dense().float() if delta else zero for delta in deltas]
    merged = execute(planned, zero, full)
    matrices = merged if change.is_stack else merged.flatten(1)[None]
    kept = [leading_directions(matrix, min(rank, *matrix.shape)) for matrix in matrices]
    left = torch.stack([one.left * one.values for one in kept])
    right = torch.stack([one.right.mT for one in kept]).double()
    if not change.is_stack:
        left, right = left[0], right[0]
    delta = LowRank(left, right, change.shape)
    lost = max(0.0, float(matrices.double().square().sum()) - delta.energy)
    return MergedProduct(delta if delta.energy else None, lost)


def _merge_saved(plan: AdapterPlan, tensor: ChangedTensor) -> Tensor:
    """Merge a tensor that adapters hold whole, as the full merge does: that takes the base's."""
    weight, name = tensor.planned.task.output_weight, tensor.known[0].name
    try:
        loader = plan.base.lazy_loader()
    except Exception as error:  # of mergekit and the Hub: no such files
        raise ConfigError(
            f"the adapters hold {name} whole, which is merged as a difference from the base's own, "
            f"and the weights of {plan.base} are not there; put them beside its config.json"
        ) from error
    for stored in (name, *names_in_memory(weight), *(weight.tied_names or ())):
        base = loader.get_tensor(stored, raise_on_missing=False)
        if base is not None:
            base = base.to(torch.promote_types(base.dtype, torch.float32))
            versions = [tensor.version(model, base) for model in tensor.planned.experts]
            return execute(tensor.planned, base, versions)
    raise ConfigError(
        f"the adapters hold {name} whole, and the base model {plan.base} has no such tensor to "
        "compare it with; merge full models by mergekit-yaml"
    )


def _dtype(plan: AdapterPlan) -> torch.dtype:
    """Return the dtype of the result: the config's, or else the widest of the adapters."""
    config = plan.merge.config
    named = dtype_from_name(config.out_dtype or config.dtype)
    if named is not None:
        return named
    held = sorted((dtype for adapter in plan.adapters for dtype in adapter.dtypes), key=str)
    return reduce(torch.promote_types, held)


def _published_base(plan: AdapterPlan) -> tuple[str, str | None]:
    """Return the name and the revision of the base, as others know it where that can be told.

    A folder is known on this machine alone; if all adapters name one model of the Hub that ends
    like the folder, that is it.
    """
    path, revision = plan.base.model.path, plan.base.model.revision
    named = {(a.config.base_model_name_or_path, a.config.revision) for a in plan.adapters}
    if Path(path).expanduser().is_dir() and len(named) == 1:
        ((name, other),) = named
        if name and not Path(name).expanduser().exists() and same_name(name, path):
            return name, other
    return path, revision


def _copy_tokenizer(out: Path, plan: AdapterPlan) -> None:
    """Copy the tokenizer of the first adapter that carries one; that of an earlier result goes."""
    for name in TOKENIZER_FILES:
        (out / name).unlink(missing_ok=True)
    for adapter in plan.adapters:
        if (adapter.folder / "tokenizer_config.json").is_file():
            files = (adapter.folder / name for name in TOKENIZER_FILES)
            for file in filter(Path.is_file, files):
                shutil.copyfile(file, out / file.name)
            return


def _tell(out: Path, summary: AdapterSummary, seconds: float) -> None:
    size = (out / "adapter_model.safetensors").stat().st_size
    whole = f" and {summary.whole} whole tensors" if summary.whole else ""
    click.echo(
        f"{out}: {len(summary.ranks)} modules of rank {summary.rank}{whole}, {in_bytes(size)}, in "
        f"{in_time(seconds)}"
    )
    if summary.lost_share > 1e-9:
        click.echo(f"cut off: {summary.lost_share:.2%} of ‖X‖²")


def _span(ranks: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(ranks, default=0), max(ranks, default=0)})))


def _card_text(name: str, plan: AdapterPlan, summary: AdapterSummary, base: str) -> str:
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
        f"{method.spec.pretty_name or method.spec.name}, within the span of their factors. "
        f"{_result(summary)}",
        _table(plan),
        f"Made by `mergekit-ace adapter` ({markdown_text(packages)}) from this configuration:",
        f"```yaml\n{plan.merge.source.strip()}\n```",
        *(f"```bibtex\n{one.bibtex}\n```" for one in getattr(method, "citations", ())),
    ]
    return "\n\n".join(parts) + "\n"


def _result(summary: AdapterSummary) -> str:
    if not summary.ranks:
        return ""
    text = f"Its {len(summary.ranks)} modules have rank {summary.rank}."
    if summary.lost_share > 1e-9:
        share = f"{summary.lost_share:.2%}"
        text += f" That cuts off {share} of the merged change (of its squared norm)."
    return text


def _table(plan: AdapterPlan) -> str:
    rows = ["| adapter | rank |", "|---|---|"]
    for adapter in plan.adapters:
        ranks = [change.rank for change in adapter.changes.values() if change.rank]
        rows.append(f"| {markdown_text(adapter.name)} | {_span(ranks)} |")
    return "\n".join(rows)
