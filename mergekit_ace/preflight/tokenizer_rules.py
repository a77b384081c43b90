# SPDX-License-Identifier: Apache-2.0
"""Whether the models of a merge mean the same tokens by the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration

from mergekit_ace.headers import DamagedFileError
from mergekit_ace.model_files import VOCABULARY_FILES
from mergekit_ace.preflight.checkpoints import Checkpoint
from mergekit_ace.preflight.findings import Finding, listed

Checkpoints = Mapping[ModelReference, Checkpoint]
ALIGN = "add the line `tokenizer: {source: base}` (or union), which aligns the embeddings"


def check_tokenizers(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find tokens with other numbers, or what keeps mergekit from aligning them."""
    try:
        yield from _check_tokenizers(checkpoints, config)
    except DamagedFileError as error:
        yield Finding.error("tokenizers", str(error))


def _check_tokenizers(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    if config.tokenizer or config.tokenizer_source:
        yield from _check_built(checkpoints, config)
        for checkpoint in checkpoints.values():
            _tokens(checkpoint)  # mergekit takes the base's in the place of a damaged one
    elif config.base_model is not None:
        yield from _check_numbers(checkpoints, config.base_model)


def _has_vocabulary(checkpoint: Checkpoint) -> bool:
    return any(checkpoint.file(name) for name in ("tokenizer.json", "vocab.json", "vocab.txt"))


def _check_built(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find what keeps mergekit from building a tokenizer, which it does after the planning."""
    base = config.base_model or next(iter(checkpoints))
    if not any(checkpoints[base].file(name) for name in VOCABULARY_FILES):
        yield Finding.error(
            "tokenizers",
            f"tokenizer: the base model {base} has no tokenizer, from which mergekit builds that "
            "of the result",
            "take the files of its tokenizer into its folder, or remove the lines `tokenizer:`",
        )


def _check_numbers(checkpoints: Checkpoints, base: ModelReference) -> Iterator[Finding]:
    """Find models that disagree with the base, or the first one with a vocabulary."""
    own = [base, *(model for model in checkpoints if model != base and model.lora is None)]
    first = next((model for model in own if _has_vocabulary(checkpoints[model])), base)
    origin, named = checkpoints[first], "the base model" if first == base else str(first)
    for model in own:
        if model == first:
            continue
        checkpoint = checkpoints[model]
        different, new = _compare(origin, checkpoint)
        if different:
            yield Finding.error(
                "tokenizers",
                f"{model} numbers {len(different)} tokens differently from {named}: "
                f"{listed([repr(token) for token in different])}",
                ALIGN,
            )
        elif new and first == base:
            yield Finding.warning(
                "tokenizers",
                f"{model} has {len(new)} tokens that the base model's tokenizer, which the result "
                f"gets, lacks: {listed([repr(token) for token in new])}",
                "add the lines `tokenizer: {source: union}`, if the result needs them",
            )


def _compare(origin: Checkpoint, other: Checkpoint) -> tuple[list[str], list[str]]:
    """Return tokens known by different numbers, or that share a number, and tokens that are new."""
    files = [checkpoint.file("tokenizer.json") for checkpoint in (origin, other)]
    if all(files) and _digest(files[0]) == _digest(files[1]):
        return [], []
    first, second = _tokens(origin), _tokens(other)
    by_number = {number: token for token, number in first.items()}
    different = [
        token
        for token, number in second.items()
        if first.get(token, number) != number or by_number.get(number, token) != token
    ]
    return sorted(different), sorted(second.keys() - first.keys()) if first else []


def _tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the numbers of all tokens, by whichever files tell them; empty if none does.

    Raises:
        DamagedFileError: they are no numbers, or nothing that a tokenizer has.
    """
    try:
        tokens = _stored_tokens(checkpoint)
        wrong = next((token for token, number in tokens.items() if type(number) is not int), None)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise DamagedFileError(
            f"the tokenizer of {checkpoint.model} is damaged: its vocabulary cannot be read "
            f"({type(error).__name__}: {error}); download or save it again"
        ) from error
    if wrong is not None:
        raise DamagedFileError(
            f"the tokenizer of {checkpoint.model} is damaged: the number of its token {wrong!r} is "
            f"{tokens[wrong]!r}; download or save it again"
        )
    return tokens


def _stored_tokens(checkpoint: Checkpoint) -> dict[str, int]:
    fast = checkpoint.read_json("tokenizer.json")
    vocabulary = (fast.get("model") or {}).get("vocab") or checkpoint.read_json("vocab.json")
    lines = checkpoint.file("vocab.txt")
    if isinstance(vocabulary, list):  # a unigram model: pairs of token and score
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    elif not vocabulary and lines:
        text = lines.read_text(encoding="utf-8", errors="replace")
        vocabulary = {line: number for number, line in enumerate(text.splitlines())}
    added = {entry["content"]: entry["id"] for entry in fast.get("added_tokens") or ()}
    if not fast and vocabulary:
        added = checkpoint.read_json("added_tokens.json")
    return {**vocabulary, **added}


def _digest(path: Path | None) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
