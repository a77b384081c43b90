# SPDX-License-Identifier: Apache-2.0
"""The λ of a merge at which it is closest to its experts on their texts.

How far W0 + λ (M − W0) has gone from the base W0 towards expert t on the texts of t is

    1 − KL(p_t ‖ p_λ) / KL(p_t ‖ p_0),

with p the models' distributions of the next token, averaged over supervised tokens: 0 is the base,
1 the expert. λ is the value of a grid with the largest mean over experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from accelerate.utils import send_to_device
from torch import Tensor

from mergekit_ace.calibration.layers import TABLE, Weights
from mergekit_ace.training.tasks import Batch, CausalLanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# λ of what is already merged: finer where merges are usually best.
SCALES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
_HEAD = "lm_head.weight"


class ScaledWeights(Mapping[str, Tensor]):
    """The weights W0 + λ (M − W0) of a model by name, computed when they are asked for.

    Tensors and rows of embeddings that the base lacks are as in M. Where M has no head, the
    embeddings are that, too.
    """

    def __init__(self, base: Weights, merged: Weights, scale: float):
        self._base, self._merged, self._scale = base, merged, scale

    def __getitem__(self, name: str) -> Tensor:
        if name == _HEAD and _HEAD not in self._merged:
            name = TABLE
        base, merged = self._base.get(name), self._merged[name]
        if base is None or not merged.is_floating_point() or self._scale == 1.0:
            return merged
        scaled = merged.to(torch.float32, copy=True)
        rows = slice(0, min(len(base), len(merged))) if merged.ndim else ...
        scaled[rows] = torch.lerp(base[rows].float(), scaled[rows], self._scale)
        return scaled

    def __iter__(self) -> Iterator[str]:
        return iter(self._merged)

    def __len__(self) -> int:
        return len(self._merged)


def share_gone(
    model: PreTrainedModel, base: Weights, merged: Weights,
    experts: Sequence[tuple[Weights, Sequence[Batch]]], device: torch.device,
) -> Callable[[float], float]:  # fmt: skip
    """Return the function of λ that tells how far the merge has gone, as a mean over experts.

    An expert is its weights and its texts in batches. Of `model`, the architecture, no weights are
    looked at. All is computed in float32, with one layer in memory at a time.
    """
    model = copy.deepcopy(model).float().eval()
    wanted = []
    for weights, batches in experts:
        shaped = ScaledWeights(weights, merged, 0.0)  # with as many rows of embeddings
        answers = _log_probabilities(model, shaped, batches, device)
        wanted.append([(batch, one.half()) for batch, one in zip(batches, answers, strict=True)])

    def divergences(scale: float) -> list[float]:
        """Return KL(expert ‖ merge with a λ) per token on the texts of each expert, in nats."""
        weights, found = ScaledWeights(base, merged, scale), []
        for pairs in wanted:
            answers = _log_probabilities(model, weights, [batch for batch, _ in pairs], device)
            total = 0.0
            for now, (_, own) in zip(answers, pairs, strict=True):
                total += float((own.float().exp() * (own - now)).sum())
            found.append(total / sum(len(own) for _, own in pairs))
        return found

    of_base = divergences(0.0)

    def share(scale: float) -> float:
        pairs = zip(divergences(scale), of_base, strict=True)
        return fmean(1.0 - now / max(whole, 1e-9) for now, whole in pairs)

    return share


@torch.no_grad()
def _log_probabilities(
    model: PreTrainedModel, weights: Weights, batches: Sequence[Batch], device: torch.device
) -> Iterator[Tensor]:
    """Yield a model's log p before the supervised tokens of each batch, (P, vocabulary)."""
    attach_align_device_hook(model, device, offload=True, weights_map=weights)
    try:
        for batch in batches:
            logits = CausalLanguageModel().logits(model, send_to_device(batch, device))
            yield logits.log_softmax(dim=-1)
    finally:
        remove_hook_from_submodules(model)


def best_scale(share: Callable[[float], float]) -> tuple[float, float, float]:
    """Return the best λ, and how far the merge goes with it and as it was.

    From 1 on, neighbours are tried as long as they are better.
    """
    best = SCALES.index(1.0)
    before = most = share(1.0)
    for direction in (-1, 1):
        while 0 <= best + direction < len(SCALES):
            further = share(SCALES[best + direction])
            if further <= most:
                break
            best, most = best + direction, further
        if most > before:
            break
    return SCALES[best], most, before
