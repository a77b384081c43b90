# SPDX-License-Identifier: Apache-2.0
"""Look at all tensors of a planned merge, one after the other, without writing a model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.graph import Executor, Task
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods.base import TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from torch import Tensor
from tqdm import tqdm

import mergekit_ace
from mergekit_ace.algebra.closed_form import IllConditionedError
from mergekit_ace.algebra.inspection import TensorInspection, inspect_tensor
from mergekit_ace.files import differences, file_states, write_text
from mergekit_ace.methods.inputs import check_finite
from mergekit_ace.methods.statsmerging import StatsMerge, coefficients_of
from mergekit_ace.planning import PlannedMerge, PlannedTensor
from mergekit_ace.report.errors import ReportError
from mergekit_ace.report.lines import Line, complete_lines, inspection_line, read_lines
from mergekit_ace.report.selection import select

LOG = logging.getLogger(__name__)


class InspectTensor(Task[Line]):
    """In the place of mergekit's merge of one tensor: the same inputs, a line of a report."""

    merge: ExecuteMergeMethodTask

    def arguments(self) -> dict[str, Task]:
        """The tensors that the merge would get."""
        return {"tensors": self.merge.gather_tensors}

    def group_label(self) -> str | None:
        """As the merge: tensors that lie together are read together."""
        return self.merge.group_label()

    def uses_accelerator(self) -> bool:
        """Like the merge."""
        return True

    @torch.no_grad()
    def execute(self, tensors: dict[ModelReference, Tensor], **_: Any) -> Line:
        """The line; of a tensor that is merged without experts, or no numbers, a short one."""
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
        weights = dict(zip(planned.experts, planned.weights, strict=True))
        try:
            inspection = _inspect(
                planned,
                base,
                [tensors[model] for model in experts],
                [weights[model] for model in experts],
            )
        except (IllConditionedError, OverflowError) as error:
            raise ReportError(f"tensor {planned.name} cannot be merged by ace: {error}") from error
        names = [str(model) for model in experts]
        line = inspection_line(planned.name, names, inspection, time.perf_counter() - start)
        if self.merge.method_name == "statsmerging":
            line["coefficients"] = _coefficients(planned, group)
        return line


def _inspect(
    planned: PlannedTensor, base: Tensor, experts: list[Tensor], weights: list[float]
) -> TensorInspection:
    """On the device, or on the CPU where that is full: as the merge itself."""
    layout = planned.layout(base.ndim)
    try:
        return inspect_tensor(base, experts, weights, planned.options, layout)
    except torch.OutOfMemoryError:
        pass  # not here: the error holds on to the tensors of its frames
    LOG.warning("inspect: %s does not fit on %s; done on the CPU", planned.name, base.device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    there = [expert.cpu() for expert in experts]
    return inspect_tensor(base.cpu(), there, weights, planned.options, layout, least_memory=True)


def _short_line(planned: PlannedTensor, reason: str) -> Line:
    models = [str(model) for model in planned.experts]
    return {"tensor": planned.name, "models": models, "skipped": reason}


def _group(
    planned: PlannedTensor, tensors: dict[ModelReference, Tensor], present: list[ModelReference]
) -> TensorGroup:
    """What a merge method gets, once it is known to be finite and of one shape."""
    entries = tuple(TensorEntry(m, tensors[m], is_base=m == planned.base) for m in present)
    metadata = TensorMetadata.from_weight_info(planned.task.output_weight)
    group = TensorGroup(entries=entries, metadata=metadata)
    shapes = {model: tuple(tensors[model].shape) for model in present}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{model}: {shape}" for model, shape in shapes.items())
        raise ReportError(f"tensor {planned.name} has different shapes ({listed})")
    check_finite("inspect", group)
    return group


def _coefficients(planned: PlannedTensor, group: TensorGroup) -> list[float]:
    """λ_k of one tensor, as the merge would have them."""
    names = [parameter.name for parameter in StatsMerge.spec.input_parameters]
    own = planned.task.input_parameters
    given = {name: {m: dict(own[m].items())[name] for m in planned.experts} for name in names}
    return coefficients_of(group, {**planned.parameters, **given})


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
    """Through mergekit's own executor, which reads, moves and frees tensors as in a merge."""
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
    """What must be the same for the lines of one report."""
    places = []
    for model in plan.config.referenced_models():
        index = LoaderCache().get(model).index
        places += [str(Path(index.base_path, name)) for name in set(index.tensor_paths.values())]
    return {
        "config": plan.config.model_dump(mode="json", exclude_none=True),
        "tensors": sorted(filters),
        "sample": sample,
        "files": file_states(sorted(places)),
        "version": mergekit_ace.__version__,
    }


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
