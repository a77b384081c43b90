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

Form = Literal["primal", "dual"]
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

EPSILON_SCALE = Field(
    "spectrum",
    description="What ε multiplies to give the ridge. spectrum: ‖S‖² / tr(S) of S = Σ S_t, a mean "
    "eigenvalue weighted by the eigenvalues; absolute: 1, as in the paper; relative: the mean "
    "eigenvalue tr(S_t)/i of each estimate.",
)
EPSILON = Field(
    None,
    description="Ridge ε, in all of it added to the sum of the covariances (Eq. 9). By default "
    "0.01, and with epsilon_scale: absolute or relative the paper's 1e-5.",
)
CENTRED = "Whether the column means of Δ_t are taken out (Eq. 5)."


class RidgeOptions(BaseModel):
    """What may be chosen per tensor of every method by ridge regression.

    Every field says what it is in its description; mergekit's name for ``scale`` is ``lambda``,
    which Python reserves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    scale: Factor = Field(1.0, alias="lambda", description="Scale λ; the result is W0 + λ X.")
    epsilon: Ridge | None = EPSILON
    epsilon_scale: Literal["spectrum", "absolute", "relative"] = EPSILON_SCALE

    @property
    def ridge(self) -> float:
        """ε as given, or its default."""
        if self.epsilon is not None:
            return self.epsilon
        return 0.01 if self.epsilon_scale == "spectrum" else 1e-5


class AceOptions(RidgeOptions):
    """What may be chosen per tensor of `ace`.

    Defaults are the paper's (arXiv 2603.02945) except for ``epsilon_scale``, ``heterogeneity`` and
    ``refinement_mean``, whose other values ``absolute``, ``gamma`` and ``ridged`` are the paper's.
    """

    heterogeneity: Statistic = Field(
        "auto",
        description="What tells heterogeneous matrices. auto: Var_t[log τ_t] above 1; gamma: the "
        "paper's γ (Eq. 7), which depends on the unit of the weights and has a pole at τ = 1, "
        "above the threshold; log_variance: Var_t[log τ_t] above the threshold.",
    )
    heterogeneity_threshold: NonNegative = Field(
        0.3, description="Above it a matrix counts as heterogeneous; not used by auto."
    )
    adaptive_normalization: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether estimates are divided by their traces, S_t = G_t / tr(G_t) (Eq. 8); "
        "auto: in heterogeneous matrices.",
    )
    structural_prior: bool = Field(
        True,
        description="Whether the rank-one prior 1 cᵀ enters (Eqs. 11-13), which damps the merge's "
        "response to the all-ones input.",
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
        "the refined merge is scaled to the size that it had, and a refinement that would turn "
        "against the experts is left out.",
    )
    rank_fraction: Fraction = Field(
        0.3, description="Share k / min(o, i) of the directions that are refined."
    )
    centred: bool = Field(
        True,
        description=f"{CENTRED} X then has no mean row: a shift of all outputs alike is lost.",
    )
    compute_dtype: Literal["float32", "float64"] = Field(
        "float32", description="The dtype of task vectors, unless the tensors are wider."
    )

    @property
    def dtype(self) -> torch.dtype:
        """``compute_dtype`` as torch's."""
        return torch.float64 if self.compute_dtype == "float64" else torch.float32


class RelativeOptions(RidgeOptions):
    """What may be chosen per tensor of `ace_relative`."""

    centred: bool = Field(False, description=f"{CENTRED} Not of tables.")
    structural_prior: bool = Field(
        False, description="Whether ACE's rank-one prior enters (Eqs. 11-13); not for tables."
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
        changed: 0 for an expert that is the base, maybe in another precision, else 1.
        gamma, log_variance: the two statistics of heterogeneity; None with fewer than two experts.
        statistic, threshold: how heterogeneity is told, see `AceOptions`, and above what.
        heterogeneous: whether the matrix counts as heterogeneous.
        normalized, prior, refined: which steps were taken.
        epsilon: ε_t of Eqs. 9-10 times w_t; None for an expert that is not in use.
        ridge: ε̄ = Σ ε_t in mean eigenvalues of Σ S_t, as used.
        amplification: ‖X‖² / Σ_t ‖Δ_t‖² of the closed form: 1 for experts orthogonal to one
            another, 1/T where they agree, and large at the interpolation threshold.
        rank: k of the refinement; sigma_iso: its strength.
        form: which system was solved, see `ridge`.
        precision: dtype of the sums and the solve.
        error: the relative error of X, as some rows tell.
        mix: share of what was measured on samples in the covariances; None where nothing was.
        side: of which covariances were estimated; None where none were. With ``outputs``, i above
            is the number of outputs.
    """

    rule: str
    weight: tuple[float, ...]
    tau: tuple[float, ...]
    changed: tuple[int, ...]
    gamma: float | None = None
    log_variance: float | None = None
    statistic: Statistic | None = None
    threshold: float | None = None
    heterogeneous: bool | None = None
    normalized: bool | None = None
    prior: bool | None = None
    refined: bool | None = None
    epsilon: tuple[float | None, ...] | None = None
    ridge: float | None = None
    amplification: float | None = None
    rank: int | None = None
    sigma_iso: float | None = None
    form: Form | None = None
    precision: str | None = None
    error: float | None = None
    mix: float | None = None
    side: Side | None = None


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


class IllConditionedError(ValueError):
    """The digits at hand are not enough: Σ_t S_t is singular or nearly so, even in float64."""
