# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with checkpoints: tensors, shapes, heads, configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.tokenizer.truncate import TruncatedVocabulary
from transformers import CONFIG_MAPPING

from mergekit_ace.check.checkpoints import Checkpoint, Checkpoints
from mergekit_ace.check.findings import Finding, listed
from mergekit_ace.files.headers import TensorHeader
from mergekit_ace.planning import PlannedTensor

HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def dtype_name(name: str | None) -> str:
    """Return what a safetensors file calls a dtype that a config names; empty for none of these."""
    return NAMES.get((name or "").removeprefix("torch."), "")


def sources(tensor: PlannedTensor, checkpoints: Checkpoints) -> dict[ModelReference, TensorHeader]:
    """Return the headers of a planned tensor, of all models that have it."""
    weights = dict(tensor.gather.weight_info.items())
    found = {m: checkpoints[m].source(weights[m]) for m in tensor.task.model_order}
    return {model: header for model, header in found.items() if header is not None}


def check_tensors(tensors: Sequence[PlannedTensor], checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find tensors that a model lacks, though mergekit needs them or other models have them."""
    lacking: dict[tuple[ModelReference, bool], list[str]] = {}
    for tensor in tensors:
        found, optional = sources(tensor, checkpoints), tensor.task.output_weight.optional
        for model, weight in tensor.gather.weight_info.items():
            if model not in found and (found or not optional):
                fatal = not optional or model == tensor.base
                lacking.setdefault((model, fatal), []).append(weight.name)
    for (model, fatal), names in lacking.items():
        what = f"{model} lacks {len(names)} of {len(tensors)} tensors: {listed(names)}"
        if fatal:
            remedy = "replace the model by one of the same architecture, or save it again"
            yield Finding.error("tensors", what, remedy)
        else:
            remedy = "save it with them, or expect what the other models make of these tensors"
            yield Finding.warning("tensors", f"{what}; they are merged without it", remedy)


def compare_shapes(
    tensors: Sequence[PlannedTensor], checkpoints: Checkpoints, config: MergeConfiguration
) -> Iterator[Finding]:
    """Find tensors of another shape than the base model's, or the first model's."""
    truncated = (isinstance(t.task.gather_tensors, TruncatedVocabulary) for t in tensors)
    aligned = bool(config.tokenizer or config.tokenizer_source) or any(truncated)
    odd: dict[ModelReference, list[str]] = {}
    vocabularies: dict[ModelReference, str] = {}
    for tensor in tensors:
        found = sources(tensor, checkpoints)
        first = tensor.base if tensor.base in found else next(iter(found), None)
        for model, header in found.items():
            expected = found[first].shape
            if header.shape == expected:
                continue
            text = f"{tensor.name} {header.shape} instead of {expected}"
            if tensor.task.output_weight.vocabulary_axis is not None:
                vocabularies.setdefault(model, text)
            else:
                odd.setdefault(model, []).append(text)
    for model, texts in odd.items():
        yield Finding.error(
            "shapes",
            f"{model} has {len(texts)} tensors of another shape: {listed(texts, 3)}",
            f"remove {model}, or set base_model to the model that it was fine-tuned from",
        )
    for model, text in vocabularies.items():
        if not aligned:
            yield Finding.error(
                "vocabularies",
                f"{model} has another vocabulary: {text}",
                "align them: add the line `tokenizer: {source: base}` (or union)",
            )


# What changes the function that the same weights compute. mergekit writes the base's config.
FUNCTION = """
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act activation_function rope_theta partial_rotary_factor rms_norm_eps
    layer_norm_epsilon layer_norm_eps sliding_window max_position_embeddings
    max_window_layers attention_bias num_experts_per_tok num_local_experts num_experts
    n_routed_experts
""".split()


def check_configs(checkpoints: Checkpoints, base: ModelReference | None) -> Iterator[Finding]:
    """Find what the base's `config.json` will say differently of an expert's weights."""
    if base is None or not checkpoints[base].config:
        return
    origin = _function(checkpoints[base].config)
    for model, checkpoint in checkpoints.items():
        if model == base or not checkpoint.config:
            continue
        own = _function(checkpoint.config)
        changed = [
            f"{key}: {_short(own[key])} instead of {_short(value)}"
            for key, value in origin.items()
            if own.get(key, value) != value
        ]
        if changed:
            yield Finding.warning(
                "configs",
                f"{model} has another config than the base model ({listed(changed)})",
                "mergekit writes the base's config.json: adjust it in the result if the experts' "
                "is the right one",
            )


def _function(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `FUNCTION`, with those of rotary positions among them.

    These stand in `rope_scaling` up to transformers 4, and from 5 on, with the base, in
    `rope_parameters`.
    """
    rotary: dict[str, Any] = {}
    for part in (config.get("rope_scaling"), config.get("rope_parameters")):
        rotary |= part if isinstance(part, dict) else {}
    kind = rotary.pop("rope_type", rotary.pop("type", "default"))
    return {n: config[n] for n in FUNCTION if n in config} | {"rope_type": kind} | rotary


def check_class_names(checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find classifiers that give their classes different names, and so other meanings."""
    named: dict[ModelReference, list[str]] = {}
    for model, checkpoint in checkpoints.items():
        classes = checkpoint.config.get("id2label")
        names = [str(name) for name in classes.values()] if isinstance(classes, dict) else []
        if any(not name.startswith("LABEL_") for name in names):  # these are transformers' own
            named[model] = names
    for model, names in named.items():
        first = next(iter(named))
        if names != named[first]:
            yield Finding.warning(
                "classes",
                f"{model} calls its classes {listed(names, 4)}, and {first} calls them "
                f"{listed(named[first], 4)}; a merge of their heads means neither",
                "leave one of them out; `mergekit-ace train` merges classifiers that keep heads of "
                "their own",
            )


def same_name(one: str, other: str) -> bool:
    """Tell whether two paths or names on the Hub end alike, whatever the folder or owner."""
    ends = (path.rstrip("/").rpartition("/")[2].lower() for path in (one, other))
    return len(set(ends)) == 1


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"


def check_heads(checkpoints: Checkpoints, base: ModelReference | None) -> Iterator[Finding]:
    """Find heads that the base ties to its embedding and an expert does not, or vice versa.

    mergekit takes the embedding for a head that is not stored.
    """
    stored = {model: _stored_head(checkpoint) for model, checkpoint in checkpoints.items()}
    ties = {model: _ties_head(checkpoint) for model, checkpoint in checkpoints.items()}
    for model, head in stored.items():
        others = [other for other in stored.values() if other]
        if not head and ties[model] is False and others:
            yield Finding.error(
                "heads",
                f"{model} has no {others[0]}, and its config.json does not tie the head to the "
                "embedding, which mergekit would take for it",
                "save it again with its head, or set tie_word_embeddings: true in its config.json "
                "if it has none of its own",
            )
        elif base is not None and {ties[base], ties[model]} == {True, False}:
            tied, own = (base, model) if ties[base] else (model, base)
            if stored[own] and (tied == base or not stored[tied]):
                yield Finding.error(
                    "heads",
                    f"{tied} ties its head to the embedding, and {own} has a head of its own",
                    "save both in the same way: tied, or with `tie_word_embeddings`: false and an "
                    "lm_head",
                )


def _stored_head(checkpoint: Checkpoint) -> str:
    return next((name for name in HEADS if name in checkpoint.index.tensor_paths), "")


def _ties_head(checkpoint: Checkpoint) -> bool | None:
    """Return whether transformers ties the head to the embedding; None where that is unknown."""
    text, kind = checkpoint.config.get("text_config"), checkpoint.config.get("model_type")
    given = {**(text if isinstance(text, dict) else {}), **checkpoint.config}
    if "tie_word_embeddings" in given or kind not in CONFIG_MAPPING:
        return given.get("tie_word_embeddings")
    return getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", None)
