# SPDX-License-Identifier: Apache-2.0
"""The coefficient file: one of safetensors, with one JSON text in its metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergekit_ace.algebra.learner import Learner, LearnerConfig
from mergekit_ace.files.checkpoints import check_content
from mergekit_ace.files.saving import read_once, save_tensors
from mergekit_ace.files.statistics import Expert, MergedTensor
from mergekit_ace.naming import FileError

FORMAT = {"format": "mergekit-ace coefficients", "version": "1"}
_TENSORS = ("coefficients", "statistics", "depths", "groups")
Granularity = Literal["tensor", "kind", "block", "task"]
Basis = Literal["task_vector", "ace", "ace_relative", "ace_plus"]


class Contents(BaseModel):
    """Contents of the file beside tensors.

    Its `basis` is what is combined: task vectors (by `statsmerging`), or the components of the
    experts in a merge by `ace`, whose refinement is one more row, by `ace_relative` or
    by `ace_plus`.
    """

    model_config = ConfigDict(extra="forbid")

    base_model: str
    experts: tuple[Expert, ...]  # K, in the order of the rows
    tensors: tuple[MergedTensor, ...]  # L, in the order of the columns
    frozen: tuple[str, ...] = ()  # tensors on disk that keep the base's values
    granularity: Granularity = "tensor"
    basis: Basis = "task_vector"
    parameters: dict[str, Any] = {}  # of the merge method that the components are of
    learner: LearnerConfig
    config: dict[str, Any] = {}  # of the training
    scores: dict[str, Any] = {}
    package: str = ""

    @property
    def rows(self) -> int:
        """Rows of coefficients: one per expert, and one for the refinement of `ace`."""
        return len(self.experts) + (self.basis == "ace")


@dataclass(eq=False)
class CoefficientFile:
    """Coefficients with everything needed to apply them.

    Attributes:
        coefficients: λ, (K, L), float32; K + 1 rows where the last one is of a refinement.
        statistics: (K, L, F), float64, what the learner was given; likewise.
        depths: (L,), float32.
        learner_state: of the trained network.
        groups: (L,), int64: tensors of one group, 0 … G − 1, share a coefficient.
    """

    contents: Contents
    coefficients: Tensor
    statistics: Tensor
    depths: Tensor
    learner_state: Mapping[str, Tensor]
    groups: Tensor

    def __post_init__(self) -> None:
        shape = (self.contents.rows, len(self.contents.tensors))
        expected = [shape, (*shape, self.contents.learner.features), shape[1:], shape[1:]]
        found = [tuple(getattr(self, name).shape) for name in _TENSORS]
        if found != expected:
            raise ValueError(f"tensors have shapes {found}, expected {expected}")
        if not self.coefficients.isfinite().all():
            raise ValueError("there are coefficients that are NaN or Inf")

    @cached_property
    def columns(self) -> dict[str, int]:
        """Column of every name that a tensor has, in memory or on disk."""
        tensors = enumerate(self.contents.tensors)
        return {name: column for column, one in tensors for name in (one.name, *one.stored)}

    @cached_property
    def learner(self) -> Learner:
        """Trained network."""
        groups = int(self.groups.max()) + 1
        with torch.device("cpu"):  # also inside of mergekit's own `with torch.device(…)`
            network = Learner(self.contents.learner, len(self.coefficients), groups)
        network.load_state_dict(self.learner_state)
        return network.eval().requires_grad_(False)

    def save(self, path: str | os.PathLike) -> None:
        """Write the file whole or not at all."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        tensors |= {f"learner.{name}": tensor for name, tensor in self.learner_state.items()}
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        save_tensors(path, tensors, {**FORMAT, "contents": self.contents.model_dump_json()})

    @classmethod
    def load(cls, path: str | os.PathLike) -> CoefficientFile:
        """Read a file; see `load_coefficients`, which keeps it."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileError(
                f"there is no coefficient file {path}; `mergekit-ace train` writes one, called "
                "coefficients.safetensors, into its output folder"
            )
        try:
            check_content(path)
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if {name: metadata.get(name) for name in FORMAT} == FORMAT:
                contents = Contents.model_validate_json(metadata["contents"])
                own = {name: tensors[name] for name in _TENSORS}
                prefix = "learner."
                found = {name: t for name, t in tensors.items() if name.startswith(prefix)}
                state = {name.removeprefix(prefix): t for name, t in found.items()}
                return cls(contents, learner_state=state, **own)
        except (FileError, SafetensorError, KeyError, ValueError) as error:
            raise FileError(
                f"the coefficient file {path} is damaged ({type(error).__name__}: {error}); copy "
                "it again, or train again"
            ) from error
        raise FileError(
            f"{path} is not one of coefficients of format version {FORMAT['version']}, but format: "
            f"{metadata.get('format')}, version: {metadata.get('version')}; give the "
            "coefficients.safetensors that `mergekit-ace train` wrote, or train again"
        )


load_coefficients = read_once(CoefficientFile.load)
