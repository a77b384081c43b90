# SPDX-License-Identifier: Apache-2.0
"""What files know of one tensor: learned coefficients, and statistics measured on samples."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch
from mergekit.merge_methods.base import TensorGroup
from pydantic import BaseModel
from torch import Tensor

from mergekit_ace.algebra.learner import features, measure_moments
from mergekit_ace.algebra.ridge import MeasuredCovariance, MeasuredInputs, packed_size
from mergekit_ace.files.statistics import Expert, Measure, find_expert, load_statistics
from mergekit_ace.methods.architecture import tensor_names
from mergekit_ace.methods.base import TensorSettings, describe
from mergekit_ace.methods.coefficients import CoefficientFile, load_coefficients
from mergekit_ace.naming import ConfigError, listed, relative_depths

# Which method applies coefficients of a basis that is not named after it.
METHODS_OF_BASES = {"task_vector": "statsmerging"}


def component_coefficients(method: str, options: BaseModel, tensor: TensorSettings) -> list[float]:
    """Look up the coefficients of a merge by components, by `ace` or `ace_relative`.

    A `ConfigError` says if the file was learned for another merge or other options.
    """
    contents = load_coefficients(tensor.parameters["coefficients"]).contents
    given = {**options.model_dump(mode="json"), "layout": tensor.parameters["layout"]}
    learned = {**contents.parameters, "layout": "auto"}
    odd = [f"{n}: {given.get(n)} instead of {v}" for n, v in learned.items() if given.get(n) != v]
    coefficients = file_coefficients(method, tensor)
    start = f"{method}: the coefficients in {tensor.parameters['coefficients']} were learned for"
    if len(contents.experts) != len(tensor.experts):
        raise ConfigError(
            f"{start} {len(contents.experts)} experts together, and there are "
            f"{len(tensor.experts)}; what one expert adds depends on all of them, so merge the "
            "same ones"
        )
    if odd:
        raise ConfigError(
            f"{start} other components: {', '.join(odd)}. Give these parameters as merge.yml has "
            "them, or train again"
        )
    return coefficients


def file_coefficients(method: str, tensor: TensorSettings) -> list[float]:
    """Return λ_k of the experts of a tensor, and of the refinement where it has one.

    All are 0 for a tensor that takes no part, and 1/T for one that the file does not know, if
    `missing` is ``mean``. A `ConfigError` says if the file was learned for another method,
    or lacks the tensor or an expert.
    """
    path, name = tensor.parameters["coefficients"], tensor.name or ""
    file = load_coefficients(path)
    basis = file.contents.basis
    own = METHODS_OF_BASES.get(basis, basis)
    if own != method:
        what = "task vectors" if own == "statsmerging" else f"components of {basis}"
        raise ConfigError(
            f"{method}: the coefficients in {path} were learned for {what}; write "
            f"merge_method: {own}, or train with another `basis`"
        )
    rows = _find_experts(tensor, file.contents.experts, f"{method}: {path}")
    if len(set(rows)) != len(rows):
        raise ConfigError(
            f"{method}: two experts have the same row of the coefficient file; give each a `task:` "
            "of its own"
        )
    rows += range(len(file.contents.experts), file.contents.rows)
    if name in file.contents.frozen:
        return [0.0] * len(rows)
    if name in file.columns:
        return file.coefficients[rows, file.columns[name]].tolist()
    if tensor.parameters.get("missing") == "mean":
        return [1 / len(rows)] * len(rows)
    known = {*file.columns, *file.contents.frozen}
    unknown = sorted({tensor.name or describe(None), *(tensor_names(tensor.base) or ())} - known)
    held = [one.name for one in file.contents.tensors]
    advice = " `missing: mean` merges such tensors by the mean of the task vectors."
    raise ConfigError(
        f"{method}: {path} has no coefficients for {listed(unknown)}. It holds those of "
        f"{listed(held)}, trained on {file.contents.base_model}."
        + (advice if "missing" in tensor.parameters else "")  # components fit one merge only
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
                f"{where} holds nothing of {named}. It holds {held}. If a checkpoint has moved, "
                "give it the name above as `task:` under its parameters"
            )
        found.append(number)
    return found


def load_learner(path: str) -> CoefficientFile:
    """Load a file whose network predicts coefficients for any experts, or say why it cannot."""
    file = load_coefficients(path)
    contents, kind = file.contents, file.contents.learner.input
    if (contents.basis, kind, contents.granularity) != ("task_vector", "shared", "tensor"):
        raise ConfigError(
            f"statsmerging: the learner in {path} has basis: {contents.basis}, input: {kind} and "
            f"granularity: {contents.granularity}; only one with input: shared, trained on task "
            "vectors per tensor, can predict coefficients for other experts. Use "
            "`coefficients: PATH` for the experts it was trained on."
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
    return relative_depths(tensor_names(base) or ())


class MeasuredLookup:
    """The statistics of a kind of one tensor's experts, once they are known to be there.

    A `ConfigError` says what they lack: the kind, an expert, the tensor, or its shape.
    """

    def __init__(self, method: str, settings: TensorSettings, path: str | None, kind: Measure):
        if path is None:
            raise ValueError(
                f"{method}: there are no statistics; run `mergekit-ace statistics CONFIG OUT` on "
                "samples of the experts, and add `statistics: OUT/statistics.json` to the "
                "parameters"
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
                f"{self._start} does not know {describe(settings.name)}; it was measured on "
                f"experts of {index.base_model}. Measure the models that are merged"
            )
        self._tensor = tensor

    def inputs(self, shape: Sequence[int], mix: float = 1.0) -> MeasuredInputs:
        """Return covariances of a matrix, or counts of a table, of a shape as stored; else none."""
        layout = self._settings.layout
        if len(shape) != 2 or layout not in ("matrix", "transposed", "table"):
            return MeasuredInputs(mix=mix)
        if layout == "table":
            counts = self._read(f"counts/{self._tensor.name}", shape[:1])
            return MeasuredInputs(counts=tuple(counts), mix=mix)
        columns = shape[1] if layout == "matrix" else shape[0]
        packed = self._read(f"covariance/{self._tensor.inputs}", (packed_size(columns),))
        covariances = (p if p is None else MeasuredCovariance(p, columns) for p in packed)
        return MeasuredInputs(covariances=tuple(covariances), mix=mix)

    def fisher(self, shape: Sequence[int]) -> list[Tensor] | None:
        """Return the Fisher information of every expert; None of a tensor that has none."""
        if not self._tensor.fisher:
            return None
        found = self._read(f"fisher/{self._tensor.name}", shape)
        known = [part for part in found if part is not None]
        return known if len(known) == len(found) else None

    def _read(self, name: str, shape: Sequence[int]) -> list[Tensor | None]:
        found = []
        for number in self._experts:
            known = self._file.shape(number, name)
            if known is not None and known != tuple(shape):
                raise ConfigError(
                    f"{self._start}: {describe(self._settings.name)} does not have the shape that "
                    "it had when this was measured; measure the models that are merged, or merge "
                    "without resizing their vocabularies"
                )
            found.append(None if known is None else self._file.read(number, name))
        return found
