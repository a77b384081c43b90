# SPDX-License-Identifier: Apache-2.0
"""What a calibration computes: λ of a merge, and its linear layers solved on samples.

Teachers and the merge read the same samples, each in a stream of its own: see the README.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any, TypeAlias

import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from mergekit_ace.training.tasks import Batch, CausalLanguageModel, batches_by_length

KIND = CausalLanguageModel()
# λ of what is already merged: finer where merges are usually best.
SCALES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
RIDGE = 1.0  # λ of the linear layers
# Models whose layers work as `decoder_steps` has it.
KNOWN_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
# Linear layers with the same input, in the order of the forward pass.
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
WRITERS = ("self_attn.o_proj", "mlp.down_proj")  # to the residual stream
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Weights: TypeAlias = Mapping[str, Tensor]
Rotary: TypeAlias = tuple[Tensor, Tensor]
Step: TypeAlias = tuple[Tensor, Tensor]  # what layers read, (n, length, i), and the stream there


class LazyWeights(Mapping[str, Tensor]):
    """Weights of a model by name, computed when they are asked for."""

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]):
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def scaled_weights(base: Weights, merged: Weights, scale: float) -> LazyWeights:
    """Return the weights W0 + λ (M − W0).

    Tensors and rows of embeddings that the base lacks are as in M. Where M has no head, the
    embeddings are that, too.
    """

    def read(name: str) -> Tensor:
        if name == HEAD and HEAD not in merged:
            name = TABLE
        own, other = merged[name], base.get(name)
        if other is None or not own.is_floating_point() or scale == 1.0:
            return own
        scaled = own.to(torch.float32, copy=True)
        rows = slice(0, min(len(other), len(own))) if own.ndim else ...
        scaled[rows] = torch.lerp(other[rows].float(), scaled[rows], scale)
        return scaled

    return LazyWeights(merged, read)


def choose_scale(
    model: nn.Module,
    base: Weights,
    merged: Weights,
    experts: Sequence[tuple[Weights, Batch]],
    device: torch.device,
) -> tuple[float, float, float]:
    """Return λ of the merge, and how far it goes from the base to the experts with it and as it is.

    That is the mean over experts of 1 − KL(p_t ‖ p_λ) / KL(p_t ‖ p_0), with p the distributions of
    the next token on the texts of the expert. From 1 on, neighbours of `SCALES` are tried as long
    as they are better.
    Of `model`, the architecture, no weights are used; experts are their weights and some texts.
    """
    model = copy.deepcopy(model).float().eval()
    targets = []
    for weights, batch in experts:
        shaped = scaled_weights(weights, merged, 0.0)  # with as many rows of embeddings
        targets.append(_log_probabilities(model, shaped, batch, device).half())

    def divergences(scale: float) -> list[float]:
        """Return KL(expert ‖ merge with a λ), summed over tokens, on the texts of each expert."""
        weights, found = scaled_weights(base, merged, scale), []
        for (_, batch), target in zip(experts, targets, strict=True):
            wanted, now = target.float(), _log_probabilities(model, weights, batch, device)
            found.append(float((wanted.exp() * (wanted - now)).sum()))
        return found

    whole = divergences(0.0)

    @lru_cache
    def share(place: int) -> float:
        pairs = zip(divergences(SCALES[place]), whole, strict=True)
        return fmean(1.0 - now / max(before, 1e-6) for now, before in pairs)

    start = best = SCALES.index(1.0)
    for step in (-1, 1):
        while 0 <= best + step < len(SCALES) and share(best + step) > share(best):
            best += step
    return SCALES[best], share(best), share(start)


@torch.no_grad()
def _log_probabilities(model: Any, weights: Weights, batch: Batch, device: torch.device) -> Tensor:
    """Return log p before supervised tokens, (P, vocabulary); one layer is in memory at a time."""
    attach_align_device_hook(model, device, offload=True, weights_map=weights)
    try:
        logits = KIND.logits(model, send_to_device(batch, device))
    finally:
        remove_hook_from_submodules(model)
    return logits.log_softmax(dim=-1)


def decoder_steps(layer: Any, hidden: Tensor, rotary: Rotary) -> Iterator[Step]:
    """Run a layer of one of `KNOWN_MODELS` on its input, (n, length, features).

    Stops before each of `GROUPS`, whose weights may be replaced meanwhile. The last step is the
    output of the layer, twice.
    """
    inputs = layer.input_layernorm(hidden)
    yield inputs, hidden
    attention, seen = layer.self_attn, []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    attention(hidden_states=inputs, position_embeddings=rotary, attention_mask=None)
    hook.remove()
    (mixed,) = seen
    yield mixed, hidden
    hidden = hidden + attention.o_proj(mixed)
    inputs = layer.post_attention_layernorm(hidden)
    yield inputs, hidden
    gated = layer.mlp.act_fn(layer.mlp.gate_proj(inputs)) * layer.mlp.up_proj(inputs)
    yield gated, hidden
    hidden = hidden + layer.mlp.down_proj(gated)
    yield hidden, hidden


@dataclass
class _Streams:
    """Some texts of a teacher, and what it and the merge make of them, (n, length, features)."""

    tokens: Tensor  # (n, length): where there is no padding
    rotary: Rotary
    merged: Tensor
    own: Tensor


class SampleTeacher:
    """A model that says what the merge should do on some texts; both read them side by side."""

    layer: Any  # of the teacher, that both have come to
    _steps: list[tuple[Iterator[Step], Iterator[Step]]]

    def __init__(self, weights: Weights, texts: Sequence[Tensor], weight: float):
        """Take the tokens of texts, (length,) each, and w_t > 0."""
        self.weights, self.texts, self.weight = weights, texts, weight
        self.batches: list[_Streams] = []

    def begin(self, model: Any, merged: Weights, device: torch.device) -> None:
        """Look up all tokens in the tables of both models."""
        turn = copy.deepcopy(model.model.rotary_emb).to(device)
        tables = merged[TABLE], self.weights[TABLE]
        for places in batches_by_length([*map(len, self.texts)], device):
            # Padded at the end, where causal attention does not see it.
            batch = KIND.collate([{"input_ids": self.texts[place]} for place in places])
            ids, tokens = batch["input_ids"], batch["attention_mask"].bool().to(device)
            rows = [table[ids].float().to(device) for table in tables]
            rotary = turn(rows[0], torch.arange(ids.shape[1], device=device)[None])
            self.batches.append(_Streams(tokens, rotary, *rows))

    def enter(self, merge: nn.Module, own: nn.Module) -> None:
        """Come to a decoder layer of both models."""
        self.layer = own
        ours = [decoder_steps(merge, one.merged, one.rotary) for one in self.batches]
        theirs = [decoder_steps(own, one.own, one.rotary) for one in self.batches]
        self._steps = list(zip(ours, theirs, strict=True))

    def step(self) -> list[tuple[Step, Step]]:
        """Return the next steps of the merge and of the teacher, by batch; on a GPU by bfloat16."""
        kind = self.batches[0].merged.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return [(next(ours), next(theirs)) for ours, theirs in self._steps]

    def leave(self) -> None:
        """Take what the layers return for the streams."""
        for batch, (ours, theirs) in zip(self.batches, self.step(), strict=True):
            batch.merged, batch.own = ours[0], theirs[0]


@torch.no_grad()
def calibrated_layers(
    model: Any, start: Weights, teachers: Sequence[SampleTeacher], device: torch.device
) -> Iterator[Weights]:
    """Calibrate one decoder layer of a merge after the other; yield new weights, in float32.

    Of `model`, the architecture, no weights are looked at. One layer is in memory at a time.
    """
    model.set_attn_implementation("sdpa")  # which is causal without a mask
    for teacher in teachers:
        teacher.begin(model, start, device)
    for place in range(len(model.model.layers)):
        merge = _load_layer(model, place, start, device)
        for teacher in teachers:
            teacher.enter(merge, _load_layer(model, place, teacher.weights, device))
        for group in GROUPS:
            _solve(group, merge, teachers)
        for teacher in teachers:
            teacher.leave()
        names = [f"{name}.weight" for group in GROUPS for name in group]
        yield {f"model.layers.{place}.{n}": merge.get_parameter(n).cpu() for n in names}


def _load_layer(model: Any, place: int, weights: Weights, device: torch.device) -> nn.Module:
    """Return a decoder layer with weights, in float32."""
    layer = copy.deepcopy(model.model.layers[place]).to_empty(device=device).float().eval()
    prefix = f"model.layers.{place}."
    layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
    return layer


def _solve(group: tuple[str, ...], merge: nn.Module, teachers: Sequence[SampleTeacher]) -> None:
    """Replace W_m of a group in the merge's layer by W_m + (K − W_m C) (C + λ s̄ I)⁻¹.

    C = Σ_t w_t X_tᵀX_t / n_t, (i, i), has the mean eigenvalue s̄, and K = Σ_t w_t Y_tᵀX_t / n_t,
    (o, i), is that of each linear layer; both in float64.
    """
    linears: list[Any] = [merge.get_submodule(name) for name in group]
    writes, bias = group[0] in WRITERS, linears[0].bias
    gram: Any = 0.0
    crosses: list[Any] = [0.0] * len(group)
    for teacher in teachers:
        rows = [
            (ours[0][one.tokens], theirs[0][one.tokens], (theirs[1] - ours[1])[one.tokens])
            for one, (ours, theirs) in zip(teacher.batches, teacher.step(), strict=True)
        ]
        inputs, outer, back = (torch.cat(part).float() for part in zip(*rows, strict=True))
        own = [teacher.layer.get_submodule(name) for name in group]
        if writes:
            outer = own[0](outer) + back - (0 if bias is None else bias)
        share = teacher.weight / len(inputs)
        gram = gram + share * (inputs.mT @ inputs).double()
        product = share * (outer.mT @ inputs).double()
        for n, linear in enumerate(own):  # Y_t = X W_tᵀ; biases stay those of the merge
            crosses[n] = crosses[n] + (product if writes else linear.weight.double() @ product)
    ridged = gram.clone()
    # Inputs that are all zero leave nothing to invert; any positive number then keeps the start.
    ridged.diagonal().add_(RIDGE * gram.diagonal().mean().clamp_min(1e-30))
    factor = torch.linalg.cholesky(ridged)
    for linear, cross in zip(linears, crosses, strict=True):
        start = linear.weight.double()
        linear.weight.copy_(start + torch.cholesky_solve((cross - start @ gram).mT, factor).mT)
