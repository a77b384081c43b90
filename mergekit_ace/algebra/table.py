# SPDX-License-Identifier: Apache-2.0
"""The sum of relative errors for a table whose rows are looked up, such as token embeddings.

Looking up row v multiplies the table, read as (d, n), by the v-th unit vector. So the covariance of
its inputs is diagonal, whatever the task: how often each row is asked for. Of ACE's estimate, here
Δ_tΔ_tᵀ with Δ_t stored (n, d), only the diagonal is left, c_tv = ‖Δ_t[v]‖² / τ_t + ε/n, and the
merge that minimises Σ_t Σ_v c_tv ‖X[v] − Δ_t[v]‖² / Σ_v c_tv ‖Δ_t[v]‖² is a mean row by row:

    X[v] = Σ_t w_t c_tv Δ_t[v] / Σ_t w_t c_tv,   w_t = 1 / Σ_v c_tv ‖Δ_t[v]‖².

A token that one expert alone has moved comes out as that expert has it. Ours, not the paper's,
which reads embeddings as any other matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks
from mergekit_ace.algebra.covariance import choose_unit
from mergekit_ace.algebra.mean import merge_mean, merge_trivial
from mergekit_ace.algebra.records import MatrixRecord
from mergekit_ace.algebra.task_vectors import ActiveExperts


def merge_table(
    base: Tensor, active: ActiveExperts, epsilon: float, scale: float
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one table.

    Args:
        base: W0, (n, d), a row per thing that is looked up.
        active: the experts W_t, each (n, d), that changed it.
        epsilon: ε ≥ 0, in mean squared norms of a row of Δ_t.
        scale: λ.

    Working memory is one block of rows, and a number per row and expert.

    Returns:
        W0 + λ X, (n, d), in the compute dtype or wider, and the record of what was done.
    """
    trivial = merge_trivial(base, active, scale)
    if trivial is not None:
        return trivial
    rows, width = base.shape
    if rows == 1:  # whatever is asked for, it is this row
        return merge_mean(base, active, scale)
    unit = choose_unit(active, base.numel())

    def moved(expert: Tensor, block: slice) -> Tensor:
        return expert[block].to(active.dtype, copy=True).sub_(base[block]).div_(unit)

    counts = base.new_empty((len(active.experts), rows), dtype=torch.float64)  # c_tv, then w_t c_tv
    shares = []
    for count, expert, weight in zip(counts, active.experts, active.weights, strict=True):
        for block in blocks(rows, width):
            # in float64: squares of a far weaker expert's entries leave the range of float32
            norms = torch.linalg.vector_norm(moved(expert, block), dim=1, dtype=torch.float64)
            count[block] = norms.square()
        squares = count.clone()
        total = squares.sum()
        count.div_(total).add_(epsilon / rows)
        shares.append(weight / float(count @ squares))
    for count, share in zip(counts, shares, strict=True):
        count.mul_(share / sum(shares))
    total = counts.sum(dim=0)
    counts.div_(torch.where(total > 0, total, 1.0))  # with ε = 0, rows that nobody has moved
    merged = base.to(active.dtype, copy=True)
    counts.mul_(counts.new_tensor(active.coefficients)[:, None])
    for block in blocks(rows, width):
        sum_ = torch.zeros_like(merged[block])
        for count, expert in zip(counts, active.experts, strict=True):
            sum_ += moved(expert, block) * count[block, None].to(active.dtype)
        merged[block].add_(sum_, alpha=scale * unit)
    record = MatrixRecord(
        rule="ace_relative",
        weight=active.spread(active.weights, 0.0),
        tau=active.all_tau,
        share=active.spread([share / sum(shares) for share in shares], None),
        precision=str(active.dtype).removeprefix("torch."),
    )
    return merged, record
