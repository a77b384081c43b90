# SPDX-License-Identifier: Apache-2.0
"""`merge_method: ace`, and what it shares with other methods by ridge regression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from mergekit.merge_methods.base import TensorGroup
from pydantic import BaseModel
from torch import Tensor

from mergekit_ace.algebra.ace import AceOptions, RelativeOptions, merge_tensor
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.task_vectors import RelativeLayout, TensorRecord, other_side
from mergekit_ace.methods.architecture import is_table
from mergekit_ace.methods.base import (
    Merged,
    TaskVectorMethod,
    Work,
    cited,
    matrices_in,
    method_spec,
    notice,
)
from mergekit_ace.methods.parameters import (
    COEFFICIENTS,
    COVARIANCES,
    LAYOUT,
    MIX,
    SIDE,
    TASK,
    WEIGHT,
    NamedParameter,
    TensorSettings,
    option_parameters,
    options_from,
)

if TYPE_CHECKING:
    from mergekit_ace.methods.measured_lookup import MeasuredLookup

_OF_INPUTS = ("coefficients", "covariances")  # files that belong to covariances of inputs


def ridge_parameters(
    options_class: type[BaseModel], layout: NamedParameter = LAYOUT
) -> tuple[NamedParameter, ...]:
    """Return the parameters of a `RidgeMethod`: the fields of its options, and the shared ones."""
    own = option_parameters(options_class)
    return (WEIGHT, *own, SIDE, layout, COEFFICIENTS, COVARIANCES, MIX, TASK)


class RidgeMethod(TaskVectorMethod):
    """A method that solves a ridge regression per matrix, of any number of experts.

    Attributes:
        options_class: its options.
        refines: whether a refinement may follow.
    """

    options_class: ClassVar[type[AceOptions] | type[RelativeOptions]]
    citations = cited("xu2026ace")
    refines: ClassVar[bool] = False
    ill_conditioned = "Raise `epsilon` for this tensor (by a filter) or for all."
    whole = True

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        read, shape = _as_solved(settings, tensors[0].ndim), tensors[0].shape
        lookup, mix = self.lookup(settings), settings.parameters.get("mix", 1.0)
        weights = settings.weights
        if settings.coefficients is not None and not any(settings.coefficients):
            weights = [0.0] * len(weights)  # training left the tensor out, as the base has it
        merged, record = merge_tensor(
            tensors[0],
            tensors[1:],
            weights,
            options_from(self.options_class, settings.parameters),
            read.layout,
            settings.coefficients,
            space=read.space,
            measured=lookup and lookup.inputs(shape, mix),
        )
        if "side" in settings.parameters:
            side = "inputs" if read is settings else "outputs"
            solved = (m if m.ridge is None else replace(m, side=side) for m in record.matrices)
            record = replace(record, matrices=tuple(solved))
        if record.layout == read.layout:  # and not averaged after all
            record = replace(record, layout=settings.layout)
        return merged, record

    def check_settings(self, settings: TensorSettings) -> None:
        known = next((n for n in _OF_INPUTS if settings.parameters.get(n) is not None), None)
        if known and settings.parameters.get("side") == "outputs":
            raise ValueError(
                f"{self.spec.name}: `{known}` belongs to covariances of inputs; leave it out, or "
                "side: outputs"
            )
        if self.lookup(settings) and settings.parameters.get("coefficients") is not None:
            raise ValueError(
                f"{self.spec.name}: the coefficients were learned for a merge with estimated "
                "covariances; leave out `covariances`, or `coefficients`"
            )

    def lookup(self, settings: TensorSettings) -> MeasuredLookup | None:
        """Return what was measured of a tensor; None where the config names no file."""
        path = settings.parameters["covariances"]
        if path is None:
            return None
        from mergekit_ace.methods.measured_lookup import MeasuredLookup  # few merges need it

        return MeasuredLookup(self.spec.name, settings, path, "covariances")

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        measured = _is_measured(parameters)
        return "measured covariances of inputs are not of low rank" if measured else ""

    def coefficients(
        self, settings: TensorSettings, group: TensorGroup | None = None
    ) -> Sequence[float] | None:
        if settings.parameters.get("coefficients") is None:
            return None
        from mergekit_ace.methods.lookup import component_coefficients

        options = options_from(self.options_class, settings.parameters)
        return component_coefficients(self.spec.name, options, settings)

    def work(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> Work:
        """Return what the closed form takes, if all experts changed the tensor."""
        found = matrices_in(shape, _as_solved(settings, len(shape)).layout)
        if found is None or experts < 2:
            return super().work(settings, shape, experts)
        count, rows, columns = found
        size = columns if _is_measured(settings.parameters) else min(columns, experts * rows)
        # Products with all task vectors, the factor and its solve; of the refinement, its residual,
        # the Gram matrix of F in float64 and its eigenvectors.
        operations = 2.0 * experts * rows * columns * size + size**3 / 3 + 2 * rows * columns * size
        working, small = 4 * (experts + 4) * max(rows * columns, size**2), min(rows, columns)
        if self.refines:
            operations += 2 * rows * columns * (columns + small) + 9.0 * small**3
            working += 24 * small**2
        return Work(count * operations, working)


def _as_solved(settings: TensorSettings, ndim: int) -> TensorSettings:
    """Return settings by which matrices are solved for: those of the outputs' side, transposed.

    A of a LoRA adapter starts at random and hardly moves, so that the rows of Δ = B A, unlike those
    of a full fine-tune, do not tell the task's inputs. B starts at zero, and holds gradients alone.
    """
    parameters, layout = settings.parameters, other_side(settings.layout, ndim)
    side = parameters.get("side", "inputs")
    if side == "auto" and not any(parameters.get(name) is not None for name in _OF_INPUTS):
        adapters = all(getattr(model, "lora", None) is not None for model in settings.experts)
        side = "outputs" if adapters else "inputs"
    table = is_table(settings.base, settings.name)
    if layout == settings.layout or side != "outputs" or table:
        return settings
    space = settings.space and CoreSpace(settings.space.right, settings.space.left)
    return replace(settings, layout=layout, space=space)


def _is_measured(parameters: Mapping[str, Any]) -> bool:
    """Return whether a config names covariances that were measured."""
    return any(parameters.get(name) is not None for name in ("covariances", "statistics"))


class AceMerge(RidgeMethod):
    """ACE-Merging (Xu et al., CVPR 2026) for one tensor at a time."""

    spec = method_spec(
        "ace", "ACE-Merging", "https://arxiv.org/abs/2603.02945", ridge_parameters(AceOptions)
    )
    summary = (
        "Solves one ridge regression per matrix in closed form, with covariances that are "
        "estimated from the task vectors; needs no data."
    )
    own_rule = "merged by the closed form"
    options_class = AceOptions
    refines = True
    ill_conditioned = (
        "Raise `epsilon` for this tensor (by a filter) or for all; epsilon_scale: relative adapts "
        "it to the size of task vectors."
    )

    def doubts(self, settings: TensorSettings) -> Iterator[tuple[str, str]]:
        yield from super().doubts(settings)
        options = options_from(AceOptions, settings.parameters)
        refined = options.spectral_refinement == "always" and options.rank_fraction > 0
        if refined and options.adaptive_normalization == "never":
            yield (
                "spectral_refinement: always with adaptive_normalization: never refines by a "
                "residual of the third power of the weights, which is next to nothing for small "
                "task vectors and everything for large ones",
                "write adaptive_normalization: always, or auto for both",
            )

    def mention(self, settings: TensorSettings, record: TensorRecord) -> None:
        super().mention(settings, record)
        if any(matrix.rank and not matrix.refined for matrix in record.matrices):
            notice(
                "ace: in {tensors} the refinement would have turned the merge against the "
                "experts, and was left out"
            )


RELATIVE_LAYOUT = replace(
    LAYOUT,
    value_type=RelativeLayout,
    description=f"{LAYOUT.description} table merges rows that are looked up, as of embeddings.",
)


class RelativeAceMerge(RidgeMethod):
    """ACE's ridge regression with covariances of trace 1 and nothing else; ours."""

    spec = method_spec(
        "ace_relative",
        "ACE-Merging with relative covariances",
        "https://arxiv.org/abs/2603.02945",
        ridge_parameters(RelativeOptions, RELATIVE_LAYOUT),
    )
    summary = (
        "Solves the ridge regression of ACE-Merging with all covariances brought to trace 1, and "
        "merges embeddings row by row unless they are also the head; ours, not the paper's."
    )
    own_rule = "merged by the closed form of relative covariances"
    options_class = RelativeOptions
