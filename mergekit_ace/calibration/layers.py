# SPDX-License-Identifier: Apache-2.0
"""What a calibration computes: λ of a merge, and its linear layers solved on samples.

Teachers and the merge read the same samples, each in a stream of its own: see the README.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any, TypeAlias

import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from mergekit_ace.naming import ConfigError
from mergekit_ace.training.tasks import Batch, CausalLanguageModel, batches_by_length

KIND = CausalLanguageModel()
# λ of what is already merged: finer where merges are usually best.
SCALES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
RIDGE = 1.0  # λ of the linear layers
# Layers that work as `decoder_steps` has it.
KNOWN_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
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


def minimisers(starts: Iterable[Tensor], gram: Tensor, crosses: Iterable[Tensor]) -> list[Tensor]:
    """Return W = W_m + (Σ_t w_t Y_tᵀX_t / n_t − W_m C) (C + λ s̄ I)⁻¹ of linear layers; float64.

    Args:
        starts, crosses: W_m and Σ_t w_t Y_tᵀX_t / n_t, (o, i), of each layer with the same inputs.
        gram: C = Σ_t w_t X_tᵀX_t / n_t, (i, i), float64; s̄ is its mean eigenvalue.
    """
    ridged = gram.clone()
    # Inputs that are all zero leave nothing to invert; any positive number then keeps the start.
    ridged.diagonal().add_(RIDGE * gram.diagonal().mean().clamp_min(1e-30))
    factor = torch.linalg.cholesky(ridged)
    pairs = ((start.double(), cross) for start, cross in zip(starts, crosses, strict=True))
    return [
        start + torch.cholesky_solve((cross - start @ gram).mT, factor).mT for start, cross in pairs
    ]


def decoder_steps(layer: Any, hidden: Tensor, rotary: Rotary) -> Iterator[Step]:
    """Run one of `KNOWN_LAYERS` on its input, (n, length, features).

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


@dataclass(frozen=True)
class SampleTeacher:
    """A model that says what the merge should do on some samples."""

    weights: Weights
    texts: Sequence[Tensor]  # tokens, (length,)
    weight: float  # w_t, > 0


@dataclass
class _Streams:
    """The residual streams of the merge and of a teacher on some texts, (n, length, features)."""

    tokens: Tensor  # (n, length): where there is no padding
    rotary: Rotary
    merged: Tensor
    own: Tensor


class Calibration:
    """The way from a merge to what its teachers do, with one decoder layer in memory at a time.

    Of `model`, the architecture, no weights are looked at. A `ConfigError` says that its layers
    are not `KNOWN_LAYERS`.
    """

    def __init__(self, model: Any, device: torch.device):
        self.model, self.device = model, device
        layers = getattr(getattr(model, "model", None), "layers", [None])
        if any(type(layer) not in KNOWN_LAYERS for layer in layers):
            raise ConfigError(
                f"{type(model).__name__} cannot be calibrated, as its decoder layers are not those "
                "of Llama, Mistral, Qwen2 or Qwen3"
            )
        model.set_attn_implementation("sdpa")  # which is causal without a mask
        self._rotary = copy.deepcopy(model.model.rotary_emb).to(device)

    @torch.no_grad()
    def layers(self, start: Weights, teachers: Sequence[SampleTeacher]) -> Iterator[Weights]:
        """Calibrate one decoder layer of a merge after the other; yield new weights, in float32."""
        streams = self._embed(start, teachers)
        for place in range(len(self.model.model.layers)):
            merge = self._load(place, start)
            experts = [self._load(place, teacher.weights) for teacher in teachers]
            pairs = zip(experts, streams, strict=True)
            runs = [self._run(merge, expert, own) for expert, own in pairs]
            for group in GROUPS:
                self._solve(group, merge, experts, teachers, streams, runs)
            for own, run in zip(streams, runs, strict=True):
                for one, (ours, theirs) in zip(own, next(run), strict=True):
                    one.merged, one.own = ours[0], theirs[0]
            names = [f"{name}.weight" for group in GROUPS for name in group]
            yield {f"model.layers.{place}.{n}": merge.get_parameter(n).cpu() for n in names}

    def _run(
        self, merge: nn.Module, expert: nn.Module, batches: Sequence[_Streams]
    ) -> Iterator[list[tuple[Step, Step]]]:
        """Yield the steps of the merge and of a teacher on all batches; on a GPU by bfloat16."""
        ours = [decoder_steps(merge, one.merged, one.rotary) for one in batches]
        theirs = [decoder_steps(expert, one.own, one.rotary) for one in batches]
        kind = self.device.type
        for _ in range(len(GROUPS) + 1):
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                steps = [(next(one), next(other)) for one, other in zip(ours, theirs, strict=True)]
            yield steps

    def _embed(self, start: Weights, teachers: Sequence[SampleTeacher]) -> list[list[_Streams]]:
        merged, streams = start[TABLE], []
        for teacher in teachers:
            own, found = teacher.weights[TABLE], []
            for places in batches_by_length([*map(len, teacher.texts)], self.device):
                # Padded at the end, where causal attention does not see it.
                batch = KIND.collate([{"input_ids": teacher.texts[place]} for place in places])
                ids, used = batch["input_ids"], batch["attention_mask"].bool().to(self.device)
                rows = [table[ids].float().to(self.device) for table in (merged, own)]
                rotary = self._rotary(rows[0], torch.arange(ids.shape[1], device=self.device)[None])
                found.append(_Streams(used, rotary, *rows))
            streams.append(found)
        return streams

    def _load(self, place: int, weights: Weights) -> nn.Module:
        """Return a decoder layer of a model, in float32."""
        skeleton = self.model.model.layers[place]
        layer = copy.deepcopy(skeleton).to_empty(device=self.device).float().eval()
        prefix = f"model.layers.{place}."
        layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
        return layer

    def _solve(
        self,
        group: tuple[str, ...],
        merge: nn.Module,
        experts: Sequence[nn.Module],
        teachers: Sequence[SampleTeacher],
        streams: Sequence[Sequence[_Streams]],
        runs: Sequence[Iterator[list[tuple[Step, Step]]]],
    ) -> None:
        """Replace the weights of a group in the merge's layer, given the same of every teacher."""
        linears: list[Any] = [merge.get_submodule(name) for name in group]
        writes, bias = group[0] in WRITERS, linears[0].bias
        gram: Any = 0.0
        crosses: list[Any] = [0.0] * len(group)
        for expert, teacher, own, run in zip(experts, teachers, streams, runs, strict=True):
            rows = [
                (ours[0][one.tokens], theirs[0][one.tokens], (theirs[1] - ours[1])[one.tokens])
                for one, (ours, theirs) in zip(own, next(run), strict=True)
            ]
            inputs, outer, back = (torch.cat(part).float() for part in zip(*rows, strict=True))
            if writes:
                outer = expert.get_submodule(group[0])(outer) + back - (0 if bias is None else bias)
            share = teacher.weight / len(inputs)
            gram = gram + share * (inputs.mT @ inputs).double()
            product = share * (outer.mT @ inputs).double()
            for n, name in enumerate(group):  # Y_t = X W_tᵀ; biases stay those of the merge
                weight = expert.get_parameter(f"{name}.weight").double()
                crosses[n] = crosses[n] + (product if writes else weight @ product)
        solved = minimisers([linear.weight for linear in linears], gram, crosses)
        for linear, weight in zip(linears, solved, strict=True):
            linear.weight.copy_(weight)
