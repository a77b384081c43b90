# SPDX-License-Identifier: Apache-2.0
"""`merge_method: tsv_m`: TSV-Merge, Gargiulo et al., "Task Singular Vectors", CVPR 2025."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mergekit_ace.algebra.spectrum import nearest_orthonormal, singular_directions
from mergekit_ace.methods.base import Citation, method_spec
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT
from mergekit_ace.methods.peers.matrix_method import MatrixMethod


def merge_singular_vectors(deltas: Sequence[Tensor], rank: int) -> Tensor:
    """Add the task vectors' leading directions, made orthogonal to those of the others.

    Of Δ_t = U_t diag(σ_t) V_tᵀ the leading triplets are kept; the concatenated U and V are replaced
    by the nearest orthonormal matrices U⊥ and V⊥, and the result is U⊥ diag(σ) V⊥ᵀ (the paper's
    Algorithm 1).

    Args:
        deltas: Δ_t, (o, i), float64.
        rank: how many of each; the paper's choice is floor(min(o, i) / T).
    """
    parts = [singular_directions(delta, rank) for delta in deltas]
    left = nearest_orthonormal([part.left for part in parts])
    right = nearest_orthonormal([part.right for part in parts])
    start, merged = 0, 0
    for part in parts:
        own = slice(start, start + len(part.values))
        merged = merged + (left[:, own] * part.values) @ right[:, own].mT
        start = own.stop
    return merged


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

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int:
        """Return floor(min(o, i) / T), or 1 (departure: the paper's share would be none)."""
        return max(1, min(shape) // experts)

    def combine(
        self,
        deltas: Sequence[Tensor],
        parameters: Mapping[str, Any],
        unit: float,
        shape: tuple[int, ...],
    ) -> Tensor:
        return merge_singular_vectors(deltas, self.rank(shape, len(deltas), parameters))
