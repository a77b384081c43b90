# SPDX-License-Identifier: Apache-2.0
"""CLIP's classifiers without training: an image is of the class whose prompt it is nearest to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import attach_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ZeroShotHead(nn.Module):
    """What stands in the place of an image tower's projection: it answers with logits.

    Args:
        projection: of the tower.
        texts: embeddings of the classes' prompts, (C, d), as long as CLIP's scale of logits.
    """

    def __init__(self, projection: nn.Linear, texts: Tensor):
        super().__init__()
        self.projection = projection
        self.register_buffer("texts", texts)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return logits, (B, C), of what the tower makes of images, (B, h)."""
        return normalize(self.projection(pooled), dim=-1) @ self.texts.T


@torch.no_grad()
def zero_shot_head(folder: str, prompts: Sequence[str | Sequence[str]]) -> ZeroShotHead:
    """Let the text tower of a CLIP make the head for some classes.

    Args:
        folder: of a whole CLIP with its tokenizer.
        prompts: of each class, in the order of their numbers; the mean direction of several.

    Raises:
        TrainingError: there is no text tower, or no tokenizer.
    """
    from transformers import AutoTokenizer, CLIPModel

    try:
        model, info = CLIPModel.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{_no_texts(folder)} ({error})") from error
    if info["missing_keys"]:
        raise TrainingError(f"{_no_texts(folder)}; it lacks {min(info['missing_keys'])}")
    rows = []
    for prompt in prompts:
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        pooled = model.text_model(**tokens).pooler_output
        rows.append(normalize(model.text_projection(pooled), dim=-1).mean(0))
    texts = model.logit_scale.exp() * normalize(torch.stack(rows), dim=-1)
    return ZeroShotHead(model.visual_projection, texts).requires_grad_(False)


def _no_texts(folder: str) -> str:
    return (
        f"{folder} cannot make heads of prompts: give a whole CLIPModel with its tokenizer as "
        "base_model"
    )


def attach_zero_shot_head(
    model: PreTrainedModel, folder: str, prompts: Sequence[str | Sequence[str]]
) -> dict[str, nn.Module]:
    """Make an image tower answer as the classes of some prompts; return that head by its name.

    Args:
        model: the tower.
        folder, prompts: see `zero_shot_head`.
    """
    head: dict[str, nn.Module] = {"visual_projection": zero_shot_head(folder, prompts)}
    attach_head(model, head)
    return head
