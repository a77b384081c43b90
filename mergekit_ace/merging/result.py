# SPDX-License-Identifier: Apache-2.0
"""What is asked of a result: that it is a whole model, and, by `--try`, what it says."""

from __future__ import annotations

import math
from pathlib import Path

import click
import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergekit_ace.check.loading import (
    NotLoadedError,
    merged_model,
    quiet_transformers,
    verify_model,
)
from mergekit_ace.files.model_files import config_donor
from mergekit_ace.merging.plan import MergeChecks
from mergekit_ace.merging.shards import MergeError
from mergekit_ace.methods.architecture import model_class
from mergekit_ace.planning import PlannedMerge, read_merge_config

_TOKENS = 20  # that are generated


def check_result(folder: Path, plan: PlannedMerge, checks: MergeChecks) -> None:
    """Check that a result is a whole model, and let it continue the prompt, where there is one.

    Raises:
        MergeError: something is wrong with it.
    """
    donor, options = config_donor(plan.config), plan.options
    weights = Path(LoaderCache().get(donor).index.base_path)
    try:
        problem = verify_model(folder, donor, weights, trust_remote_code=options.trust_remote_code)
    except NotLoadedError as error:
        problem = ""
        if not options.quiet:
            click.echo(f"whether the result loads was not checked: {str(error).splitlines()[0]}")
    if problem:
        text = (
            f"{folder} is no model that transformers loads whole: {problem}. The files stay. See "
            "what `slices:` and `modules:` of the config leave out, and what --unplanned carries "
            "over"
        )
        if checks.strict:
            raise MergeError(text)
        click.echo(f"warning: {text}", err=True)
    if checks.prompt is not None:
        for trial in _try_prompt(checks.prompt, folder, donor, options):
            click.echo(trial)


def check_trial(prompt: str, config: Path, options: MergeOptions) -> None:
    """Raise a `MergeError` if the result will not be able to continue a prompt."""
    donor, trust = config_donor(read_merge_config(config)[0]), options.trust_remote_code
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


def _try_prompt(
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
