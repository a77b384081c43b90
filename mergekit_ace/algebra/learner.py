# SPDX-License-Identifier: Apache-2.0
"""StatsMergeLearner: from statistics of weights to merging coefficients (Eqs. 1-3, A.3.1).

The statistics are mean, variance, magnitude (Frobenius norm) and the largest singular values of a
tensor: linear weights (o, i) as they are, kernels (o, …) as (o, rest), vectors as one row. What
several tensors have in common (a block, a whole model) is described by the statistics of all their
entries together and by the largest singular values that any of them has, which are those of the
block-diagonal matrix of them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from mergekit_ace.algebra.linalg import leading_directions
from mergekit_ace.algebra.task_vectors import Integer, Number

Statistic = Literal["mean", "variance", "magnitude", "singular_values"]
STATISTICS: tuple[Statistic, ...] = ("mean", "variance", "magnitude", "singular_values")


@dataclass(frozen=True)
class WeightMoments:
    """Moments of a tensor, from which those of several tensors together follow.

    Attributes:
        spread: Σ (x − mean)² over its `count` entries.
        singular: the largest singular values, descending; missing ones are left out.
    """

    count: int = 0
    mean: float = 0.0
    spread: float = 0.0
    singular: tuple[float, ...] = ()

    @property
    def variance(self) -> float:
        """Population variance of the entries."""
        return self.spread / self.count if self.count else 0.0

    @property
    def magnitude(self) -> float:
        """Frobenius norm, from Σ x² = Σ (x − mean)² + n mean²."""
        return math.sqrt(self.spread + self.count * self.mean**2)


def measure_moments(tensor: Tensor, rank: int) -> WeightMoments:
    """Measure moments and `rank` singular values of a tensor; a ValueError where it is not finite.

    Sums are in float64 over blocks, so that no float64 copy exists.
    """
    if tensor.numel() == 0:
        return WeightMoments()
    blocks = tensor.detach().reshape(-1).split(2**20)
    mean = sum(float(block.sum(dtype=torch.float64)) for block in blocks) / tensor.numel()
    spread = sum(float((block.double() - mean).square().sum()) for block in blocks)
    if not (math.isfinite(mean) and math.isfinite(spread)):
        raise ValueError("the tensor contains NaN or Inf")
    return WeightMoments(tensor.numel(), mean, spread, leading_singular_values(tensor, rank))


def leading_singular_values(tensor: Tensor, rank: int) -> tuple[float, ...]:
    """Return the `rank` largest singular values of a tensor as a matrix, or all, descending."""
    matrix = tensor.detach()
    matrix = matrix.reshape(1, -1) if matrix.ndim < 2 else matrix.flatten(start_dim=1)
    rank = min(rank, *matrix.shape)
    return tuple(leading_directions(matrix, rank).values.tolist()) if rank else ()


def combine(parts: Iterable[WeightMoments], rank: int) -> WeightMoments:
    """Combine moments of several tensors (Chan, Golub & LeVeque 1979, pairwise updating)."""
    total = WeightMoments()
    for part in parts:
        if part.count == 0:
            continue
        count, step = total.count + part.count, part.mean - total.mean
        total = WeightMoments(
            count,
            total.mean + step * part.count / count,
            total.spread + part.spread + step**2 * total.count * part.count / count,
            tuple(sorted((*total.singular, *part.singular), reverse=True)[:rank]),
        )
    return total


def feature_names(statistics: Sequence[Statistic], rank: int) -> tuple[str, ...]:
    """Return the names of `features`, in their order: `mean`, …, `singular_value_1`, …"""
    singular = [f"singular_value_{n + 1}" for n in range(rank)]
    parts = (singular if one == "singular_values" else [one] for one in statistics)
    return tuple(name for part in parts for name in part)


def features(moments: WeightMoments, statistics: Sequence[Statistic], rank: int) -> list[float]:
    """Return the chosen statistics as F numbers; missing singular values are 0."""
    known = {name: getattr(moments, name) for name in ("mean", "variance", "magnitude")}
    known |= {f"singular_value_{n}": value for n, value in enumerate(moments.singular, start=1)}
    return [known.get(name, 0.0) for name in feature_names(statistics, rank)]


class LearnerConfig(BaseModel):
    """Settings of the learner: which network, on which statistics.

    What the network sees at once the paper leaves open. ``concatenated``: the statistics of all
    tensors of one expert give all its coefficients (A.3.1). ``shared``: those of one expert and
    tensor, and its relative depth, give one coefficient. ``direct``: there is no network.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Literal["shared", "concatenated", "direct"] = "concatenated"
    layers: Annotated[Integer, Field(ge=1, le=16)] = 2
    hidden: Annotated[Integer, Field(ge=4, le=4096)] = 256
    statistics: tuple[Statistic, ...] = STATISTICS
    rank: Annotated[Integer, Field(ge=1, le=64)] = 3
    statistics_of: Literal["task_vector", "weights"] = "task_vector"
    activation: Literal["softmax", "relu", "identity"] = "identity"
    initial: Number = 0.3

    @model_validator(mode="after")
    def _check(self) -> LearnerConfig:
        if not self.statistics or len(set(self.statistics)) != len(self.statistics):
            raise ValueError(f"statistics must be different ones of {', '.join(STATISTICS)}")
        return self

    def start(self, experts: int) -> float:
        """Return what every coefficient is before training."""
        return 1 / experts if self.activation == "softmax" else self.initial

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the F features."""
        return feature_names(self.statistics, self.rank)


class Standardizer(nn.Module):
    """Signed logarithm, then zero mean and unit variance; the constants are saved with the learner.

    Experts of one base differ by little, and statistics of one kind span decades over the tensors
    of a model; without this the raw numbers barely tell the experts apart.
    The logarithm is sign(x) log(1 + |x| / unit); all constants are (F,).
    """

    unit: Tensor
    centre: Tensor
    width: Tensor

    def __init__(self, features: int):
        super().__init__()
        for name in ("unit", "centre", "width"):
            self.register_buffer(name, torch.ones(features, dtype=torch.float64))

    def fit(self, statistics: Tensor) -> Standardizer:
        """Take the constants from all experts and tensors: (K, L, F), float64."""
        for n, column in enumerate(statistics.flatten(0, 1).unbind(-1)):
            sizes = column.abs()[column != 0]
            self.unit[n] = torch.quantile(sizes, 0.01) if len(sizes) else 1.0
        logarithms = self._logarithm(statistics).flatten(0, 1)
        self.centre.copy_(logarithms.mean(0))
        width = logarithms.std(0, correction=0)
        # A feature that is the same everywhere says nothing: it stays 0 instead of being magnified.
        self.width.copy_(torch.where(width > 1e-9, width, 1.0))
        return self

    def forward(self, statistics: Tensor) -> Tensor:
        """Standardise statistics (…, F) in float64; the result is in float32."""
        return ((self._logarithm(statistics) - self.centre) / self.width).float()

    def _logarithm(self, statistics: Tensor) -> Tensor:
        return statistics.sign() * torch.log1p(statistics.abs() / self.unit)


class LearnerInputs(NamedTuple):
    """Inputs of a learner: statistics (K, L, F) in float64, and relative depths (L,), 0 to 1."""

    statistics: Tensor
    depths: Tensor


class Learner(nn.Module):
    """Network that predicts coefficients (K, L) from statistics (K, L, F).

    Only ``direct`` is tied to K, and it and ``concatenated`` to L.
    """

    def __init__(self, config: LearnerConfig, experts: int, tensors: int):
        super().__init__()
        self.config = config
        self.standardizer = Standardizer(len(config.features))
        if config.input == "direct":
            self.table = nn.Parameter(torch.zeros(experts, tensors))
            return
        inputs, outputs = len(config.features) + 1, 1
        if config.input == "concatenated":
            inputs, outputs = tensors * inputs, tensors
        layers: list[nn.Module] = []
        for _ in range(config.layers - 1):
            layers += [nn.Linear(inputs, config.hidden), nn.GELU()]
            inputs = config.hidden
        last = nn.Linear(inputs, outputs)
        # Training starts at task arithmetic, not at an accident of initialisation.
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.ModuleDict({"body": nn.Sequential(*layers, last)})

    def forward(self, statistics: Tensor, depths: Tensor) -> Tensor:
        """Return the coefficients λ, (K, L) in float32, for `LearnerInputs`."""
        if self.config.input == "direct":
            raw = self.table
        else:
            standard = self.standardizer(statistics)
            depths = depths.to(standard.dtype)[None, :, None].expand(len(standard), -1, 1)
            inputs = torch.cat((standard, 2 * depths - 1), dim=-1)  # (K, L, F + 1)
            shared = self.config.input == "shared"
            body = self.network["body"]
            raw = body(inputs).squeeze(-1) if shared else body(inputs.flatten(1))
        if self.config.activation == "softmax":
            return raw.softmax(dim=0)
        raw = raw + self.config.initial
        return raw.relu() if self.config.activation == "relu" else raw
