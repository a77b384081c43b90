# SPDX-License-Identifier: Apache-2.0
"""StatsMergeLearner: from statistics of weights to merging coefficients (Eqs. 1-3, A.3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from mergekit_ace.algebra.linalg import leading_directions
from mergekit_ace.algebra.task_vectors import Integer, Number

Statistic = Literal["mean", "variance", "magnitude", "singular_values"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)


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


def measure_moments(tensor: Tensor, rank: int) -> WeightMoments:
    """Measure moments and the `rank` largest singular values of a tensor, in float64 by blocks.

    Linear weights (o, i) are matrices as they are, kernels (o, …) as (o, rest), vectors as one row.
    A ValueError says that the tensor is not finite.
    """
    if tensor.numel() == 0:
        return WeightMoments()
    tensor = tensor.detach()
    blocks = tensor.reshape(-1).split(2**20)
    mean = sum(float(block.sum(dtype=torch.float64)) for block in blocks) / tensor.numel()
    spread = sum(float((block.double() - mean).square().sum()) for block in blocks)
    if not (math.isfinite(mean) and math.isfinite(spread)):
        raise ValueError("the tensor contains NaN or Inf")
    matrix = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(start_dim=1)
    rank = min(rank, *matrix.shape)
    singular = tuple(leading_directions(matrix, rank)[1].tolist()) if rank else ()
    return WeightMoments(tensor.numel(), mean, spread, singular)


def combine(parts: Iterable[WeightMoments], rank: int) -> WeightMoments:
    """Combine moments of several tensors (Chan, Golub & LeVeque 1979, pairwise updating).

    Singular values are those of the block-diagonal matrix of all tensors.
    """
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


def features(moments: WeightMoments, statistics: Sequence[Statistic], rank: int) -> list[float]:
    """Return the chosen statistics as F numbers; missing singular values are 0."""
    known = {
        "mean": [moments.mean],
        "variance": [moments.spread / max(moments.count, 1)],
        "magnitude": [math.sqrt(moments.spread + moments.count * moments.mean**2)],
        "singular_values": [*moments.singular, *[0.0] * rank][:rank],
    }
    return [number for name in statistics for number in known[name]]


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
    def features(self) -> int:
        """The number F of features."""
        return len(features(WeightMoments(), self.statistics, self.rank))


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


class Learner(nn.Module):
    """Network that predicts coefficients (K, L) from statistics (K, L, F).

    Only ``direct`` is tied to K, and it and ``concatenated`` to L.
    """

    def __init__(self, config: LearnerConfig, experts: int, tensors: int):
        super().__init__()
        self.config = config
        self.standardizer = Standardizer(config.features)
        if config.input == "direct":
            self.table = nn.Parameter(torch.zeros(experts, tensors))
            return
        at_once = tensors if config.input == "concatenated" else 1
        inputs, outputs = at_once * (config.features + 1), at_once
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
        """Return coefficients λ, (K, L), in float32.

        Statistics are (K, L, F) in float64, relative depths (L,) from 0 to 1.
        """
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
