# SPDX-License-Identifier: Apache-2.0
"""The coefficient file: what the trainer found, for a merge method to apply.

One safetensors file. Its tensors are `coefficients` (K, L), `statistics` (K, L, F), `depths` (L,),
`groups` (L,) and the learner's weights as `learner.…`; everything else is one JSON text in the
metadata. Nothing is unpickled, and whatever does not fit is refused with the reason.
"""

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
from mergekit_ace.files.headers import DamagedFileError, check_content
from mergekit_ace.files.saving import read_once, save_tensors, with_prefix
from mergekit_ace.files.statistics import Expert, MergedTensor, find_expert

FORMAT = "mergekit-ace coefficients"
VERSION = "1"
Granularity = Literal["tensor", "kind", "block", "task"]
Basis = Literal["task_vector", "ace", "ace_relative"]
_LEARNER = "learner."


class CoefficientFileError(ValueError):
    """Coefficient file that cannot be used; the message says why and what to do."""


class Contents(BaseModel):
    """Contents of the file beside tensors.

    Attributes:
        base_model: mergekit's reference, as text.
        experts: K of them, in the order of the rows.
        tensors: L of them, in the order of the columns, input first.
        frozen: tensors on disk that take no part: the merge has the base's.
        granularity: what one coefficient was learned for.
        basis: what is combined: task vectors (by `statsmerging`), or the components of the experts
            in a merge by `ace`, whose refinement is one more row, or by `ace_relative`.
        parameters: of the merge method that the components are of, where they are.
        config: of the training, as it was resolved.
        scores: of the comparison at its end.
        package: version of this package.
    """

    model_config = ConfigDict(extra="forbid")

    base_model: str
    experts: tuple[Expert, ...]
    tensors: tuple[MergedTensor, ...]
    frozen: tuple[str, ...] = ()
    granularity: Granularity = "tensor"
    basis: Basis = "task_vector"
    parameters: dict[str, Any] = {}
    learner: LearnerConfig
    config: dict[str, Any] = {}
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
        contents: names, configuration, scores.
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
        expected = [shape, (*shape, len(self.contents.learner.features)), shape[1:], shape[1:]]
        tensors = (self.coefficients, self.statistics, self.depths, self.groups)
        found = [tuple(tensor.shape) for tensor in tensors]
        if found != expected:
            raise ValueError(f"tensors have shapes {found}, expected {expected}")
        if not self.coefficients.isfinite().all():
            raise ValueError("there are coefficients that are NaN or Inf")
        tasks = [expert.task for expert in self.contents.experts]
        if len(set(tasks)) != len(tasks):
            raise ValueError(f"experts share a task name: {tasks}")

    @cached_property
    def columns(self) -> dict[str, int]:
        """Column of every name that a tensor has, in memory or on disk."""
        columns = {}
        for column, tensor in enumerate(self.contents.tensors):
            columns |= dict.fromkeys((tensor.name, *tensor.stored), column)
        return columns

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Names on disk of the tensors that keep the base's values."""
        return frozenset(self.contents.frozen)

    @cached_property
    def learner(self) -> Learner:
        """Trained network."""
        groups = int(self.groups.max()) + 1
        with torch.device("cpu"):  # also inside of mergekit's own `with torch.device(…)`
            network = Learner(self.contents.learner, len(self.coefficients), groups)
        network.load_state_dict(self.learner_state)
        return network.eval().requires_grad_(False)

    def row(self, model: str, task: str | None = None) -> int | None:
        """Return the row of an expert, see `find_expert`."""
        return find_expert(self.contents.experts, model, task)

    def save(self, path: str | os.PathLike) -> None:
        """Write the file whole or not at all."""
        tensors = {
            "coefficients": self.coefficients.float().contiguous(),
            "statistics": self.statistics.double().contiguous(),
            "depths": self.depths.float().contiguous(),
            "groups": self.groups.contiguous(),
        }
        for name, tensor in self.learner_state.items():
            tensors[_LEARNER + name] = tensor.detach().cpu().contiguous().clone()
        contents = self.contents.model_dump_json()
        save_tensors(path, tensors, {"format": FORMAT, "version": VERSION, "contents": contents})

    @classmethod
    def load(cls, path: str | os.PathLike) -> CoefficientFile:
        """Read a file; see `load_coefficients`, which keeps it.

        Raises:
            CoefficientFileError: it is missing, damaged, or something else.
        """
        path = os.path.expanduser(os.fspath(path))
        if not os.path.isfile(path):
            raise CoefficientFileError(
                f"there is no coefficient file {path}; `mergekit-ace train` writes one, called "
                "coefficients.safetensors, into its output folder"
            )
        try:
            check_content(Path(path))
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except DamagedFileError as error:
            raise CoefficientFileError(f"the coefficient file {error}") from error
        except SafetensorError as error:
            raise _damaged(path, error) from error
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            raise CoefficientFileError(
                f"{path} is not one of coefficients of format version {VERSION}, but format: "
                f"{metadata.get('format')}, version: {metadata.get('version')}; give the "
                "coefficients.safetensors that `mergekit-ace train` wrote, or train again"
            )
        try:
            contents = Contents.model_validate_json(metadata["contents"])
            own = {
                name: tensors[name] for name in ("coefficients", "statistics", "depths", "groups")
            }
            return cls(contents, learner_state=with_prefix(tensors, _LEARNER), **own)
        except (KeyError, ValueError) as error:
            raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> CoefficientFileError:
    return CoefficientFileError(
        f"the coefficient file {path} is damaged ({type(error).__name__}: {error}); copy it again, "
        "or train again"
    )


load_coefficients = read_once(CoefficientFile.load)
