# SPDX-License-Identifier: Apache-2.0
"""Kinds of models: how rows become samples, samples batches, and batches logits.

A kind of model has the class of transformers' that loads it (`auto_class`), tells whether its
experts have heads of their own (`has_heads`), and says how a row becomes a sample (`encode`),
samples become a batch (`collate`) and a batch becomes logits (P, C) at P supervised positions with
C classes or tokens (`logits`). Where rows lack an answer, teachers of kinds that write (`writes`)
add it (`complete`).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from mergekit_ace.training.config import DataConfig, Task
from mergekit_ace.training.data import Batch, Example
from mergekit_ace.training.state import TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_INPUTS = ("input_ids", "token_type_ids")
_PADDED = (*_TEXT_INPUTS, "target_ids", "supervised")


def longest_input(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for; None where any number will do."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    # RoBERTa and its kin count positions from behind the number of the padding token.
    tables = (
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    )
    first = (t.padding_idx + 1 for t in tables if t.padding_idx is not None)
    return positions - max(first, default=0)


def fit_to_model(data: DataConfig, model: PreTrainedModel) -> DataConfig:
    """Return the data with a `max_length` of at most the model's positions."""
    longest = longest_input(model)
    if data.image is not None or longest is None or data.max_length <= longest:
        return data
    return data.model_copy(update={"max_length": longest})


def text_of(row: dict[str, Any], data: DataConfig, purpose: str) -> str:
    """Return the text that a row has for `purpose`.

    Raises:
        TrainingError: it is no text.
    """
    text = row[data.columns[purpose]]
    if not isinstance(text, str):
        raise TrainingError(
            f"data {data.path}: column {data.columns[purpose]} holds {text!r} instead of text"
        )
    return text


def encode_texts(row: dict[str, Any], data: DataConfig, tokenizer: Any) -> Example:
    """Encode a text, or a pair, with special tokens, cut to the tokenizer's or the data's length.

    Returns:
        `input_ids` (n,) and, of some tokenizers, `token_type_ids` (n,).
    """
    texts = [text_of(row, data, "text")]
    if data.text_pair is not None:
        texts.append(text_of(row, data, "text_pair"))
    longest = min(data.max_length, tokenizer.model_max_length)
    encoded = tokenizer(*texts, truncation=True, max_length=longest)
    return {name: torch.tensor(encoded[name]) for name in _TEXT_INPUTS if name in encoded}


class TextModel:
    """Base of the kinds of models that read texts."""

    has_heads = False
    writes = False

    def collate(self, samples: Sequence[Example]) -> Batch:
        """Pad what models read of samples at the end, (B, n), and mark that there it was padded."""
        columns = {n: [one[n] for one in samples] for n in _PADDED if n in samples[0]}
        columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
        return {name: pad_sequence(rows, batch_first=True) for name, rows in columns.items()}


class CausalLanguageModel(TextModel):
    """Decoder; supervised at the tokens of a text, of a completion, or of answers in a chat."""

    auto_class = "AutoModelForCausalLM"
    writes = True

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        """Encode a row: `input_ids` (n,), and `supervised` (n,) at the tokens to be predicted.

        What is to be predicted is `true`; a row without a completion has none yet: see `complete`.

        Returns:
            None where nothing is left to predict within `max_length`.
        """
        ids, supervised = _token_ids(row, data, processor)
        if supervised is None:  # a prompt that fills max_length leaves no room for an answer
            nothing = torch.zeros(len(ids), dtype=torch.bool)
            sample = {"input_ids": torch.tensor(ids), "supervised": nothing}
            return sample if len(ids) < data.max_length else None
        ids, supervised = ids[: data.max_length], supervised[: data.max_length]
        if supervised:
            supervised[0] = False  # nothing comes before it
        if not any(supervised):
            return None
        example = {"input_ids": torch.tensor(ids), "supervised": torch.tensor(supervised)}
        return example | {"true": example["input_ids"][example["supervised"]]}

    @torch.no_grad()
    def complete(
        self, model: PreTrainedModel, samples: Sequence[Example], data: DataConfig, processor: Any
    ) -> list[Example]:
        """Let the teacher write what follows each prompt, greedily."""
        known = [sample["input_ids"] for sample in samples]
        # Flush right, so that writing starts at one column.
        ids, mask = (
            pad_sequence(rows, batch_first=True, padding_side="left")
            for rows in (known, [*map(torch.ones_like, known)])
        )
        completed = []
        for prompt, answer in zip(known, _write(model, ids, mask, data, processor), strict=True):
            supervised = torch.arange(len(prompt) + len(answer)) >= len(prompt)
            completed.append({"input_ids": torch.cat((prompt, answer)), "supervised": supervised})
        return completed

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the model's logits before each supervised token, (P, vocabulary)."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits[:, :-1][batch["supervised"][:, 1:]]


class Seq2SeqLanguageModel(TextModel):
    """Encoder with decoder; supervised at every token of the target."""

    auto_class = "AutoModelForSeq2SeqLM"
    writes = True

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        """Encode a row: `input_ids` (n,) and, where there is a target, `target_ids` (m,)."""
        cut = {"truncation": True, "max_length": data.max_length}
        source = processor(text_of(row, data, "prompt"), **cut)
        example = {"input_ids": torch.tensor(source["input_ids"])}
        if data.completion is None:
            return example
        target = processor(text_target=text_of(row, data, "completion"), **cut)
        true = torch.tensor(target["input_ids"])
        return example | _target(true) | {"true": true} if len(true) else None

    @torch.no_grad()
    def complete(
        self, model: PreTrainedModel, samples: Sequence[Example], data: DataConfig, processor: Any
    ) -> list[Example]:
        """Let the teacher write the targets, greedily."""
        batch = self.collate(samples)
        answers = _write(model, batch["input_ids"], batch["attention_mask"], data, processor)
        return [one | _target(answer) for one, answer in zip(samples, answers, strict=True)]

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the model's logits at each token of the target, (P, vocabulary)."""
        targets, config = batch["target_ids"], model.config
        start = config.decoder_start_token_id
        start = config.pad_token_id if start is None else start
        shifted = torch.cat((torch.full_like(targets[:, :1], start), targets[:, :-1]), dim=1)
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=shifted,
            use_cache=False,
        ).logits
        return logits[batch["supervised"]]


def _target(ids: Tensor) -> Example:
    """Return what a sample has of a target, (m,), which is supervised as a whole."""
    return {"target_ids": ids, "supervised": torch.ones_like(ids, dtype=torch.bool)}


def _token_ids(
    row: dict[str, Any], data: DataConfig, tokenizer: Any
) -> tuple[list[int], list[bool] | None]:
    """Return all tokens, and which are supervised; None where the teacher has to write them."""
    if data.text is not None:
        ids = tokenizer(text_of(row, data, "text"))["input_ids"]
        return ids, [True] * len(ids)
    if data.messages is not None:
        return _chat_ids(row[data.messages], data, tokenizer)
    prompt = tokenizer(text_of(row, data, "prompt"))["input_ids"]
    if data.completion is None:
        return prompt, None
    answer = tokenizer(text_of(row, data, "completion"), add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return _supervised_after(prompt, answer + ([end] if end is not None else []))


def _supervised_after(prompt: list[int], answer: list[int]) -> tuple[list[int], list[bool]]:
    """Return prompt and answer as one, supervised on the answer only."""
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _check_messages(messages: Any, data: DataConfig, template: str) -> None:
    """Raise a `TrainingError` unless messages have a known role, or one of the template, and text.

    A template writes an unknown role like a known one, and it would not be learned.
    """
    whose = f"data {data.path}: column {data.messages}"
    if not isinstance(messages, list) or not messages:
        raise TrainingError(f"{whose} holds {messages!r} instead of a list of messages")
    for message in messages:
        given = message.items() if isinstance(message, dict) else ()
        keys = {key for key, value in given if value is not None}
        if "role" not in keys or not {"content", "tool_calls"} & keys:
            found = f"the keys {', '.join(sorted(keys))}" if keys else repr(message)
            raise TrainingError(
                f"{whose} has a message with {found}; messages have `role` (system, user, "
                "assistant) and `content`: rename the keys"
            )
        role = message["role"]
        if role not in _ROLES and not re.search(f"""["']{re.escape(role)}["']""", template):
            raise TrainingError(
                f"{whose} has a message of the role {role!r}; roles are {', '.join(_ROLES)}"
            )


def _chat_ids(
    messages: Any, data: DataConfig, tokenizer: Any
) -> tuple[list[int], list[bool] | None]:
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        raise TrainingError(
            f"data {data.path} holds chat messages, but the tokenizer has no chat template"
        )
    _check_messages(messages, data, str(template))

    def render(part: list, **options: bool) -> Any:
        try:
            return tokenizer.apply_chat_template(part, tokenize=True, **options)
        except Exception as error:  # whatever a template raises
            raise TrainingError(
                f"data {data.path}: the tokenizer's chat template refuses messages of column "
                f"{data.messages}: {error}"
            ) from error

    if messages[-1]["role"] != "assistant":
        return render(messages, return_dict=False, add_generation_prompt=True), None
    if tokenizer.is_fast and re.search(r"{%-?\s*generation\s*-?%}", str(template)):
        marked = render(messages, return_dict=True, return_assistant_tokens_mask=True)
        if any(marked["assistant_masks"]):
            return marked["input_ids"], [bool(mark) for mark in marked["assistant_masks"]]
    prompt = render(messages[:-1], return_dict=False, add_generation_prompt=True)
    whole = render(messages, return_dict=False)
    if whole[: len(prompt)] == prompt:
        return _supervised_after(prompt, whole[len(prompt) :])
    # A template that writes past answers differently: the answer as plain text.
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise TrainingError(
            f"data {data.path}: column {data.messages} has an answer without text, which the "
            "tokenizer's chat template does not write behind its question; leave out such chats"
        )
    answer = tokenizer(content, add_special_tokens=False)["input_ids"]
    return _supervised_after(prompt, answer)


def _write(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, data: DataConfig, tokenizer: Any
) -> list[Tensor]:
    """Return what a model writes to each row, greedily, up to and with its first end token."""
    read = 1 if model.config.is_encoder_decoder else ids.shape[1]  # the start token, or the prompt
    longest = longest_input(model)
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # padding is masked
    written = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=min(data.max_new_tokens, (longest or math.inf) - read),
        do_sample=False,
        num_beams=1,
        pad_token_id=next(token for token in known if token is not None),
    ).cpu()
    ends = model.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long).flatten()
    answers = []
    for answer in written[:, read:]:
        stops = torch.isin(answer, ends).nonzero()
        answers.append(answer[: int(stops[0]) + 1] if len(stops) else answer)
    return answers


class MaskedLanguageModel(TextModel):
    """Encoder; supervised at the masks of a text or, where it has none, at tokens masked here."""

    auto_class = "AutoModelForMaskedLM"

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        """Encode a text, with `supervised` (n,) where the masks are.

        Of a text without masks a share of `data.masking_rate`, at least one token and none of the
        tokenizer's special ones, is masked; the same ones whenever the text is the same. What they
        were is then `true`.

        Returns:
            None where there is nothing to mask.
        """
        if processor.mask_token_id is None:
            raise TrainingError("task: masked-lm needs a tokenizer that has a mask token")
        example = encode_texts(row, data, processor)
        ids = example["input_ids"]
        masks = ids == processor.mask_token_id
        if bool(masks.any()):
            return example | {"supervised": masks}
        if processor.mask_token in text_of(row, data, "text"):
            return None  # all masks were cut off
        special = processor.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
        places = (torch.tensor(special) == 0).nonzero()[:, 0]
        if not len(places):
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(ids.numpy().tobytes()))
        order = torch.randperm(len(places), generator=generator)
        masks[places[order[: max(round(data.masking_rate * len(places)), 1)]]] = True
        masked = ids.masked_fill(masks, processor.mask_token_id)
        return example | {"input_ids": masked, "supervised": masks, "true": ids[masks]}

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the model's logits at each mask, (P, vocabulary)."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "supervised"}
        return model(**inputs).logits[batch["supervised"]]


def _truth(row: dict[str, Any], data: DataConfig) -> Example:
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


class SequenceClassification(TextModel):
    """Classifier of texts, or of pairs of them; each expert keeps its own head."""

    has_heads = True
    auto_class = "AutoModelForSequenceClassification"

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        """Encode a row: `input_ids` (n,) and, of some tokenizers, `token_type_ids` (n,).

        Returns:
            None for a text without tokens.
        """
        example = encode_texts(row, data, processor)
        return example | _truth(row, data) if len(example["input_ids"]) else None

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


class ImageClassification:
    """Classifier of images, or of pixel values (channels, height, width) as they are."""

    has_heads = True
    writes = False
    auto_class = "AutoModelForImageClassification"

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example:
        """Encode a row: `pixel_values` (1, channels, height, width)."""
        pixels = _pixels(row[data.columns["image"]], data, processor)
        if pixels.ndim != 3:
            raise TrainingError(
                f"data {data.path}: column {data.image} holds arrays with {pixels.ndim} axes; "
                "pixel values have three: channels, height, width"
            )
        return {"pixel_values": pixels[None]} | _truth(row, data)

    def collate(self, samples: Sequence[Example]) -> Batch:
        """Put images of one size into a batch, (B, channels, height, width)."""
        return {"pixel_values": torch.cat([sample["pixel_values"] for sample in samples])}

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the logits, (B, classes)."""
        return model(**batch).logits


def _pixels(image: Any, data: DataConfig, processor: Any) -> Tensor:
    """Return the pixel values of an image, or those that are given."""
    whose = f"data {data.path}: column {data.image}"
    if isinstance(image, list):
        try:
            return torch.tensor(image, dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise TrainingError(f"{whose} holds a list that is no array: {error}") from error
    if not hasattr(image, "convert"):
        raise TrainingError(
            f"{whose} holds {image!r:.60} instead of an image or pixel values; give a folder of "
            "images, or a data set that has them in it"
        )
    if processor is None:
        raise TrainingError(
            f"data {data.path} holds images, but the base model has no image processor "
            "(preprocessor_config.json); add one, or give pixel values"
        )
    return processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]


class ZeroShotImageClassification(ImageClassification):
    """Image tower of a CLIP, whose heads are prompts that its text tower has read."""

    auto_class = "CLIPVisionModelWithProjection"

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the logits, (B, classes), of a `ZeroShotHead` for a projection."""
        return model(**batch).image_embeds


ModelKind = TextModel | ImageClassification


_KINDS = {
    "causal-lm": CausalLanguageModel,
    "seq2seq-lm": Seq2SeqLanguageModel,
    "masked-lm": MaskedLanguageModel,
    "sequence-classification": SequenceClassification,
    "image-classification": ImageClassification,
    "zero-shot-image-classification": ZeroShotImageClassification,
}


def model_kind(task: Task) -> ModelKind:
    """Return how models are used for `task`."""
    return _KINDS[task]()


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

    wanted = "give a whole CLIPModel with its tokenizer as base_model"
    no_texts = f"{folder} cannot make heads of prompts: {wanted}"
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
