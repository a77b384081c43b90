# SPDX-License-Identifier: Apache-2.0
"""The rows of an expert's data set, split for training, validation and test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.errors import TrainingError

if TYPE_CHECKING:
    from datasets import Dataset

_READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Rows:
    """The splits of one expert's data; each is a `datasets.Dataset` of the named columns."""

    train: Dataset
    validation: Dataset
    test: Dataset


def load_rows(config: DataConfig, seed: int) -> Rows:
    """Read, draw `samples` rows and split them 8 : 1 : 1 where the data has no splits of its own.

    Raises:
        TrainingError: naming the data and what is missing: the file, a column, rows.
    """
    data = _draw(_read(config, config.split), config.samples, seed)
    held_out = {}
    for split, name in (("test", config.test_split), ("validation", config.validation_split)):
        if name is not None:
            held_out[split] = _draw(_read(config, name), config.held_out, seed)
            continue
        count = max(len(data) // 10, 1) if split == "test" else max(len(data) // 9, 1)
        if len(data) <= count:
            raise TrainingError(
                f"data {config.path} has too few rows to hold some out for validation and test; "
                "give more, or name its validation_split and test_split"
            )
        held_out[split] = data.select(range(len(data) - count, len(data)))
        data = data.select(range(len(data) - count))
    return Rows(data, held_out["validation"], held_out["test"])


def _read(config: DataConfig, split: str) -> Dataset:
    try:
        data = _open(config, split)
    except TrainingError:
        raise
    except Exception as error:  # of many kinds, from readers, the file system and the Hub
        raise TrainingError(
            f"data {config.path} (split {split}) cannot be read: {type(error).__name__}: {error}"
        ) from error
    if len(data) == 0:
        raise TrainingError(f"data {config.path} (split {split}) is empty")
    missing = sorted(set(config.columns.values()) - set(data.column_names))
    if missing:
        raise TrainingError(
            f"data {config.path} has no column {', '.join(missing)}; it has "
            f"{', '.join(data.column_names)}"
        )
    return data


def _open(config: DataConfig, split: str) -> Dataset:
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = os.path.expanduser(config.path)
    reader = _READERS.get(os.path.splitext(path)[1].lower())
    if reader and not os.path.isfile(path):
        raise TrainingError(f"there is no data file {config.path}")
    if reader:
        data = load_dataset(reader, data_files=path, split="train")
    elif any(os.path.isfile(os.path.join(path, n)) for n in ("state.json", "dataset_dict.json")):
        data = load_from_disk(path)
        if isinstance(data, DatasetDict):
            return data[split]
    else:
        return load_dataset(path if os.path.exists(path) else config.path, config.name, split=split)
    if split != config.split:
        raise TrainingError(
            f"data {config.path} is one split, so it has no other called {split}; leave out "
            "validation_split and test_split, and a tenth each is held out"
        )
    return data


def _draw(data: Dataset, most: int | None, seed: int) -> Dataset:
    # Not `data.shuffle`: it writes a cache beside the data.
    order = torch.randperm(len(data), generator=torch.Generator("cpu").manual_seed(seed))
    return data.select(order[:most].tolist())
