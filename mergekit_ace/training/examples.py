# SPDX-License-Identifier: Apache-2.0
"""Samples as tensors, kept on disk: what goes into a model, and the labels for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mergekit_ace.files import save_tensors

# A sample: inputs of a model and, after the teacher has seen it, `hard` (P,), `soft_values` and
# `soft_indices` (P, k) and `true` (P,), for its P supervised positions.
Example = dict[str, Tensor]


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
        """Lay samples end to end; a tensor's first axis may differ. Names that not all of them
        have are dropped.
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
        """One tensor of one sample, a view."""
        tensor, _ = self.fields[name]
        return tensor[self._start(name, index) : self._ends[name][index]]

    def length(self, name: str, index: int) -> int:
        """Length of one tensor of one sample."""
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
    """The splits, memory-mapped, and the metadata of a file that `save_examples` wrote."""
    fields: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            if not key.endswith("/ends"):
                split, name = key.split("/")
                pair = (file.get_tensor(key), file.get_tensor(f"{key}/ends"))
                fields.setdefault(split, {})[name] = pair
        metadata = file.metadata() or {}
    return {split: Examples(named) for split, named in fields.items()}, metadata
