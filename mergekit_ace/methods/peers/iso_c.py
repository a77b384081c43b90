# SPDX-License-Identifier: Apache-2.0
"""`merge_method: iso_c`: Marczak et al., "No Task Left Behind", ICML 2025, Iso-C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mergekit_ace.algebra.spectrum import singular_directions
from mergekit_ace.methods.peers.decomposed import Peer, shared_parameters
from mergekit_ace.methods.task_vectors import method_spec


def merge_isotropic(deltas: Sequence[Tensor]) -> Tensor:
    """σ̄ U Vᵀ of Σ_t Δ_t = U diag(σ) Vᵀ, σ̄ = mean(σ_1…σ_r), r = min(o, i).

    Directions that the sum does not have count in σ̄ with σ = 0 and are not added (departure: a full
    decomposition returns arbitrary vectors there).

    Args:
        deltas: Δ_t, (o, i), float64.
    """
    directions = singular_directions(sum(deltas))
    strength = directions.values.sum() / min(deltas[0].shape)
    return strength * (directions.left @ directions.right.mT)


class Method(Peer):
    """Iso-C: isotropic merging in the common subspace."""

    spec = method_spec(
        "iso_c", "Iso-C", "https://arxiv.org/abs/2502.04959", shared_parameters("iso_c")
    )

    def combine(
        self, deltas: Sequence[Tensor], parameters: Mapping[str, Any], unit: float
    ) -> Tensor:
        return merge_isotropic(deltas)
