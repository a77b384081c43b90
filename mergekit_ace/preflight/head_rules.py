# SPDX-License-Identifier: Apache-2.0
"""Tensors that some models of a merge have and others do not: heads, and what is optional."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mergekit.common import ModelReference
from transformers import CONFIG_MAPPING

from mergekit_ace.planning import PlannedTensor
from mergekit_ace.preflight.checkpoint_rules import sources
from mergekit_ace.preflight.checkpoints import Checkpoint
from mergekit_ace.preflight.config_rules import Finding, listed

Checkpoints = Mapping[ModelReference, Checkpoint]
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


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
        elif base is None or model == base:
            continue
        elif ties[base] and head and ties[model] is False:
            yield Finding.error(
                "heads",
                f"the base model ties its head to the embedding, {model} has a head of its own, "
                "which the result will lose",
                "save the base untied (tie_word_embeddings: false, with its lm_head), or the "
                "expert tied",
            )
        elif ties[base] is False and stored[base] and ties[model] and not head:
            yield Finding.error(
                "heads",
                f"{model} ties its head to the embedding, the base model has one of its own",
                "save both in the same way",
            )


def _stored_head(checkpoint: Checkpoint) -> str:
    return next((name for name in HEADS if name in checkpoint.index.tensor_paths), "")


def _ties_head(checkpoint: Checkpoint) -> bool | None:
    """Return whether transformers ties the head to the embedding; None where that is unknown."""
    text = checkpoint.config.get("text_config")
    for config in (checkpoint.config, text if isinstance(text, dict) else {}):
        if "tie_word_embeddings" in config:
            return bool(config["tie_word_embeddings"])
    kind = checkpoint.config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    default = getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", None)
    return None if default is None else bool(default)


def check_optional(tensors: Sequence[PlannedTensor], checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find tensors that mergekit calls optional, and that not all models have."""
    lacking: dict[ModelReference, list[str]] = defaultdict(list)
    fatal = set()
    for tensor in tensors:
        if not tensor.task.output_weight.optional:
            continue
        found = sources(tensor, checkpoints)
        # Old pickles have no headers: nothing is known of them.
        absent = [m for m in tensor.task.model_order if m not in found and checkpoints[m].headers]
        for model in absent if found else ():
            lacking[model].append(tensor.name)
            if model == tensor.base:
                fatal.add(model)
    for model, names in lacking.items():
        what = f"{model} lacks {len(names)} tensors that other models have: {listed(names)}"
        if model in fatal:
            remedy = "save the base model with them, or the experts without"
            yield Finding.error("tensors", f"the base model {what}", remedy)
        else:
            remedy = "save it with them, or expect what the other models make of these tensors"
            yield Finding.warning("tensors", f"{what}; they are merged without it", remedy)
