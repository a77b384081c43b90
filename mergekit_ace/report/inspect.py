# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace inspect`: measure all tensors of a planned merge without writing a model."""

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
from mergekit_ace.adapters.plan import AdapterPlan, names_adapters, plan_adapters
from mergekit_ace.algebra.inspection import evenly_spaced
from mergekit_ace.check.models import check_dtypes, check_tensors
from mergekit_ace.files.headers import DamagedFileError, json_or_empty
from mergekit_ace.files.models import headers_only, read_checkpoint
from mergekit_ace.files.saving import differences, file_states, locked, write_text
from mergekit_ace.files.statistics import load_statistics
from mergekit_ace.methods.parameters import FILE_PARAMETERS
from mergekit_ace.methods.report_lines import Record, append_line
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
from mergekit_ace.report.measure import InspectTensor, adapter_record, why_in_full
from mergekit_ace.report.page import write_page
from mergekit_ace.report.record import Report, ReportError, read_records
from mergekit_ace.report.summary import write_summary

LOCK_FILE = ".inspection.lock"


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
    plan = adapters.merge if adapters else _plan_models(merge, source, options)
    files = _adapter_files(adapters) if adapters else _weight_files(plan)
    files += [*plan.named_paths(*FILE_PARAMETERS), *filter(None, [covariances])]
    selected = select(plan.tensors, tensors, sample)
    work = partial(_adapter_records, plan=adapters) if adapters else partial(
        _records, plan=plan, covariances=covariances
    )  # fmt: skip
    busy = f"another inspection is writing to {folder}; wait for it, or choose another folder"
    with locked(folder, LOCK_FILE, ReportError(busy)):
        _claim(folder, _identity(plan, tensors, sample, files), overwrite=overwrite)
        report = Report(_complete(folder / "report.jsonl", selected, work, quiet=quiet))
        summary = write_summary(report, folder / "summary.json")
        base = adapters.base if adapters else merge.base_model
        all_or_part = "" if len(selected) == len(plan.tensors) else f", {len(selected)} looked at"
        about = f"Base model {base}; {len(plan.tensors)} tensors{all_or_part}. Before the merge."
        write_page(report, folder / "report.html", about)
    if report.about:
        click.echo(f"{report.about}\n")
    for sentence in summary["sentences"]:
        click.echo(f"* {sentence}")
    click.echo(f"\n{folder / 'report.html'}")


def _plan_models(config: MergeConfiguration, source: str, options: MergeOptions) -> PlannedMerge:
    """Return the plan of a merge of full models, which are stored in a way that can be compared."""
    find_models(config)
    plan = plan_merge(config, source, options)
    checkpoints = {model: read_checkpoint(model) for model in plan.config.referenced_models()}
    findings = (
        *check_dtypes(checkpoints, plan.config),
        *check_tensors(plan.tensors, checkpoints),
    )
    for finding in findings:
        if finding.level == "error":
            raise ReportError(f"{finding.message}; {finding.remedy}")
    if config.base_model is None and all(tensor.base is None for tensor in plan.tensors):
        raise ReportError(
            "there is no base model to compare the experts with; add a line base_model: to the "
            "config"
        )
    return plan


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


def _weight_files(plan: PlannedMerge) -> list[str]:
    indices = [LoaderCache().get(model).index for model in plan.config.referenced_models()]
    return [str(Path(i.base_path, name)) for i in indices for name in {*i.tensor_paths.values()}]


def _adapter_files(plan: AdapterPlan) -> list[str]:
    pairs = ((a.file, a.folder / "adapter_config.json") for a in plan.adapters)
    return [str(path) for pair in pairs for path in pair]


def select(
    tensors: Sequence[PlannedTensor], filters: Sequence[str], sample: int | None
) -> list[PlannedTensor]:
    """Return the chosen tensors, in the order of the model.

    Args:
        filters: parts of names; all tensors without any.
        sample: how many at most: evenly spaced, by kinds (names that differ by numbers only) and in
            every kind by depth.

    Raises:
        ReportError: none is left.
    """
    chosen = {t.name: t for t in tensors if not filters or any(part in t.name for part in filters)}
    if not chosen:
        raise ReportError(
            f"no tensor contains {' or '.join(map(repr, filters))}; there are, for example, "
            f"{', '.join(tensor.name for tensor in tensors[:3])}"
        )
    names = sorted(chosen, key=lambda name: (without_numbers(name), natural_order(name)))
    if sample is not None:
        names = [names[n] for n in evenly_spaced(len(names), sample)]
    return [chosen[name] for name in sorted(names, key=natural_order)]


def _identity(
    plan: PlannedMerge, filters: Iterable[str], sample: int | None, files: Iterable[str]
) -> dict[str, Any]:
    """Return what must be the same for the records of one report."""
    return {
        "config": config_content(plan.source),
        "tensors": sorted(filters),
        "sample": sample,
        "files": file_states(sorted(files)),
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


def _complete(
    path: Path,
    selected: Sequence[PlannedTensor],
    work: Callable[[Sequence[PlannedTensor]], Iterator[Record]],
    *,
    quiet: bool,
) -> list[Record]:
    """Add the records that a report lacks, and return all in the order of the model."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]  # a kill may have cut off the last line
    if whole != text:
        write_text(path, whole)
    known = {record.tensor for record in read_records(path)} if whole else set()
    todo = [tensor for tensor in selected if tensor.name not in known]
    bar = tqdm(
        work(todo), "inspecting", len(selected), initial=len(selected) - len(todo), unit="tensor",
        disable=quiet,
    )  # fmt: skip
    for record in bar:
        append_line(path, record)
    records = {record.tensor: record for record in read_records(path)}
    return [records[tensor.name] for tensor in selected]


def _records(
    todo: Sequence[PlannedTensor], plan: PlannedMerge, covariances: str | None
) -> Iterator[Record]:
    """Run mergekit's own executor, which reads, moves and frees tensors as in a merge."""
    tasks: list[Task] = [InspectTensor(merge=t.task, covariances=covariances) for t in todo]
    executor = Executor(tasks, math_device=torch.device(plan.options.device or "cpu"))
    for _, record in executor.run(quiet=True):
        yield record


def _adapter_records(todo: Sequence[PlannedTensor], plan: AdapterPlan) -> Iterator[Record]:
    changed = {tensor.planned.name: tensor for tensor in plan.tensors}
    with headers_only(plan.checkpoints):
        for tensor in todo:
            header = plan.checkpoints[0].source(tensor.task.output_weight)
            yield adapter_record(plan, tensor, header, changed.get(tensor.name))
