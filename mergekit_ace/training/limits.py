# SPDX-License-Identifier: Apache-2.0
"""What a model can read and answer: how many tokens, which tokens, one class of several."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import Example
from mergekit_ace.training.state import TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LOG = logging.getLogger(__name__)


def longest_input(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for; None where any number will do."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    # RoBERTa and its kin count positions from behind the number of the padding token.
    tables = (
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    )
    first = (t.padding_idx + 1 for t in tables if t.padding_idx is not None)
    return positions - max(first, default=0)


def fit_to_model(data: DataConfig, model: PreTrainedModel) -> DataConfig:
    """Return the data with a `max_length` of at most the model's positions."""
    longest = longest_input(model)
    if data.image is not None or longest is None or data.max_length <= longest:
        return data
    return data.model_copy(update={"max_length": longest})


def warn_of_cuts(
    samples: Sequence[Example], given: DataConfig, fitted: DataConfig, model: PreTrainedModel
) -> None:
    """Say where texts were cut because a model has fewer positions than `max_length` asks for.

    Args:
        samples: encoded ones.
        given, fitted: the data before and after `fit_to_model`.
        model: that will read them.
    """
    full = sum(len(sample.get("input_ids", ())) >= fitted.max_length for sample in samples)
    if full and fitted.max_length < given.max_length:
        LOG.warning(
            "data %s: %d texts are cut to %d tokens instead of max_length: %d, as %s has no more "
            "positions",
            given.path, full, fitted.max_length, given.max_length, model.name_or_path,
        )  # fmt: skip


def check_samples(samples: Sequence[Example], data: DataConfig, model: PreTrainedModel) -> None:
    """Raise a `TrainingError` for tokens that a model has no embedding of, or images of two sizes.

    Args:
        samples: encoded ones, at least one.
        data: theirs.
        model: that will read them.
    """
    sizes = {tuple(sample["pixel_values"].shape) for sample in samples if "pixel_values" in sample}
    if len(sizes) > 1:
        one, other = sorted(sizes)[:2]
        raise TrainingError(
            f"data {data.path}: column {data.image} holds images of different sizes, {one[1:]} and "
            f"{other[1:]}; bring all to the size that the model reads"
        )
    texts = [sample[n] for n in ("input_ids", "target_ids") for sample in samples if n in sample]
    largest = max((int(ids.max()) for ids in texts if len(ids)), default=None)
    if largest is not None and largest >= model.get_input_embeddings().weight.shape[0]:
        raise TrainingError(
            f"data {data.path}: the tokenizer has the token number {largest}, but "
            f"{model.name_or_path} has only {model.get_input_embeddings().weight.shape[0]} "
            "embeddings; use the tokenizer that belongs to the model"
        )


def check_classes(config: PreTrainedConfig, reference: str, *, regression: bool = False) -> None:
    """Raise a `TrainingError` unless a classifier answers with one class of several.

    Args:
        config: of the model.
        reference: its name, for the message.
        regression: one with a single number as its answer will do, too.
    """
    kind = getattr(config, "problem_type", None)
    if config.num_labels > 1 and kind in (None, "single_label_classification"):
        return
    if regression and config.num_labels == 1 and kind in (None, "regression"):
        return
    what = f"problem_type: {kind}" if config.num_labels > 1 else "a single output (a regression)"
    known = "a number, or one class of several" if regression else "one class of several"
    raise TrainingError(
        f"{reference} has {what}; the trainer knows only classifiers that give every sample "
        f"{known}: leave it out, or merge it without data"
    )


@contextmanager
def explained_failures(data: DataConfig, model: PreTrainedModel) -> Iterator[None]:
    """Raise what a model says to its inputs as a `TrainingError` that names the data."""
    try:
        yield
    except (torch.OutOfMemoryError, TrainingError):
        raise
    except (ValueError, RuntimeError, IndexError, NotImplementedError) as error:
        raise TrainingError(
            f"data {data.path}: {model.name_or_path} cannot read its samples: {error}"
        ) from error
