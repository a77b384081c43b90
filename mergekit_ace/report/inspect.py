# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace inspect`: measure all tensors of a planned merge without writing a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import torch
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from pydantic_core import to_json
from tqdm import tqdm

from mergekit_ace.adapters.command import plan_adapters
from mergekit_ace.algebra.inspection import evenly_spaced
from mergekit_ace.check.models import check_dtypes, check_tensors
from mergekit_ace.files.models import read_checkpoint
from mergekit_ace.files.quantised import open_quantised
from mergekit_ace.files.saving import write_text
from mergekit_ace.files.statistics import load_statistics
from mergekit_ace.naming import ConfigError, FileError, natural_order, without_numbers
from mergekit_ace.planning import (
    PlannedMerge,
    PlannedTensor,
    find_models,
    plan_merge,
    read_merge_config,
)
from mergekit_ace.report.measure import IN_FULL, InspectTensor, adapter_records
from mergekit_ace.report.page import write_page
from mergekit_ace.report.record import Report, summarize


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
        tensors, sample: parts of names of tensors that are looked at, and how many at most.
        overwrite: replace another report in the folder.
        covariances: path of statistics that the estimates are compared with.
    """
    if (folder / "report.jsonl").exists() and not overwrite:
        raise ConfigError(
            f"{folder} holds another inspection. Choose another folder, or --overwrite to drop it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    merge, source = read_merge_config(config)
    adapters = None
    if any(model.lora for model in merge.referenced_models()) and not options.lora_merge_cache:
        if covariances is not None:
            raise ConfigError(f"--covariances compares full matrices; {IN_FULL}")
        try:
            adapters = plan_adapters(merge, source, options)
        except (ConfigError, FileError) as error:
            raise ConfigError(f"{error}; {IN_FULL}") from error
    if covariances is not None:
        load_statistics(covariances)  # says here, before a tensor is read, if it cannot be used
    plan = adapters.merge if adapters else _plan_models(merge, source, options)
    selected = select(plan.tensors, tensors, sample)
    if adapters:
        work = adapter_records(adapters, selected)
    else:  # by mergekit's own executor, which reads, moves and frees tensors as in a merge
        tasks = [InspectTensor(**vars(t.task), covariances=covariances) for t in selected]
        executor = Executor(tasks, math_device=torch.device(options.device or "cpu"))
        work = (record for _, record in executor.run(quiet=True))
    bar = tqdm(work, "inspecting", len(selected), unit="tensor", disable=quiet)
    records = sorted(bar, key=lambda record: natural_order(record.name))
    report = Report(records)
    for name in ("report.html", "summary.json", "report.jsonl"):
        (folder / name).unlink(missing_ok=True)  # they belong together
    base = adapters.base if adapters else merge.base_model
    some = "" if len(selected) == len(plan.tensors) else f", {len(selected)} looked at"
    about = f"Base model {base}; {len(plan.tensors)} tensors{some}. Before the merge."
    write_page(report, folder / "report.html", about)
    summary = to_json(summarize(report), indent=1, inf_nan_mode="strings").decode()
    write_text(folder / "summary.json", summary + "\n")
    lines = [record.model_dump_json(exclude_defaults=True) + "\n" for record in records]
    write_text(folder / "report.jsonl", "".join(lines))
    sentences = [f"* {sentence}" for sentence in summarize(report)["sentences"]]
    click.echo("\n".join([report.about, "", *sentences, "", str(folder / "report.html")]).lstrip())


def select(
    tensors: Sequence[PlannedTensor], filters: Sequence[str], sample: int | None
) -> list[PlannedTensor]:
    """Return the tensors whose names hold one of the filters, or of all names.

    Args:
        sample: how many at most: evenly spaced, by kinds (names that differ by numbers only) and in
            every kind by depth.
    """
    chosen = {t.name: t for t in tensors if not filters or any(part in t.name for part in filters)}
    if not chosen:
        raise ConfigError(
            f"no tensor contains {' or '.join(map(repr, filters))}; there are, for example, "
            f"{', '.join(tensor.name for tensor in tensors[:3])}"
        )
    names = sorted(chosen, key=lambda name: (without_numbers(name), natural_order(name)))
    return [chosen[names[n]] for n in evenly_spaced(len(names), sample or len(names))]


def _plan_models(config: MergeConfiguration, source: str, options: MergeOptions) -> PlannedMerge:
    """Return the plan of a merge of full models, which are stored in a way that can be compared."""
    find_models(config)
    LoaderCache().setup(options)
    open_quantised(config.referenced_models())
    plan = plan_merge(config, source, options)
    checkpoints = {model: read_checkpoint(model) for model in plan.config.referenced_models()}
    dtypes, tensors = check_dtypes(checkpoints, config), check_tensors(plan.tensors, checkpoints)
    for finding in (*dtypes, *tensors):
        if finding.level == "error":
            raise ConfigError(f"{finding.message}; {finding.remedy}")
    if config.base_model is None and all(tensor.base is None for tensor in plan.tensors):
        raise ConfigError("there is no base model to compare with; add a line base_model:")
    return plan
