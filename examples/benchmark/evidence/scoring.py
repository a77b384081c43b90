# SPDX-License-Identifier: Apache-2.0
"""Merge a family by a row of the table, through mergekit, and examine the result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from evidence.families import Family, Half, Split
from evidence.overlaps import OVERLAPS
from evidence.rows import Row
from evidence.studies import STUDIES, Rule
from mergekit.common import ModelReference
from mergekit.merge_methods import merge_state_dicts
from torch import Tensor

from mergekit_ace.algebra.layouts import as_matrices
from mergekit_ace.algebra.relative import RelativeOptions, merge_tensor_relative
from mergekit_ace.methods.architecture import stored_layout
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.run import run_training

State = dict[str, Tensor]
# What `learn` of a row says about samples: the arguments of `Family.unlabelled`.
SAMPLES = {"samples": None, "rehearsed": 0, "words": None, "validation": 0}


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
        """Mean over the experts' tasks."""
        return sum(self.new.values()) / len(self.new)

    @property
    def whole(self) -> float:
        """Score that λ is chosen by: the experts' tasks and what the base knew count alike."""
        return self.mean if self.old is None else (self.mean + self.old) / 2


class Examiner:
    """A family in memory: merges and examines without a detour over the disk."""

    def __init__(self, family: Family):
        self.family = family
        self.model = family.load(family.base)
        self.base: State = {}
        stored = set()
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in stored:  # a tied head is on disk under its first name only
                stored.add(tensor.data_ptr())
                self.base[name] = tensor.clone()

    @cached_property
    def experts(self) -> dict[str, State]:
        """The experts' tensors that the base has too, by task."""
        loaded = {}
        for task, folder in self.family.experts.items():
            tensors = self.family.load(folder).state_dict()
            loaded[task] = {name: tensors[name] for name in self.base}
        return loaded

    def spread(self) -> float:
        """Return how far the experts' strengths are apart: the largest ‖Δ‖² over the smallest."""
        strengths = [
            sum(float((state[name] - base).square().sum()) for name, base in self.base.items())
            for state in self.experts.values()
        ]
        return max(strengths) / min(strengths)

    def merge(self, row: Row, parameters: Mapping | None = None) -> tuple[State, float]:
        """Return the merged tensors, and the seconds that the merge took."""
        models: dict[ModelReference, State] = {}
        base = None
        if row.with_base:
            base = ModelReference.model_validate(str(self.family.base))
            models[base] = self.base
        for task, folder in self.family.experts.items():
            models[ModelReference.model_validate(str(folder))] = self.experts[task]
        torch.manual_seed(self.family.seed)  # dare_ties drops at random
        start = time.perf_counter()
        if row.study is not None:
            rule = (STUDIES | OVERLAPS)[row.study]
            return self._study(row, rule), time.perf_counter() - start
        chosen = dict(row.parameters if parameters is None else parameters)
        if row.learn is not None:
            chosen["coefficients"] = str(learn(self.family, row))
        if row.method == "lines" and self.family.layers:
            chosen["layers"] = self.family.layers
        with torch.no_grad():
            merged = merge_state_dicts(models, row.method, base=base, parameters=chosen)
        return merged, time.perf_counter() - start

    @torch.no_grad()
    def _study(self, row: Row, rule: Rule) -> State:
        """Merge matrices by a rule of `studies`, and everything else as `ace_relative` does."""
        model = ModelReference.model_validate(str(self.family.base))
        options = RelativeOptions()
        merged = {}
        for name, base in self.base.items():
            experts = [state[name] for state in self.experts.values()]
            layout = stored_layout("auto", model, name, base.ndim, tables=row.tables)
            changed = [expert for expert in experts if not torch.equal(expert, base)]
            if layout in ("mean", "table") or len(changed) < 2:
                merged[name], _ = merge_tensor_relative(base, experts, None, options, layout)
                continue
            (origin,) = as_matrices(base.double(), layout)
            deltas = [as_matrices(e.double(), layout)[0] - origin for e in changed]
            result = rule(deltas)
            merged[name] = (base + (result.mT if layout == "transposed" else result)).to(base.dtype)
        return merged

    def origin(self, row: Row) -> State:
        """Return the tensors that λ = 0 stands for."""
        if row.origin is None:
            return self.base
        return self.merge(row, {**row.parameters, **row.origin})[0]

    @torch.no_grad()
    def put(self, origin: State, merged: State, scale: float) -> None:
        """Write origin + λ (merged − origin) into the model."""
        state = self.model.state_dict()
        for name in self.base:
            tensor = state[name]
            if tensor.is_floating_point():
                tensor.copy_(torch.lerp(origin[name].double(), merged[name].double(), scale))

    def examine(self, split: Split, half: Half | None = None) -> Score:
        """Return the score of the model as it is; by one half of the words, if one is given."""
        family = self.family
        new = {task: family.accuracy(self.model, task, split, half) for task in family.tasks}
        old = [family.accuracy(self.model, task, split, half) for task in family.old]
        return Score(new, sum(old) / len(old) if old else None)


def learn(family: Family, row: Row) -> Path:
    """Return the coefficient file of a row that learns; train it unless it is there.

    Args:
        family: one with `unlabelled` samples.
        row: one with `learn`, what a `train.yml` says beside models and data.
    """
    assert row.learn is not None
    name = f"{family.name}-{family.seed}-{len(family.tasks)}-{row.name}".replace(" ", "-")
    name = name.replace("+", "plus")  # mergekit reads what follows a + as an adapter
    folder = family.folder / "learned" / name
    file = folder / "coefficients.safetensors"
    if not file.exists():
        given = dict(row.learn)
        samples = (given.pop(name, other) for name, other in SAMPLES.items())
        config = family.unlabelled(*samples) | {
            "compare": {"direct": False, "task_arithmetic": []},
            **given,
        }
        config["training"] = {**given["training"], "seed": family.seed}
        if family.steps is not None:
            config["training"]["max_steps"] = family.steps
        run_training(TrainConfig.model_validate(config), folder, quiet=True)
        shutil.rmtree(folder / "state", ignore_errors=True)
    return file
