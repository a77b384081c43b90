# SPDX-License-Identifier: Apache-2.0
"""A merge as a sum of components, one per expert and one for the refinement.

Step 4 of ACE-Merging is linear in what stands outside of the covariances: X = Σ_t X_t with the
components X_t = C_t (S_t + ε_t I)(A + 1 cᵀ)⁻¹. The refinement of step 5 is one more. So
coefficients can be learned over components as over task vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.adaptive import merge_tensor
from mergekit_ace.algebra.records import AceOptions, FixedLayout
from mergekit_ace.algebra.relative import RelativeOptions, merge_tensor_relative
from mergekit_ace.algebra.task_vectors import task_vector


def split_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    options: AceOptions | RelativeOptions,
    layout: FixedLayout,
    weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """The components of the merge of one stored tensor; their sum times λ is what is added to W0.

    Args:
        base, experts, weights: see `merge_tensor`.
        options: of `ace` or `ace_relative`; λ is taken for 1.
        layout: one that fits the tensor, see `resolve_layout`.

    Returns:
        T components shaped as `base`, in the compute dtype or wider, and with options of `ace` the
        refinement as the last one: zeros where nothing is refined.

    Raises:
        IllConditionedError, OverflowError: see `merge_matrix`.
    """
    dtype = torch.promote_types(options.dtype, base.dtype)
    origin = torch.zeros_like(base, dtype=dtype)
    deltas = [task_vector(expert, base, dtype) for expert in experts]
    options = options.model_copy(update={"scale": 1.0})
    count = len(experts) + isinstance(options, AceOptions)

    def merge(coefficients: Sequence[float]) -> Tensor:
        given = (origin, deltas, weights, options, layout, coefficients)
        if isinstance(options, AceOptions):
            return merge_tensor(*given)[0]
        return merge_tensor_relative(*given)[0]

    return [merge([float(s == t) for s in range(count)]) for t in range(count)]
