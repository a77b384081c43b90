# SPDX-License-Identifier: Apache-2.0
"""Files of a model beside weights, config and tokenizer, which mergekit leaves out of most results.

Without `tokenizer:` it copies some of them together with the tokenizer of the base; with it, none.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration

from mergekit_ace.files.headers import json_or_empty

GENERATION = "generation_config.json"
_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
MORE_TEMPLATES = "additional_chat_templates"
TOKENIZER_CONFIG = "tokenizer_config.json"
_STAMP = {"transformers_version"}  # of whoever wrote the file
# One of them is there wherever transformers can load a tokenizer.
VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", TOKENIZER_CONFIG, "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
TOKENIZER_FILES = (
    *VOCABULARY_FILES, "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
# Of an earlier result, these would be read as part of one that has none.
READ_BESIDE = (*TOKENIZER_FILES, GENERATION, *_PROCESSORS, "chat_template.json")
# What mergekit copies with a tokenizer that it takes as it is.
_COPIED = (GENERATION, "video_preprocessor_config.json", *_TEMPLATES)


def tokenizer_donor(config: MergeConfiguration) -> ModelReference:
    """Return the model whose tokens have the same numbers in the result."""
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    return source if isinstance(source, ModelReference) else config_donor(config)


def config_donor(config: MergeConfiguration) -> ModelReference:
    """Return the model whose `config.json` the result has."""
    return config.base_model or config.referenced_models()[0]


def add_model_files(
    config: MergeConfiguration, folder: Path, *, beside: Path = Path(), cache: str | None = None
) -> dict[str, ModelReference]:
    """Copy what a result lacks from the models that it has its config and tokenizer of.

    The generation config names end tokens by their numbers, so it comes from the same model as the
    tokenizer. Nothing that is there is touched.

    Args:
        beside: where relative names of models are looked for as well.
        cache: of transformers, for models on the Hub.

    Returns:
        The models by the names of the files that were added.
    """
    added = {}
    for name, model in _expected(config, folder, beside, cache):
        source = find_model_file(model.model, name, beside=beside, cache=cache)
        if source is not None and not (folder / name).exists() and not _is_derived(source):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, folder / name)
            added[name] = model
    return added


def _expected(
    config: MergeConfiguration, folder: Path, beside: Path, cache: str | None
) -> Iterator[tuple[str, ModelReference]]:
    """Yield the files that a result should have, if their models have them."""
    speaker = tokenizer_donor(config)
    yield GENERATION, speaker
    for name in (*_PROCESSORS, *_code(config_donor(config), beside)):
        yield name, config_donor(config)
    if config.chat_template or _has_template(folder):
        return
    for name in _TEMPLATES:
        yield name, speaker
    for path in sorted(Path(speaker.model.path).expanduser().glob(f"{MORE_TEMPLATES}/*.jinja")):
        yield f"{MORE_TEMPLATES}/{path.name}", speaker


def _code(model: ModelReference, beside: Path) -> list[str]:
    """Return the files with the code of a local model, which its config names without the folder.

    They are copied, not run. The config of a model on the Hub names the repository.
    """
    config = find_model_file(model.model, "config.json", beside=beside)
    names = json_or_empty(config).get("auto_map")
    if config is None or not isinstance(names, dict) or "--" in str(names):
        return []
    return sorted(path.name for path in config.parent.glob("*.py"))


def _has_template(folder: Path) -> bool:
    """Tell whether a result has a chat template, or no tokenizer that could use one."""
    if not (folder / TOKENIZER_CONFIG).is_file():
        return True
    own = json_or_empty(folder / TOKENIZER_CONFIG).get("chat_template")
    return bool(own) or any((folder / name).exists() for name in _TEMPLATES)


def find_model_file(
    model: ModelPath, name: str, *, beside: Path = Path(), cache: str | None = None
) -> Path | None:
    """Return where a small file of a model lies; None where it has none, or is not to be had."""
    for folder in (Path(model.path).expanduser(), beside / model.path):
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.path, name, revision=model.revision, cache_dir=cache))
    except Exception:  # no such file or model, or no connection
        return None


def lost_model_files(
    config: MergeConfiguration, kept: tuple[str, ...]
) -> dict[str, ModelReference]:
    """Return what `mergekit-yaml` would leave out: models by the names of their files.

    Args:
        kept: files that mergekit's architecture names.
    """
    base, speaker = config_donor(config), tokenizer_donor(config)
    has = {
        name: find_model_file(base.model, name) is not None
        for name in (TOKENIZER_CONFIG, "tokenizer.json", "tokenizer.model")
    }
    built = config.tokenizer or config.tokenizer_source or config.chat_template
    if not built and has[TOKENIZER_CONFIG] and (has["tokenizer.json"] or has["tokenizer.model"]):
        kept = (*kept, *_COPIED)
    lost = {name: base for name in _PROCESSORS if find_model_file(base.model, name)}
    generation = find_model_file(speaker.model, GENERATION)
    if generation and has[TOKENIZER_CONFIG] and not _is_derived(generation):
        lost[GENERATION] = speaker
    return {name: model for name, model in lost.items() if name not in kept}


def _is_derived(path: Path) -> bool:
    """Tell whether transformers makes a generation config from `config.json`, whenever it loads.

    One that was made so may have been changed since, and then bears the mark all the same.
    """
    own, config = json_or_empty(path), json_or_empty(path.with_name("config.json"))
    made = path.name == GENERATION and bool(own.get("_from_model_config"))
    return made and all(own[name] == config[name] for name in own.keys() & config.keys() - _STAMP)
