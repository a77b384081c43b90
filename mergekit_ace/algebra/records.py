# SPDX-License-Identifier: Apache-2.0
"""Types of options, and what is recorded of a merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

FixedLayout = Literal["matrix", "transposed", "stacked", "flattened", "mean", "table"]
Layout = Literal["auto", "matrix", "transposed", "stacked", "flattened", "mean"]
RelativeLayout = Literal["auto", "matrix", "transposed", "stacked", "flattened", "mean", "table"]
Side = Literal["inputs", "outputs"]  # of a weight

Form = Literal["primal", "dual"]
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
        selected: share of the entries that were added, where a method chooses entries.
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
    selected: float | None = None


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
