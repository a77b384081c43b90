# SPDX-License-Identifier: Apache-2.0
"""What every merge method here is: one object that knows all that is to be known of the method.

A tensor's way: mergekit gathers its versions and calls `merge_group`, which checks them, resolves
the settings, calls the method's own `merge` (again on the CPU, where the device is full),
checks the result and writes the line of the report.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    GroupMergeMethod,
    InputContract,
    MergeMethodSpec,
    OptionalTensorPolicy,
    TensorGroup,
)
from torch import Tensor

from mergekit_ace.algebra.task_vectors import (
    FixedLayout,
    IllConditionedError,
    NonFiniteError,
    TensorRecord,
    clamp_to_versions,
)
from mergekit_ace.methods.architecture import (
    check_shapes,
    is_transposed,
    shape_mismatch,
    stored_layout,
)
from mergekit_ace.methods.parameters import (
    FILE_PARAMETERS,
    LAYOUT,
    REPORT,
    NamedParameter,
    TensorSettings,
)
from mergekit_ace.naming import is_running_statistic

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Merged = tuple[Tensor, TensorRecord]

# Words for the rules that methods share; a method adds those for the rule that bears its name.
SHARED_RULES = {
    "mean": "by the mean (vectors)",
    "single": "taken from the only expert that changed them",
    "base": "as in the base (changed by no expert)",
}
# The most adapters that are merged without a warning where `lambda` is 1.
MOST_ADAPTERS = 2
# In the messages of libraries that allocate memory of their own, which torch passes on as errors
# of another kind.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
_NOTICES: Counter[str] = Counter()
_LOCK = threading.Lock()  # --multi-gpu merges tensors side by side
MERGE_ERRORS = (IllConditionedError, OverflowError, torch.linalg.LinAlgError)  # pyright: ignore


@dataclass(frozen=True)
class Citation:
    """A paper, by its key and its entry in BibTeX."""

    key: str
    bibtex: str


@cache
def cited(key: str) -> tuple[Citation]:
    """Return a paper of `citations.bib`, which lies beside this file."""
    text = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8")
    entries = text.strip().split("\n\n")
    return (Citation(key, next(entry for entry in entries if f"{{{key}," in entry)),)


@dataclass(frozen=True)
class Work:
    """What the merge of one tensor takes, with all that is optional.

    Attributes:
        operations: floating-point operations.
        working: bytes beside inputs and result.
    """

    operations: float
    working: int


def method_spec(
    name: str, title: str, url: str, parameters: Sequence[NamedParameter]
) -> MergeMethodSpec:
    """Return mergekit's description of a method with a base model and at least one expert.

    Args:
        name: as in ``merge_method:``.
        title, url: for people.
        parameters: of the method; ``report`` is added to them.
    """
    return MergeMethodSpec(
        name=name,
        pretty_name=title,
        reference_url=url,
        parameters=tuple(replace(p, method=name) for p in (*parameters, REPORT)),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON,
    )


class TaskVectorMethod(GroupMergeMethod):
    """A merge method on the differences between experts and their base.

    Nothing outlives a tensor but strings (which weights are transposed, what the headers say), so a
    checkpoint of any size merges shard by shard, and threads may merge tensors side by side.

    Attributes:
        spec: name, title, reference and parameters, see `method_spec`.
        summary: what the method does, in one sentence.
        citations: the papers to cite.
        own_rule: what is done with a tensor by the method's own formula, after "12 tensors are …".
        remedy: what else helps against a result that is too large for its dtype.
        ill_conditioned: what helps where a system cannot be solved.
        whole: whether experts that share few directions all come back nearly whole at `lambda: 1`.
    """

    summary: ClassVar[str]
    citations: ClassVar[tuple[Citation, ...]]
    own_rule: ClassVar[str]
    remedy: ClassVar[str] = ""
    ill_conditioned: ClassVar[str] = ""
    whole: ClassVar[bool] = False

    @abstractmethod
    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        """Merge the versions of one tensor.

        Args:
            tensors: the base's and the experts', finite, of one shape, on one device.

        Returns:
            The merged tensor in any dtype, and the record of what was done.
        """

    @property
    def layouts(self) -> tuple[str, ...]:
        """What ``layout`` may be; empty for a method that reads tensors entry by entry."""
        types = [p.value_type for p in self.spec.parameters if p.name == LAYOUT.name]
        return get_args(types[0]) if types else ()

    @property
    def rules(self) -> dict[str, str]:
        """Words for what is done with tensors, by the rule in their records."""
        return {self.spec.name: self.own_rule, **SHARED_RULES}

    @property
    def about(self) -> str:
        """The title, what the method does, and where to read more."""
        return f"{self.spec.pretty_name}: {self.summary} {self.spec.reference_url}"

    def seed(self, parameters: Mapping[str, Any]) -> str:
        """Return what a model card says of random numbers, for the parameters of a config."""
        return "none needed: the method draws no random numbers"

    def layout(self, settings: TensorSettings, ndim: int) -> FixedLayout:
        """Return how a tensor of so many axes is read as matrices."""
        chosen = settings.parameters.get("layout", "auto")
        tables = "table" in self.layouts
        return stored_layout(chosen, settings.base, settings.name, ndim, tables=tables)

    def learned_coefficients(self, settings: TensorSettings) -> Sequence[float] | None:
        """Look a tensor up in the coefficient file; None where the config names none.

        Raises:
            CoefficientFileError: the file was learned for another merge, or lacks something.
        """
        return None

    def check_settings(self, settings: TensorSettings) -> None:
        """Check what the types of the parameters cannot: whether they fit together, and the merge.

        Raises:
            ValueError: the tensor cannot be merged so; the message says what to write.
        """

    def coefficients(
        self, settings: TensorSettings, group: TensorGroup | None
    ) -> Sequence[float] | None:
        """Return the coefficients that the merge of a tensor uses; None where it has none."""
        return self.learned_coefficients(settings)

    def settings(self, group: TensorGroup, parameters: Mapping[str, Any]) -> TensorSettings:
        """Return all that is known of a tensor before it is merged."""
        assert group.base is not None
        return self.complete(TensorSettings.of(group, parameters), group.base.tensor.ndim, group)

    def complete(
        self, settings: TensorSettings, ndim: int, group: TensorGroup | None = None
    ) -> TensorSettings:
        """Return settings with the tensor's layout and coefficients, once they are checked.

        Args:
            settings: of the tensor, as the config has them.
            ndim: its axes.
            group: its versions; None for those of low rank, which `leaves_span` lets pass.
        """
        self.check_settings(settings)
        if self.layouts:
            settings = replace(settings, layout=self.layout(settings, ndim))
        return replace(settings, coefficients=self.coefficients(settings, group))

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        """Return why task vectors of low rank have no merge of low rank; empty where they have."""
        return ""

    def doubts(self, settings: TensorSettings) -> Iterator[tuple[str, str]]:
        """Yield what is allowed, but seldom meant, in the settings of a tensor, and remedies."""
        if settings.parameters.get("lambda") == 0:
            yield "lambda: 0 leaves tensors as the base has them", "leave lambda out, or raise it"
        adapters = sum(getattr(model, "lora", None) is not None for model in settings.experts)
        if self.whole and adapters > MOST_ADAPTERS and settings.parameters.get("lambda") == 1:
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
        """Count what is to be said of the merged tensors at the end of the merge.

        Here experts that are left out of a tensor though they differ from the base in it.
        """
        for t, model in enumerate(settings.models):
            if any(matrix.tau[t] > 0 and matrix.changed[t] == 0 for matrix in record.matrices):
                notice(
                    f"{self.spec.name}: {model} is left out of {{tensors}}, where it is the base, "
                    "saved in another precision"
                )

    def work(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> Work:
        """Return what a merge takes, from the shape as stored: here a sweep over the entries."""
        return sweep(shape, experts)

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
                is_transposed(base_id, group_name)  # mergekit plans on the main thread: see there

    def __call__(self, groups: Sequence[TensorGroup], /, **options: Any) -> tuple[Tensor, ...]:
        """Merge tensors in memory; mergekit's entry point for them, with its arguments."""
        for group in groups:
            check_shapes_in_memory(self.spec.name, group)
        return super().__call__(groups, **options)

    @torch.no_grad()
    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> Tensor:
        """Merge one tensor; the result has the dtype of the inputs."""
        start = time.perf_counter()
        work, name = partial(self._merge_on, group, parameters), group.metadata.name
        try:
            device = group.tensors[0].device
            merged, record, settings = first_that_fits(device, work, self.spec.name, name)
        except NonFiniteError:
            check_finite(self.spec.name, group)  # which names the model
            raise
        except MERGE_ERRORS as error:
            raise ValueError(self.explain(error, TensorSettings.of(group, parameters))) from error
        self.check_size(merged, settings)
        self.mention(settings, record)
        if settings.recorded:
            from mergekit_ace.methods.report_lines import append_report

            seconds = time.perf_counter() - start
            append_report(self.spec.name, settings, record, seconds)
        return merged

    def check_size(self, merged: Tensor, settings: TensorSettings) -> None:
        """Raise a `ValueError` for a result that its dtype cannot hold.

        One that only float16 cannot hold is said at the end of the merge.
        """
        size = largest_size(merged)
        if not math.isfinite(size):
            raise ValueError(
                f"{self.spec.name}: {describe(settings.name)} came out too large for "
                f"{merged.dtype}. Use a dtype with more range (dtype: bfloat16 or float32)"
                f"{self.remedy}."
            )
        if merged.dtype != torch.float16 and size > torch.finfo(torch.float16).max:
            notice(
                f"{self.spec.name}: {{tensors}} came out with entries above 65504, which "
                "out_dtype: float16 turns into Inf; write out_dtype: bfloat16"
            )

    def _merge_on(
        self,
        group: TensorGroup,
        parameters: Mapping[str, Any],
        device: torch.device,
    ) -> tuple[Tensor, TensorRecord, TensorSettings]:
        group = _moved(group, device)
        settings = self.settings(group, parameters)
        tensors = _versions(group)
        merged, record = self.merge(tensors, settings)
        if is_running_statistic(settings.name or ""):  # sums of changes may be negative variances
            merged = clamp_to_versions(merged, tensors)
        return merged.to(tensors[0].dtype), record, settings


def _moved(group: TensorGroup, device: torch.device) -> TensorGroup:
    entries = [replace(entry, tensor=entry.tensor.to(device)) for entry in group.entries]
    return replace(group, entries=tuple(entries))


def _versions(group: TensorGroup) -> list[Tensor]:
    """Return the base's tensor, then the experts'."""
    assert group.base is not None  # the contract requires it
    return [group.base.tensor, *(expert.tensor for expert in group.non_base)]


def sweep(shape: Sequence[int], experts: int) -> Work:
    """Return what it takes to read every entry of every expert once."""
    entries = math.prod(shape)
    return Work(2.0 * experts * entries, 4 * entries)


def matrices_in(shape: Sequence[int], layout: str) -> tuple[int, int, int] | None:
    """Return how many matrices (o, i) a tensor holds, o and i; None for vectors and tables."""
    if layout in ("mean", "table") or len(shape) < 2 or not math.prod(shape):
        return None
    rows, columns = (shape[0], math.prod(shape[1:])) if layout == "flattened" else shape[-2:]
    if layout == "transposed":
        rows, columns = columns, rows
    return (math.prod(shape) // (rows * columns), rows, columns) if rows > 1 else None


def check_models(
    method: str, input_ids: Sequence[Hashable], base_id: Hashable | None, group_name: str | None
) -> list[Hashable]:
    """Return the experts, once there is a base model among the inputs and at least one expert.

    Raises:
        ValueError: naming `method` and the line to add or change.
    """
    where = f" (for {group_name})" if group_name else ""
    experts = [model for model in input_ids if model != base_id]
    if base_id is None:
        raise ValueError(
            f"{method}: there is no base model{where}. The method works on the differences between "
            "experts and the model they were fine-tuned from. Add to the config a line\n"
            "    base_model: NAME_OR_PATH_OF_THAT_MODEL\n"
            "(in Python: base_index=, or base=)."
        )
    if base_id not in input_ids and ".slices[" in (group_name or ""):
        raise ValueError(
            f"{method}: the base model {base_id} is not among the sources{where}. List it in every "
            "slice, with its layer_range, beside the experts."
        )
    if base_id not in input_ids:
        raise ValueError(
            f"{method}: the base model {base_id} has no tensor{where}, but an expert has. Save "
            "both with the same heads, tied or untied, or take the tensor out of the expert."
        )
    if not experts:
        raise ValueError(
            f"{method}: there is no expert besides the base model {base_id}{where}. List at least "
            "one fine-tuned model under models:."
        )
    return experts


def check_shapes_in_memory(method: str, group: TensorGroup) -> None:
    """Do what `shapes.check_shapes` does, for tensors that have no header."""
    base = group.base
    if base is None:
        return
    for entry in group.non_base:
        shape, expected = tuple(entry.tensor.shape), tuple(base.tensor.shape)
        if shape != expected:
            message = shape_mismatch(group.metadata.name, entry.id, shape, base.id, expected)
            raise ValueError(f"{method}: {message}")


def check_finite(method: str, group: TensorGroup) -> None:
    """Raise a `ValueError` where there is NaN or Inf, naming the tensor and the model."""
    for entry in group.entries:
        if not is_finite(entry.tensor):
            raise ValueError(
                f"{method}: {describe(group.metadata.name)} of model {entry.id} contains NaN or "
                "Inf. The checkpoint is damaged, or its dtype overflowed: check it, or leave the "
                "model out."
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf; without a copy of it."""
    return math.isfinite(largest_size(tensor))


def largest_size(tensor: Tensor) -> float:
    """Return max |x| over the entries; 0 without any, NaN or Inf where there is one."""
    if tensor.numel() == 0:
        return 0.0
    return float(torch.stack(torch.aminmax(tensor)).abs().max())  # both are NaN if an entry is


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
    """Work on a device; if it is full, on the CPU.

    Args:
        device: where the tensors are, or are meant to go.
        work: from a device, to which it moves the tensors, to a result.
        method, name: of the merge and of the tensor, for the warning.

    Raises:
        torch.OutOfMemoryError: there is no memory on the CPU either.
    """
    for where in (device, torch.device("cpu")):
        try:
            return work(where)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if torch.cuda.is_available():  # out here: the error holds on to the tensors of its frames
            torch.cuda.empty_cache()
        if where.type == "cpu":
            break
        LOG.warning(
            "%s: %s does not fit into the free memory of %s; merged on the CPU instead, which "
            "takes longer. Other work on the device, or tensors that --read-to-gpu and "
            "--low-cpu-memory keep there, leave it less.",
            method, describe(name), device,
        )  # fmt: skip
    raise torch.OutOfMemoryError(f"{method}: there is no memory left to merge {describe(name)}")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error says that a device has too little free memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in OUT_OF_MEMORY)


def notice(text: str, count: int = 1) -> None:
    """Count tensors of which something is to be said when the merge is done.

    Args:
        text: of the warning, with "{tensors}" where their number goes; each is said once.
    """
    with _LOCK:
        _NOTICES[text] += count


def take_notices() -> dict[str, int]:
    """Return numbers of tensors by warning, and forget them."""
    with _LOCK:
        counts = dict(_NOTICES)
        _NOTICES.clear()
    return counts


def flush_notices() -> None:
    """Log one warning for everything that was counted, and forget it."""
    for text, count in take_notices().items():
        LOG.warning("%s", text.replace("{tensors}", f"{count} tensor{'s' if count > 1 else ''}"))


atexit.register(flush_notices)
