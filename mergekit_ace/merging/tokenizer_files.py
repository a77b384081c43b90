# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and chat template of the result, as `mergekit-yaml` chooses them."""

from __future__ import annotations

import importlib.resources
import logging
import os
import shutil
from collections import Counter
from pathlib import Path

from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergekit_ace.merging.errors import MergeError

LOG = logging.getLogger(__name__)
TOKENIZER_FILES = """
    tokenizer_config.json special_tokens_map.json tokenizer.json tokenizer.model added_tokens.json
    merges.txt chat_template.jinja generation_config.json chat_template.json
    video_preprocessor_config.json
""".split()
# mergekit takes anything shorter for the name of a template, and a name for shorter than that.
_SHORTEST_TEMPLATE, _LONGEST_NAME = 20, 256


def donor_folder(config: MergeConfiguration, options: MergeOptions) -> str:
    """Where the model lies whose small files the result gets."""
    donor = config.base_model or config.referenced_models()[0]
    merged = donor.merged(
        cache_dir=options.lora_merge_cache,
        trust_remote_code=options.trust_remote_code,
        lora_merge_dtype=options.lora_merge_dtype,
    )
    return merged.local_path(cache_dir=options.transformers_cache)


def copy_tokenizer(config: MergeConfiguration, out: Path, options: MergeOptions) -> None:
    """The base model's tokenizer, or the first model's: its files, or loaded and saved again."""
    folder = donor_folder(config, options)
    present = {name for name in TOKENIZER_FILES if os.path.exists(os.path.join(folder, name))}
    whole = "tokenizer_config.json" in present and present & {"tokenizer.json", "tokenizer.model"}
    if whole and not config.chat_template:
        for name in present:
            shutil.copy(os.path.join(folder, name), out / name)
        return
    donor = config.base_model or config.referenced_models()[0]
    tokenizer = AutoTokenizer.from_pretrained(
        donor.model.path,
        revision=donor.model.revision,
        trust_remote_code=options.trust_remote_code,
    )
    set_chat_template(tokenizer, config)
    tokenizer.save_pretrained(out)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, config: MergeConfiguration) -> None:
    """The template that the config asks for.

    Raises:
        MergeError: it is neither a template nor the name of one.
    """
    wanted = config.chat_template
    if not wanted:
        return
    if wanted == "auto":
        template = most_common_template(config)
        if template is not None:
            tokenizer.chat_template = template
        return
    named = importlib.resources.files("mergekit") / "_data" / "chat_templates" / f"{wanted}.jinja"
    short = len(wanted) < _LONGEST_NAME and "\n" not in wanted and "{" not in wanted
    if short and named.is_file():
        wanted = named.read_text()
    elif len(wanted) < _SHORTEST_TEMPLATE or "{" not in wanted:
        raise MergeError(f"chat_template: {wanted!r} is neither a template nor the name of one")
    tokenizer.chat_template = wanted


def most_common_template(config: MergeConfiguration) -> str | None:
    """That of most models; None where no tokenizer has one."""
    found: Counter[str] = Counter()
    for model in config.referenced_models():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model.model.path, revision=model.model.revision
            )
        except Exception as error:  # a model without a tokenizer has no say
            LOG.warning("The tokenizer of %s cannot be loaded: %s", model, error)
            continue
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template:
            found[template.strip()] += 1
    return found.most_common(1)[0][0] if found else None
