# SPDX-License-Identifier: Apache-2.0
"""`merge_method: ace`, and what it shares with other methods by ridge regression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from mergekit_ace.algebra.ace import (
    LONGEST,
    RIDGE,
    AceOptions,
    AdapterOptions,
    PlusOptions,
    merge_tensor,
)
from mergekit_ace.algebra.ridge import LARGEST_STACK
from mergekit_ace.algebra.task_vectors import TableLayout, TensorRecord
from mergekit_ace.methods.base import (
    Merged,
    TaskVectorMethod,
    TensorSettings,
    method_spec,
    notice,
)
from mergekit_ace.methods.coefficients import MeasuredLookup, component_coefficients
from mergekit_ace.methods.parameters import INPUTS, LAYOUT, SIDE, WEIGHT, option_parameters
from mergekit_ace.methods.storage import is_table

_OF_INPUTS = ("coefficients", "covariances")  # with one of these, `side: auto` is inputs
# A flatness of Σ S_t: 0.78 in the median after Muon, 0.10 after AdamW (the judge's llama families).
WHITENED = 0.5
SMALLEST = 128  # columns of a matrix whose covariance is worth a word


class RidgeMethod(TaskVectorMethod):
    """A method that solves a ridge regression per matrix, of any number of experts."""

    options_class: ClassVar[type[PlusOptions]]
    whole = True
    products = 3.0  # the system, the numerator, and what flattens the spectrum

    def options(self, settings: TensorSettings) -> PlusOptions:
        """Return the options among the resolved parameters of a tensor."""
        fields = self.options_class.model_fields.items()
        names = [info.alias or field for field, info in fields]
        return self.options_class.model_validate({n: settings.parameters[n] for n in names})

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        (base, *experts), weights = tensors, settings.weights
        read, lookup = _as_solved(settings, base.ndim), self.lookup(settings)
        measured = lookup.inputs(base.shape, settings.parameters["mix"]) if lookup else ()
        if settings.coefficients is not None and not any(settings.coefficients):
            weights = [0.0] * len(weights)  # training left the tensor out, as the base has it
        options, side = self.options(settings), "inputs" if read is settings else "outputs"
        if side == "outputs" and type(options) is PlusOptions:
            options = AdapterOptions.model_validate(options.model_dump())
        given = weights, options, read.layout, settings.coefficients
        merged, record = merge_tensor(base, experts, *given, shape=read.shape, measured=measured)
        solved = (m if m.ridge is None else replace(m, side=side) for m in record.matrices)
        record = replace(record, matrices=tuple(solved))
        if record.layout == read.layout:  # and not averaged after all
            record = replace(record, layout=settings.layout)
        return merged, record

    def mention(self, settings: TensorSettings, record: TensorRecord) -> None:
        super().mention(settings, record)
        if any(matrix.rank and not matrix.refined for matrix in record.matrices):
            said = "the refinement of {tensors} would turn against the experts, and is left out"
            notice(f"{self.spec.name}: {said}")
        parameters = settings.parameters
        spectral = parameters.get("epsilon_scale", "spectrum") == "spectrum"
        if self.leaves_span(parameters) or not spectral or record.shape[-1:] < (SMALLEST,):
            return  # measured covariances are no guess
        epsilon = parameters.get("epsilon") or RIDGE
        # tr(S)² / (i ‖S‖²), 1 of the identity: the ridge is ε over it
        if any(m.ridge and epsilon > WHITENED * m.ridge for m in record.matrices):
            notice(
                f"{self.spec.name}: in {{tensors}} the experts' updates are nearly whitened, as "
                "Muon leaves them: covariances from weights say little there; use `statistics`"
            )

    def check_settings(self, settings: TensorSettings) -> None:
        given = [name for name in _OF_INPUTS if settings.parameters.get(name) is not None]
        if "covariances" in given and settings.parameters.get("side") == "outputs":
            said = f"{self.spec.name}: `covariances` holds those of inputs"
            raise ValueError(f"{said}; leave it out, or side: outputs")
        if len(given) > 1:
            raise ValueError(
                f"{self.spec.name}: the coefficients were learned for a merge with estimated "
                "covariances; leave out `covariances`, or `coefficients`"
            )
        self.lookup(settings)

    def lookup(self, settings: TensorSettings) -> MeasuredLookup | None:
        """Return what was measured of a tensor; None where the config names no file."""
        path = settings.parameters["covariances"]
        return path and MeasuredLookup(self.spec.name, settings, path, "covariances")

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        known = parameters.get("covariances") is not None
        return "measured covariances of inputs are not of low rank" if known else ""

    def coefficients(self, settings: TensorSettings) -> Sequence[float] | None:
        if settings.parameters.get("coefficients") is None:
            return None
        return component_coefficients(self.spec.name, self.options(settings), settings)

    def memory(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> int:
        return super().memory(_as_solved(settings, len(shape)), shape, experts)

    def working(self, rows: int, columns: int, experts: int) -> int:
        entries, size = rows * columns, min(columns, experts * rows)
        refinement = 4 * entries * self.options_class.refines  # which works in float64
        stack = experts * entries
        if columns <= 2 * rows:  # else it is formed whole
            stack = min(stack, LARGEST_STACK)
        return 4 * (2 * stack + 2 * size**2 + refinement)


def _as_solved(settings: TensorSettings, ndim: int) -> TensorSettings:
    """Return settings by which matrices are solved for: those of the outputs' side, transposed."""
    parameters, turned = settings.parameters, "matrix" if ndim == 2 else "stacked"
    other = {"matrix": "transposed", "stacked": "transposed", "transposed": turned}
    side = parameters.get("side", "inputs")
    if side == "auto" and not any(parameters.get(name) is not None for name in _OF_INPUTS):
        # A of an adapter starts at random and hardly moves: rows of Δ = B A tell nothing of inputs
        adapters = all(getattr(model, "lora", None) is not None for model in settings.experts)
        side = "outputs" if adapters else "inputs"
    table = is_table(settings.base, settings.name)
    if settings.layout not in other or side != "outputs" or table:
        return settings
    shape = settings.shape and settings.shape[::-1]
    return replace(settings, layout=other[settings.layout], shape=shape)


class AceMerge(RidgeMethod):
    """ACE-Merging (Xu et al., CVPR 2026) for one tensor at a time."""

    spec = method_spec(
        "ace",
        "ACE-Merging",
        "https://arxiv.org/abs/2603.02945",
        (WEIGHT, *option_parameters(AceOptions), SIDE, LAYOUT, *INPUTS),
    )
    summary = "Solves a ridge regression per matrix, with covariances estimated from task vectors."
    options_class = AceOptions
    ill_conditioned = "Raise `epsilon` for this tensor (by a filter) or for all."
    products = 5.0  # with the refinement


class PlusAceMerge(RidgeMethod):
    """ACE's regression with covariances of trace 1 and a flatter spectrum; ours."""

    table_layout = replace(
        LAYOUT,
        value_type=TableLayout,
        description=f"{LAYOUT.description} table merges rows that are looked up, as of embeddings.",
    )
    spec = method_spec(
        "ace_plus",
        "ACE-Merging with a flatter spectrum",
        "https://arxiv.org/abs/2603.02945",
        (WEIGHT, *option_parameters(PlusOptions), SIDE, table_layout, *INPUTS),
    )
    summary = (
        "Solves the regression of `ace` with all covariances brought to trace 1, and strengthens "
        "directions that are weak in its result where experts are unlike; ours, not the paper's."
    )
    options_class = PlusOptions
    also_cites = ("2412.00081",)

    def memory(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> int:
        if settings.layout == "table":
            return 12 * math.prod(shape)  # of the orthogonal sum, by blocks
        return super().memory(settings, shape, experts)

    def working(self, rows: int, columns: int, experts: int) -> int:
        solved, added = super().working(rows, columns, experts), 12 * rows * columns
        short, long = sorted((rows, columns))  # embeddings are solved before they are added
        return max(solved, added) if long > LONGEST * short else solved + added
