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
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from accelerate.utils import send_to_device
from torch import Tensor

from mergekit_ace.calibration.layers import TABLE, Weights
from mergekit_ace.training.data import Batch
from mergekit_ace.training.tasks import CausalLanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# λ of what is already merged: finer where merges are usually best.
SCALES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
_HEAD = "lm_head.weight"


class ScaledWeights(Mapping[str, Tensor]):
    """The weights W0 + λ (M − W0) of a model, computed when they are asked for.

    Args:
        base: W0, by name.
        merged: M, by name. Tensors and rows of embeddings that the base lacks are as in M. Where
            it has no head, the embeddings are that, too.
        scale: λ.
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


@dataclass(frozen=True)
class ChosenScale:
    """The λ that was chosen, and how far the merge has gone with it and as it was, at most 1."""

    scale: float
    share: float
    share_before: float

    def __str__(self) -> str:
        return (
            f"The merge's change of the base was first multiplied by {self.scale:g}: that goes "
            f"{self.share:.2f} of the way from the base to the experts on their texts, the merge "
            f"as it was {self.share_before:.2f}."
        )


class ScaleSearch:
    """The choice of λ, in float32, with one layer of a model in memory at a time.

    Args:
        model: the architecture; its weights are not looked at.
        experts: weights of each, and its texts in batches as `CausalLanguageModel.collate` makes
            them.
        progress: called whenever a model has read the texts of an expert.
    """

    def __init__(
        self, model: PreTrainedModel, base: Weights, merged: Weights,
        experts: Sequence[tuple[Weights, Sequence[Batch]]], device: torch.device,
        progress: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        self.model = copy.deepcopy(model).float().eval()
        self.base, self.merged, self.device, self.progress = base, merged, device, progress
        self.wanted: list[list[tuple[Batch, Tensor]]] = []
        for weights, batches in experts:
            shaped = ScaledWeights(weights, merged, 0.0)  # with as many rows of embeddings
            answers = [logits.half() for logits in self._log_probabilities(shaped, batches)]
            self.wanted.append(list(zip(batches, answers, strict=True)))
        self.from_base = self._divergences(0.0)

    def choose(self) -> ChosenScale:
        """Return the best λ: from 1 on, neighbours are tried as long as they are better."""
        as_merged = best = SCALES.index(1.0)
        shares = {best: self.share(1.0)}
        for direction in (-1, 1):
            while 0 <= (place := best + direction) < len(SCALES):
                if place not in shares:
                    shares[place] = self.share(SCALES[place])
                if shares[place] <= shares[best]:
                    break
                best = place
        return ChosenScale(SCALES[best], shares[best], shares[as_merged])

    def share(self, scale: float) -> float:
        """Return how far the merge with a λ has gone, as a mean over experts."""
        pairs = zip(self._divergences(scale), self.from_base, strict=True)
        return fmean(1.0 - now / max(whole, 1e-9) for now, whole in pairs)

    def _divergences(self, scale: float) -> list[float]:
        """Return KL(expert ‖ merge with a λ) per token on the texts of each expert, in nats."""
        weights = ScaledWeights(self.base, self.merged, scale)
        found = []
        for pairs in self.wanted:
            total = 0.0
            read = self._log_probabilities(weights, [batch for batch, _ in pairs])
            for merge, (_, expert) in zip(read, pairs, strict=True):
                total += float((expert.float().exp() * (expert - merge)).sum())
            found.append(total / sum(len(expert) for _, expert in pairs))
        return found

    @torch.no_grad()
    def _log_probabilities(self, weights: Weights, batches: Sequence[Batch]) -> Iterator[Tensor]:
        """Yield a model's log p before the supervised tokens of each batch, (P, vocabulary)."""
        attach_align_device_hook(self.model, self.device, offload=True, weights_map=weights)
        try:
            for batch in batches:
                batch = send_to_device(batch, self.device)
                yield CausalLanguageModel().logits(self.model, batch).log_softmax(dim=-1)
        finally:
            remove_hook_from_submodules(self.model)
            self.progress()
