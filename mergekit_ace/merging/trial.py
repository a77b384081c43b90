# SPDX-License-Identifier: Apache-2.0
"""`--try PROMPT`: what the result says beside the base, and how well it predicts the base."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergekit_ace.check.loading import merged_model, quiet_transformers
from mergekit_ace.merging.shards import MergeError
from mergekit_ace.methods.architecture import model_class

_TOKENS = 20  # that are generated


def check_trial(prompt: str, donor: ModelReference, options: MergeOptions) -> None:
    """Raise a `MergeError` if the result will not be able to continue a prompt."""
    trust = options.trust_remote_code
    if not prompt.strip():
        raise MergeError('--try needs a text to continue, such as --try "The capital of France is"')
    try:
        kind = model_class(donor.config(trust_remote_code=trust), trust)
        speaks = kind.can_generate()
        _tokenizer(donor.model.path, donor.model.revision, trust)
    except Exception as error:  # of many kinds, from the config, the Hub and the tokenizer
        raise MergeError(
            f"--try needs a model and a tokenizer that transformers loads, and {donor} has none: "
            f"{error}"
        ) from error
    if not speaks:
        raise MergeError(f"--try needs a model that generates text, and a {kind.__name__} does not")


def try_prompt(
    prompt: str, result: Path, donor: ModelReference, options: MergeOptions
) -> list[str]:
    """Let the base and the result continue a prompt; one of them is in memory at a time.

    Args:
        donor: the base, or the model whose config the result has.

    Returns:
        A line for each: the most likely tokens behind the prompt, at most 20, and the mean negative
        log-likelihood per token, in nats, of the prompt with the base's continuation; where an
        encoder reads the prompt, of the continuation alone (or of the prompt, should the base say
        nothing).

    Raises:
        MergeError: the result's loss is not a number, or it cannot be loaded.
    """
    base = Path(LoaderCache().get(donor).index.base_path)
    trust = options.trust_remote_code
    tokenizers = (
        _tokenizer(donor.model.path, donor.model.revision, trust),
        _tokenizer(str(result), None, trust),
    )
    try:
        with quiet_transformers(), torch.inference_mode():
            expected, base_loss = _speak(base, donor, tokenizers[0], prompt, None, options)
            model = merged_model(result)
            said, loss = _speak(result, model, tokenizers[1], prompt, expected, options)
    except (ValueError, RuntimeError, OSError, IndexError) as error:
        raise MergeError(f"--try: {error}") from error
    if not math.isfinite(loss) and math.isfinite(base_loss):
        raise MergeError(f"--try: the loss of {result} on {prompt!r} is {loss}")
    trials = ((str(donor), expected, base_loss), (str(result), said, loss))
    return [f"{name}: {text!r}, mean loss {number:.5g}" for name, text, number in trials]


def _tokenizer(path: str, revision: str | None, trust: bool) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust)


def _speak(
    folder: Path,
    reference: ModelReference,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    expected: str | None,
    options: MergeOptions,
) -> tuple[str, float]:
    """Return how a model continues a prompt, and its loss on that, or on what is expected."""
    trust = options.trust_remote_code
    kind = model_class(reference.config(trust_remote_code=trust), trust)
    model = kind.from_pretrained(str(folder), dtype="auto", trust_remote_code=trust)
    model = model.eval().to(options.device or "cpu")

    def ids(text: str) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt").input_ids.to(model.device)

    inputs, reads = ids(prompt), model.config.is_encoder_decoder
    output = model.generate(
        inputs, max_new_tokens=_TOKENS, do_sample=False, num_beams=1,
        attention_mask=torch.ones_like(inputs),
    )  # fmt: skip
    known = 0 if reads else inputs.shape[1]
    said = tokenizer.decode(output[0, known:], skip_special_tokens=True)
    wanted = said if expected is None else expected
    labels = ids((wanted or prompt) if reads else prompt + wanted)
    return said, float(model(inputs if reads else labels, labels=labels).loss)
