# SPDX-License-Identifier: Apache-2.0
"""Merge a family by a row of the table, through mergekit, and examine the result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from evidence.families import Family, Split
from evidence.rows import Row
from mergekit.common import ModelReference
from mergekit.merge_methods import merge_state_dicts
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Score:
    """Shares of right answers, 0 to 1.

    Attributes:
        new: by task of an expert.
        old: mean over what the base knew already; None where there is nothing of that kind.
    """

    new: dict[str, float]
    old: float | None

    @property
    def mean(self) -> float:
        """Over the experts' tasks."""
        return sum(self.new.values()) / len(self.new)

    @property
    def whole(self) -> float:
        """What λ is chosen by: the experts' tasks and what the base knew count alike."""
        return self.mean if self.old is None else (self.mean + self.old) / 2


class Examiner:
    """A family in memory: merges and examines without a detour over the disk."""

    def __init__(self, family: Family):
        self.family = family
        self.model = family.load(family.base)
        self.base: State = {n: t.clone() for n, t in self.model.state_dict().items()}

    @cached_property
    def experts(self) -> dict[str, State]:
        """The experts' tensors that the base has too, by task."""
        loaded = {}
        for task, folder in self.family.experts.items():
            tensors = self.family.load(folder).state_dict()
            loaded[task] = {name: tensors[name] for name in self.base}
        return loaded

    def merge(self, row: Row, parameters: Mapping | None = None) -> tuple[State, float]:
        """The merged tensors, and the seconds that it took."""
        models: dict[ModelReference, State] = {}
        base = None
        if row.with_base:
            base = ModelReference.model_validate(str(self.family.base))
            models[base] = self.base
        for task, folder in self.family.experts.items():
            models[ModelReference.model_validate(str(folder))] = self.experts[task]
        torch.manual_seed(self.family.seed)  # dare_ties drops at random
        start = time.perf_counter()
        chosen = dict(row.parameters if parameters is None else parameters)
        if row.method == "lines" and self.family.layers:
            chosen["layers"] = self.family.layers
        with torch.no_grad():
            merged = merge_state_dicts(models, row.method, base=base, parameters=chosen)
        return merged, time.perf_counter() - start

    def origin(self, row: Row) -> State:
        """What λ = 0 stands for."""
        if row.origin is None:
            return self.base
        return self.merge(row, {**row.parameters, **row.origin})[0]

    @torch.no_grad()
    def put(self, origin: State, merged: State, scale: float) -> None:
        """origin + λ (merged − origin) into the model."""
        for name, tensor in self.model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.lerp(origin[name].double(), merged[name].double(), scale))

    def examine(self, split: Split) -> Score:
        """The model as it is."""
        family = self.family
        new = {task: family.accuracy(self.model, task, split) for task in family.tasks}
        old = [family.accuracy(self.model, task, split) for task in family.old]
        return Score(new, sum(old) / len(old) if old else None)
