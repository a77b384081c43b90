# SPDX-License-Identifier: Apache-2.0
"""What was measured of one tensor, looked up in the statistics that a config names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mergekit_ace.algebra.measured import MeasuredCovariance, MeasuredInputs, packed_size
from mergekit_ace.files.statistics import Measure, find_expert, load_statistics
from mergekit_ace.methods.base import describe
from mergekit_ace.methods.parameters import TensorSettings
from mergekit_ace.naming import ConfigError


def required_lookup(method: str, settings: TensorSettings, kind: Measure) -> MeasuredLookup:
    """Look up what a method cannot do without, under `statistics:` of the config.

    Raises:
        ValueError: the config names no statistics, or they lack something, see `MeasuredLookup`.
    """
    path = settings.parameters["statistics"]
    if path is None:
        raise ValueError(
            f"{method}: there are no statistics; run `mergekit-ace statistics CONFIG OUT` on "
            "samples of the experts, and add `statistics: OUT/statistics.json` to the parameters"
        )
    return MeasuredLookup(method, settings, path, kind)


class MeasuredLookup:
    """The statistics of a kind of one tensor's experts, once they are known to be there.

    A `ConfigError` says what they lack: the kind, an expert, the tensor, or its shape.
    """

    def __init__(self, method: str, settings: TensorSettings, path: str, kind: Measure):
        self._start = f"{method}: {path}"
        self._settings, self._file = settings, load_statistics(path)
        if kind not in self._file.index.measured:
            raise ConfigError(
                f"{self._start} holds no {kind}; add `measure: [{kind}]` to the config of "
                "`mergekit-ace statistics` and run it again"
            )
        tasks = settings.of_experts("task", None)
        pairs = zip(settings.models, tasks, strict=True)
        self._experts = [self._find_expert(model, task) for model, task in pairs]
        tensor = self._file.tensors.get(settings.name or "")
        if tensor is None:
            raise ConfigError(
                f"{self._start} does not know {describe(settings.name)}; it was measured on "
                f"experts of {self._file.index.base_model}. Measure the models that are merged"
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

    def _find_expert(self, model: str, task: str | None) -> int:
        number = find_expert(self._file.index.experts, model, task)
        if number is None:
            held = ", ".join(f"{e.task} ({e.model})" for e in self._file.index.experts)
            named = model if task is None else f"{model} (task: {task})"
            raise ConfigError(
                f"{self._start} holds nothing of {named}. It holds {held}. If a checkpoint has "
                "moved, give it the name above as `task:` under its parameters"
            )
        return number
