# SPDX-License-Identifier: Apache-2.0
"""Statistics as `mergekit-ace statistics` would have written them, of tensors made up by tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from mergekit_ace.algebra.ridge import MeasuredCovariance, pack
from mergekit_ace.files.saving import save_tensors
from mergekit_ace.files.statistics import (
    INDEX_FILE,
    MeasuredExpert,
    MeasuredTensor,
    Statistics,
    StatisticsIndex,
    load_statistics,
)
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.training.statistics import StatisticsConfig, measure_statistics

Kind = Literal["covariance", "fisher"]


def random_covariance(rng: torch.Generator, columns: int, rank: int | None = None) -> Tensor:
    """X_tᵀX_t/n_t of inputs that differ in size."""
    rows = torch.randn(rank or 2 * columns, columns, generator=rng)
    rows *= torch.rand(columns, generator=rng) + 0.1
    return rows.T @ rows / len(rows)


def in_memory(covariances: Iterable[Tensor | None]) -> tuple[MeasuredCovariance | None, ...]:
    """Covariances as they come from such files; None for experts without one."""
    return tuple(
        None if c is None else MeasuredCovariance(pack(c.float()), len(c)) for c in covariances
    )


def write_statistics(
    folder: Path,
    measured: dict[Kind, dict[str, list[Tensor]]],
    models: list[str],
    others: tuple[str, ...] = (),
) -> str:
    """Write what was measured, by kind and name of a tensor: a list over the experts.

    The `others` are names of tensors that are known, but of which nothing was measured.
    """
    folder.mkdir(exist_ok=True)
    experts = []
    for number, model in enumerate(models):
        tensors = {
            f"{kind}/{name}": pack(parts[number]) if kind == "covariance" else parts[number].clone()
            for kind, own in measured.items()
            for name, parts in own.items()
        }
        save_tensors(folder / f"{number}.safetensors", tensors)
        experts.append(
            MeasuredExpert(
                task=f"task{number}", model=model, samples=1, tokens=1,
                files=(f"{number}.safetensors",),
            )
        )  # fmt: skip
    names = dict.fromkeys([*others, *(name for own in measured.values() for name in own)])
    kinds = ["fisher"] * ("fisher" in measured) + ["covariances"] * ("covariance" in measured)
    index = StatisticsIndex(
        base_model="base",
        measured=tuple(kinds),
        experts=tuple(experts),
        tensors=tuple(
            MeasuredTensor(
                name=name,
                stored=(name,),
                inputs=name if name in measured.get("covariance", ()) else None,
                fisher=name in measured.get("fisher", ()),
            )
            for name in names
        ),
    )
    index.save(folder)
    return str(folder / INDEX_FILE)


def measured_checkpoints(folder: Path, paths: list[str]) -> str:
    """Write made-up statistics of the experts of a base, whose path is the first one."""
    rng = torch.Generator().manual_seed(0)
    measured: dict[Kind, dict[str, list[Tensor]]] = {"covariance": {}, "fisher": {}}
    for name, tensor in load_file(Path(paths[0]) / "model.safetensors").items():
        count = range(len(paths) - 1)
        measured["fisher"][name] = [torch.rand(tensor.shape, generator=rng) for _ in count]
        if tensor.ndim == 2:
            columns = tensor.shape[1]
            measured["covariance"][name] = [random_covariance(rng, columns) for _ in count]
    return write_statistics(folder, measured, paths[1:])


def measure(config: dict, out: Path, *kinds: str, **options) -> Statistics:
    """Measure the statistics of a family, by default covariances."""
    settings = StatisticsConfig.model_validate({**config, "measure": kinds or ["covariances"]})
    return load_statistics(str(measure_statistics(settings, out, quiet=True, **options)))


def needs_statistics(method: TaskVectorMethod) -> bool:
    """Whether a method merges nothing without what was measured."""
    return "statistics" in {parameter.name for parameter in method.spec.parameters}
