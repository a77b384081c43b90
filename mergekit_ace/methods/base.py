# SPDX-License-Identifier: Apache-2.0
"""What every merge method here is, its parameters, and a tensor's way through it: `merge_group`."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import numpy as np
import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    GroupMergeMethod,
    InputContract,
    MergeMethodSpec,
    OptionalTensorPolicy,
    ParameterScope,
    ParameterSpec,
    TensorGroup,
)
from pydantic import AfterValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from torch import Tensor

from mergekit_ace.algebra.linalg import largest_size
from mergekit_ace.algebra.low_rank import LowRank, merge_in_span
from mergekit_ace.algebra.task_vectors import (
    FixedLayout,
    IllConditionedError,
    TensorRecord,
    add_task_vectors,
    select_active,
)
from mergekit_ace.methods.report_lines import append_report, report_path
from mergekit_ace.methods.storage import check_shapes, is_table, stored_layout
from mergekit_ace.naming import FileError, is_running_statistic

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Merged = tuple[Tensor, TensorRecord]

# Those that name files whose content goes into the result, and in which experts have names.
FILE_PARAMETERS = ("coefficients", "learner", "statistics", "covariances")
MOST_ADAPTERS = 2  # that are merged without a warning where `lambda` is 1
_LIN_ALG_ERRORS = np.linalg.LinAlgError, torch.linalg.LinAlgError  # pyright: ignore
MERGE_ERRORS = (IllConditionedError, OverflowError, *_LIN_ALG_ERRORS)
_NOTICES: Counter[str] = Counter()
_LOCK = threading.Lock()  # --multi-gpu merges tensors side by side


@dataclass(frozen=True)
class NamedParameter(ParameterSpec):
    """A mergekit parameter that explains itself when its value is wrong."""

    method: str = ""  # that has it

    def validate(self, value: Any) -> Any:
        """Return `value` as its type, or raise a `ValueError` that names what is allowed."""
        try:
            return super().validate(value)
        except (ValidationError, FileError) as error:
            cause = error
            if isinstance(error, ValidationError):
                cause = error.errors()[0].get("ctx", {}).get("error")
            reason = f" ({cause})" if cause else ""
            raise ValueError(
                f"{self.method}: parameter {self.name!r} is {value!r}{reason}; "
                f"allowed: {describe_type(self.value_type)}"
            ) from None


def shared(name: str, value_type: Any, default: Any, description: str) -> NamedParameter:
    """Declare a parameter of whole tensors; `description` is its line in the reference."""
    return NamedParameter(name, value_type, ParameterScope.SHARED, default, description)


def describe_type(value_type: Any) -> str:
    """Return in words what a value of a type, which may be optional, is allowed to be."""
    if NoneType in get_args(value_type):
        value_type = next(part for part in get_args(value_type) if part is not NoneType)
    info = FieldInfo.from_annotation(value_type)
    if info.description:
        return info.description
    if get_origin(info.annotation) is Literal:
        return "one of " + ", ".join(get_args(info.annotation))
    words: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(info.annotation, "text")


ReportPath = Annotated[
    str,
    AfterValidator(report_path),
    Field(description="the path of a file in an existing folder that you may write to"),
]
REPORT = shared(
    "report", ReportPath | None, None, "The merge appends a JSON line per tensor to it."
)


@dataclass(frozen=True)
class TensorSettings:
    """One tensor of a merge: of which models, and with which parameters."""

    name: str | None  # None for one in memory without a name
    base: Hashable  # the models are as mergekit refers to them
    experts: tuple[Hashable, ...]
    parameters: Mapping[str, Any]  # resolved, by name; those of experts by model
    layout: FixedLayout = "mean"  # how it is read; mean where no matrix is needed
    coefficients: Sequence[float] | None = None  # that its merge uses
    shape: Sequence[int] | None = None  # of matrices whose cores are merged, as of adapters
    group: TensorGroup | None = None  # None until tensors are read, and where they have low rank

    @classmethod
    def of(cls, group: TensorGroup, parameters: Mapping[str, Any]) -> TensorSettings:
        """Return those of a group with its resolved parameters."""
        assert group.base is not None  # the contract of our methods requires it
        experts = tuple(expert.id for expert in group.non_base)
        return cls(group.metadata.name, group.base.id, experts, parameters, group=group)

    @property
    def models(self) -> list[str]:
        """Names of the experts."""
        return [str(expert) for expert in self.experts]

    @property
    def weights(self) -> list[float]:
        """w_t of the experts; 1 for methods without weights."""
        return self.of_experts("weight", 1.0)

    def of_experts(self, name: str, default: Any) -> list[Any]:
        """Return a parameter of every expert; `default` where the method has none."""
        own = self.parameters.get(name)
        return [default if own is None else own[expert] for expert in self.experts]


def method_spec(
    name: str, title: str, url: str, parameters: Sequence[NamedParameter]
) -> MergeMethodSpec:
    """Return mergekit's description of a method; ``report`` is added to its parameters."""
    return MergeMethodSpec(
        name=name,
        pretty_name=title,
        reference_url=url,
        parameters=tuple(replace(p, method=name) for p in (*parameters, REPORT)),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON,
    )


class TaskVectorMethod(GroupMergeMethod):
    """A merge method on the differences between experts and their base, see `method_spec`.

    A method keeps nothing of a tensor: threads may merge tensors side by side.
    """

    summary: ClassVar[str]  # what the method does, in one sentence
    also_cites: ClassVar[tuple[str, ...]] = ()  # numbers on arXiv, beside the paper's
    ill_conditioned: ClassVar[str] = ""  # what helps where a system cannot be solved
    scales_all: ClassVar[bool] = True  # whether λ multiplies the whole merged task vector
    whole: ClassVar[bool] = False  # whether unlike experts come back nearly whole at `lambda: 1`
    entry: ClassVar[int] = 4  # bytes of an entry of the matrices that it works on
    beyond_span: ClassVar[str] = ""  # why its merges of task vectors of low rank have none
    products: ClassVar[float] = 0.0  # with all task vectors that a merge of matrices is worth

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        """Merge the versions of one tensor, the base's first, into one of any dtype.

        Without a formula of its own, a method adds its coefficients times the task vectors of
        those experts that changed the tensor.
        """
        (base, *experts), given = tensors, settings.coefficients
        assert given is not None
        active = select_active(base, experts, [1.0] * len(experts), torch.float32, given)
        merged = add_task_vectors(base, active.experts, active.coefficients, active.dtype)
        return merged, TensorRecord(tuple(base.shape), "mean", (active.record(self.spec.name),))

    def check_settings(self, settings: TensorSettings) -> None:
        """Raise a `ValueError` where parameters do not fit each other or the tensor."""

    def coefficients(self, settings: TensorSettings) -> Sequence[float] | None:
        """Return the coefficients that the merge of a tensor uses, or say what to write."""
        return None

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        """Return why task vectors of low rank have no merge of low rank; empty where they have."""
        return self.beyond_span

    def operations(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> float:
        """Return about how many operations the products of a merge take."""
        if len(shape) < 2 or settings.layout in ("mean", "table"):
            return 0.0
        flat = settings.layout == "flattened"
        side = max(1, min(shape[0], math.prod(shape[1:])) if flat else min(shape[-2:]))
        side = min(math.prod(shape) // side, experts * side)
        return 2.0 * experts * math.prod(shape) * self.products * side

    def memory(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> int:
        """Return the bytes that a merge takes beside its inputs and its result, as stored."""
        if settings.layout == "mean" or experts < 2:
            return 4 * math.prod(shape)
        flat = settings.layout == "flattened"
        rows, columns = (shape[0], math.prod(shape[1:])) if flat else shape[-2:]
        if settings.layout == "transposed":
            rows, columns = columns, rows
        return self.working(rows, columns, experts)

    def working(self, rows: int, columns: int, experts: int) -> int:
        """Return the same for one matrix."""
        return self.entry * (experts + 4) * rows * columns

    def doubts(self, settings: TensorSettings) -> Iterator[tuple[str, str]]:
        """Yield what is allowed, but seldom meant, in the settings of a tensor, and remedies."""
        scale = settings.parameters.get("lambda")
        if scale == 0 and self.scales_all:
            yield "lambda: 0 leaves tensors as the base has them", "leave lambda out, or raise it"
        adapters = sum(getattr(model, "lora", None) is not None for model in settings.experts)
        if self.whole and adapters > MOST_ADAPTERS and scale == 1:
            yield (
                "with lambda: 1, several LoRA adapters, if trained at a high rate, may together "
                "undo what the base knew",
                "try lambda from 0.3 to 0.7 on text that no adapter was trained on",
            )
        files = [settings.parameters.get(name) for name in FILE_PARAMETERS]
        if not any(files) and any(settings.of_experts("task", None)):
            yield (
                "`task` names an expert in a file of learned coefficients or statistics, and there "
                "is none",
                "add the file's parameter, or leave task out",
            )

    def mention(self, settings: TensorSettings, record: TensorRecord) -> None:
        """Count what is to be said of the merged tensors at the end of the merge."""
        for t, model in enumerate(settings.models):
            if any(matrix.tau[t] > 0 and matrix.changed[t] == 0 for matrix in record.matrices):
                notice(
                    f"{self.spec.name}: {model} is left out of {{tensors}}, where it is the base, "
                    "saved in another precision"
                )

    @property
    def layouts(self) -> tuple[str, ...]:
        """What ``layout`` may be; empty for a method that reads tensors entry by entry."""
        types = [p.value_type for p in self.spec.parameters if p.name == "layout"]
        return get_args(types[0]) if types else ()

    @property
    def rules(self) -> dict[str, str]:
        """Words for what is done with tensors, by the rule in their records."""
        return {
            self.spec.name: f"merged by {self.spec.pretty_name}",
            "mean": "by the mean (vectors)",
            "single": "taken from the only expert that changed them",
            "base": "as in the base (changed by no expert)",
        }

    @property
    def citations(self) -> tuple[str, ...]:
        """The papers to cite, in BibTeX, as `citations.bib` has them."""
        entries = Path(__file__).with_name("citations.bib").read_text("utf-8").strip().split("\n\n")
        numbers = (str(self.spec.reference_url).rpartition("/")[2], *self.also_cites)
        return tuple(entry for number in numbers for entry in entries if number in entry)

    @property
    def about(self) -> str:
        """The title, what the method does, and where to read more."""
        return f"{self.spec.pretty_name}: {self.summary} {self.spec.reference_url}"

    def layout(self, settings: TensorSettings, ndim: int) -> FixedLayout:
        """Return how a tensor of so many axes is read as matrices."""
        chosen = settings.parameters.get("layout", "auto")
        tables = "table" in self.layouts
        return stored_layout(chosen, settings.base, settings.name, ndim, tables=tables)

    def complete(self, settings: TensorSettings, ndim: int) -> TensorSettings:
        """Return settings with the tensor's layout and coefficients, once they are checked."""
        self.check_settings(settings)
        if self.layouts:
            settings = replace(settings, layout=self.layout(settings, ndim))
        return replace(settings, coefficients=self.coefficients(settings))

    def explain(self, error: Exception, settings: TensorSettings) -> str:
        """Return the message for a tensor that cannot be merged."""
        listed = ", ".join(f"{number}: {model}" for number, model in enumerate(settings.models))
        what = f"{self.spec.name}: {describe(settings.name)} cannot be merged: {error}"
        if isinstance(error, IllConditionedError) and self.ill_conditioned:
            return f"{what}, too much to be solved even in float64. {self.ill_conditioned}"
        return f"{what} (experts: {listed})."

    def validate_inputs(
        self,
        input_ids: Sequence[Hashable],
        base_id: Hashable | None = None,
        *,
        group_name: str | None = None,
    ) -> None:
        """Do mergekit's structural check, with errors that say what to write instead."""
        experts = check_models(self.spec.name, input_ids, base_id, group_name)
        super().validate_inputs(input_ids, base_id, group_name=group_name)
        if group_name is not None:
            check_shapes(group_name, experts, base_id, method=self.spec.name)
            if self.layouts:
                is_table(base_id, group_name)  # mergekit plans on the main thread: see there

    @torch.no_grad()
    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> Tensor:
        """Merge one tensor, on its device or the CPU; the result has the dtype of the inputs."""
        start, method = time.perf_counter(), self.spec.name
        settings = TensorSettings.of(group, parameters)
        name = settings.name

        def merge_on(device: torch.device) -> tuple[Tensor, TensorRecord, TensorSettings]:
            entries = (replace(e, tensor=e.tensor.to(device)) for e in group.entries)
            moved = replace(group, entries=tuple(entries))
            assert moved.base is not None  # the contract requires it
            tensors = [moved.base.tensor, *(expert.tensor for expert in moved.non_base)]
            complete = self.complete(replace(settings, group=moved), tensors[0].ndim)
            merged, record = self.merge(tensors, complete)
            if name and is_running_statistic(name):  # sums may be negative variances
                low, high = (reduce(f, tensors) for f in (torch.minimum, torch.maximum))
                merged = torch.clamp(merged, low.to(merged.dtype), high.to(merged.dtype))
            return merged.to(tensors[0].dtype), record, complete

        try:
            device = group.tensors[0].device
            merged, record, settings = first_that_fits(device, merge_on, method, name)
        except MERGE_ERRORS as error:
            raise ValueError(self.explain(error, settings)) from error
        except ValueError:
            check_finite(method, group)  # names the model that contains NaN or Inf
            raise
        self.check_size(merged, settings)
        self.mention(settings, record)
        if settings.parameters["report"] is not None:
            append_report(method, settings, record, time.perf_counter() - start)
        return merged

    def merge_low_rank(
        self, deltas: Sequence[LowRank | None], settings: TensorSettings, rank: int | None = None
    ) -> tuple[LowRank | None, float, TensorRecord]:
        """Merge task vectors of low rank; see `merge_in_span` and `leaves_span`."""

        def merge(tensors: list[Tensor], layout: FixedLayout, shape: Sequence[int]) -> Merged:
            return self.merge(tensors, replace(settings, layout=layout, shape=shape))

        return merge_in_span(deltas, settings.layout, merge, rank)

    def check_size(self, merged: Tensor, settings: TensorSettings) -> None:
        """Raise a `ValueError` for a result that its dtype cannot hold; note one above float16."""
        size = largest_size(merged)
        if not math.isfinite(size):
            raise ValueError(
                f"{self.spec.name}: {describe(settings.name)} came out too large for "
                f"{merged.dtype}. Use a dtype with more range (dtype: bfloat16 or float32), or "
                "smaller coefficients."
            )
        if merged.dtype != torch.float16 and size > torch.finfo(torch.float16).max:
            notice(
                f"{self.spec.name}: {{tensors}} came out with entries above 65504, which "
                "out_dtype: float16 turns into Inf; write out_dtype: bfloat16"
            )


def check_models(
    method: str, input_ids: Sequence[Hashable], base_id: Hashable | None, group_name: str | None
) -> list[Hashable]:
    """Return the experts; without a base model, or any expert, raise a `ValueError`."""
    where = f" (for {group_name})" if group_name else ""
    experts = [model for model in input_ids if model != base_id]
    if base_id is None:
        problem = f"there is no base model{where}, which the experts were fine-tuned from"
        remedy = "Add to the config a line\n    base_model: NAME_OR_PATH_OF_THAT_MODEL\n"
        remedy += "(in Python: base_index=, or base=)"
    elif base_id not in input_ids and ".slices[" in where:
        problem = f"the base model {base_id} is not among the sources{where}"
        remedy = "List it in every slice, with its layer_range, beside the experts"
    elif base_id not in input_ids:
        problem = f"the base model {base_id} has no tensor{where}, but an expert has"
        remedy = "Save both with the same heads, tied or not, or take it out of the expert"
    elif not experts:
        problem = f"there is no expert besides the base model {base_id}{where}"
        remedy = "List at least one fine-tuned model under models:"
    else:
        return experts
    raise ValueError(f"{method}: {problem}. {remedy}.")


def check_finite(method: str, group: TensorGroup) -> None:
    """Raise a `ValueError` where there is NaN or Inf, naming the tensor and the model."""
    for entry in group.entries:
        if not is_finite(entry.tensor):
            raise ValueError(
                f"{method}: {describe(group.metadata.name)} of model {entry.id} contains NaN or "
                "Inf; leave the model out, or save it again, in a dtype with more range"
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf; without a copy of it."""
    return math.isfinite(largest_size(tensor))


def describe(name: str | None) -> str:
    """Return a tensor in words."""
    return f"tensor {name}" if name else "a tensor"


def check_device(device: str) -> None:
    """Raise a `ValueError` if torch cannot compute on a device here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts that it has it
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"torch cannot compute on {device!r} here: {reason}; leave out --cuda and --device, or "
            "install a torch for this device"
        ) from error


def first_that_fits(
    device: torch.device, work: Callable[[torch.device], T], method: str, name: str | None
) -> T:
    """Return what work on a device returns; if that is full, what the same on the CPU does."""
    for where in (device, torch.device("cpu")):
        try:
            return work(where)
        except RuntimeError as error:
            full = isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)
            if not full and "out of memory" not in str(error):  # of libraries that allocate, too
                raise
        if torch.cuda.is_available():  # out here: the error holds on to the tensors of its frames
            torch.cuda.empty_cache()
        if where.type == "cpu":
            break
        LOG.warning(
            "%s: %s does not fit into the free memory of %s; computed on the CPU instead. "
            "--read-to-gpu and --low-cpu-memory keep tensors there, and leave it less.",
            method, describe(name), device,
        )  # fmt: skip
    raise torch.OutOfMemoryError(f"{method}: there is no memory left for {describe(name)}")


def notice(text: str, count: int = 1) -> None:
    """Count tensors for a warning at the end of the merge; "{tensors}" stands for their number."""
    with _LOCK:
        _NOTICES[text] += count


def take_notices() -> dict[str, int]:
    """Return numbers of tensors by warning, and forget them."""
    with _LOCK:
        counts = dict(_NOTICES)
        _NOTICES.clear()
    return counts


@atexit.register
def flush_notices() -> None:
    """Log one warning for everything that was counted, and forget it."""
    for text, count in take_notices().items():
        LOG.warning("%s", text.replace("{tensors}", f"{count} tensor{'s' if count > 1 else ''}"))
