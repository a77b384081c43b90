# SPDX-License-Identifier: Apache-2.0
"""`config.json` of the result, as `mergekit-yaml` writes it."""

from __future__ import annotations

import logging

from mergekit.architecture import ModelArchitecture
from mergekit.common import set_config_value
from mergekit.config import MergeConfiguration
from transformers import PretrainedConfig, PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)


def output_config(
    config: MergeConfiguration, architecture: ModelArchitecture, *, trust_remote_code: bool
) -> PretrainedConfig:
    """That of the base model, or the first, with the result's dtype and number of layers.

    Args:
        config: of the merge, not yet rewritten by a planner.
        architecture: of its models.
        trust_remote_code: run code that models bring.
    """
    donor = config.base_model or config.referenced_models()[0]
    result = donor.config(trust_remote_code=trust_remote_code)
    dtype = config.out_dtype or config.dtype
    if dtype:
        result.torch_dtype = dtype
    for module, layers in _layers(config, architecture).items():
        _set_layers(result, architecture, module, layers)
    return result


def set_vocabulary(
    result: PretrainedConfig,
    architecture: ModelArchitecture,
    tokenizer: PreTrainedTokenizerBase,
    multiple: int | None,
) -> None:
    """Note the size of a tokenizer that was built for the result, padded as its embeddings are."""
    key = architecture.vocab_size_config_key or "vocab_size"
    try:
        set_config_value(result, key, padded_vocabulary(tokenizer, multiple))
    except RuntimeError as error:
        LOG.warning("config.json of the result needs its %s set by hand: %s", key, error)


def padded_vocabulary(tokenizer: PreTrainedTokenizerBase, multiple: int | None) -> int:
    """Rows of the result's embeddings."""
    size = len(tokenizer.get_vocab())
    return size + -size % multiple if multiple else size


def _layers(config: MergeConfiguration, architecture: ModelArchitecture) -> dict[str, int]:
    """Number of layers by module, where the configuration puts slices together."""
    found = {}
    for module in architecture.modules:
        if config.modules and module in config.modules:
            slices = config.modules[module].slices
        else:
            slices = config.slices
        if slices:
            ranges = [piece.sources[0].layer_range for piece in slices]
            found[module] = sum(end - start for start, end in ranges)
    return found


def _set_layers(
    result: PretrainedConfig, architecture: ModelArchitecture, module: str, layers: int
) -> None:
    key = architecture.modules[module].architecture.num_layers_config_key()
    try:
        if key:
            set_config_value(result, key, layers)
    except RuntimeError as error:
        LOG.warning("config.json of the result needs its %s set by hand: %s", key, error)
