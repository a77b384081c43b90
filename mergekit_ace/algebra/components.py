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

from mergekit_ace.algebra.ace import AceOptions, RelativeOptions, merge_tensor
from mergekit_ace.algebra.task_vectors import (
    FixedLayout,
    as_matrices,
    from_matrices,
    select_active,
    task_vector,
)


def split_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    options: AceOptions | RelativeOptions,
    layout: FixedLayout,
    weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """Return the components of the merge of one stored tensor, whose sum times λ is added to W0.

    Each is a merge with all other coefficients at 0; for arguments and errors see `merge_tensor`.

    Returns:
        T components shaped as `base`, in the compute dtype or wider, and with options of `ace` the
        refinement as the last one: zeros where nothing is refined.
    """
    options = options.model_copy(update={"scale": 1.0})
    weights = [1.0] * len(experts) if weights is None else weights
    if layout not in ("mean", "table", "matrix") and base.numel():
        views = [as_matrices(tensor, layout) for tensor in (base, *experts)]
        split = [
            split_tensor(own[0], own[1:], options, "matrix", weights)
            for own in zip(*views, strict=True)
        ]
        return [from_matrices(parts, base.shape, layout) for parts in zip(*split, strict=True)]
    active = select_active(base, experts, weights, options.dtype)
    used = active.spread(active.weights, 0.0)
    origin = torch.zeros_like(base, dtype=active.dtype)
    deltas = [task_vector(expert, base, active.dtype) for expert in experts]
    return [
        merge_tensor(origin, deltas, used, options, layout, one)[0]
        for one in torch.eye(len(experts) + options.refines).tolist()
    ]
