# SPDX-License-Identifier: Apache-2.0
"""What `mergekit-ace statistics` measured of experts on samples, for merge methods to read.

A folder with `statistics.json`, which is written last, and safetensors files of each expert. These
hold, per token or sample, in float32:

* `covariance/NAME`: the lower triangle of X_tᵀX_t/n_t of the inputs of a linear layer, packed row
  by row (`algebra.ridge`), once for all layers with the same inputs, under the first one's name;
* `fisher/NAME`: the diagonal of the Fisher information, shaped as the tensor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from safetensors import safe_open
from torch import Tensor

from mergekit_ace.files.checkpoints import TensorHeader, read_file_header
from mergekit_ace.files.saving import read_once, write_text
from mergekit_ace.naming import FileError

INDEX_FILE = "statistics.json"
Measure = Literal["covariances", "fisher"]


class Expert(BaseModel, extra="forbid"):
    """Expert as it was called at training, or when it was measured."""

    task: str  # its name, unique in the file; the model reference unless another was given
    model: str  # mergekit's reference, as text
    revision: str | None = None  # the commit that was read from a Hub, where that is known


class MergedTensor(BaseModel, extra="forbid"):
    """Tensor of the merge, in memory and on disk."""

    name: str  # of the parameter in memory
    # Tensors on disk that hold it; several where it is packed from them, or tied under two names.
    stored: tuple[str, ...]


def find_expert(experts: Sequence[Expert], model: str, task: str | None = None) -> int | None:
    """Return the number of an expert, by its task if one is given, else by its model, or None.

    A folder is the same under a relative and an absolute path.
    """
    for number, expert in enumerate(experts):
        folders = os.path.isdir(model) and os.path.isdir(expert.model)
        same = model == expert.model or (folders and os.path.samefile(model, expert.model))
        if same if task is None else task == expert.task:
            return number
    return None


class MeasuredExpert(Expert):
    """Expert, and what it was measured on."""

    samples: int  # that it read
    tokens: int  # of all texts together, 0 for images
    files: tuple[str, ...]  # of its tensors, beside the index


class MeasuredTensor(MergedTensor):
    """Tensor of the models; `stored` has further names in memory, too, where it is tied."""

    inputs: str | None = None  # NAME of its covariance; None where nothing was measured
    fisher: bool = False  # whether there is Fisher information, shaped as it is stored


class StatisticsIndex(BaseModel, extra="forbid"):
    """Contents of `statistics.json`."""

    format: Literal["mergekit-ace statistics 1"] = "mergekit-ace statistics 1"
    base_model: str  # mergekit's reference, as text
    measured: tuple[Measure, ...]  # what was asked for
    experts: tuple[MeasuredExpert, ...]  # in the order of the config
    tensors: tuple[MeasuredTensor, ...]  # all that a merge may ask for, measured or not
    config: dict[str, Any] = {}  # of the run, as it was resolved
    package: str = ""  # version of this package

    def save(self, folder: Path) -> None:
        """Write it into a folder, whole or not at all."""
        write_text(folder / INDEX_FILE, self.model_dump_json(indent=1))


class Statistics:
    """A folder of statistics; tensors are mapped from its files when they are asked for."""

    def __init__(self, path: str | os.PathLike):
        """Read the index, given itself or its folder, and the headers of all files.

        A `FileError` says which one is missing, damaged or something else.
        """
        self.path = Path(path).expanduser()
        if self.path.is_dir():
            self.path /= INDEX_FILE
        try:
            self.index = StatisticsIndex.model_validate_json(self.path.read_bytes())
        except (OSError, ValidationError) as error:
            what = "is no file of statistics" if self.path.is_file() else "is missing"
            said = f"{self.path} {what}; give the one that `mergekit-ace statistics` wrote"
            raise FileError(said) from error
        self._headers: list[dict[str, TensorHeader]] = []
        for expert in self.index.experts:
            try:
                files = [read_file_header(self.path.parent / name) for name in expert.files]
            except FileError as error:
                said = f"the statistics of {expert.task} cannot be used: {error}"
                raise FileError(f"{said}; or delete it, and measure it again") from error
            self._headers.append({name: one for file in files for name, one in file.items()})

    @cached_property
    def tensors(self) -> Mapping[str, MeasuredTensor]:
        """The tensors by every name that they have, in memory or on disk."""
        return {name: t for t in self.index.tensors for name in (t.name, *t.stored)}

    def shape(self, expert: int, name: str) -> tuple[int, ...] | None:
        """Return the shape of what was measured of an expert under a name, if anything was."""
        header = self._headers[expert].get(name)
        return header.shape if header else None

    def read(self, expert: int, name: str) -> Tensor:
        """Return what was measured, on the CPU, mapped from its file."""
        return _open(self._headers[expert][name].file).get_tensor(name)


load_statistics = read_once(Statistics)
_open = read_once(partial(safe_open, framework="pt"), 64)
