# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace inspect`: measure all tensors of a planned merge without writing a model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click
import torch
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.graph import Executor, Task, TaskHandle, TaskUniverse
from mergekit.merge_methods.base import ParameterScope, TensorGroup
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.algebra.task_vectors import compare_entries
from mergekit_ace.files.checkpoints import own_loaders
from mergekit_ace.files.saving import occupied, write_text
from mergekit_ace.merging.plan import build_tokenizer, in_float32, plan_run
from mergekit_ace.methods.base import (
    MERGE_ERRORS,
    TaskVectorMethod,
    TensorSettings,
    check_finite,
    first_that_fits,
)
from mergekit_ace.methods.report_lines import tensor_record
from mergekit_ace.naming import ConfigError, listed, natural_order, without_numbers
from mergekit_ace.planning import PlannedTensor
from mergekit_ace.report.page import evenly_spaced, write_page
from mergekit_ace.report.summary import Report, summarize


def run_inspection(
    config: Path,
    folder: Path,
    options: MergeOptions,
    *,
    tensors: Sequence[str] = (),
    sample: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """`mergekit-ace inspect`: write `report.jsonl` and `report.html`."""
    if (folder / "config.json").exists():  # whose report may bear the same name
        raise ConfigError(f"{folder} holds a model; choose another folder for the page")
    if (folder / "report.jsonl").exists() and not overwrite:
        raise occupied(folder, "another inspection")
    with own_loaders():
        plan, _ = plan_run(config, options, "merge", strict=True)
        folder.mkdir(parents=True, exist_ok=True)
        planned = {tensor.name: tensor.task for tensor in plan.tensors}
        if all(task.base_model is None for task in planned.values()):
            raise ConfigError("there is no base model to compare with; add a line base_model:")
        selected = select(planned, tensors, sample)
        # by mergekit's own executor, which reads, moves and frees tensors as in a merge
        tasks: list[Task] = [InspectTensor(**vars(in_float32(planned[name]))) for name in selected]
        universe, device = TaskUniverse(tasks), torch.device(options.device or "cpu")
        handles, values = [universe.add_task(task) for task in tasks], dict[TaskHandle, Any]()
        if plan.tokenizer_task is not None:
            values[universe.add_task(plan.tokenizer_task)] = build_tokenizer(plan)
        executor = Executor(handles, math_device=device, cached_values=values)
        work = (record for _, record in executor.run(quiet=True))
        bar = tqdm(work, "inspecting", len(selected), unit="tensor", disable=quiet)
        records = sorted(filter(None, bar), key=lambda record: natural_order(record.name))
    report, page, lines = Report(records), folder / "report.html", folder / "report.jsonl"
    lines.unlink(missing_ok=True)  # it belongs to the former page
    some = "" if len(selected) == len(planned) else f", {len(selected)} looked at"
    about = f"Base model {plan.config.base_model}; {len(planned)} tensors{some}. Before the merge."
    missing = sorted({*selected} - {record.name for record in records}, key=natural_order)
    why = "the base or all experts lack them, or they hold no floating-point numbers"
    apart = [f"Not compared, because {why}: {listed(missing)}."] if missing else []
    write_page(report, page, " ".join([about, *apart]))
    texts = [record.model_dump_json(exclude_defaults=True) + "\n" for record in records]
    write_text(lines, "".join(texts))
    sentences = [f"* {sentence}" for sentence in [*summarize(report), *apart]]
    click.echo("\n".join([report.about, "", *sentences, "", str(page)]).lstrip())


def select(names: Iterable[str], filters: Sequence[str], sample: int | None) -> list[str]:
    """Return the names that hold one of the filters, or all; at most `sample`, evenly spaced.

    They are spaced by kinds (names that differ by numbers only), and in every kind by depth.
    """
    names = list(names)
    chosen = [name for name in names if not filters or any(part in name for part in filters)]
    if not chosen:
        raise ConfigError(
            f"no tensor contains {' or '.join(map(repr, filters))}; there are, for example, "
            f"{', '.join(names[:3])}"
        )
    chosen.sort(key=lambda name: (without_numbers(name), natural_order(name)))
    return [chosen[n] for n in evenly_spaced(len(chosen), sample or len(chosen))]


class InspectTensor(ExecuteMergeMethodTask):
    """In the place of mergekit's merge of one tensor: the same inputs, the record of a report."""

    @torch.no_grad()
    def execute(self, tensors: dict[ModelReference, Tensor], **_: Any) -> Any:
        """Return the record; None of a tensor that cannot be compared."""
        start, planned = time.perf_counter(), PlannedTensor(self)
        present = [model for model in self.model_order if tensors.get(model) is not None]
        if planned.base not in present or len(present) < 2:
            return None
        base = tensors[planned.base]
        if not base.is_floating_point():
            return None
        group = TensorGroup.from_tensors(
            [tensors[model] for model in present],
            ids=present,
            base_index=present.index(planned.base),
            name=planned.name,
        )
        check_finite("inspect", group)
        method, parameters = planned.method, planned.settings.parameters
        if not isinstance(method, TaskVectorMethod):  # mergekit's, which tell nothing
            method, shared = cast(TaskVectorMethod, merge_methods.get("ace")), ParameterScope.SHARED
            parameters = {p.name: p.default for p in method.spec.parameters if p.scope == shared}
        settings = method.complete(TensorSettings.of(group, parameters), base.ndim)
        settings = replace(settings, layout=method.layout(settings, base.ndim))
        versions = [base, *(entry.tensor for entry in group.non_base)]

        def measure(device: torch.device) -> Any:
            moved = [version.to(device) for version in versions]
            return method.merge(moved, settings)[1], compare_entries(moved[0], moved[1:])

        try:
            record, comparison = first_that_fits(base.device, measure, "inspect", planned.name)
        except MERGE_ERRORS as error:
            raise ConfigError(method.explain(error, settings)) from error
        other = None if method is planned.method else method.spec.name
        measured = {**comparison, "decisions_of": other}
        seconds = time.perf_counter() - start
        return tensor_record(planned.task.method_name, settings, record, seconds, **measured)
