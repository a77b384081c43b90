# SPDX-License-Identifier: Apache-2.0
"""Tasks: the kind of model for each; classifiers of texts and images, and their heads.

Everything else in the training sees a model as a function from a batch to logits (P, C) at P
supervised positions with C classes or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mergekit_ace.training.config import DataConfig, Task
from mergekit_ace.training.data import Example
from mergekit_ace.training.language import (
    Batch,
    CausalLanguageModel,
    MaskedLanguageModel,
    Seq2SeqLanguageModel,
    TextModel,
    encode_texts,
)
from mergekit_ace.training.state import TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Classification:
    """Base of classifiers: one answer per sample; each expert keeps its own head."""

    has_heads = True
    writes = False

    @staticmethod
    def truth(row: dict[str, Any], data: DataConfig) -> Example:
        """Return `true` (1,) where the data has a column of classes, or of numbers."""
        if data.label is None:
            return {}
        label = row[data.label]
        if isinstance(label, bool) or not isinstance(label, int | float):
            raise TrainingError(
                f"data {data.path}: column {data.label} holds {label!r}; labels are the numbers of "
                "the classes: 0, 1, …"
            )
        return {"true": torch.tensor([label])}


class SequenceClassification(_Classification, TextModel):
    """Classifier of texts, or of pairs of them."""

    auto_class = "AutoModelForSequenceClassification"

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        """Encode a row: `input_ids` (n,) and, of some tokenizers, `token_type_ids` (n,).

        Returns:
            None for a text without tokens.
        """
        example = encode_texts(row, data, processor)
        return example | self.truth(row, data) if len(example["input_ids"]) else None

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the logits, (B, classes).

        Decoders read their answer at the last token that is no padding, which they tell by its
        number; where they have none, one stands in that this batch does not contain.
        """
        config = model.config.get_text_config()
        ids, present = batch["input_ids"], batch["attention_mask"] == 1
        known = config.pad_token_id
        if known is None:
            used = set(ids[present].tolist())
            config.pad_token_id = next(n for n in range(len(used) + 1) if n not in used)
        try:
            padded = ids.masked_fill(~present, config.pad_token_id)
            return model(**batch | {"input_ids": padded}).logits
        finally:
            config.pad_token_id = known


class ImageClassification(_Classification):
    """Classifier of images, or of pixel values (channels, height, width) as they are."""

    auto_class = "AutoModelForImageClassification"

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example:
        """Encode a row: `pixel_values` (1, channels, height, width)."""
        image, whose = row[data.columns["image"]], f"data {data.path}: column {data.image}"
        if isinstance(image, list):
            try:
                pixels = torch.tensor(image, dtype=torch.float32)
            except (TypeError, ValueError) as error:
                raise TrainingError(f"{whose} holds a list that is no array: {error}") from error
        elif not hasattr(image, "convert"):
            raise TrainingError(
                f"{whose} holds {image!r:.60} instead of an image or pixel values; give a folder "
                "of images, or a data set that has them in it"
            )
        elif processor is None:
            raise TrainingError(
                f"data {data.path} holds images, but the base model has no image processor "
                "(preprocessor_config.json); add one, or give pixel values"
            )
        else:
            pixels = processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        if pixels.ndim != 3:
            raise TrainingError(
                f"{whose} holds arrays with {pixels.ndim} axes; pixel values have three: "
                "channels, height, width"
            )
        return {"pixel_values": pixels[None]} | self.truth(row, data)

    def collate(self, samples: Sequence[Example]) -> Batch:
        """Put images of one size into a batch, (B, channels, height, width)."""
        return {"pixel_values": torch.cat([sample["pixel_values"] for sample in samples])}

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the logits, (B, classes)."""
        return model(**batch).logits


class ZeroShotImageClassification(ImageClassification):
    """Image tower of a CLIP, whose heads are prompts that its text tower has read."""

    auto_class = "CLIPVisionModelWithProjection"

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the logits, (B, classes), of a `ZeroShotHead` for a projection."""
        return model(**batch).image_embeds


ModelKind = TextModel | ImageClassification


def model_kind(task: Task) -> ModelKind:
    """Return how models are used for `task`."""
    return {
        "causal-lm": CausalLanguageModel,
        "seq2seq-lm": Seq2SeqLanguageModel,
        "masked-lm": MaskedLanguageModel,
        "sequence-classification": SequenceClassification,
        "image-classification": ImageClassification,
        "zero-shot-image-classification": ZeroShotImageClassification,
    }[task]()


def head_names(model: PreTrainedModel, kind: ModelKind) -> list[str]:
    """Return the children of a classifier that are its head: all but the backbone."""
    if not kind.has_heads:
        return []
    if not hasattr(model, model.base_model_prefix):
        raise TrainingError(
            f"{type(model).__name__} does not tell its backbone from its head; this architecture "
            "cannot be merged for classification"
        )
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def head_modules(
    model: PreTrainedModel, kind: ModelKind, data: DataConfig, base: str
) -> dict[str, nn.Module]:
    """Return the modules of a classifier's head by name; none of other models.

    For data with prompts, the model gets a head that is made of them.

    Args:
        base: folder of the base model, a CLIP where the data has prompts.
    """
    if data.prompts is not None:
        attach_head(model, {"visual_projection": zero_shot_head(base, data.prompts)})
    return {name: model.get_submodule(name) for name in head_names(model, kind)}


def attach_head(model: PreTrainedModel, head: Mapping[str, nn.Module]) -> None:
    """Make `model` answer as the classes of a head of `head_modules`."""
    for name, module in head.items():
        module.to(model.device, model.dtype)
        setattr(model, name, module)


class ZeroShotHead(nn.Module):
    """What stands in the place of an image tower's projection: it answers with logits.

    Args:
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

    no_texts = (
        f"{folder} cannot make heads of prompts: give a whole CLIPModel with its tokenizer as "
        "base_model"
    )
    try:
        model, info = CLIPModel.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{no_texts} ({error})") from error
    if info["missing_keys"]:
        raise TrainingError(f"{no_texts}; it lacks {min(info['missing_keys'])}")
    rows = []
    for prompt in prompts:
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        pooled = model.text_model(**tokens).pooler_output
        rows.append(normalize(model.text_projection(pooled), dim=-1).mean(0))
    texts = model.logit_scale.exp() * normalize(torch.stack(rows), dim=-1)
    return ZeroShotHead(model.visual_projection, texts).requires_grad_(False)
