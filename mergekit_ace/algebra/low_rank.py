# SPDX-License-Identifier: Apache-2.0
"""Task vectors of low rank, as adapters hold them, merged without ever forming a full matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """A task vector of one stored tensor as a product, Δ = left · right.

    Attributes:
        left: (o, r), or (E, o, r) of a stack of E matrices.
        right: (r, i), or (E, r, i).
        shape: of the stored tensor: (o, i), (E, o, i), or (o, …) with i entries in the rest.
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """r, which the rank of Δ does not exceed."""
        return self.left.shape[-1]

    def dense(self) -> Tensor:
        """Return Δ, in the shape of the stored tensor."""
        return (self.left @ self.right).reshape(self.shape)
