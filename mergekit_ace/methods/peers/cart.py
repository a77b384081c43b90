# SPDX-License-Identifier: Apache-2.0
"""`merge_method: cart`: Choi et al., "Revisiting Weight Averaging for Model Merging" (CART)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mergekit_ace.algebra.records import Fraction
from mergekit_ace.algebra.spectrum import singular_directions
from mergekit_ace.methods.base import Citation, method_spec
from mergekit_ace.methods.inputs import TensorSettings
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT, shared
from mergekit_ace.methods.peers.matrix_method import MatrixMethod, TaskMatrices


def merge_centred(matrices: TaskMatrices, rank: int, scale: float) -> Tensor:
    """Return Δ̄ + λ Σ_t SVD_k(Δ_t − Δ̄): the average, and each expert's rest at rank k.

    Args:
        matrices: the task vectors.
        rank: k.
        scale: λ.
    """
    experts = len(matrices.deltas)
    mean = matrices.total().div_(experts)
    merged, others = mean.clone(), math.fsum(matrices.rounding) / experts**2
    for delta, own in zip(matrices.deltas, matrices.rounding, strict=True) if rank else ():
        noise = (own * (1 - 2 / experts) + others) ** 0.5  # of (1 − 1/T) Δ_t − Σ_(s≠t) Δ_s / T
        directions = singular_directions(
            delta - mean, rank, tolerance=matrices.tolerance, noise=noise
        )
        merged.add_(directions.matrix, alpha=scale)
    return merged


class CartMerge(MatrixMethod):
    """CART: centred arithmetic with rank-reduced task vectors.

    ``lambda`` is the paper's: it scales what is added to the average of the experts. The average
    itself, and with it everything that is no matrix, is not scaled.
    """

    spec = method_spec(
        "cart",
        "CART",
        "https://arxiv.org/abs/2412.12153",
        (
            replace(LAMBDA, description="Scale λ of what is added to the average."),
            LAYOUT,
            shared(
                "rank_fraction",
                Fraction,
                0.08,
                "Share of the directions that are kept of each expert.",
            ),
        ),
    )
    summary = "Takes the average of the experts, and adds what is left of each one at low rank."
    citations = (
        Citation(
            key="choi2024cart",
            authors="Choi, Jiho and Kim, Donggyun and Lee, Chanhyuk and Hong, Seunghoon",
            title="Revisiting Weight Averaging for Model Merging",
            year=2024,
            arxiv="2412.12153",
        ),
    )
    own_rule = "merged as the average and low-rank differences from it"

    def doubts(
        self, settings: TensorSettings, rows_per_column: float | None
    ) -> Iterator[tuple[str, str]]:
        return iter(())  # with λ = 0 it is the average of the experts

    def scale(self, parameters: Mapping[str, Any]) -> float:
        return 1.0

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int:
        """Return floor(rank_fraction · min(o, i)), at least 1 unless the fraction is 0."""
        fraction = parameters["rank_fraction"]
        return max(int(fraction * min(shape)), 1) if fraction > 0 else 0

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        rank = self.rank(matrices.shape, len(matrices.deltas), parameters)
        return merge_centred(matrices, rank, parameters["lambda"])
