# SPDX-License-Identifier: Apache-2.0
"""Look at all tensors of a planned merge, one after the other, without writing a model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from filelock import FileLock, Timeout
from mergekit.common import ModelReference
from mergekit.graph import Executor, Task
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods.base import ParameterScope, TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from torch import Tensor
from tqdm import tqdm

import mergekit_ace
from mergekit_ace.algebra.inspection import (
    TensorInspection,
    evenly_spaced,
    inspect_tensor,
    measure_noise,
)
from mergekit_ace.algebra.records import FixedLayout, Observer
from mergekit_ace.files import differences, file_states, write_text
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.base import MERGE_ERRORS, Merged, TaskVectorMethod, first_that_fits
from mergekit_ace.methods.inputs import TensorSettings, check_finite
from mergekit_ace.naming import natural_order, without_numbers
from mergekit_ace.planning import (
    PlannedMerge,
    PlannedTensor,
    config_content,
    find_models,
    plan_merge,
    read_merge_config,
)
from mergekit_ace.preflight.checkpoint_rules import check_tensors
from mergekit_ace.preflight.checkpoints import read_checkpoint
from mergekit_ace.preflight.dtype_rules import check_dtypes, check_tensor_dtypes
from mergekit_ace.report.jsonl import (
    Line,
    ReportError,
    complete_lines,
    inspection_line,
    read_lines,
)
from mergekit_ace.report.page import write_page
from mergekit_ace.report.summary import write_summary

LOCK_FILE = ".inspection.lock"
# Whose decisions are shown for methods that are not ours.
STAND_IN = AceMerge()


class InspectTensor(Task[Line]):
    """In the place of mergekit's merge of one tensor: the same inputs, a line of a report."""

    merge: ExecuteMergeMethodTask

    def arguments(self) -> dict[str, Task]:
        """Return the tensors that the merge would get."""
        return {"tensors": self.merge.gather_tensors}

    def group_label(self) -> str | None:
        """Return the merge's label: tensors that lie together are read together."""
        return self.merge.group_label()

    def uses_accelerator(self) -> bool:
        """Return True, as of a merge."""
        return True

    @torch.no_grad()
    def execute(self, tensors: dict[ModelReference, Tensor], **_: Any) -> Line:
        """Return the line; a short one of a tensor without experts, or without numbers."""
        start = time.perf_counter()
        planned = PlannedTensor(self.merge)
        present = [m for m in self.merge.model_order if tensors.get(m) is not None]
        experts = [m for m in planned.experts if m in present]
        if planned.base not in present or not experts:
            return _short_line(planned, "the base model or all experts lack it")
        base = tensors[planned.base]
        if not base.is_floating_point():
            return _short_line(planned, "it holds no floating-point numbers")
        group = _group(planned, tensors, present)
        method, parameters = deciding_method(planned)
        settings = replace(method.settings(group, parameters), recorded=True)
        work = partial(_inspect, method, settings, planned.layout(base.ndim))
        given = [base, *(tensors[model] for model in experts)]
        try:
            inspection = first_that_fits(given, work, "inspect", planned.name)
        except MERGE_ERRORS as error:
            raise ReportError(method.explain(error, settings)) from error
        seconds = time.perf_counter() - start
        line = inspection_line(self.merge.method_name, settings, inspection, seconds)
        if method is not planned.method:
            line["decisions_of"] = method.spec.name
        return line


def deciding_method(planned: PlannedTensor) -> tuple[TaskVectorMethod, Mapping[str, Any]]:
    """Return the method whose decisions are shown, with its parameters for a tensor.

    That is the merge's own. mergekit's methods decide nothing that they could show: in their place
    stands ACE-Merging with its defaults.
    """
    if isinstance(planned.method, TaskVectorMethod):
        return planned.method, planned.settings.parameters
    parameters: dict[str, Any] = {}
    for parameter in STAND_IN.spec.parameters:
        own = parameter.scope == ParameterScope.NON_BASE
        default = parameter.default
        parameters[parameter.name] = dict.fromkeys(planned.experts, default) if own else default
    return STAND_IN, parameters


def _inspect(
    method: TaskVectorMethod,
    settings: TensorSettings,
    layout: FixedLayout,
    tensors: Sequence[Tensor],
    least_memory: bool,
) -> TensorInspection:
    merge = partial(_merge, method, settings, least_memory)
    dtype = getattr(torch, settings.parameters.get("compute_dtype", "float32"))
    return inspect_tensor(tensors[0], tensors[1:], layout, merge, dtype)


def _merge(
    method: TaskVectorMethod,
    settings: TensorSettings,
    least_memory: bool,
    tensors: Sequence[Tensor],
    layout: FixedLayout,
    observe: Observer | None,
) -> Merged:
    settings = replace(settings, layout=layout)
    merged, record = method.merge(tensors, settings, least_memory=least_memory, observe=observe)
    return merged, measure_noise(record, tensors)


def _short_line(planned: PlannedTensor, reason: str) -> Line:
    models = [str(model) for model in planned.experts]
    return {"tensor": planned.name, "models": models, "skipped": reason}


def _group(
    planned: PlannedTensor, tensors: dict[ModelReference, Tensor], present: list[ModelReference]
) -> TensorGroup:
    """Return what a merge method gets, once it is known to be finite and of one shape."""
    entries = tuple(TensorEntry(m, tensors[m], is_base=m == planned.base) for m in present)
    metadata = TensorMetadata.from_weight_info(planned.task.output_weight)
    group = TensorGroup(entries=entries, metadata=metadata)
    shapes = {model: tuple(tensors[model].shape) for model in present}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{model}: {shape}" for model, shape in shapes.items())
        raise ReportError(f"tensor {planned.name} has different shapes ({listed})")
    check_finite("inspect", group)
    return group


def inspect_merge(
    plan: PlannedMerge,
    folder: Path,
    *,
    filters: Sequence[str] = (),
    sample: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> list[Line]:
    """Write `report.jsonl` into a folder; a call that was interrupted goes on where it was.

    Args:
        plan: the merge.
        folder: is created if need be.
        filters: parts of names; a tensor that contains one of them is looked at. All by default.
        sample: how many tensors at most, of every kind and depth.
        overwrite: drop the state of another inspection in the folder.
        quiet: no progress bar.

    Returns:
        The lines of all selected tensors, in the order of the model.

    Raises:
        ReportError: no tensor matches, the folder holds another inspection, a tensor cannot be
            merged.
        DamagedFileError: a file of a checkpoint is damaged.
        ValueError: a tensor holds NaN or Inf.
    """
    if plan.config.base_model is None and all(tensor.base is None for tensor in plan.tensors):
        raise ReportError(
            "there is no base model to compare the experts with; add a line base_model: to the "
            "config"
        )
    selected = select(plan.tensors, filters, sample)
    path = folder / "report.jsonl"
    _claim(folder, _identity(plan, filters, sample), overwrite=overwrite)
    complete_lines(path)
    done = {line["tensor"] for line in read_lines(path)} if _has_lines(path) else set()
    todo = [tensor for tensor in selected if tensor.name not in done]
    with open(path, "a", encoding="utf-8") as file:
        for line in _lines(todo, plan, len(done), quiet=quiet):
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
    found = {line["tensor"]: line for line in read_lines(path)}
    return [found[tensor.name] for tensor in selected]


def _lines(
    todo: Sequence[PlannedTensor], plan: PlannedMerge, done: int, *, quiet: bool
) -> Iterator[Line]:
    """Run mergekit's own executor, which reads, moves and frees tensors as in a merge."""
    tasks: list[Task] = [InspectTensor(merge=tensor.task) for tensor in todo]
    executor = Executor(tasks, math_device=torch.device(plan.options.device or "cpu"))
    bar = tqdm(
        total=done + len(todo), initial=done, desc="inspecting", unit="tensor", disable=quiet
    )
    with bar:
        for _, line in executor.run(quiet=True):
            bar.update()
            yield line


def _identity(plan: PlannedMerge, filters: Iterable[str], sample: int | None) -> dict[str, Any]:
    """Return what must be the same for the lines of one report."""
    places = []
    for model in plan.config.referenced_models():
        index = LoaderCache().get(model).index
        places += [str(Path(index.base_path, name)) for name in set(index.tensor_paths.values())]
    return {
        "config": config_content(plan.source),
        "tensors": sorted(filters),
        "sample": sample,
        "files": file_states(sorted(places)),
        "version": mergekit_ace.__version__,
    }


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other inspections out of a folder.

    Raises:
        ReportError: another one is at work there, or nothing can be written there.
    """
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ReportError(
            f"another inspection is writing to {folder}; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise ReportError(f"{folder} cannot be used: {error}") from error
    try:
        yield
    finally:
        (folder / LOCK_FILE).unlink(missing_ok=True)
        lock.release()


def _claim(folder: Path, identity: dict[str, Any], *, overwrite: bool) -> None:
    """Make the folder this inspection's, or find that it is already."""
    record = folder / "inspection.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else None
    except ValueError:
        known = {}
    except OSError as error:
        raise ReportError(f"{folder} cannot be used: {error}") from error
    changed = differences(known, identity) if known is not None else []
    if known is not None and not changed:
        return
    leftover = (folder / "report.jsonl").exists()
    if (changed or leftover) and not overwrite:
        what = f"; changed since then: {', '.join(changed[:8])}" if changed else ""
        raise ReportError(
            f"{folder} holds another inspection{what}. Choose another folder, or --overwrite to "
            "drop it"
        )
    try:
        for name in ("report.jsonl", "summary.json", "report.html"):
            (folder / name).unlink(missing_ok=True)
        write_text(record, json.dumps(identity, indent=1))
    except OSError as error:
        raise ReportError(f"{folder} cannot be written to: {error}") from error


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def select(
    tensors: Sequence[PlannedTensor], filters: Sequence[str], sample: int | None
) -> list[PlannedTensor]:
    """Return the chosen tensors, in the order of the model.

    Args:
        tensors: all that are merged.
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
    flags: Mapping[str, Any],
    *,
    tensors: Sequence[str] = (),
    sample: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """`mergekit-ace inspect`: write `report.jsonl`, `summary.json` and `report.html`.

    Args:
        config, folder: of the merge, and for the report.
        flags: fields of mergekit's `MergeOptions`.
        tensors, sample, overwrite, quiet: see `inspect_merge`.
    """
    merge, source = read_merge_config(config)
    find_models(merge)
    plan = plan_merge(merge, source, MergeOptions(**flags, quiet=True))
    checkpoints = {model: read_checkpoint(model) for model in merge.referenced_models()}
    findings = (
        *check_dtypes(checkpoints, merge),
        *check_tensors(plan.tensors, checkpoints),
        *check_tensor_dtypes(plan.tensors, checkpoints),
    )
    for finding in findings:
        if finding.level == "error":
            raise ReportError(f"{finding.message}; {finding.remedy}")
    with _lock(folder):
        lines = inspect_merge(
            plan, folder, filters=tensors, sample=sample, overwrite=overwrite, quiet=quiet
        )
        summary = write_summary(lines, folder / "summary.json")
        write_page(lines, folder / "report.html", describe_inspection(plan, len(lines)))
    if isinstance(plan.method, TaskVectorMethod):
        click.echo(f"{plan.method.about}\n")
    for sentence in summary["sentences"]:
        click.echo(f"* {sentence}")
    click.echo(f"\n{folder / 'report.html'}")


def describe_inspection(plan: PlannedMerge, looked_at: int) -> str:
    """Return what the page says below its title."""
    part = "" if looked_at == len(plan.tensors) else f", {looked_at} of them looked at"
    return (
        f"Base model {plan.config.base_model}; {len(plan.tensors)} tensors{part}. "
        "Seen before the merge, by mergekit-ace inspect."
    )
