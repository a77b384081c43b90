# SPDX-License-Identifier: Apache-2.0
"""What may be chosen for a merge, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

FixedLayout = Literal["matrix", "transposed", "stacked", "flattened", "mean", "table"]
Layout = Literal["auto", "matrix", "transposed", "stacked", "flattened", "mean"]
RelativeLayout = Literal["auto", "matrix", "transposed", "stacked", "flattened", "mean", "table"]
Side = Literal["inputs", "outputs"]  # of a weight

Form = Literal["primal", "tall", "lean", "dual"]
Stage = Literal["closed form", "refined"]
Observer = Callable[[Stage, Tensor], None]
Statistic = Literal["auto", "gamma", "log_variance"]


def _number(value: Any) -> Any:
    """Pydantic reads a bool as 0 or 1; a YAML `yes` where a number belongs is a mistake."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not a boolean")
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Integer = Annotated[int, BeforeValidator(_number)]
NonNegative = Annotated[Number, Field(ge=0)]
# Products of two factors, and a ridge, stay in the range of float32, in which they are applied.
Factor = Annotated[Number, Field(ge=-1e15, le=1e15)]
Ridge = Annotated[Number, Field(ge=0, le=1e30)]
Fraction = Annotated[Number, Field(ge=0, le=1)]

# Where Σ ε_t of normalised estimates is above it, a refinement whose mean holds the ridges points
# against the experts; at a third of it, it is the plain one but for a few percent.
LARGEST_MEAN_RIDGE = 0.3

RIDGE_FLOOR = Field(
    True,
    description="Raises ε until Σ ε_t is at least 0.005 tr(S²) / tr(S), with S = Σ S_t, and "
    "further where X would be much larger than the task vectors. false is the paper's formula, by "
    "which X can grow without bound.",
)


class AceOptions(BaseModel):
    """What may be chosen per tensor.

    Defaults are the paper's (arXiv 2603.02945) but for ``ridge_floor``, ``heterogeneity`` and
    ``refinement_mean``.

    Every field says what it is in its description; mergekit's name for ``scale`` is ``lambda``,
    which Python reserves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    scale: Factor = Field(1.0, alias="lambda", description="Scale λ; the result is W0 + λ X.")
    epsilon: Ridge = Field(
        1e-5, description="Ridge ε, added to every task's covariance estimate (Eq. 9)."
    )
    epsilon_scale: Literal["absolute", "relative"] = Field(
        "absolute",
        description="relative: ε multiplies the mean eigenvalue tr(S_t)/i of each estimate.",
    )
    ridge_floor: bool = RIDGE_FLOOR
    heterogeneity: Statistic = Field(
        "auto",
        description="The statistic that is compared with the threshold: gamma (Eq. 7), which has a "
        "pole at τ = 1, or log_variance, Var_t[log τ_t]. auto: gamma, but only where "
        "Var_t[log τ_t] exceeds 1.",
    )
    heterogeneity_threshold: NonNegative = Field(
        0.3, description="Above it a matrix counts as heterogeneous."
    )
    adaptive_normalization: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether estimates are divided by their traces, S_t = G_t / tr(G_t) (Eq. 8); "
        "auto: in heterogeneous matrices.",
    )
    structural_prior: bool = Field(
        True,
        description="Whether the rank-one prior 1 cᵀ enters (Eqs. 11-13), which damps the merge's "
        "response to the all-ones input. Left out where it would turn the merge against the "
        "experts.",
    )
    spectral_refinement: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether the spectrum is refined (Eqs. 15-19); auto: in heterogeneous "
        "matrices. Use it with normalised estimates.",
    )
    refinement_mean: Literal["plain", "ridged"] = Field(
        "plain",
        description="Whether the refinement's mean of the estimates holds their ridges. ridged is "
        "the paper's (Eq. 15), and turns against the experts where Σ ε_t exceeds 0.3. With plain, "
        "a refinement that would do so is left out.",
    )
    rank_fraction: Fraction = Field(
        0.3, description="Share k / min(o, i) of the directions that are refined."
    )
    centred: bool = Field(
        True,
        description="Whether the column means of Δ_t are taken out (Eq. 5). X then has no mean "
        "row: a shift of all outputs alike is lost.",
    )
    compute_dtype: Literal["float32", "float64"] = Field(
        "float32", description="The dtype of task vectors, unless the tensors are wider."
    )

    @property
    def dtype(self) -> torch.dtype:
        """``compute_dtype`` as torch's."""
        return torch.float64 if self.compute_dtype == "float64" else torch.float32


@dataclass(frozen=True)
class MatrixRecord:
    """What was measured and decided for one matrix. Tuples have an entry per expert given.

    Attributes:
        rule: the name of the merge method whose formula was used; ``single`` (one expert changed
            it); ``mean``; ``base`` (nobody changed it).
        weight: w_t, rescaled to mean 1 over the experts in use; 0 for one that is not.
        tau: τ_t, 0 where unchanged.
        changed: s_t, how far the expert counts as having changed it: 0 where its task vector is
            nothing but rounding, see `changed_share`; between 0 and 1 its merge with and without
            the expert are mixed.
        noise: ν_t², the energy of the rounding noise in τ_t; None where nobody asked for it.
        gamma, log_variance: the two statistics of heterogeneity; None with fewer than two experts.
        statistic, threshold: how heterogeneity is told, see `AceOptions`, and above what.
        heterogeneous: whether the matrix counts as heterogeneous.
        normalized, prior, refined: which steps were taken; a prior or a refinement that would turn
            the merge against the experts is not.
        epsilon: ε_t of Eqs. 9-10 times w_t; None for an expert that is not in use.
        share: of ``ace_relative``: 1 / ‖Δ_t K_t^½‖² times w_t, and times the share of τ_t that is
            not rounding (`genuine_share`), divided by their sum; None for an expert that is not in
            use.
        ridge: ε̄ = Σ ε_t in mean eigenvalues of Σ S_t, as used.
        raised: whether `ridge_floor` raised it; None where that is off.
        bounded: whether it was raised so far that ‖X‖ keeps to its bound; None as of ``raised``.
        amplification: ‖X‖² / Σ_t ‖Δ_t‖² of the closed form: 1 for experts orthogonal to one
            another, 1/T where they agree, and large at the interpolation threshold.
        rank: k of the refinement; sigma_iso: its strength.
        form: how the closed form was computed, see `forms.choose_forms`.
        condition: estimated condition number of A.
        precision: dtype of the sums and the solve.
        tolerance: the relative error of X that was allowed; None for a solve in float64.
        mix: share of what was measured on samples in the covariances; None where nothing was.
        side: of which covariances were estimated; None where none were. With ``outputs``, i above
            is the number of outputs.
    """

    rule: str
    weight: tuple[float, ...]
    tau: tuple[float, ...]
    changed: tuple[float, ...]
    noise: tuple[float, ...] | None = None
    gamma: float | None = None
    log_variance: float | None = None
    statistic: Statistic | None = None
    threshold: float | None = None
    heterogeneous: bool | None = None
    normalized: bool | None = None
    prior: bool | None = None
    refined: bool | None = None
    epsilon: tuple[float | None, ...] | None = None
    share: tuple[float | None, ...] | None = None
    ridge: float | None = None
    raised: bool | None = None
    bounded: bool | None = None
    amplification: float | None = None
    rank: int | None = None
    sigma_iso: float | None = None
    form: Form | None = None
    condition: float | None = None
    precision: str | None = None
    tolerance: float | None = None
    mix: float | None = None
    side: Side | None = None

    @property
    def ridge_turns_refinement(self) -> bool:
        """Whether a refinement would turn against the experts, were it ``ridged``."""
        ridges = [value for value in self.epsilon or () if value is not None]
        return bool(self.normalized and self.rank and sum(ridges) > LARGEST_MEAN_RIDGE)


@dataclass(frozen=True)
class TensorRecord:
    """What was done to one tensor.

    Attributes:
        shape: as stored.
        layout: how it was read.
        matrices: a record per matrix: one, or one per stacked matrix in row-major order.
        coefficients: of the components, and of the refinement, where they are not all 1.
    """

    shape: tuple[int, ...]
    layout: FixedLayout
    matrices: tuple[MatrixRecord, ...]
    coefficients: tuple[float, ...] | None = None


def show(observe: Observer | None, stage: Stage, merged: Tensor, unit: float) -> None:
    """Call an observer, if there is one, with X in the unit of the weights."""
    if observe is not None:
        observe(stage, merged if unit == 1 else merged * unit)


class IllConditionedError(ValueError):
    """The digits at hand are not enough: A is singular or nearly so, or the result is too blurred.

    Attributes:
        condition: the estimated condition number of A; infinite where no factor exists.
        error: the estimated relative error of the result that led to this; None where the
            condition number alone did.
    """

    def __init__(self, condition: float, error: float | None = None):
        super().__init__(f"the regularised covariance has condition number {condition:.1e}")
        self.condition = condition
        self.error = error


# An error of X that is this share of what the rounding of the experts puts into it, or less, is
# hidden by that; above `LARGEST_HIDDEN` of ‖X‖ nothing counts as hidden.
HIDDEN_SHARE = 0.01
LARGEST_HIDDEN = 2e-3
# From this hidden error on, ways that keep few digits are worth a try.
CLEARLY_HIDDEN = 1e-4


def is_noisy(noise: float) -> bool:
    """Tell whether the rounding of the experts hides so much that few digits are enough.

    Args:
        noise: see `rounding_in_merge`.
    """
    return HIDDEN_SHARE * noise > CLEARLY_HIDDEN


def hidden_error(noise: float) -> float:
    """Return the relative error that is hidden by noise, a share of the norm of what has it."""
    return min(HIDDEN_SHARE * noise, LARGEST_HIDDEN)


def tolerance(condition: float, noise: float = 0.0) -> float:
    """Return the relative error that float32 may leave in a merged task vector.

    Storing a merged task vector in bfloat16 costs ten times as much.

    Args:
        condition: the condition number of A.
        noise: of the experts' rounding in X, see `rounding_in_merge`.
    """
    return max(2e-5, min(2e-7 * condition, 1e-3), hidden_error(noise))
