# SPDX-License-Identifier: Apache-2.0
"""What was measured and decided in a merge; the content of a `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mergekit_ace.algebra.forms import Form
from mergekit_ace.algebra.options import FixedLayout, Statistic

Rule = Literal["ace", "ace_relative", "peer", "single", "mean", "base"]


@dataclass(frozen=True)
class MatrixRecord:
    """What was measured and decided for one matrix. Tuples have an entry per expert given.

    Attributes:
        rule: ``ace``; ``ace_relative``; ``peer`` (a formula of another method); ``single`` (one
            expert changed it); ``mean``; ``base`` (nobody changed it).
        weight: w_t, rescaled to mean 1 over the experts in use; 0 for one that is not.
        tau: τ_t, 0 where unchanged.
        gamma, log_variance: the two statistics of heterogeneity; None with fewer than two experts.
        statistic, threshold: which of the two is compared, and with what.
        heterogeneous: whether it exceeds the threshold.
        normalized, refined: which steps were taken.
        epsilon: ε_t of Eqs. 9-10 times w_t; None for an expert that is not in use.
        share: of ``ace_relative``: 1 / ‖Δ_t Σ_t^½‖² times w_t, divided by their sum; None for an
            expert that is not in use.
        rank: k of the refinement; sigma_iso: its strength.
        form: how the closed form was computed, see `forms.choose_forms`.
        condition: estimated condition number of A.
        precision: dtype of the sums and the solve.
    """

    rule: Rule
    weight: tuple[float, ...]
    tau: tuple[float, ...]
    gamma: float | None = None
    log_variance: float | None = None
    statistic: Statistic | None = None
    threshold: float | None = None
    heterogeneous: bool | None = None
    normalized: bool | None = None
    refined: bool | None = None
    epsilon: tuple[float | None, ...] | None = None
    share: tuple[float | None, ...] | None = None
    rank: int | None = None
    sigma_iso: float | None = None
    form: Form | None = None
    condition: float | None = None
    precision: str | None = None


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
