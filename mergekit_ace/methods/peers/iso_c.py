# SPDX-License-Identifier: Apache-2.0
"""`merge_method: iso_c`: Marczak et al., "No Task Left Behind", ICML 2025, Iso-C."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mergekit_ace.algebra.polar import polar_factor
from mergekit_ace.methods.base import Citation, method_spec
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT
from mergekit_ace.methods.peers.matrix_method import (
    MatrixMethod,
    TaskMatrices,
    decomposition_operations,
)


def merge_isotropic(matrices: TaskMatrices) -> Tensor:
    """Return σ̄ U Vᵀ of Σ_t Δ_t = U diag(σ) Vᵀ, σ̄ = mean(σ_1…σ_r), r = min(o, i).

    U Vᵀ comes without its factors, and Σ_j σ_j = ⟨U Vᵀ, Σ_t Δ_t⟩. Directions that the sum does not
    have, but for float32's rounding, count in σ̄ with σ = 0 and are not added (departure: a full
    decomposition returns arbitrary vectors there).
    """
    total = matrices.total()
    size = float(torch.linalg.vector_norm(total))
    share = math.fsum(matrices.rounding) ** 0.5 / size if size > 0 else 0.0
    merged = polar_factor(total, matrices.edge(), matrices.allowed(share))
    strength = float(total.mul_(merged).sum(dtype=torch.float64)) / min(matrices.shape)
    return merged.mul_(strength)


ISO_CITATION = Citation(
    key="marczak2025isotropic",
    authors="Marczak, Daniel and Magistri, Simone and Cygert, Sebastian and Twardowski, "
    "Bartłomiej and Bagdanov, Andrew D. and van de Weijer, Joost",
    title="No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces",
    year=2025,
    arxiv="2502.04959",
    booktitle="International Conference on Machine Learning",
)


class IsoCMerge(MatrixMethod):
    """Iso-C: isotropic merging in the common subspace."""

    spec = method_spec("iso_c", "Iso-C", "https://arxiv.org/abs/2502.04959", (LAMBDA, LAYOUT))
    summary = "Sums the task vectors, and makes all singular values of the sum equal."
    citations = (ISO_CITATION,)
    own_rule = "merged with equal singular values"

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        return merge_isotropic(matrices)

    def operations(
        self, rows: int, columns: int, experts: int, parameters: Mapping[str, Any]
    ) -> float:
        return decomposition_operations(rows, columns)
