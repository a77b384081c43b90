# SPDX-License-Identifier: Apache-2.0
"""The coefficients of one tensor: found in a coefficient file, or predicted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Literal

import torch
from mergekit.merge_methods.base import TensorGroup
from pydantic import BaseModel
from torch import Tensor

from mergekit_ace.algebra.learner import features, measure_moments
from mergekit_ace.methods.architecture import tensor_names
from mergekit_ace.methods.base import describe
from mergekit_ace.methods.coefficients import (
    CoefficientFile,
    CoefficientFileError,
    load_coefficients,
)
from mergekit_ace.methods.parameters import TensorSettings
from mergekit_ace.naming import relative_depths

# Which method applies coefficients of a basis that is not named after it.
METHODS_OF_BASES = {"task_vector": "statsmerging"}
LISTED = 8  # names in an error before it says how many more there are


def component_coefficients(method: str, options: BaseModel, tensor: TensorSettings) -> list[float]:
    """Look up the coefficients of a merge by components.

    Args:
        method: `ace` or `ace_relative`.
        options: the parameters of the tensor as options of the algebra.
        tensor: whose coefficients are wanted.

    Raises:
        CoefficientFileError: the file was learned for another merge, or lacks something.
    """
    path = tensor.parameters["coefficients"]
    source = FileCoefficients(path, method=method)
    source.check_parameters(options)
    known, given = source.file.contents.experts, tensor.experts
    if len(known) != len(given):
        raise CoefficientFileError(
            f"{method}: the coefficients in {path} were learned for {len(known)} experts together, "
            f"and there are {len(given)}; what one expert adds depends on all of them, so merge "
            "the same ones"
        )
    layout = tensor.parameters["layout"]
    if layout != "auto":
        raise CoefficientFileError(
            f"{method}: the coefficients in {path} were learned for layout: auto, not for {layout}"
        )
    return source.find(tensor)


class FileCoefficients:
    """Coefficients as the trainer left them.

    Args:
        path: of the file.
        method: the merge method that asks.

    Raises:
        CoefficientFileError: they are coefficients of another basis.
    """

    def __init__(self, path: str, *, method: str = "statsmerging"):
        self.path = path
        self.file = load_coefficients(path)
        self.method = method
        basis = self.file.contents.basis
        own = METHODS_OF_BASES.get(basis, basis)
        if own != method:
            what = "task vectors" if own == "statsmerging" else f"components of {basis}"
            raise CoefficientFileError(
                f"{method}: the coefficients in {path} were learned for {what}; write "
                f"merge_method: {own}, or train with another `basis`"
            )

    def check_parameters(self, options: BaseModel) -> None:
        """Raise unless the components are those that the coefficients were learned for.

        Raises:
            CoefficientFileError: with the parameters that differ.
        """
        learned = self.file.contents.parameters
        given = options.model_dump(mode="json")
        pairs = [(name, given.get(name), value) for name, value in learned.items()]
        odd = [f"{name}: {own} instead of {value}" for name, own, value in pairs if own != value]
        if odd:
            raise CoefficientFileError(
                f"{self.method}: the coefficients in {self.path} were learned for other "
                f"components: {', '.join(odd)}. Give these parameters as merge.yml has them, or "
                "train again"
            )

    def find(
        self, tensor: TensorSettings, *, missing: Literal["error", "mean"] = "error"
    ) -> list[float]:
        """Return λ_k of the experts of a tensor, and of the refinement where it has one.

        All 0 for a tensor that takes no part.

        Raises:
            CoefficientFileError: an expert or the tensor is not in the file.
        """
        rows = self._rows(tensor.models, tensor.of_experts("task", None))
        rows += range(len(self.file.contents.experts), self.file.contents.rows)
        name = tensor.name
        if name in self.file.frozen:
            return [0.0] * len(rows)
        column = self.file.columns.get(name or "")
        if column is not None:
            return self.file.coefficients[rows, column].tolist()
        if missing == "mean":
            return [1 / len(rows)] * len(rows)
        raise CoefficientFileError(self._unknown_tensors(name, tensor.base))

    def _rows(self, models: Sequence[str], tasks: Sequence[str | None]) -> list[int]:
        rows = [self.file.row(model, task) for model, task in zip(models, tasks, strict=True)]
        absent = [
            f"{model} (task: {task})" if task is not None else model
            for model, task, row in zip(models, tasks, rows, strict=True)
            if row is None
        ]
        if absent:
            held = "\n".join(f"    {e.task} ({e.model})" for e in self.file.contents.experts)
            raise CoefficientFileError(
                f"{self.method}: {self.path} has no coefficients for {', '.join(absent)}. "
                f"It holds\n{held}\nIf a checkpoint has moved, give it the name above as `task:` "
                "under its parameters."
            )
        found = [row for row in rows if row is not None]
        if len(set(found)) != len(found):
            raise CoefficientFileError(
                f"{self.method}: two experts have the same row of the coefficient file; give each "
                "a `task:` of its own"
            )
        return found

    def _unknown_tensors(self, name: str | None, base: Hashable) -> str:
        if name is None:
            return f"{self.method}: a tensor without a name is in no coefficient file"
        known = self.file.columns.keys() | self.file.frozen
        unknown = sorted({name, *(tensor_names(base) or ())} - known)
        held = [tensor.name for tensor in self.file.contents.tensors]
        text = (
            f"{self.method}: {self.path} has no coefficients for {_some(unknown)}. It holds those "
            f"of {_some(held)}, trained on {self.file.contents.base_model}."
        )
        if self.file.contents.basis not in METHODS_OF_BASES:  # components fit one merge only
            return text
        return f"{text} `missing: mean` merges such tensors by the mean of the task vectors."


def load_learner(path: str) -> CoefficientFile:
    """Load a file whose network predicts coefficients for any experts.

    Raises:
        CoefficientFileError: the learner is tied to the experts or tensors of its training.
    """
    file = load_coefficients(path)
    contents, kind = file.contents, file.contents.learner.input
    if contents.basis != "task_vector":
        raise CoefficientFileError(
            f"statsmerging: the learner in {path} predicts coefficients of what {contents.basis} "
            "makes of task vectors, not of these"
        )
    if kind != "shared" or contents.granularity != "tensor":
        raise CoefficientFileError(
            f"statsmerging: the learner in {path} has input: {kind} and granularity: "
            f"{contents.granularity}; only one with input: shared, trained per tensor, can predict "
            "coefficients for other experts. Use `coefficients: PATH` for the experts it was "
            "trained on."
        )
    return file


def predict_coefficients(path: str, group: TensorGroup) -> list[float]:
    """Return λ_k of the experts of a tensor, from the statistics of their weights."""
    file, name = load_learner(path), group.metadata.name
    assert group.base is not None
    if name in file.frozen:
        return [0.0] * len(group.non_base)
    config, rows = file.contents.learner, []
    for expert in group.non_base:
        weights = _described(expert.tensor, group.base.tensor, config.statistics_of)
        rows.append(features(measure_moments(weights, config.rank), config.statistics, config.rank))
    statistics = torch.tensor(rows, dtype=torch.float64, device="cpu")[:, None]
    depth = torch.tensor([_depth(group.base.id, name)], device="cpu")
    return file.learner(statistics, depth)[:, 0].tolist()


def _described(expert: Tensor, base: Tensor, what: str) -> Tensor:
    """Return what the statistics describe: the weights, or the task vector."""
    dtype = torch.promote_types(torch.float32, expert.dtype)
    return expert.to(dtype) if what == "weights" else expert.to(dtype) - base.to(dtype)


def _depth(base: Hashable, name: str | None) -> float:
    """Return the relative depth of a tensor; the middle for one without a name."""
    if name is None:
        return 0.5
    depth = _depths(base).get(name)
    return relative_depths([name])[name] if depth is None else depth


@lru_cache(maxsize=8)
def _depths(base: Hashable) -> dict[str, float]:
    return relative_depths(tensor_names(base) or ())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:LISTED])
    more = len(names) - LISTED
    return f"{shown} and {more} more" if more > 0 else shown or describe(None)
