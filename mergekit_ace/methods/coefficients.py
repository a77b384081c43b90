# SPDX-License-Identifier: Apache-2.0
"""What files know of one tensor: learned coefficients, and statistics measured on samples.

The coefficient file is one of safetensors, with one JSON text in its metadata.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from mergekit.merge_methods.base import TensorGroup
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergekit_ace.algebra.learner import Learner, LearnerConfig, features, measure_moments
from mergekit_ace.algebra.ridge import MeasuredCovariance
from mergekit_ace.files.checkpoints import check_content
from mergekit_ace.files.saving import read_once, save_tensors
from mergekit_ace.files.statistics import (
    Expert,
    Measure,
    MergedTensor,
    find_expert,
    load_statistics,
)
from mergekit_ace.methods.base import TensorSettings, describe, is_finite
from mergekit_ace.methods.storage import stored_layout, tensor_names
from mergekit_ace.naming import ConfigError, FileError, listed, relative_depths

FORMAT = {"format": "mergekit-ace coefficients", "version": "2"}
Granularity = Literal["tensor", "kind", "block", "task"]
Basis = Literal["task_vector", "ace", "ace_plus"]


class Contents(BaseModel):
    """Contents of the file beside tensors.

    Its `basis` is what is combined: task vectors (by `statsmerging`), or the components of the
    experts in a merge by `ace`, whose refinement is one more row, or by `ace_plus`.
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
        learner_state: of the trained network.
    """

    contents: Contents
    coefficients: Tensor
    learner_state: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        expected = (self.contents.rows, len(self.contents.tensors))
        if (found := tuple(self.coefficients.shape)) != expected:
            raise ValueError(f"the coefficients have the shape {found}, expected {expected}")
        if not self.coefficients.isfinite().all():
            raise ValueError("there are coefficients that are NaN or Inf")

    @cached_property
    def columns(self) -> dict[str, int]:
        """Column of every name that a tensor has, in memory or on disk."""
        tensors = enumerate(self.contents.tensors)
        return {name: column for column, one in tensors for name in (one.name, *one.stored)}

    @cached_property
    def learner(self) -> Learner:
        """Trained network, of `input: shared`, which knows no numbers of experts and tensors."""
        with torch.device("cpu"):  # also inside of mergekit's own `with torch.device(…)`
            network = Learner(self.contents.learner, 1, 1)
        network.load_state_dict(self.learner_state)
        return network.eval().requires_grad_(False)

    def save(self, path: str | os.PathLike) -> None:
        """Write the file whole or not at all."""
        tensors = {"coefficients": self.coefficients}
        tensors |= {f"learner.{name}": tensor for name, tensor in self.learner_state.items()}
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        save_tensors(path, tensors, {**FORMAT, "contents": self.contents.model_dump_json()})

    @classmethod
    def load(cls, path: str | os.PathLike) -> CoefficientFile:
        """Read a file; see `load_coefficients`, which keeps it."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileError(
                f"there is no coefficient file {path}; give the coefficients.safetensors that "
                "`mergekit-ace train` wrote"
            )
        try:
            check_content(path)
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if {name: metadata.get(name) for name in FORMAT} == FORMAT:
                contents = Contents.model_validate_json(metadata["contents"])
                coefficients = tensors.pop("coefficients")
                state = {name.removeprefix("learner."): t for name, t in tensors.items()}
                return cls(contents, coefficients, state)
        except (FileError, SafetensorError, KeyError, ValueError) as error:
            raise FileError(
                f"the coefficient file {path} is damaged ({type(error).__name__}: {error}); copy "
                "it again, or train again"
            ) from error
        raise FileError(
            f"{path} is not one of coefficients of format version {FORMAT['version']}, but format: "
            f"{metadata.get('format')}, version: {metadata.get('version')}; train again"
        )


load_coefficients = read_once(CoefficientFile.load)

# Which method applies coefficients of a basis that is not named after it.
METHODS_OF_BASES = {"task_vector": "statsmerging"}


def component_coefficients(method: str, options: BaseModel, tensor: TensorSettings) -> list[float]:
    """Look up the coefficients of a merge by components.

    A `ConfigError` says if the file was learned for another merge or other options.
    """
    path = tensor.parameters["coefficients"]
    contents, coefficients = load_coefficients(path).contents, file_coefficients(method, tensor)
    side = "outputs" if tensor.parameters.get("side") == "outputs" else "inputs"
    more = {"layout": tensor.parameters["layout"], "side": side}
    given = {**options.model_dump(mode="json"), **more}
    learned = {"side": "inputs", **contents.parameters, "layout": "auto"}
    odd = [f"{n}: {given.get(n)} instead of {v}" for n, v in learned.items() if given.get(n) != v]
    start = f"{method}: the coefficients in {path} were learned for"
    if len(contents.experts) != len(tensor.experts):
        raise ConfigError(
            f"{start} {len(contents.experts)} experts together, and there are "
            f"{len(tensor.experts)}; merge the same ones"
        )
    if odd:
        raise ConfigError(f"{start} other components: {', '.join(odd)}; take those of merge.yml")
    return coefficients


def file_coefficients(method: str, tensor: TensorSettings) -> list[float]:
    """Return λ_k of the experts of a tensor, and of the refinement where it has one.

    All are 0 for a tensor that takes no part, and 1/T for one that the file does not know, if
    `missing` is ``mean``. A `ConfigError` says if the file was learned for another method,
    or lacks the tensor or an expert.
    """
    path, name = tensor.parameters["coefficients"], tensor.name or ""
    file = load_coefficients(path)
    contents, basis = file.contents, file.contents.basis
    own = METHODS_OF_BASES.get(basis, basis)
    if own != method:
        what = "task vectors" if own == "statsmerging" else f"components of {basis}"
        raise ConfigError(
            f"{method}: the coefficients in {path} were learned for {what}; write "
            f"merge_method: {own}, or train with another `basis`"
        )
    rows = _find_experts(tensor, contents.experts, f"{method}: {path}")
    rows += range(len(contents.experts), contents.rows)
    if name in contents.frozen:
        return [0.0] * len(rows)
    if name in file.columns:
        return file.coefficients[rows, file.columns[name]].tolist()
    if tensor.parameters.get("missing") == "mean":
        return [1 / len(rows)] * len(rows)
    known = {*file.columns, *contents.frozen}
    unknown = sorted({tensor.name or describe(None), *tensor_names(tensor.base)} - known)
    remedy = "; train again"
    if "missing" in tensor.parameters:  # components fit one merge only
        remedy += ", or set `missing: mean`, which merges them by the mean of the task vectors"
    raise ConfigError(
        f"{method}: {path}, trained on {contents.base_model}, has no coefficients for "
        f"{listed(unknown)}{remedy}"
    )


def _find_experts(tensor: TensorSettings, known: Sequence[Expert], where: str) -> list[int]:
    """Return where the experts of a tensor stand among those that a file knows."""
    found = []
    for model, task in zip(tensor.models, tensor.of_experts("task", None), strict=True):
        number = find_expert(known, model, task)
        if number is None:
            named = model if task is None else f"{model} (task: {task})"
            held = ", ".join(f"{one.task} ({one.model})" for one in known)
            raise ConfigError(
                f"{where} holds nothing of {named}. It holds {held}; name one of them as `task:` "
                "under the parameters of a checkpoint that has moved"
            )
        if number in found:
            raise ConfigError(f"{where}: two experts have the same row; correct a `task:`")
        found.append(number)
    return found


def load_learner(path: str) -> CoefficientFile:
    """Load a file whose network predicts coefficients for any experts, or say why it cannot."""
    file = load_coefficients(path)
    contents, kind = file.contents, file.contents.learner.input
    if (contents.basis, kind, contents.granularity) != ("task_vector", "shared", "tensor"):
        raise ConfigError(
            f"statsmerging: the learner in {path} has basis: {contents.basis}, input: {kind} and "
            f"granularity: {contents.granularity}; to predict coefficients of other experts, train "
            "one with basis: task_vector, input: shared and granularity: tensor"
        )
    return file


def predict_coefficients(path: str, group: TensorGroup) -> list[float]:
    """Return λ_k of the experts of a tensor, from the statistics of their weights."""
    file, name, base = load_learner(path), group.metadata.name, group.base
    assert base is not None
    if name in file.contents.frozen:
        return [0.0] * len(group.non_base)
    config, rows = file.contents.learner, []
    for expert in group.non_base:
        dtype = torch.promote_types(torch.float32, expert.tensor.dtype)
        weights = expert.tensor.to(dtype)
        if config.statistics_of != "weights":
            weights = weights - base.tensor.to(dtype)
        rows.append(features(measure_moments(weights, config.rank), config.statistics, config.rank))
    statistics = torch.tensor(rows, dtype=torch.float64, device="cpu")[:, None]
    depth = 0.5  # the middle, without a name
    if name is not None:
        depth = {**relative_depths([name]), **_depths(base.id)}[name]
    depths = torch.tensor([depth], device="cpu")
    return file.learner(statistics, depths)[:, 0].tolist()


@lru_cache(maxsize=8)
def _depths(base: Hashable) -> dict[str, float]:
    return relative_depths(tensor_names(base))


class MeasuredLookup:
    """The statistics of a kind of one tensor's experts, once they are known to be there.

    A `ConfigError` says what they lack: the kind, an expert, the tensor, or its shape.
    """

    def __init__(self, method: str, settings: TensorSettings, path: str | None, kind: Measure):
        if path is None:
            raise ValueError(
                f"{method}: there are no statistics; run `mergekit-ace statistics CONFIG OUT`, and "
                "add `statistics: OUT/statistics.json` to the parameters"
            )
        self._start = f"{method}: {path}"
        self._settings, self._file = settings, load_statistics(path)
        index = self._file.index
        if kind not in index.measured:
            raise ConfigError(
                f"{self._start} holds no {kind}; add `measure: [{kind}]` to the config of "
                "`mergekit-ace statistics` and run it again"
            )
        self._experts = _find_experts(settings, index.experts, self._start)
        tensor = self._file.tensors.get(settings.name or "")
        if tensor is None:
            raise ConfigError(
                f"{self._start}, measured on experts of {index.base_model}, does not know "
                f"{describe(settings.name)}; measure the models that are merged"
            )
        self._tensor = tensor

    def inputs(self, shape: Sequence[int], mix: float = 1.0) -> list[MeasuredCovariance]:
        """Return every expert's covariance of a matrix, by its stored shape; none of others."""
        layout, name = self._settings.layout, self._tensor.inputs
        if name is None or len(shape) != 2 or layout not in ("matrix", "transposed"):
            return []
        stored = stored_layout("auto", self._settings.base, self._settings.name, 2)
        if (layout, stored) == ("matrix", "transposed"):
            said = f"covariances are of inputs, and {describe(self._settings.name)} is stored as"
            raise ConfigError(f"{self._start}: {said} (in, out); leave out `layout: matrix`")
        columns = shape[1] if layout == "matrix" else shape[0]
        packed = self._read(f"covariance/{name}", (columns * (columns + 1) // 2,))
        return [MeasuredCovariance(one, columns, mix=mix) for one in packed]

    def fisher(self, shape: Sequence[int]) -> list[Tensor] | None:
        """Return the Fisher information of every expert; None of a tensor that has none."""
        return self._read(f"fisher/{self._tensor.name}", shape) if self._tensor.fisher else None

    def _read(self, name: str, shape: Sequence[int]) -> list[Tensor]:
        if any(self._file.shape(number, name) != tuple(shape) for number in self._experts):
            raise ConfigError(
                f"{self._start}: {describe(self._settings.name)} does not have the shape that it "
                "had when this was measured; measure the models that are merged"
            )
        found = [self._file.read(number, name) for number in self._experts]
        if not all(map(is_finite, found)):
            said = f"what was measured of {describe(self._settings.name)} contains NaN or Inf"
            raise ConfigError(f"{self._start}: {said}; run `mergekit-ace statistics` again")
        return found
