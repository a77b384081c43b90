# SPDX-License-Identifier: Apache-2.0
"""Calibrate a merged Llama on samples, one decoder layer after the other, without a gradient.

`mergekit-ace calibrate` does what the best of these settings does. This has the others that were
tried beside it, and bfloat16 on processors that are fast at it. The closed form is that of
`mergekit_ace.algebra.least_squares`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from experts import half_precision
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from mergekit_ace.algebra.least_squares import mean_product, ridge_factor, solve_from
from mergekit_ace.calibration.decoder_steps import (
    GROUPS,
    WRITERS,
    DecoderStep,
    decoder_steps,
)

State = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """What is calibrated, and towards what.

    Attributes:
        ridge: λ, in mean eigenvalues of C.
        targets: Y_t. `outputs` are what the teacher's linear has in the teacher's own forward pass;
            `stream` is the same, plus the difference of the two residual streams where a linear
            writes to them, so that the merge's stream comes back to the teacher's; `weights` is the
            teacher's linear on the merge's inputs, as RegMean++ has it.
        off_diagonal: factor of all but the diagonal of X̃ᵀX̃, for `weights`; RegMean has 0.9.
    """

    ridge: float = 1.0
    targets: Literal["outputs", "stream", "weights"] = "stream"
    off_diagonal: float = 1.0


@dataclass(frozen=True)
class Teacher:
    """A model that says what the merge should do on some samples.

    Attributes:
        weights: of the model.
        ids: tokens of the samples, (n, length).
        used: which of them count, (n, length).
        weight: w_t.
    """

    weights: Mapping[str, Tensor]
    ids: Tensor
    used: Tensor
    weight: float = 1.0


def scale_off_diagonal(gram: Tensor, factor: float) -> Tensor:
    """Return an (i, i) matrix with all but its diagonal multiplied."""
    return factor * gram + (1 - factor) * torch.diag(gram.diagonal())


class Calibration:
    """A merge that is calibrated on the samples of its teachers.

    Args:
        model: of their architecture; what runs is copies of its first decoder layer.
        start: the merge, by name of the tensor.
        teachers: experts, and others.
        settings: of the calibration.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        start: Mapping[str, Tensor],
        teachers: list[Teacher],
        settings: Settings,
    ):
        self.start, self.teachers, self.settings = start, teachers, settings
        self.depth = model.config.num_hidden_layers
        self.merge = copy.deepcopy(model.model.layers[0]).float()
        self.experts = [copy.deepcopy(self.merge) for _ in teachers]
        self.rotary = model.model.rotary_emb

    @torch.no_grad()
    def run(self) -> State:
        """Return the tensors of the merge, the calibrated ones in float32."""
        result = dict(self.start)
        merged = [embed(self.start, teacher.ids) for teacher in self.teachers]
        own = [embed(teacher.weights, teacher.ids) for teacher in self.teachers]
        for place in range(self.depth):
            prefix = f"model.layers.{place}."
            load(self.merge, self.start, prefix)
            for layer, teacher in zip(self.experts, self.teachers, strict=True):
                load(layer, teacher.weights, prefix)
            new, merged, own = self._layer(prefix, merged, own)
            result |= new
        return result

    def _layer(
        self, prefix: str, merged: list[Tensor], own: list[Tensor]
    ) -> tuple[State, list[Tensor], list[Tensor]]:
        """Calibrate one decoder layer; return its new tensors and all streams behind it."""
        new = {}
        runs = [decoder_steps(self.merge, hidden, self._positions(hidden)) for hidden in merged]
        teachers = [
            decoder_steps(layer, hidden, self._positions(hidden))
            for layer, hidden in zip(self.experts, own, strict=True)
        ]
        behind = [advance(run) for run in teachers]
        for group in GROUPS:
            seen = [advance(run) for run in runs]
            theirs, behind = behind, [advance(run) for run in teachers]
            self._solve(group, seen, theirs, behind)
            for name in group:
                new[f"{prefix}{name}.weight"] = self.merge.get_submodule(name).weight.clone()
        merged = [advance(run).stream for run in runs]
        return new, merged, [step.stream for step in behind]

    def _positions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.rotary(hidden, places)

    def _solve(self, group: tuple[str, ...], *steps: list[DecoderStep]) -> None:
        """Replace the linears of a group in the merge's layer; see `_sums`."""
        gram, cross = self._sums(group, *steps)
        factor = ridge_factor(gram, self.settings.ridge)
        for name in group:
            weight = self.merge.get_submodule(name).weight
            weight.copy_(solve_from(weight, gram, cross[name], factor))

    def _sums(
        self,
        names: tuple[str, ...],
        seen: list[DecoderStep],
        theirs: list[DecoderStep],
        behind: list[DecoderStep],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return C, and Σ_t w_t Y_tᵀX̃_t / n_t by linear.

        Args:
            names: of linears that read the same.
            seen: what the merge has there, for every teacher's samples.
            theirs: what the teachers have there.
            behind: what the teachers have at the next group.
        """
        gram, cross = torch.zeros(()), dict.fromkeys(names, torch.zeros(()))
        settings, layers = self.settings, self.experts
        for t, (teacher, ours, own) in enumerate(zip(self.teachers, seen, theirs, strict=True)):
            used = teacher.used
            inputs = ours.inputs[used]
            one = teacher.weight * mean_product(inputs, inputs)
            one = scale_off_diagonal(one, settings.off_diagonal)
            gram = gram + one
            if settings.targets != "weights" and names[0] in WRITERS:
                before = ours.stream if settings.targets == "stream" else own.stream
                wanted = (behind[t].stream - before)[used]
                cross[names[0]] = cross[names[0]] + teacher.weight * mean_product(wanted, inputs)
                continue
            if settings.targets != "weights":  # Y = X_t W_tᵀ, so that W_t comes out of the sum
                one = teacher.weight * mean_product(own.inputs[used], inputs)
            for name in names:
                cross[name] = cross[name] + layers[t].get_submodule(name).weight.double() @ one
        return gram, cross


def advance(run: Iterator[DecoderStep]) -> DecoderStep:
    """Go on to the next group of linears, in half precision where that is fast."""
    with half_precision():
        return next(run)


def embed(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Return what enters the first decoder layer, (n, length, features)."""
    return embedding(ids, weights["model.embed_tokens.weight"].float())


def load(layer: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> None:
    """Put the weights of one decoder layer of a model into a layer."""
    layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
