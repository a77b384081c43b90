# SPDX-License-Identifier: Apache-2.0
"""Configurations, tokenizers, tied heads and adapters of the models beside each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ace.preflight.checkpoints import Checkpoint
from mergekit_ace.preflight.findings import Finding, listed

# What changes the function that the same weights compute. mergekit writes the base's config.
FUNCTION = """
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act activation_function rope_theta rope_scaling rope_parameters partial_rotary_factor
    rms_norm_eps layer_norm_epsilon layer_norm_eps sliding_window max_position_embeddings
    max_window_layers attention_bias tie_word_embeddings num_experts_per_tok
""".split()
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


def check_configs(
    checkpoints: Mapping[ModelReference, Checkpoint], base: ModelReference | None
) -> Iterator[Finding]:
    """What the base's `config.json` will say differently of an expert's weights."""
    if base is None or not checkpoints[base].config:
        return
    origin = checkpoints[base].config
    for model, checkpoint in checkpoints.items():
        if model == base or not checkpoint.config:
            continue
        changed = [
            f"{key}: {_short(checkpoint.config.get(key))} instead of {_short(origin.get(key))}"
            for key in FUNCTION
            if checkpoint.config.get(key) != origin.get(key)
            and key != "tie_word_embeddings"
            and key in checkpoint.config
            and key in origin
        ]
        if changed:
            yield Finding(
                "warning",
                "configs",
                f"{model} has another config than the base model ({listed(changed)})",
                "mergekit writes the base's config.json: adjust it in the result if the experts' "
                "is the right one",
            )


def check_heads(
    checkpoints: Mapping[ModelReference, Checkpoint], base: ModelReference | None
) -> Iterator[Finding]:
    """A head that the base ties to its embedding, and an expert does not."""
    if base is None:
        return
    tied = _is_tied(checkpoints[base])
    for model, checkpoint in checkpoints.items():
        if model == base or _is_tied(checkpoint) == tied:
            continue
        if tied:
            yield Finding(
                "error",
                "heads",
                f"the base model ties its head to the embedding, {model} has a head of its own, "
                "which the result will lose",
                "save the base untied (tie_word_embeddings: false, with its lm_head), or the "
                "expert tied",
            )
        else:
            yield Finding(
                "error",
                "heads",
                f"{model} ties its head to the embedding, the base model has one of its own",
                "save both in the same way",
            )


def _is_tied(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.config.get("tie_word_embeddings")) and not any(
        name in checkpoint.index.tensor_paths for name in _HEADS
    )


def check_adapters(
    checkpoints: Mapping[ModelReference, Checkpoint], options: MergeOptions
) -> Iterator[Finding]:
    """Adapters that are merged first."""
    for model, checkpoint in checkpoints.items():
        if model.lora is None:
            continue
        if Path(model.lora.path).expanduser().is_dir() and not checkpoint.adapter:
            yield Finding(
                "error",
                "adapters",
                f"{model.lora} holds no adapter_config.json",
                "give the folder that peft's save_pretrained wrote",
            )
            continue
        if not options.lora_merge_cache:
            yield Finding(
                "error",
                "adapters",
                f"{model} is an adapter, which mergekit merges into its base first",
                "say where, with --lora-merge-cache DIR, to the merge and to this check; add "
                "--lora-merge-dtype float32",
            )
        made_for = checkpoint.adapter.get("base_model_name_or_path")
        if made_for and _name(made_for) != _name(model.model.path):
            yield Finding(
                "warning",
                "adapters",
                f"the adapter {model.lora} was trained on {made_for}, not on {model.model}",
                "put it onto the model that it was trained on",
            )


def check_tokenizers(
    checkpoints: Mapping[ModelReference, Checkpoint],
    base: ModelReference | None,
    config: MergeConfiguration,
) -> Iterator[Finding]:
    """Tokenizers that give the same token another number."""
    if config.tokenizer or config.tokenizer_source or base is None:
        return
    origin = checkpoints[base]
    for model, checkpoint in checkpoints.items():
        if model == base or model.lora is not None:
            continue
        pieces = [_digest(c.file("tokenizer.model")) for c in (origin, checkpoint)]
        if all(pieces) and pieces[0] != pieces[1] and not checkpoint.file("tokenizer.json"):
            yield Finding(
                "warning",
                "tokenizers",
                f"the tokenizer.model of {model} differs from the base model's",
                "if tokens have other numbers, add the line `tokenizer: {source: base}`",
            )
        different = _different_tokens(origin, checkpoint)
        if different:
            yield Finding(
                "error",
                "tokenizers",
                f"{model} numbers {len(different)} tokens differently from the base model: "
                f"{listed([repr(token) for token in different])}",
                "add the line `tokenizer: {source: base}` (or union), which aligns the embeddings",
            )


def _different_tokens(origin: Checkpoint, other: Checkpoint) -> list[str]:
    """Tokens that both know by different numbers, or that share a number; empty if unknown."""
    files = [checkpoint.file("tokenizer.json") for checkpoint in (origin, other)]
    if None in files or _digest(files[0]) == _digest(files[1]):
        return []
    first, second = _tokens(origin), _tokens(other)
    by_number = {number: token for token, number in first.items()}
    return sorted(
        token
        for token, number in second.items()
        if first.get(token, number) != number or by_number.get(number, token) != token
    )


def _tokens(checkpoint: Checkpoint) -> dict[str, int]:
    content = checkpoint.read_json("tokenizer.json")
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # a unigram model: pairs of token and score
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", ())}
    return {**vocabulary, **added}


def _digest(path: Path | None) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"
