# SPDX-License-Identifier: Apache-2.0
"""`merge_method: tsv_m`: TSV-Merge, Gargiulo et al., "Task Singular Vectors", CVPR 2025."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import product
from mergekit_ace.algebra.polar import nearest_orthonormal
from mergekit_ace.algebra.spectrum import singular_directions
from mergekit_ace.methods.base import Citation, method_spec
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT
from mergekit_ace.methods.peers.matrix_method import MatrixMethod, TaskMatrices


def merge_singular_vectors(matrices: TaskMatrices, rank: int) -> Tensor:
    """Add the task vectors' leading directions, made orthogonal to those of the others.

    Of Δ_t = U_t diag(σ_t) V_tᵀ the leading triplets are kept; the concatenated U and V are replaced
    by the nearest orthonormal matrices U⊥ and V⊥, and the result is U⊥ diag(σ) V⊥ᵀ (the paper's
    Algorithm 1).

    Args:
        matrices: the task vectors.
        rank: how many of each; the paper's choice is floor(min(o, i) / T). Those that a task vector
            has by float32's rounding alone are left out (departure: as vectors of length 1
            they would bend all others, however small their σ).
    """
    given = zip(matrices.deltas, matrices.edges(), matrices.rounding, strict=True)
    parts = [
        singular_directions(delta, rank, edge, matrices.tolerance, energy**0.5)
        for delta, edge, energy in given
    ]
    allowed = matrices.allowed(min(part.blur for part in parts))
    left = nearest_orthonormal([part.left for part in parts], allowed)
    right = nearest_orthonormal([part.right for part in parts], allowed)
    values = torch.cat([part.values for part in parts]).to(left)
    return product(left * values, right.mT)


class TsvMerge(MatrixMethod):
    """TSV-Merge: task singular vectors without interference."""

    spec = method_spec("tsv_m", "TSV-Merge", "https://arxiv.org/abs/2412.00081", (LAMBDA, LAYOUT))
    summary = (
        "Keeps each expert's leading singular directions, and makes them orthogonal to those of "
        "the others."
    )
    citations = (
        Citation(
            key="gargiulo2025tsv",
            authors="Gargiulo, Antonio Andrea and Crisostomi, Donato and Bucarelli, Maria Sofia "
            "and Scardapane, Simone and Silvestri, Fabrizio and Rodolà, Emanuele",
            title="Task Singular Vectors: Reducing Task Interference in Model Merging",
            year=2025,
            arxiv="2412.00081",
            booktitle="Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern "
            "Recognition",
        ),
    )
    own_rule = "merged from orthogonal singular directions"
    whole = True

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int:
        """Return floor(min(o, i) / T), or 1 (departure: the paper's share would be none)."""
        return max(1, min(shape) // experts)

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        rank = self.rank(matrices.shape, len(matrices.deltas), parameters)
        return merge_singular_vectors(matrices, rank)
