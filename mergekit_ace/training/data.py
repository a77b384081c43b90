# SPDX-License-Identifier: Apache-2.0
"""Data of the teachers: their rows, samples as tensors on disk, and the order of samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mergekit_ace.files import save_tensors
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.state import TrainingError, open_tensors

if TYPE_CHECKING:
    from datasets import Dataset


_READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}


def load_rows(config: DataConfig, seed: int) -> dict[str, Dataset]:
    """Read, draw `samples` rows and split them 8 : 1 : 1 where the data has no splits of its own.

    Returns:
        The rows by split: train, validation, test.

    Raises:
        TrainingError: naming the data and what is missing: the file, a column, rows.
    """
    data = read_rows(config, seed)
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
    return {"train": data, **{split: held_out[split] for split in ("validation", "test")}}


def read_rows(config: DataConfig, seed: int) -> Dataset:
    """Read the data and draw `samples` rows of it.

    Raises:
        TrainingError: naming the data and what is missing: the file, a column, rows.
    """
    return _draw(_read(config, config.split), config.samples, seed)


def _read(config: DataConfig, split: str) -> Dataset:
    try:
        data = _open(config, split)
    except TrainingError:
        raise
    except Exception as error:  # of many kinds, from readers, the file system and the Hub
        cause = error.__cause__ or error  # `datasets` often says no more than that it failed
        raise TrainingError(
            f"data {config.path} (split {split}) cannot be read: {type(cause).__name__}: {cause}"
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
    if os.path.isfile(path) and not reader:
        raise TrainingError(
            f"data {config.path} is of no kind that can be read: {', '.join(_READERS)}"
        )
    if reader and os.path.getsize(path) == 0:
        raise TrainingError(f"data {config.path} is empty")
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


# A sample: inputs of a model and, after the teacher has seen it, `hard` (P,), `soft_values` and
# `soft_indices` (P, k) and `true` (P,), for its P supervised positions.
Example = dict[str, Tensor]
Batch = dict[str, Tensor]  # inputs of several samples


class Examples(Sequence[Example]):
    """Samples whose tensors differ in length, laid end to end; memory-mapped when loaded.

    Attributes:
        fields: name to (tensor of all samples along its first axis, ends of the samples).
    """

    def __init__(self, fields: Mapping[str, tuple[Tensor, Tensor]]):
        self.fields = dict(fields)
        self._ends = {name: ends.tolist() for name, (_, ends) in self.fields.items()}

    @classmethod
    def pack(cls, samples: Sequence[Example]) -> Examples:
        """Lay samples end to end; names that not all of them have are dropped.

        Args:
            samples: tensors of one name may differ in the length of their first axis.
        """
        fields = {}
        shared = set.intersection(*(set(sample) for sample in samples)) if samples else set()
        for name in sorted(shared):
            tensors = [sample[name] for sample in samples]
            ends = torch.tensor([len(tensor) for tensor in tensors]).cumsum(0)
            fields[name] = (torch.cat(tensors), ends)
        return cls(fields)

    def __len__(self) -> int:
        return len(next(iter(self._ends.values()), ()))

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        return {name: self.field(name, index) for name in self.fields}

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def field(self, name: str, index: int) -> Tensor:
        """Return one tensor of one sample, a view."""
        tensor, _ = self.fields[name]
        return tensor[self._start(name, index) : self._ends[name][index]]

    def length(self, name: str, index: int) -> int:
        """Return the length of one tensor of one sample."""
        return self._ends[name][index] - self._start(name, index)

    def _start(self, name: str, index: int) -> int:
        return self._ends[name][index - 1] if index else 0


def save_examples(splits: Mapping[str, Examples], path: Path, metadata: dict[str, str]) -> None:
    """Write all splits into one safetensors file, whole or not at all."""
    tensors = {}
    for split, examples in splits.items():
        for name, (tensor, ends) in examples.fields.items():
            tensors[f"{split}/{name}"] = tensor.contiguous()
            tensors[f"{split}/{name}/ends"] = ends
    save_tensors(path, tensors, metadata)


def load_examples(path: Path) -> tuple[dict[str, Examples], dict[str, str]]:
    """Open what `save_examples` wrote: the splits, memory-mapped, and the metadata."""
    fields: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    with open_tensors(path) as file:
        for key in file.keys():  # noqa: SIM118
            if not key.endswith("/ends"):
                split, name = key.split("/")
                pair = (file.get_tensor(key), file.get_tensor(f"{key}/ends"))
                fields.setdefault(split, {})[name] = pair
        metadata = file.metadata() or {}
    return {split: Examples(named) for split, named in fields.items()}, metadata


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def step_indices(seed: int, teacher: int, step: int, batch: int, count: int) -> list[int]:
    """Return which samples of a teacher a step sees, all processes together.

    They are gone through in a new random order each time around; a step may end one round and begin
    the next. It is a function of its arguments alone, so that there is no state to save.

    Args:
        seed: of the run.
        teacher: its index.
        step: from 0.
        batch: samples per step.
        count: samples that there are.
    """
    places = range(step * batch, (step + 1) * batch)
    return [_order(seed, teacher, place // count, count)[place % count] for place in places]


@lru_cache(maxsize=64)
def _order(seed: int, teacher: int, turn: int, count: int) -> list[int]:
    # Four numbers to one seed: mixed, so that no two of them meet in the same order.
    mixed = (seed * 1_000_003 + teacher) * 1_000_003 + turn
    generator = torch.Generator("cpu").manual_seed(mixed % 2**63)
    return torch.randperm(count, generator=generator).tolist()
