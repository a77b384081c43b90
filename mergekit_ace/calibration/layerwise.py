# SPDX-License-Identifier: Apache-2.0
"""Calibration: every linear of a merge is solved so that the merge follows its teachers on samples.

Teachers and the merge read the same samples, each in a stream of its own, one decoder layer after
the other. A linear that reads the residual stream is to give what the teacher's gives in the
teacher's stream; one that writes to it is to bring the merge's stream back to the teacher's. Each
is the closed form of `mergekit_ace.algebra.least_squares`, on the inputs that it has in the merge
as calibrated so far.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from mergekit_ace.algebra.least_squares import mean_product, ridge_factor, solve_from
from mergekit_ace.calibration.decoder_steps import (
    GROUPS,
    WRITERS,
    DecoderStep,
    Rotary,
    decoder_steps,
    runs_in_steps,
)

RIDGE = 1.0
# Of the way from the merge to what the layers are solved to: half of it gains nearly as much on
# held-out texts and costs less elsewhere (examples/llm/README.md).
STEP = 0.5
Weights = Mapping[str, Tensor]


class UnknownLayersError(ValueError):
    """The decoder layers of a model are not built as Llama's are."""


@dataclass(frozen=True)
class SampleTeacher:
    """A model that says what the merge should do on some samples.

    Attributes:
        weights: of the model, by name.
        batches: pairs of tokens (n, length) and of which of them count (n, length).
        weight: w_t, > 0.
    """

    weights: Weights
    batches: Sequence[tuple[Tensor, Tensor]]
    weight: float


@dataclass
class _Streams:
    """The residual streams of one batch, (n, length, features), and what is going on in them."""

    teacher: SampleTeacher
    used: Tensor
    rotary: Rotary
    own: Tensor
    merged: Tensor
    own_run: Iterator[DecoderStep] = field(init=False)
    merged_run: Iterator[DecoderStep] = field(init=False)
    behind: DecoderStep = field(init=False)

    def enter(self, own_layer: nn.Module, merged_layer: nn.Module) -> None:
        """Begin a decoder layer."""
        self.own_run = decoder_steps(own_layer, self.own, self.rotary)
        self.merged_run = decoder_steps(merged_layer, self.merged, self.rotary)
        self.behind = self._advance(self.own_run)

    def advance(self) -> tuple[DecoderStep, DecoderStep]:
        """Go on to the next group; return the merge's step and the teacher's."""
        own = self.behind
        self.behind = self._advance(self.own_run)
        return self._advance(self.merged_run), own

    def leave(self) -> None:
        """Finish the decoder layer."""
        self.own, self.merged = self.behind.stream, self._advance(self.merged_run).stream

    def _advance(self, run: Iterator[DecoderStep]) -> DecoderStep:
        with half_precision(self.used.device):
            return next(run)


class Calibration:
    """A merge on its way to what its teachers do.

    Args:
        model: the architecture; its weights are not looked at.
        start: weights of the merge.
        teachers: experts, and whoever says what should stay.
        device: of the work.
        ridge: λ > 0, in mean eigenvalues of the inputs' covariance.
    """

    def __init__(
        self, model: nn.Module, start: Weights, teachers: Sequence[SampleTeacher],
        device: torch.device, ridge: float = RIDGE,
    ):  # fmt: skip
        self.model, self.start, self.teachers, self.device = model, start, teachers, device
        self.ridge = ridge
        self.rotary = copy.deepcopy(model.model.rotary_emb).to(device)

    @torch.no_grad()
    def layers(self) -> Iterator[dict[str, Tensor]]:
        """Calibrate one decoder layer after the other; yield the new weights of each, in float32.

        Raises:
            UnknownLayersError: the layers are not built as Llama's are.
        """
        streams = [self._open(t, *batch) for t in self.teachers for batch in t.batches]
        for place, skeleton in enumerate(self.model.model.layers):
            prefix = f"model.layers.{place}."
            merge = self._load(skeleton, self.start, prefix)
            self._check(merge, streams[0], prefix)
            experts = {id(t): self._load(skeleton, t.weights, prefix) for t in self.teachers}
            for stream in streams:
                stream.enter(experts[id(stream.teacher)], merge)
            new = {}
            for group in GROUPS:
                self._solve(group, merge, experts, streams)
                for name in group:
                    new[f"{prefix}{name}.weight"] = merge.get_submodule(name).weight.cpu()
            for stream in streams:
                stream.leave()
            yield new

    def _open(self, teacher: SampleTeacher, ids: Tensor, used: Tensor) -> _Streams:
        ids, used = ids.to(self.device), used.to(self.device)
        own, merged = (self._embed(weights, ids) for weights in (teacher.weights, self.start))
        rotary = self.rotary(own, torch.arange(ids.shape[1], device=self.device)[None])
        return _Streams(teacher, used, rotary, own, merged)

    def _embed(self, weights: Weights, ids: Tensor) -> Tensor:
        rows, places = ids.cpu().unique(return_inverse=True)
        table = weights["model.embed_tokens.weight"][rows].float().to(self.device)
        return embedding(places.to(self.device), table)

    def _load(self, skeleton: nn.Module, weights: Weights, prefix: str) -> nn.Module:
        """Return a decoder layer of a model, in float32."""
        layer = copy.deepcopy(skeleton).to_empty(device=self.device).float().eval()
        layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
        return layer

    def _check(self, layer: nn.Module, stream: _Streams, prefix: str) -> None:
        """Raise unless the steps of a layer are the layer."""
        if not runs_in_steps(layer, stream.merged[:1], stream.rotary):
            raise UnknownLayersError(
                f"{prefix[:-1]} of {type(self.model).__name__} does not work as a decoder layer of "
                "Llama does, so it cannot be calibrated; Llama, Mistral and Qwen can"
            )

    def _solve(
        self, group: tuple[str, ...], merge: nn.Module, experts: Mapping[int, nn.Module],
        streams: Sequence[_Streams],
    ) -> None:  # fmt: skip
        """Replace the weights of a group in the merge's layer."""
        gram = torch.zeros((), dtype=torch.float64, device=self.device)
        cross, both = dict.fromkeys(group, gram), dict.fromkeys(experts, gram)
        tokens = {id(t): sum(int(used.sum()) for _, used in t.batches) for t in self.teachers}
        for stream in streams:
            teacher, used = stream.teacher, stream.used
            step, own = stream.advance()
            share = teacher.weight * int(used.sum()) / tokens[id(teacher)]
            inputs = step.inputs[used]
            gram = gram + share * mean_product(inputs, inputs)
            if group[0] in WRITERS:
                wanted = (stream.behind.stream - step.stream)[used]
                bias = merge.get_submodule(group[0]).bias
                wanted = wanted if bias is None else wanted - bias
                cross[group[0]] = cross[group[0]] + share * mean_product(wanted, inputs)
                continue
            both[id(teacher)] = both[id(teacher)] + share * mean_product(own.inputs[used], inputs)
        factor = ridge_factor(gram, self.ridge)
        for name in group:
            if name not in WRITERS:
                # Y = X_t W_tᵀ, so that W_t comes out of the sum; biases stay those of the merge.
                weights = {t: expert.get_submodule(name).weight for t, expert in experts.items()}
                cross[name] = sum(weights[t].double() @ both[t] for t in weights)
            weight = merge.get_submodule(name).weight
            weight.copy_(solve_from(weight, gram, cross[name], factor))


def half_precision(device: torch.device) -> torch.autocast:
    """Return autocast to bfloat16, where processors multiply in it: several times as fast there."""
    return torch.autocast(device.type, torch.bfloat16, enabled=_multiplies_bfloat16(device.type))


@cache
def _multiplies_bfloat16(kind: str) -> bool:
    known = getattr(torch.cpu, "get_capabilities", dict)()  # which older versions of torch lack
    fast = known.get("avx512_bf16", False) or known.get("amx_bf16", False)
    return kind == "cuda" or (kind == "cpu" and fast)
