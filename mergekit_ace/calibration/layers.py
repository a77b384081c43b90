# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a merge, solved so that the merge follows its teachers on samples.

Teachers and the merge read the same samples, each in a stream of its own, one decoder layer after
the other. Every linear layer becomes the minimiser of

    Σ_t w_t ‖W X_tᵀ − Y_tᵀ‖² / n_t + λ s̄ ‖W − W_m‖²,

X_t (n_t, i) being its inputs in the merge as calibrated so far, W_m (o, i) the layer as merged, and
s̄ the mean eigenvalue of C = Σ_t w_t X_tᵀX_t / n_t:

    W = W_m + (Σ_t w_t E_tᵀX_t / n_t) (C + λ s̄ I)⁻¹,  E_t = Y_t − X_t W_mᵀ.

For a layer that reads the residual stream, Y_t (n_t, o) is what the teacher's layer gives in the
teacher's stream. For one that writes to it, Y_t brings the merge's stream back to the teacher's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from mergekit_ace.training.state import TrainingError

RIDGE = 1.0
# Linear layers with the same input, in the order of the forward pass.
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
WRITERS = ("self_attn.o_proj", "mlp.down_proj")  # to the residual stream
TABLE = "model.embed_tokens.weight"
Weights = Mapping[str, Tensor]
Rotary: TypeAlias = tuple[Tensor, Tensor]
_PROBE = 16  # tokens with which the architecture is checked
_CHUNK = 4096  # rows that are multiplied in float32 before they are added in float64


def summed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ right, (a, b), in float64, of (n, a) and (n, b)."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for one, other in zip(left.split(_CHUNK), right.split(_CHUNK), strict=True):
        total += one.float().mT @ other.float()
    return total


def ridge_factor(gram: Tensor, ridge: float) -> Tensor:
    """Return the Cholesky factor of C + λ s̄ I, (i, i), for all linear layers with the same inputs.

    Args:
        gram: C, (i, i), float64.
        ridge: λ, > 0.
    """
    ridged = gram.clone()
    # Inputs that are all zero leave nothing to invert; any positive number then keeps the start.
    ridged.diagonal().add_(ridge * gram.diagonal().mean().clamp_min(1e-30))
    return torch.linalg.cholesky(ridged)


def solve_from(start: Tensor, gram: Tensor, cross: Tensor, factor: Tensor) -> Tensor:
    """Return the minimiser W of the module's docstring, (o, i), in float64.

    Args:
        start: W_m, (o, i).
        gram: C, (i, i).
        cross: Σ_t w_t Y_tᵀX_t / n_t, (o, i).
        factor: from `ridge_factor`.
    """
    start = start.double()
    residual = cross - start @ gram
    return start + torch.cholesky_solve(residual.mT, factor).mT


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

    @property
    def tokens(self) -> int:
        """How many tokens count, n_t."""
        return sum(int(used.sum()) for _, used in self.batches)


@dataclass
class _Streams:
    """The residual streams of a teacher and of the merge on one batch, (n, length, features).

    Attributes:
        number: of the teacher.
        used: which tokens count, (n, length).
        share: w_t / n_t.
    """

    number: int
    used: Tensor
    share: float
    rotary: Rotary
    own: Tensor
    merged: Tensor

    def steps(
        self, own_layer: nn.Module, merged_layer: nn.Module
    ) -> Iterator[tuple[DecoderStep, DecoderStep, Tensor]]:
        """Run a decoder layer of both; go on behind it at the end.

        Yields:
            The steps of the merge and of its teacher, and the teacher's stream behind the latter.
        """
        own_run = decoder_steps(own_layer, self.own, self.rotary)
        merged_run = decoder_steps(merged_layer, self.merged, self.rotary)
        own = self._advance(own_run)
        for _ in GROUPS:
            behind = self._advance(own_run)
            yield self._advance(merged_run), own, behind.stream
            own = behind
        self.own, self.merged = own.stream, self._advance(merged_run).stream

    def _advance(self, run: Iterator[DecoderStep]) -> DecoderStep:
        """Go on to the next step; a GPU takes less time for products in bfloat16."""
        device = self.used.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return next(run)


class Calibration:
    """The way from a merge to what its teachers do, with one decoder layer in memory at a time.

    Args:
        model: the architecture; its weights are not looked at.
        ridge: λ > 0, in mean eigenvalues of the inputs' covariance.
    """

    def __init__(self, model: nn.Module, device: torch.device, ridge: float = RIDGE):
        self.model, self.device, self.ridge = model, device, ridge
        self._rotary = copy.deepcopy(model.model.rotary_emb).to(device)

    @torch.no_grad()
    def check(self, weights: Weights) -> None:
        """Run every layer of a model on a few embeddings, as a whole and in steps.

        Raises:
            TrainingError: the layers are not built as Llama's are.
        """
        hidden = weights[TABLE][None, :_PROBE].float().to(self.device)
        for place in range(len(self.model.model.layers)):
            if not self._runs_in_steps(self._load(place, weights), hidden):
                raise TrainingError(
                    f"model.layers.{place} of {type(self.model).__name__} does not work as a "
                    "decoder layer of Llama does, so it cannot be calibrated; Llama, Mistral and "
                    "Qwen can"
                )

    def _runs_in_steps(self, layer: nn.Module, hidden: Tensor) -> bool:
        """Return whether `decoder_steps` does what the layer does, and no token sees later ones.

        Some implementations of attention are only causal with a mask, which they get none here.
        """
        first = hidden[:, : hidden.shape[1] // 2]
        try:
            rotary = self._positions(hidden)
            *_, last = decoder_steps(layer, hidden, rotary)
            *_, earlier = decoder_steps(layer, first, self._positions(first))
            whole = layer(hidden, position_embeddings=rotary, attention_mask=None)
        except (AttributeError, TypeError, ValueError, RuntimeError):  # modules of other names
            return False
        whole = whole[0] if isinstance(whole, tuple) else whole
        later = last.stream[:, : first.shape[1]] - earlier.stream
        apart = max((whole - last.stream).norm(), later.norm())
        return bool(apart <= 1e-2 * (whole - hidden).norm())

    @torch.no_grad()
    def layers(
        self, start: Weights, teachers: Sequence[SampleTeacher]
    ) -> Iterator[dict[str, Tensor]]:
        """Calibrate one decoder layer after the other; yield the new weights of each, in float32.

        Args:
            start: weights of the merge.
            teachers: experts, and whoever says what should stay.
        """
        streams = [s for n, t in enumerate(teachers) for s in self._open(start, n, t)]
        names = [name for group in GROUPS for name in group]
        for place in range(len(self.model.model.layers)):
            merge = self._load(place, start)
            experts = [self._load(place, teacher.weights) for teacher in teachers]
            runs = [stream.steps(experts[stream.number], merge) for stream in streams]
            for group in GROUPS:
                steps = zip(streams, map(next, runs), strict=True)
                self._solve(group, merge, experts, steps)
            for run in runs:
                next(run, None)  # to the streams behind the layer
            weights = {name: merge.get_submodule(name).weight.cpu() for name in names}
            yield {f"model.layers.{place}.{name}.weight": weights[name] for name in names}

    def _open(self, start: Weights, number: int, teacher: SampleTeacher) -> Iterator[_Streams]:
        """Yield the streams of all batches of a teacher, at the embeddings."""
        share = teacher.weight / teacher.tokens
        for ids, used in teacher.batches:
            own, merged = (self._embed(weights, ids) for weights in (teacher.weights, start))
            used = used.to(self.device)
            yield _Streams(number, used, share, self._positions(own), own, merged)

    def _embed(self, weights: Weights, ids: Tensor) -> Tensor:
        rows, places = ids.unique(return_inverse=True)
        return embedding(places, weights[TABLE][rows].float()).to(self.device)

    def _positions(self, hidden: Tensor) -> Rotary:
        """Return cosines and sines of the positions of tokens, (n, length, features)."""
        return self._rotary(hidden, torch.arange(hidden.shape[1], device=self.device)[None])

    def _load(self, place: int, weights: Weights) -> nn.Module:
        """Return a decoder layer of a model, in float32."""
        skeleton = self.model.model.layers[place]
        layer = copy.deepcopy(skeleton).to_empty(device=self.device).float().eval()
        prefix = f"model.layers.{place}."
        layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
        return layer

    def _solve(
        self, group: tuple[str, ...], merge: nn.Module, experts: Sequence[nn.Module],
        steps: Iterable[tuple[_Streams, tuple[DecoderStep, DecoderStep, Tensor]]],
    ) -> None:  # fmt: skip
        """Replace the weights of a group in the merge's layer.

        Args:
            experts: the same layer of every teacher.
            steps: of every batch.
        """
        writer = group[0] if group[0] in WRITERS else None
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        gram, written, read = zero, zero, [zero] * len(experts)
        for streams, (merged, own, behind) in steps:
            used, share, number = streams.used, streams.share, streams.number
            inputs = merged.inputs[used]
            gram = gram + share * summed_product(inputs, inputs)
            if writer:
                wanted = (behind - merged.stream)[used]
                bias = merge.get_submodule(writer).bias
                wanted = wanted if bias is None else wanted - bias
                written = written + share * summed_product(wanted, inputs)
            else:
                product = summed_product(own.inputs[used], inputs)
                read[number] = read[number] + share * product
        factor = ridge_factor(gram, self.ridge)
        for name in group:
            cross = written
            if not writer:
                # Y_t = X W_tᵀ, so that W_t comes out of the sum; biases stay those of the merge.
                weights = (layer.get_submodule(name).weight.double() for layer in experts)
                cross = sum(own @ both for own, both in zip(weights, read, strict=True))
            weight = merge.get_submodule(name).weight
            weight.copy_(solve_from(weight, gram, cross, factor))
