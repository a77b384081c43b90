# SPDX-License-Identifier: Apache-2.0
"""Calibrate a merged Llama on samples, one decoder layer after the other, without a gradient.

Teachers (experts, and models that say what should stay) and the merge read the same samples. Every
linear of the merge is replaced by the minimiser of

    Σ_t w_t ‖W X̃_tᵀ − Y_tᵀ‖² / n_t + λ s̄ ‖W − W_m‖²,

X̃_t (n_t, i) being its inputs in the merge, as calibrated so far, Y_t (n_t, o) what teacher t would
have there, W_m the linear as it was merged, and s̄ the mean eigenvalue of C = Σ_t w_t X̃_tᵀX̃_t / n_t:

    W = W_m + (Σ_t w_t E_tᵀX̃_t / n_t) (C + λ s̄ I)⁻¹,  E_t = Y_t − X̃_t W_mᵀ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from experts import half_precision
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

State = dict[str, Tensor]
# Linears with the same input, in the order of the forward pass; `o_proj` and `down_proj` write to
# the residual stream.
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
CHUNK = 4096  # rows that are multiplied in float32 before they are added in float64


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
        rank: changes stay in the span of so many directions, those in which the rows of the
            teachers' task vectors are strongest; 0 is all.
        linears: parts of the names of what is calibrated; empty is all.
        layers: share of the decoder layers that are calibrated, from the first one to the last.
    """

    ridge: float = 1.0
    targets: Literal["outputs", "stream", "weights"] = "stream"
    off_diagonal: float = 1.0
    rank: int = 0
    linears: tuple[str, ...] = ()
    layers: tuple[float, float] = (0.0, 1.0)


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


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ right / n in float64 for (n, a) and (n, b), multiplied in float32 chunks."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for one, other in zip(left.split(CHUNK), right.split(CHUNK), strict=True):
        total += one.float().mT @ other.float()
    return total / len(left)


def scale_off_diagonal(gram: Tensor, factor: float) -> Tensor:
    """Return an (i, i) matrix with all but its diagonal multiplied."""
    return factor * gram + (1 - factor) * torch.diag(gram.diagonal())


def solve(start: Tensor, gram: Tensor, cross: Tensor, ridge: float, span: Tensor | None) -> Tensor:
    """Return the minimiser W of the module's docstring, (o, i), in float64.

    Args:
        start: W_m, (o, i).
        gram: C, (i, i).
        cross: Σ_t w_t Y_tᵀX̃_t / n_t, (o, i).
        ridge: λ.
        span: (i, r), orthonormal: rows of W − W_m stay in the span of its columns. None is no
            restriction.
    """
    start = start.double()
    residual = cross - start @ gram
    mean = gram.diagonal().mean()
    if span is not None:
        gram, residual = span.mT @ gram @ span, residual @ span
    ridged = gram + ridge * mean * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    change = torch.cholesky_solve(residual.mT, torch.linalg.cholesky(ridged)).mT
    return start + (change if span is None else change @ span.mT)


def strongest_rows(changes: list[Tensor], rank: int) -> Tensor:
    """Return (i, rank), orthonormal: the main directions of the rows of (o, i) matrices.

    Each matrix counts the same, however large it is.
    """
    total = sum(
        (change.mT @ change / change.square().sum().clamp_min(1e-30)).double() for change in changes
    )
    return torch.linalg.eigh(total).eigenvectors[:, -rank:]


class Step(NamedTuple):
    """What a group of linears reads, and the residual stream at that place, both (n, length, i)."""

    inputs: Tensor
    stream: Tensor


def steps(layer: nn.Module, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Iterator[Step]:
    """Run a decoder layer of a Llama; stop before each group of linears, which may be replaced.

    The last step is the layer's output.
    """
    inputs = layer.input_layernorm(hidden)
    yield Step(inputs, hidden)
    context = attend(layer.self_attn, inputs, rotary)
    yield Step(context, hidden)
    hidden = hidden + layer.self_attn.o_proj(context)
    inputs = layer.post_attention_layernorm(hidden)
    yield Step(inputs, hidden)
    gated = layer.mlp.act_fn(layer.mlp.gate_proj(inputs)) * layer.mlp.up_proj(inputs)
    yield Step(gated, hidden)
    hidden = hidden + layer.mlp.down_proj(gated)
    yield Step(hidden, hidden)


def attend(attention: nn.Module, inputs: Tensor, rotary: tuple) -> Tensor:
    """Return what comes before the output projection of a causal attention."""
    seen: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    attention(hidden_states=inputs, position_embeddings=rotary, attention_mask=None)
    hook.remove()
    return seen[0]


class Calibration:
    """A merge that is calibrated on the samples of its teachers.

    Args:
        model: of their architecture; what runs is copies of its first decoder layer.
        start: the merge, by name of the tensor.
        base: what the merge and the experts come from; asked for where changes have a `rank`.
        teachers: experts, and others.
        settings: of the calibration.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        start: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        teachers: list[Teacher],
        settings: Settings,
    ):
        self.start, self.base, self.teachers, self.settings = start, base, teachers, settings
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
        first, last = (share * self.depth for share in self.settings.layers)
        for place in range(self.depth):
            prefix = f"model.layers.{place}."
            load(self.merge, self.start, prefix)
            for layer, teacher in zip(self.experts, self.teachers, strict=True):
                load(layer, teacher.weights, prefix)
            new, merged, own = self._layer(prefix, merged, own, first <= place < last)
            result |= new
        return result

    def _layer(
        self, prefix: str, merged: list[Tensor], own: list[Tensor], calibrated: bool
    ) -> tuple[State, list[Tensor], list[Tensor]]:
        """Calibrate one decoder layer; return its new tensors and all streams behind it."""
        new = {}
        runs = [steps(self.merge, hidden, self._positions(hidden)) for hidden in merged]
        teachers = [
            steps(layer, hidden, self._positions(hidden))
            for layer, hidden in zip(self.experts, own, strict=True)
        ]
        behind = [advance(run) for run in teachers]
        for group in GROUPS:
            seen = [advance(run) for run in runs]
            theirs, behind = behind, [advance(run) for run in teachers]
            if calibrated:
                for name in self._solve(prefix, group, seen, theirs, behind):
                    new[f"{prefix}{name}.weight"] = self.merge.get_submodule(name).weight.clone()
        merged = [advance(run).stream for run in runs]
        return new, merged, [step.stream for step in behind]

    def _positions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.rotary(hidden, places)

    def _solve(self, prefix: str, group: tuple[str, ...], *steps: list[Step]) -> list[str]:
        """Replace the linears of a group in the merge's layer; return their names. See `_sums`."""
        wanted = self.settings.linears
        names = [name for name in group if not wanted or any(part in name for part in wanted)]
        if not names:
            return names
        gram, cross = self._sums(names, *steps)
        for name in names:
            weight = self.merge.get_submodule(name).weight
            key = f"{prefix}{name}.weight"
            span = self._span(key) if self.settings.rank else None
            weight.copy_(solve(weight, gram, cross[name], self.settings.ridge, span))
        return names

    def _sums(
        self, names: list[str], seen: list[Step], theirs: list[Step], behind: list[Step]
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
            one = teacher.weight * product(inputs, inputs)
            one = scale_off_diagonal(one, settings.off_diagonal)
            gram = gram + one
            if settings.targets != "weights" and names[0] in WRITERS:
                before = ours.stream if settings.targets == "stream" else own.stream
                wanted = (behind[t].stream - before)[used]
                cross[names[0]] = cross[names[0]] + teacher.weight * product(wanted, inputs)
                continue
            if settings.targets != "weights":  # Y = X_t W_tᵀ, so that W_t comes out of the sum
                one = teacher.weight * product(own.inputs[used], inputs)
            for name in names:
                cross[name] = cross[name] + layers[t].get_submodule(name).weight.double() @ one
        return gram, cross

    def _span(self, key: str) -> Tensor:
        """Return the directions that the rows of a tensor's change may have."""
        base = self.base[key].float()
        changes = [teacher.weights[key].float() - base for teacher in self.teachers]
        return strongest_rows(changes, self.settings.rank)


def advance(run: Iterator[Step]) -> Step:
    """Go on to the next group of linears, in half precision where that is fast."""
    with half_precision():
        return next(run)


def embed(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Return what enters the first decoder layer, (n, length, features)."""
    return embedding(ids, weights["model.embed_tokens.weight"].float())


def load(layer: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> None:
    """Put the weights of one decoder layer of a model into a layer."""
    layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
