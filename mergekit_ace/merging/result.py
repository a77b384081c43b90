# SPDX-License-Identifier: Apache-2.0
"""What is asked of a result: that it is a whole model, and, by `--try`, what it says."""

from __future__ import annotations

from pathlib import Path

import click
import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from transformers import AutoTokenizer

from mergekit_ace.check.loading import merged_model, quiet_transformers, verify_model
from mergekit_ace.files.models import config_donor
from mergekit_ace.merging.plan import MergeSettings
from mergekit_ace.methods.architecture import model_class
from mergekit_ace.naming import ConfigError
from mergekit_ace.planning import PlannedMerge

_TOKENS = 20  # that are generated


def check_result(folder: Path, plan: PlannedMerge, settings: MergeSettings) -> None:
    """Check that a result is a whole model, and let it continue the prompt, where there is one.

    The trial prints a line for the model whose config the result has, mostly the base, and one for
    the result: the most likely tokens behind the prompt, and the mean loss per token, in nats, of
    prompt and base's continuation; where an encoder reads the prompt, of the continuation alone.

    Raises:
        ConfigError: something is wrong with it.
    """
    donor, options = config_donor(plan.config), plan.options
    origin = Path(LoaderCache().get(donor).index.base_path)
    try:
        problem = verify_model(folder, donor, origin, trust_remote_code=options.trust_remote_code)
    except ConfigError as error:
        problem = ""
        if not options.quiet:
            click.echo(f"whether the result loads was not checked: {str(error).splitlines()[0]}")
    if problem:
        text = (
            f"{folder} is no model that transformers loads whole: {problem}. The files stay. See "
            "what `slices:` and `modules:` of the config leave out, and what --unplanned carries "
            "over"
        )
        if settings.strict:
            raise ConfigError(text)
        click.echo(f"warning: {text}", err=True)
    if settings.prompt is None:
        return
    model = merged_model(folder)
    try:
        with quiet_transformers(), torch.inference_mode():  # one of them is in memory at a time
            expected, base_loss = _speak(origin, donor, settings.prompt, None, options)
            said, loss = _speak(folder, model, settings.prompt, expected, options)
    except Exception as error:  # of many kinds, from model classes, tokenizers and the prompt
        raise ConfigError(
            f"the merge is complete, and --try failed, which needs a model that generates text and "
            f"its tokenizer: {error}"
        ) from error
    for name, text, number in ((donor, expected, base_loss), (folder, said, loss)):
        click.echo(f"{name}: {text!r}, mean loss {number:.5g}")


def _speak(
    folder: Path,
    reference: ModelReference,
    prompt: str,
    expected: str | None,
    options: MergeOptions,
) -> tuple[str, float]:
    """Return how a model continues a prompt, and its loss on that, or on what is expected.

    Args:
        folder: of its weights; for an adapter, of those of its base.
    """
    trust, source = options.trust_remote_code, reference.model
    tokenizer = AutoTokenizer.from_pretrained(
        source.path, revision=source.revision, trust_remote_code=trust
    )
    kind = model_class(reference.config(trust_remote_code=trust), trust)
    model = kind.from_pretrained(str(folder), dtype="auto", trust_remote_code=trust)
    model = model.eval().to(options.device or "cpu")

    def ids(text: str) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt").input_ids.to(model.device)

    inputs, encoder = ids(prompt), model.config.is_encoder_decoder
    output = model.generate(
        inputs, max_new_tokens=_TOKENS, do_sample=False, num_beams=1,
        attention_mask=torch.ones_like(inputs),
    )  # fmt: skip
    start = 0 if encoder else inputs.shape[1]
    said = tokenizer.decode(output[0, start:], skip_special_tokens=True)
    wanted = said if expected is None else expected
    labels = ids((wanted or prompt) if encoder else prompt + wanted)
    return said, float(model(inputs if encoder else labels, labels=labels).loss)
