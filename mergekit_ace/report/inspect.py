# SPDX-License-Identifier: Apache-2.0
"""Look at all tensors of a planned merge, one after the other, without writing a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from tqdm import tqdm

import mergekit_ace
from mergekit_ace.adapters.adapter_plan import AdapterPlan, names_adapters, plan_adapters
from mergekit_ace.algebra.inspection import evenly_spaced
from mergekit_ace.check.models import check_dtypes, check_tensors
from mergekit_ace.files.headers import DamagedFileError, json_or_empty
from mergekit_ace.files.models import headers_only, read_checkpoint
from mergekit_ace.files.saving import differences, file_states, locked, write_text
from mergekit_ace.files.statistics import load_statistics
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.methods.parameters import FILE_PARAMETERS
from mergekit_ace.naming import natural_order, without_numbers
from mergekit_ace.planning import (
    ConfigError,
    PlannedMerge,
    PlannedTensor,
    config_content,
    find_models,
    plan_merge,
    read_merge_config,
)
from mergekit_ace.report.jsonl import Line, ReportError, complete_lines, read_lines
from mergekit_ace.report.page import write_page
from mergekit_ace.report.summary import write_summary
from mergekit_ace.report.tensor_lines import InspectTensor, adapter_line, why_in_full

LOCK_FILE = ".inspection.lock"


def _lines(
    todo: Sequence[PlannedTensor], plan: PlannedMerge, covariances: str | None
) -> Iterator[dict[str, Any]]:
    """Run mergekit's own executor, which reads, moves and frees tensors as in a merge."""
    tasks: list[Task] = [InspectTensor(merge=t.task, covariances=covariances) for t in todo]
    executor = Executor(tasks, math_device=torch.device(plan.options.device or "cpu"))
    for _, line in executor.run(quiet=True):
        yield line


def _adapter_lines(todo: Sequence[PlannedTensor], plan: AdapterPlan) -> Iterator[dict[str, Any]]:
    changed = {tensor.planned.name: tensor for tensor in plan.tensors}
    with headers_only(plan.checkpoints):
        for tensor in todo:
            header = plan.checkpoints[0].source(tensor.task.output_weight)
            yield adapter_line(plan, tensor, header, changed.get(tensor.name))


def _weight_files(plan: PlannedMerge) -> list[str]:
    places = []
    for model in plan.config.referenced_models():
        index = LoaderCache().get(model).index
        places += [str(Path(index.base_path, name)) for name in set(index.tensor_paths.values())]
    return places


def _identity(
    plan: PlannedMerge, filters: Iterable[str], sample: int | None, places: Sequence[str]
) -> dict[str, Any]:
    """Return what must be the same for the lines of one report."""
    return {
        "config": config_content(plan.source),
        "tensors": sorted(filters),
        "sample": sample,
        "files": file_states(sorted(places)),
        "version": mergekit_ace.__version__,
    }


def _claim(folder: Path, identity: dict[str, Any], *, overwrite: bool) -> None:
    """Make the folder this inspection's, or find that it is already."""
    record = folder / "inspection.json"
    changed = differences(json_or_empty(record), identity) if record.exists() else []
    if record.exists() and not changed:
        return
    leftover = (folder / "report.jsonl").exists()
    if (changed or leftover) and not overwrite:
        what = f"; changed since then: {', '.join(changed[:8])}" if changed else ""
        raise ReportError(
            f"{folder} holds another inspection{what}. Choose another folder, or --overwrite to "
            "drop it"
        )
    for name in ("report.jsonl", "summary.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
    write_text(record, json.dumps(identity, indent=1))


def select(
    tensors: Sequence[PlannedTensor], filters: Sequence[str], sample: int | None
) -> list[PlannedTensor]:
    """Return the chosen tensors, in the order of the model.

    Args:
        filters: parts of names; all tensors without any.
        sample: how many at most: as many of every kind, a kind being all tensors whose names differ
            by numbers only, evenly spaced over the depth of the model.

    Raises:
        ReportError: none is left.
    """
    chosen = {
        tensor.name: tensor
        for tensor in tensors
        if not filters or any(part in tensor.name for part in filters)
    }
    if not chosen:
        raise ReportError(
            f"no tensor contains {' or '.join(map(repr, filters))}; there are, for example, "
            f"{', '.join(tensor.name for tensor in tensors[:3])}"
        )
    names = sorted(chosen, key=natural_order)
    if sample is not None:
        names = thin_out(names, sample)
    return [chosen[name] for name in names]


def thin_out(names: Sequence[str], wanted: int) -> list[str]:
    """Return at most `wanted` names, of every kind evenly over the depth, in their order."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(without_numbers(name), []).append(name)
    members = list(kinds.values())
    if wanted < len(members):
        members = [members[n] for n in evenly_spaced(len(members), wanted)]
    each = max(1, wanted // len(members))
    kept = {group[n] for group in members for n in evenly_spaced(len(group), each)}
    return [name for name in names if name in kept]


def run_inspection(
    config: Path,
    folder: Path,
    options: MergeOptions,
    *,
    tensors: Sequence[str] = (),
    sample: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    covariances: str | None = None,
) -> None:
    """`mergekit-ace inspect`: write `report.jsonl`, `summary.json` and `report.html`.

    Args:
        config, folder: of the merge, and for the report.
        options: mergekit's flags.
        tensors: parts of names; a tensor that contains one of them is looked at. All by default.
        sample: how many tensors at most, of every kind and depth.
        overwrite: drop the state of another inspection in the folder.
        quiet: no progress bar.
        covariances: path of statistics that the estimates are compared with.

    Raises:
        ReportError: no tensor matches, the folder holds another inspection, a tensor cannot be
            merged.
        DamagedFileError: a file of a checkpoint is damaged.
        ValueError: a tensor holds NaN or Inf.
    """
    merge, source = read_merge_config(config)
    adapters = None
    if names_adapters(merge):
        adapters = _plan_adapters(merge, source, options, in_full=covariances is not None)
    if covariances is not None:
        load_statistics(covariances)  # says here, before a tensor is read, if it cannot be used
    if adapters is not None:
        plan, base = adapters.merge, adapters.base
        own = ((a.file.path, a.folder / "adapter_config.json") for a in adapters.adapters)
        places = [str(path) for pair in own for path in pair]
    else:
        find_models(merge)
        plan = plan_merge(merge, source, options)
        _check_tensors(plan)
        base, places = merge.base_model, _weight_files(plan)
        if base is None and all(tensor.base is None for tensor in plan.tensors):
            raise ReportError(
                "there is no base model to compare the experts with; add a line base_model: to the "
                "config"
            )
    selected = select(plan.tensors, tensors, sample)
    places += [*plan.named_paths(*FILE_PARAMETERS), *([covariances] if covariances else [])]
    busy = f"another inspection is writing to {folder}; wait for it, or choose another folder"
    with locked(folder, LOCK_FILE, ReportError(busy)):
        _claim(folder, _identity(plan, tensors, sample, places), overwrite=overwrite)
        make = (
            partial(_adapter_lines, plan=adapters)
            if adapters
            else partial(_lines, plan=plan, covariances=covariances)
        )
        lines = _complete(folder / "report.jsonl", selected, make, quiet=quiet)
        summary = write_summary(lines, folder / "summary.json")
        part = "" if len(lines) == len(plan.tensors) else f", {len(lines)} of them looked at"
        about = f"Base model {base}; {len(plan.tensors)} tensors{part}. Seen before the merge."
        write_page(lines, folder / "report.html", about)
    if isinstance(plan.method, TaskVectorMethod):
        click.echo(f"{plan.method.about}\n")
    for sentence in summary["sentences"]:
        click.echo(f"* {sentence}")
    click.echo(f"\n{folder / 'report.html'}")


def _complete(
    path: Path,
    selected: Sequence[PlannedTensor],
    make: Callable[[Sequence[PlannedTensor]], Iterator[dict[str, Any]]],
    *,
    quiet: bool,
) -> list[Line]:
    """Add the lines that a report lacks, and return all in the order of the model."""
    known = {line.tensor for line in read_lines(path)} if complete_lines(path) else set()
    todo = [tensor for tensor in selected if tensor.name not in known]
    done = len(selected) - len(todo)
    with open(path, "a", encoding="utf-8") as file:
        for line in tqdm(
            make(todo), "inspecting", len(selected), initial=done, unit="tensor", disable=quiet
        ):
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
    found = {line.tensor: line for line in read_lines(path)}
    return [found[tensor.name] for tensor in selected]


def _check_tensors(plan: PlannedMerge) -> None:
    """Raise a `ReportError` for what is stored in a way that says nothing of its values."""
    checkpoints = {model: read_checkpoint(model) for model in plan.config.referenced_models()}
    findings = (
        *check_dtypes(checkpoints, plan.config),
        *check_tensors(plan.tensors, checkpoints),
    )
    for finding in findings:
        if finding.level == "error":
            raise ReportError(f"{finding.message}; {finding.remedy}")


def _plan_adapters(
    config: MergeConfiguration, source: str, options: MergeOptions, *, in_full: bool
) -> AdapterPlan | None:
    """Return the plan of a merge of adapters of one base; None if full models have to be read.

    Raises:
        ReportError: nobody has said where to merge adapters into full models.
    """
    try:
        plan = plan_adapters(config, source, options)
        with headers_only(plan.checkpoints):
            reason = why_in_full(plan)
        if not reason and not in_full:
            return plan
        reason = reason or "--covariances compares full matrices"
    except (ConfigError, DamagedFileError) as error:
        reason = str(error)
    if not options.lora_merge_cache:
        raise ReportError(
            f"{reason}. With --lora-merge-cache DIR, adapters are merged into full models first, "
            "and these are looked at"
        )
    click.echo(f"adapters are merged into full models first: {reason}", err=True)
    return None
