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
import timeit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from mergekit_ace.algebra.least_squares import mean_product, ridge_factor, solve_from
from mergekit_ace.training.state import TrainingError

RIDGE = 1.0
# Linears with the same input, in the order of the forward pass.
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
# What these write is added to the residual stream.
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
Weights = Mapping[str, Tensor]
Rotary: TypeAlias = tuple[Tensor, Tensor]


class DecoderStep(NamedTuple):
    """What a group of linear layers reads, (n, length, i), and the residual stream there."""

    inputs: Tensor
    stream: Tensor


def decoder_steps(layer: nn.Module, hidden: Tensor, rotary: Rotary) -> Iterator[DecoderStep]:
    """Run a decoder layer; stop before each of `GROUPS`, whose weights may be replaced meanwhile.

    The last step is the output of the layer.

    Args:
        layer: with norms before attention and MLP, and linear layers of the names in `GROUPS`.
        hidden: its input, (n, length, features).
        rotary: cosines and sines of the positions.
    """
    inputs = layer.input_layernorm(hidden)
    yield DecoderStep(inputs, hidden)
    mixed = _attend(layer.self_attn, inputs, rotary)
    yield DecoderStep(mixed, hidden)
    hidden = hidden + layer.self_attn.o_proj(mixed)
    inputs = layer.post_attention_layernorm(hidden)
    yield DecoderStep(inputs, hidden)
    gated = layer.mlp.act_fn(layer.mlp.gate_proj(inputs)) * layer.mlp.up_proj(inputs)
    yield DecoderStep(gated, hidden)
    hidden = hidden + layer.mlp.down_proj(gated)
    yield DecoderStep(hidden, hidden)


def _attend(attention: nn.Module, inputs: Tensor, rotary: Rotary) -> Tensor:
    """Return what comes before the output projection of a causal attention."""
    seen: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    attention(hidden_states=inputs, position_embeddings=rotary, attention_mask=None)
    hook.remove()
    return seen[0]


@torch.no_grad()
def runs_in_steps(layer: nn.Module, hidden: Tensor, rotary: Rotary) -> bool:
    """Return whether `decoder_steps` computes what the layer does, and no token sees later ones.

    Some implementations of attention are only causal with a mask, which they are not given here.
    """
    half = hidden.shape[1] // 2
    first = hidden[:, :half], (rotary[0][:, :half], rotary[1][:, :half])
    try:
        *_, last = decoder_steps(layer, hidden, rotary)
        *_, earlier = decoder_steps(layer, *first)
        whole = layer(hidden, position_embeddings=rotary, attention_mask=None)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # modules of other names
        return False
    whole = whole[0] if isinstance(whole, tuple) else whole
    apart = (whole - last.stream).norm(), (last.stream[:, :half] - earlier.stream).norm()
    return bool(max(apart) <= 1e-2 * (whole - hidden).norm())


@dataclass(frozen=True)
class SampleTeacher:
    """A model that says what the merge should do on some samples.

    Attributes:
        batches: pairs of tokens (n, length) and of which of them count (n, length).
        weight: w_t, > 0.
    """

    weights: Weights
    batches: Sequence[tuple[Tensor, Tensor]]
    weight: float


@dataclass
class _Streams:
    """The residual streams of a teacher and of the merge on one batch, (n, length, features)."""

    teacher: SampleTeacher
    used: Tensor
    rotary: Rotary
    own: Tensor
    merged: Tensor

    def steps(self, own_layer: nn.Module, merged_layer: nn.Module) -> Iterator[_StepsOfBoth]:
        """Run a decoder layer of both, one step at a time; go on behind it at the end."""
        own_run = decoder_steps(own_layer, self.own, self.rotary)
        merged_run = decoder_steps(merged_layer, self.merged, self.rotary)
        own = self._advance(own_run)
        for _ in GROUPS:
            ahead = self._advance(own_run)
            yield _StepsOfBoth(self._advance(merged_run), own, ahead.stream)
            own = ahead
        self.own, self.merged = own.stream, self._advance(merged_run).stream

    def _advance(self, run: Iterator[DecoderStep]) -> DecoderStep:
        with half_precision(self.used.device):
            return next(run)


class _StepsOfBoth(NamedTuple):
    """The steps of the merge and of its teacher, and the teacher's stream behind the latter."""

    merged: DecoderStep
    own: DecoderStep
    behind: Tensor


@dataclass
class Calibration:
    """A merge on its way to what its teachers do.

    Args:
        model: the architecture; its weights are not looked at.
        start: weights of the merge.
        teachers: experts, and whoever says what should stay.
        ridge: λ > 0, in mean eigenvalues of the inputs' covariance.
    """

    model: nn.Module
    start: Weights
    teachers: Sequence[SampleTeacher]
    device: torch.device
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        self.rotary = copy.deepcopy(self.model.model.rotary_emb).to(self.device)

    @torch.no_grad()
    def layers(self) -> Iterator[dict[str, Tensor]]:
        """Calibrate one decoder layer after the other; yield the new weights of each, in float32.

        Raises:
            TrainingError: the layers are not built as Llama's are.
        """
        streams = [self._open(t, *batch) for t in self.teachers for batch in t.batches]
        for place, skeleton in enumerate(self.model.model.layers):
            prefix = f"model.layers.{place}."
            merge = self._load(skeleton, self.start, prefix)
            if not runs_in_steps(merge, streams[0].merged[:1], streams[0].rotary):
                raise TrainingError(
                    f"{prefix[:-1]} of {type(self.model).__name__} does not work as a decoder "
                    "layer of Llama does, so it cannot be calibrated; Llama, Mistral and Qwen can"
                )
            experts = {id(t): self._load(skeleton, t.weights, prefix) for t in self.teachers}
            runs = [stream.steps(experts[id(stream.teacher)], merge) for stream in streams]
            for group in GROUPS:
                self._solve(group, merge, experts, zip(streams, map(next, runs), strict=True))
            for run in runs:
                next(run, None)
            names = (name for group in GROUPS for name in group)
            yield {f"{prefix}{n}.weight": merge.get_submodule(n).weight.cpu() for n in names}

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

    def _solve(
        self, group: tuple[str, ...], merge: nn.Module, experts: Mapping[int, nn.Module],
        steps: Iterable[tuple[_Streams, _StepsOfBoth]],
    ) -> None:  # fmt: skip
        """Replace the weights of a group in the merge's layer."""
        gram = torch.zeros((), dtype=torch.float64, device=self.device)
        cross, both = dict.fromkeys(group, gram), dict.fromkeys(experts, gram)
        tokens = {id(t): sum(int(used.sum()) for _, used in t.batches) for t in self.teachers}
        for stream, step in steps:
            teacher, used = stream.teacher, stream.used
            share = teacher.weight * int(used.sum()) / tokens[id(teacher)]
            inputs = step.merged.inputs[used]
            gram = gram + share * mean_product(inputs, inputs)
            if group[0] in WRITERS:
                wanted = (step.behind - step.merged.stream)[used]
                bias = merge.get_submodule(group[0]).bias
                wanted = wanted if bias is None else wanted - bias
                cross[group[0]] = cross[group[0]] + share * mean_product(wanted, inputs)
            else:
                own = share * mean_product(step.own.inputs[used], inputs)
                both[id(teacher)] = both[id(teacher)] + own
        factor = ridge_factor(gram, self.ridge)
        for name in group:
            if name not in WRITERS:
                # Y = X_t W_tᵀ, so that W_t comes out of the sum; biases stay those of the merge.
                weights = {t: expert.get_submodule(name).weight for t, expert in experts.items()}
                cross[name] = sum(weights[t].double() @ both[t] for t in weights)
            weight = merge.get_submodule(name).weight
            weight.copy_(solve_from(weight, gram, cross[name], factor))


def half_precision(device: torch.device) -> torch.autocast:
    """Return autocast to bfloat16, where products take less time in it than in float32."""
    enabled = device.type == "cuda" or (device.type == "cpu" and _half_is_faster())
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


@cache
def _half_is_faster() -> bool:
    """Time a product in both: some processors have bfloat16, and are slower in it nonetheless."""
    known = getattr(torch.cpu, "get_capabilities", dict)()  # which older versions of torch lack
    if not (known.get("avx512_bf16", False) or known.get("amx_bf16", False)):
        return False

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        return min(timeit.repeat(lambda: left @ right, number=1, repeat=5))

    return seconds(torch.bfloat16) < seconds(torch.float32)
