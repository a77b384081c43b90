# SPDX-License-Identifier: Apache-2.0
"""`merge_method: iso_cts`: Marczak et al., "No Task Left Behind", ICML 2025, Iso-CTS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import product, rounding
from mergekit_ace.algebra.polar import nearest_orthonormal
from mergekit_ace.algebra.records import Fraction
from mergekit_ace.algebra.spectrum import Directions, singular_directions
from mergekit_ace.methods.base import method_spec
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT, shared
from mergekit_ace.methods.peers.iso_c import ISO_CITATION
from mergekit_ace.methods.peers.matrix_method import MatrixMethod, TaskMatrices


def merge_common_and_specific(matrices: TaskMatrices, each: int) -> Tensor:
    """Join a common subspace of the sum and as many directions of each task vector outside of it.

    Of r = min(o, i) directions each task contributes s leading ones of (I − U Uᵀ) Δ_t, U the common
    left ones, which are the other r − T·s and lead Σ_t Δ_t. The concatenated left and right
    directions are replaced by the nearest orthonormal matrices, and all singular values by their
    mean.

    Args:
        matrices: the task vectors.
        each: s.

    Directions that a matrix does not have, but for float32's rounding, count in the mean
    with σ = 0 and are not added.
    """
    deltas, full, tolerance = matrices.deltas, min(matrices.shape), matrices.tolerance
    size = full - each * len(deltas)
    noise = math.fsum(matrices.rounding) ** 0.5
    common = singular_directions(matrices.total(), size, matrices.edge(), tolerance, noise)
    parts, outside = [], 1 - size / matrices.shape[0]
    given = zip(deltas, matrices.edges(), matrices.rounding, strict=True)
    for delta, edge, energy in given if each else ():
        # what is inside of the common subspace must not come back as a rounding error
        least = 1e4 * rounding(delta.dtype) * float(torch.linalg.vector_norm(delta))
        floor, noise = max(edge, least), (outside * energy) ** 0.5
        parts.append(_directions_outside(delta, common, each, floor, tolerance, noise))
    strength = sum(float(part.values.sum()) for part in (common, *parts)) / full
    left, right = [common.left], [common.right, *(part.right for part in parts)]
    allowed = matrices.allowed(min(part.blur for part in (common, *parts)))
    if parts:  # already orthogonal to the common ones
        left.append(nearest_orthonormal([part.left for part in parts], allowed))
    merged = product(torch.cat(left, dim=1), nearest_orthonormal(right, allowed).mT)
    return merged.mul_(strength)


def _directions_outside(
    delta: Tensor, common: Directions, count: int, floor: float, tolerance: float, noise: float
) -> Directions:
    """Return leading directions of (I − U Uᵀ) Δ, U the common left ones."""
    if common.rest is None:
        outside = delta - product(common.left, product(common.left.mT, delta))
        return singular_directions(outside, count, floor, tolerance, noise)
    found = singular_directions(product(common.rest.mT, delta), count, floor, tolerance, noise)
    left = product(common.rest, found.left)
    return Directions(left, found.values, found.right, blur=found.blur)


class IsoCtsMerge(MatrixMethod):
    """Iso-CTS: isotropic merging in common and task-specific subspaces."""

    spec = method_spec(
        "iso_cts",
        "Iso-CTS",
        "https://arxiv.org/abs/2502.04959",
        (
            LAMBDA,
            LAYOUT,
            shared(
                "common_fraction",
                Fraction,
                0.8,
                "Share of the directions that come from the sum of the task vectors.",
            ),
        ),
    )
    summary = (
        "Joins the leading directions of the summed task vectors with a few of each expert alone, "
        "all with equal singular values."
    )
    citations = (ISO_CITATION,)
    own_rule = "merged with equal singular values in common and own directions"

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int:
        """Return s, rounded so that all tasks get the same."""
        full = min(shape)
        own = full - int(full * parameters["common_fraction"])
        return min(round(own / experts), full // experts)

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        rank = self.rank(matrices.shape, len(matrices.deltas), parameters)
        return merge_common_and_specific(matrices, rank)
