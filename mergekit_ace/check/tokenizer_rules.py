# SPDX-License-Identifier: Apache-2.0
"""Whether the models of a merge mean the same tokens by the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from tokenizers import Tokenizer

from mergekit_ace.check.checkpoints import Checkpoint, Checkpoints
from mergekit_ace.check.findings import Finding, listed
from mergekit_ace.files.headers import DamagedFileError
from mergekit_ace.files.model_files import VOCABULARY_FILES

ALIGN = "add the line `tokenizer: {source: base}` (or union), which aligns the embeddings"


def check_tokenizers(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find tokens with other numbers, or what keeps mergekit from aligning them."""
    try:
        yield from _check_tokenizers(checkpoints, config)
    except DamagedFileError as error:
        yield Finding.error("tokenizers", str(error))


def _check_tokenizers(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    if config.tokenizer or config.tokenizer_source:
        base = config.base_model or next(iter(checkpoints))
        if not any(checkpoints[base].file(name) for name in VOCABULARY_FILES):
            yield Finding.error(
                "tokenizers",
                f"tokenizer: the base model {base} has no tokenizer, from which mergekit builds "
                "that of the result",
                "take the files of its tokenizer into its folder, or remove the lines `tokenizer:`",
            )
        for checkpoint in checkpoints.values():
            _tokens(checkpoint)  # mergekit takes the base's in the place of a damaged one
    elif config.base_model is not None:
        yield from _check_numbers(checkpoints, config.base_model)


def _has_vocabulary(checkpoint: Checkpoint) -> bool:
    return any(checkpoint.file(name) for name in ("tokenizer.json", "vocab.json", "vocab.txt"))


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
    if all(files) and files[0].read_bytes() == files[1].read_bytes():
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
    fast, lines = checkpoint.file("tokenizer.json"), checkpoint.file("vocab.txt")
    if fast:
        try:
            return Tokenizer.from_file(str(fast)).get_vocab()
        except Exception as error:  # the library raises nothing more special
            raise DamagedFileError(
                f"the tokenizer of {checkpoint.model} is damaged: {fast.name} cannot be read "
                f"({error}); download or save it again"
            ) from error
    text = lines.read_text(encoding="utf-8", errors="replace") if lines else ""
    # not splitlines: a token may be one of the separators of lines that Unicode has beside these
    tokens = text.removesuffix("\n").split("\n") if text else ()
    numbered = {token: number for number, token in enumerate(tokens)}
    vocabulary = checkpoint.read_json("vocab.json") or numbered
    return {**vocabulary, **checkpoint.read_json("added_tokens.json")} if vocabulary else {}
