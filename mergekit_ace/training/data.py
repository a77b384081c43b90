# SPDX-License-Identifier: Apache-2.0
"""Data of the teachers: their rows, samples as tensors on disk, and the order of samples."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.state import TrainingError

if TYPE_CHECKING:
    from datasets import Dataset


_READERS = dict.fromkeys((".jsonl", ".json"), "json")
_READERS |= {".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def load_rows(config: DataConfig, seed: int) -> dict[str, Dataset]:
    """Read, draw `samples` rows and split them 8 : 1 : 1 where the data has no splits of its own.

    What is held out asks nothing that the rest asks: rows with the same texts stay together.

    Returns:
        The rows by split: train, validation, test.

    Raises:
        TrainingError: naming the data and what is missing: the file, a column, rows.
    """
    data = read_rows(config, seed)
    contents = _contents(data, config)
    held_out = {}
    for split, name, parts in (
        ("test", config.test_split, 10),
        ("validation", config.validation_split, 9),
    ):
        if name is not None:
            held_out[split] = _draw(_read(config, name), config.held_out, seed)
            continue
        chosen = _choose(contents, parts)
        if len(chosen) == len(set(contents)):
            raise TrainingError(
                f"data {config.path} has too few rows to hold some out for validation and test; "
                "give more, or name its validation_split and test_split"
            )
        held_out[split] = data.select([n for n, own in enumerate(contents) if own in chosen])
        data = data.select([n for n, own in enumerate(contents) if own not in chosen])
        contents = [content for content in contents if content not in chosen]
    return {"train": data, "validation": held_out["validation"], "test": held_out["test"]}


def read_rows(config: DataConfig, seed: int) -> Dataset:
    """Read the data and draw `samples` rows of it.

    Raises:
        TrainingError: naming the data and what is missing: the file, a column, rows.
    """
    return _draw(_read(config, config.split), config.samples, seed)


def _contents(data: Dataset, config: DataConfig) -> list[Hashable]:
    """Return what each row asks; its number where images are asked, or the same nearly always."""
    purposes = [n for n in ("text", "text_pair", "prompt", "messages") if n in config.columns]
    columns = [data[config.columns[purpose]] for purpose in purposes]
    texts: list[Hashable] = [tuple(map(str, row)) for row in zip(*columns, strict=True)]
    return texts if len(set(texts)) > 2 else list(range(len(data)))


def _choose(contents: Sequence[Hashable], parts: int) -> set[Hashable]:
    """Choose contents from the end: one of so many parts at most, of the rows and of the contents.

    At least one content is chosen, even if its rows are more than that.
    """
    rows = Counter(contents)
    most, room = max(len(rows) // parts, 1), max(len(contents) // parts, 1)
    chosen: set[Hashable] = set()
    for content in reversed(contents):
        if len(chosen) < most and content not in chosen and rows[content] <= room:
            chosen.add(content)
            room -= rows[content]
    return chosen or {min(rows, key=rows.__getitem__)}


def _read(config: DataConfig, split: str) -> Dataset:
    whose = f"data {config.path}"
    try:
        data = _open(config, split)
    except TrainingError:
        raise
    except Exception as error:  # of many kinds, from readers, the file system and the Hub
        cause = error.__cause__ or error  # `datasets` often says no more than that it failed
        raise TrainingError(
            f"{whose} (split {split}) cannot be read: {type(cause).__name__}: {cause}"
        ) from error
    if len(data) == 0:
        raise TrainingError(f"{whose} (split {split}) is empty")
    missing = sorted(set(config.columns.values()) - set(data.column_names))
    if missing:
        raise TrainingError(
            f"{whose} has no column {', '.join(missing)}; it has {', '.join(data.column_names)}"
        )
    return data


def _open(config: DataConfig, split: str) -> Dataset:
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = os.path.expanduser(config.path)
    reader = _READERS.get(os.path.splitext(path)[1].lower())
    if os.path.isfile(path):
        if reader is None:
            raise TrainingError(
                f"data {config.path} is of no kind that can be read: {', '.join(_READERS)}"
            )
        if os.path.getsize(path) == 0:
            raise TrainingError(f"data {config.path} is empty")
        data = load_dataset(reader, data_files=glob.escape(path), split="train")
    elif reader is not None:
        raise TrainingError(f"there is no data file {config.path}")
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


# A sample: inputs of a model and, after the teacher has seen it, `hard` (P,), `soft_values` and
# `soft_indices` (P, k) and `true` (P,), for its P supervised positions.
Example = dict[str, Tensor]
Batch = dict[str, Tensor]  # inputs of several samples


class Examples(Sequence[Example]):
    """Samples whose tensors lie end to end, memory-mapped; each is a view.

    Args:
        fields: name to (tensor of all samples along its first axis, ends of the samples).
    """

    def __init__(self, fields: Mapping[str, tuple[Tensor, Tensor]]):
        self._fields = {name: (all_, [0, *ends.tolist()]) for name, (all_, ends) in fields.items()}

    def __len__(self) -> int:
        return len(next(iter(self._fields.values()))[1]) - 1

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        return {
            name: all_[ends[index] : ends[index + 1]] for name, (all_, ends) in self._fields.items()
        }


def pack_examples(splits: Mapping[str, Sequence[Example]]) -> dict[str, Tensor]:
    """Lay the samples of all splits end to end, for `Examples`.

    Names that not all samples of a split have are dropped.

    Args:
        splits: at least one sample each; tensors of one name may differ in the length of their
            first axis.
    """
    tensors = {}
    for split, samples in splits.items():
        for name in sorted(set.intersection(*(set(sample) for sample in samples))):
            parts = [sample[name] for sample in samples]
            tensors[f"{split}/{name}"] = torch.cat(parts)
            tensors[f"{split}/{name}/ends"] = torch.tensor([len(part) for part in parts]).cumsum(0)
    return tensors


def unpack_examples(tensors: Mapping[str, Tensor]) -> dict[str, Examples]:
    """Return the splits that `pack_examples` has packed."""
    fields: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for key in tensors:
        if not key.endswith("/ends"):
            split, name = key.split("/")
            fields.setdefault(split, {})[name] = tensors[key], tensors[f"{key}/ends"]
    return {split: Examples(named) for split, named in fields.items()}


def step_indices(seed: int, teacher: int, step: int, batch: int, count: int) -> list[int]:
    """Return which samples of a teacher a step sees, all processes together.

    They are gone through in a new random order each time around; a step may end one round and begin
    the next. It is a function of its arguments alone, so that there is no state to save.
    """
    places = range(step * batch, (step + 1) * batch)
    return [_order(seed, teacher, place // count, count)[place % count] for place in places]


@lru_cache(maxsize=64)
def _order(seed: int, teacher: int, turn: int, count: int) -> list[int]:
    # Four numbers to one seed: mixed, so that no two of them meet in the same order.
    mixed = (seed * 1_000_003 + teacher) * 1_000_003 + turn
    generator = torch.Generator("cpu").manual_seed(mixed % 2**63)
    return torch.randperm(count, generator=generator).tolist()
