# SPDX-License-Identifier: Apache-2.0
"""Kinds of models: how rows become samples, samples batches, and batches logits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from mergekit_ace.files.saving import write_text
from mergekit_ace.methods.base import is_finite
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import DataConfig, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Inputs of a model and, after the teacher has seen them, `hard` (P,), `soft_values` and
# `soft_indices` (P, k) and `true` (P,), for the sample's P supervised positions.
Example = dict[str, Tensor]
Batch = dict[str, Tensor]  # inputs of several samples

OWN_LENGTH = 256  # tokens of a text that a model writes itself
_AT_ONCE = 16  # such texts that are written at once
_TOKENS = {"cpu": 2048, "cuda": 16384}  # of a batch, with padding
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_TEXT_INPUTS = ("input_ids", "token_type_ids")
_PADDED = (*_TEXT_INPUTS, "supervised")


def longest_input(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for; None where any number will do."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def fit_to_model(data: DataConfig, model: PreTrainedModel) -> DataConfig:
    """Return the data with a `max_length` of at most the model's positions."""
    longest = longest_input(model) or data.max_length
    return data.model_copy(update={"max_length": min(data.max_length, longest)})


def batches_by_length(texts: Sequence[Tensor], device: torch.device) -> Iterator[list[int]]:
    """Yield places of texts of like length, the longest first, for batches that fit a device."""
    batch: list[int] = []
    for place in sorted(range(len(texts)), key=lambda place: -len(texts[place])):
        if batch and (len(batch) + 1) * len(texts[batch[0]]) > _TOKENS[device.type]:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


class ModelKind:
    """Models of one task: how they are loaded, read rows, and answer."""

    auto_class: str  # of transformers
    has_heads = True  # classifiers, each with a head of its own

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        """Return a row as a sample, with `true` where there is an answer; None if it has nothing.

        Of language models it has `input_ids` (n,), and `supervised` (n,).
        """
        raise NotImplementedError

    def logits(self, model: Any, batch: Batch) -> Tensor:
        """Return logits (P, C): at P supervised positions, of C classes or tokens."""
        return model(**batch).logits

    def answer(
        self, model: Any, samples: Sequence[Example], head: Mapping[str, nn.Module] | None = None
    ) -> Tensor:
        """Return the `logits` of samples, by a head of `head_modules` if one is given."""
        attach_head(model, head or {})
        return self.logits(model, send_to_device(self.collate(samples), model.device))

    def collate(self, samples: Sequence[Example]) -> Batch:
        """Pad what models read of samples at the end, (B, n), and mark that there it was padded."""
        columns = {n: [one[n] for one in samples] for n in _PADDED if n in samples[0]}
        columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
        return {name: pad_sequence(rows, batch_first=True) for name, rows in columns.items()}


class CausalLanguageModel(ModelKind):
    """Decoder; supervised at the tokens of a text, of a completion, or of a chat's last answer."""

    auto_class = "AutoModelForCausalLM"
    has_heads = False

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        prompt, answer = _prompt_and_answer(row, data, processor)
        sample = _answered(torch.tensor(prompt), torch.tensor(answer or [], dtype=torch.long))
        if answer is None:  # a prompt that is empty asks nothing; one of max_length leaves no room
            return sample if 0 < len(prompt) < data.max_length else None
        sample = {n: tensor[: data.max_length].clone() for n, tensor in sample.items()}
        sample["supervised"][0:1] = False  # nothing comes before it
        true = sample["input_ids"][sample["supervised"]]
        return sample | {"true": true} if len(true) else None

    def logits(self, model: Any, batch: Batch) -> Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits[:, :-1][batch["supervised"][:, 1:]]

    @torch.no_grad()
    def complete(
        self, model: Any, samples: Sequence[Example], data: DataConfig, tokenizer: Any,
        ends: Iterable[int | None] | None = None,
    ) -> list[Example]:  # fmt: skip
        """Let a model write the answers, greedily, each up to and with the first of its `ends`."""
        if ends is None:
            sources = (tokenizer, model.config.get_text_config(), model.generation_config)
            known = [getattr(one, "eos_token_id", None) for one in sources]
            ends = [n for one in known for n in (one if isinstance(one, list) else [one])]
        prompts = [sample["input_ids"] for sample in samples]
        ids, mask = (  # flush right, so that writing starts at one column
            pad_sequence(rows, batch_first=True, padding_side="left").to(model.device)
            for rows in (prompts, [*map(torch.ones_like, prompts)])
        )
        longest, read = longest_input(model) or math.inf, ids.shape[1]
        ends = sorted({n for n in ends if n is not None})
        new = min(data.max_new_tokens, longest - read)
        pad = tokenizer.pad_token_id or tokenizer.eos_token_id or 0  # it is masked
        settings = {"max_new_tokens": new, "eos_token_id": ends or None, "pad_token_id": pad}
        written, completed = _generate(model, ids, mask, do_sample=False, **settings), []
        for prompt, answer in zip(prompts, written[:, read:].cpu(), strict=True):
            stops = torch.isin(answer, torch.tensor(ends, dtype=torch.long)).nonzero()
            end = int(stops[0]) + 1 if len(stops) else None
            completed.append(_answered(prompt, answer[:end]))
        return completed


def _generate(model: Any, ids: Tensor, mask: Tensor, **settings: Any) -> Tensor:
    """Let a model go on by these settings alone, without its own end tokens and penalties."""
    from transformers import GenerationConfig

    usual, model.generation_config = model.generation_config, GenerationConfig(**settings)
    try:
        return model.generate(input_ids=ids, attention_mask=mask)
    finally:
        model.generation_config = usual


def _answered(prompt: Tensor, answer: Tensor) -> Example:
    """Return a prompt with its answer as a sample."""
    ids = torch.cat((prompt.long(), answer))
    return {"input_ids": ids, "supervised": torch.arange(len(ids)) >= len(prompt)}


def _unreadable(row: dict[str, Any], data: DataConfig, purpose: str, wanted: str) -> ConfigError:
    """Return an error that says what a column holds instead of what is wanted."""
    column = data.columns[purpose]
    said = f"data {data.path}: column {column} holds {row[column]!r:.300} instead of {wanted}"
    return ConfigError(said)


def _text_of(row: dict[str, Any], data: DataConfig, purpose: str) -> str:
    text = row[data.columns[purpose]]
    if not isinstance(text, str):
        raise _unreadable(row, data, purpose, "text")
    return text


def _prompt_and_answer(
    row: dict[str, Any], data: DataConfig, tokenizer: Any
) -> tuple[list[int], list[int] | None]:
    """Return the tokens of prompt and answer; None for an answer that the teacher has to write."""
    if data.text is not None:
        return [], tokenizer(_text_of(row, data, "text"))["input_ids"]
    if data.messages is not None:
        if not _is_chat(row[data.messages]):
            wanted = f"messages with `role` (one of {', '.join(_ROLES)}) and `content`"
            raise _unreadable(row, data, "messages", wanted)
        return _chat(row[data.messages], f"data {data.path}: column {data.messages}", tokenizer)
    text, end = _text_of(row, data, "prompt"), tokenizer.eos_token_id
    prompt = tokenizer(text)["input_ids"]
    if prompt[1:][-1:] == [end] and not text.endswith(tokenizer.eos_token):  # some append it
        prompt = prompt[:-1]
    if data.completion is None:
        return prompt, None
    answer = tokenizer(_text_of(row, data, "completion"), add_special_tokens=False)["input_ids"]
    return prompt, answer + ([end] if end is not None else [])


def _is_chat(messages: Any) -> bool:
    """Tell whether templates and this module know every message."""
    # A template writes an unknown role like a known one, and it would not be learned.
    return isinstance(messages, list) and messages != [] and all(
        isinstance(one, dict) and one.get("role") in _ROLES
        and (one.get("content") is not None or bool(one.get("tool_calls")))
        for one in messages
    )  # fmt: skip


def _chat(messages: list, whose: str, tokenizer: Any) -> tuple[list[int], list[int] | None]:
    """Return the tokens of a chat before and of its last answer, as the template writes it."""
    render = partial(tokenizer.apply_chat_template, return_dict=False)
    try:
        if messages[-1]["role"] != "assistant":
            return render(messages, add_generation_prompt=True), None
        whole = render(messages)
        # Some templates begin an answer otherwise once it is written.
        starts = [render(messages[:-1], add_generation_prompt=prompt) for prompt in (True, False)]
    except Exception as error:  # whatever a template raises
        said = f"{whose}: the tokenizer's chat template refuses its messages: {error}"
        raise ConfigError(said) from error
    for before in starts:
        if whole[: len(before)] == before:
            return before, whole[len(before) :]
    said = "the tokenizer's chat template writes a question otherwise once it is answered"
    raise ConfigError(f"{whose}: {said}; give `prompt` and `completion` instead")


class SequenceClassification(ModelKind):
    """Classifier of texts, or of pairs of them; each expert keeps its own head."""

    auto_class = "AutoModelForSequenceClassification"

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        texts = [_text_of(row, data, n) for n in ("text", "text_pair") if n in data.columns]
        longest = min(data.max_length, processor.model_max_length)
        encoded = processor(*texts, truncation=True, max_length=longest)
        example = {name: torch.tensor(encoded[name]) for name in _TEXT_INPUTS if name in encoded}
        return example | _truth(row, data) if len(example["input_ids"]) else None

    def logits(self, model: Any, batch: Batch) -> Tensor:
        config, ids = model.config.get_text_config(), batch["input_ids"]
        usual, seen = config.pad_token_id, {*ids.flatten().tolist()}
        # Decoders answer at the last token that is no padding: by default one that no text has.
        config.pad_token_id = pad = min({*range(len(seen) + 1)} - seen) if usual is None else usual
        try:
            ids = ids.masked_fill(batch["attention_mask"] == 0, pad)
            return super().logits(model, batch | {"input_ids": ids})
        finally:
            config.pad_token_id = usual


def _truth(row: dict[str, Any], data: DataConfig) -> Example:
    """Return `true` (1,) where the data has a column of classes."""
    if data.label is None:
        return {}
    if type(row[data.label]) is not int:
        raise _unreadable(row, data, "label", "the number of a class: 0, 1, …")
    return {"true": torch.tensor([row[data.label]])}


class ImageClassification(ModelKind):
    """Classifier of images, or of pixel values (channels, height, width) as they are."""

    auto_class = "AutoModelForImageClassification"

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example:
        image = row[data.columns["image"]]
        if isinstance(image, list):
            pixels = torch.tensor(image, dtype=torch.float32)
        elif processor is not None and hasattr(image, "convert"):
            pixels = processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        else:
            wanted = "pixel values, or images for a model with preprocessor_config.json"
            raise _unreadable(row, data, "image", wanted)
        return {"pixel_values": pixels[None]} | _truth(row, data)

    def collate(self, samples: Sequence[Example]) -> Batch:
        return {"pixel_values": torch.cat([sample["pixel_values"] for sample in samples])}


class ZeroShotImageClassification(ImageClassification):
    """Image tower of a CLIP, whose heads are prompts that its text tower has read."""

    auto_class = "CLIPVisionModelWithProjection"

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return model(**batch).image_embeds  # of a `ZeroShotHead` for a projection


MODEL_KINDS: dict[Task, ModelKind] = {
    "causal-lm": CausalLanguageModel(),
    "sequence-classification": SequenceClassification(),
    "image-classification": ImageClassification(),
    "zero-shot-image-classification": ZeroShotImageClassification(),
}


def head_prefixes(model: PreTrainedModel, kind: ModelKind) -> tuple[str, ...]:
    """Return what names of parameters in a classifier's head start with: all but the backbone's."""
    if not kind.has_heads:
        return ()
    if not hasattr(model, model.base_model_prefix):
        raise ConfigError(f"{type(model).__name__} does not tell its backbone from its head")
    return tuple(f"{n}." for n, _ in model.named_children() if n != model.base_model_prefix)


def head_modules(
    model: PreTrainedModel, kind: ModelKind, data: DataConfig, base: str
) -> dict[str, nn.Module]:
    """Return the modules of a classifier's head by name; none of other models.

    For data with prompts, the model gets a head that the CLIP in the folder `base` makes of them.
    """
    if data.prompts is not None:
        attach_head(model, {"visual_projection": zero_shot_head(base, data.prompts)})
    return {name[:-1]: model.get_submodule(name[:-1]) for name in head_prefixes(model, kind)}


def attach_head(model: PreTrainedModel, head: Mapping[str, nn.Module]) -> None:
    """Make `model` answer as the classes of a head of `head_modules`."""
    for name, module in head.items():
        setattr(model, name, module.to(model.device, model.dtype))


class ZeroShotHead(nn.Module):
    """Projection of an image tower that answers with logits, by embedded texts (C, d)."""

    texts: Tensor

    def __init__(self, projection: nn.Linear, texts: Tensor):
        super().__init__()
        self.projection = projection
        self.register_buffer("texts", texts)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return logits, (B, C), of what the tower makes of images, (B, h)."""
        return normalize(self.projection(pooled), dim=-1) @ self.texts.T


@torch.no_grad()
def zero_shot_head(folder: str, prompts: Sequence[str | Sequence[str]]) -> ZeroShotHead:
    """Let the text tower of the whole CLIP in a folder make the head for some classes.

    These come in the order of their numbers; a class of several prompts has their mean direction.
    """
    from transformers import AutoTokenizer, CLIPModel

    load: Any = CLIPModel.from_pretrained
    try:
        model, info = load(folder, output_loading_info=True, local_files_only=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        said = f"base_model {folder}: give a whole CLIPModel with its tokenizer ({error})"
        raise ConfigError(said) from error
    rows = []
    for prompt in prompts:
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        pooled = model.text_model(**tokens).pooler_output
        rows.append(normalize(model.text_projection(pooled), dim=-1).mean(0))
    texts = model.logit_scale.exp() * normalize(torch.stack(rows), dim=-1)
    return ZeroShotHead(model.visual_projection, texts).requires_grad_(False)


def write_own_texts(
    model: Any, tokenizer: Any, count: int, path: Path, *, quiet: bool = False
) -> DataConfig:
    """Let a language model write texts into a `.jsonl`, once; return that as data.

    A text has `OWN_LENGTH` tokens, or as many as the model can read, of its whole distribution.
    """
    data = DataConfig(path=str(path), text="text", max_length=OWN_LENGTH)
    if path.exists():
        return data
    length, start = fit_to_model(data, model).max_length, first_token(tokenizer)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": length - 1, "pad_token_id": start}
    texts, begun = [], torch.full((_AT_ONCE, 1), start, device=model.device)
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.no_grad():
        if not is_finite(model(input_ids=begun[:1]).logits):
            raise ConfigError(f"model {model.name_or_path} answers NaN or Inf; leave it out")
        for done in tqdm(range(0, count, _AT_ONCE), "writing texts", disable=quiet):
            torch.manual_seed(done)
            begun = begun[: count - done]
            written = _generate(model, begun, torch.ones_like(begun), **settings)
            # The tokenizer puts the first token before a text by itself, if texts have one.
            texts += tokenizer.batch_decode(written[:, 1:], clean_up_tokenization_spaces=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return data


def first_token(tokenizer: Any) -> int:
    """Return the token that begins a text: of texts, of chats, or the end of the one before."""
    if tokenizer.bos_token_id is None and getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": "?"}]
        return tokenizer.apply_chat_template(message, return_dict=False)[0]
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ConfigError("no tokenizer says how a text begins: add `data` to every model")
