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
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from mergekit_ace.naming import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RIDGE = 1.0  # λ
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
TABLE = "model.embed_tokens.weight"
Weights: TypeAlias = Mapping[str, Tensor]
Rotary: TypeAlias = tuple[Tensor, Tensor]
Step: TypeAlias = tuple[Tensor, Tensor]  # what layers read, (n, length, i), and the stream there


def minimisers(starts: Iterable[Tensor], gram: Tensor, crosses: Iterable[Tensor]) -> list[Tensor]:
    """Return the W of linear layers with the same inputs, see the module's docstring; float64.

    Args:
        starts, crosses: W_m and Σ_t w_t Y_tᵀX_t / n_t, (o, i), of each.
        gram: C, (i, i), float64.
    """
    ridged = gram.clone()
    # Inputs that are all zero leave nothing to invert; any positive number then keeps the start.
    ridged.diagonal().add_(RIDGE * gram.diagonal().mean().clamp_min(1e-30))
    factor = torch.linalg.cholesky(ridged)
    pairs = ((start.double(), cross) for start, cross in zip(starts, crosses, strict=True))
    return [
        start + torch.cholesky_solve((cross - start @ gram).mT, factor).mT for start, cross in pairs
    ]


def decoder_steps(layer: nn.Module, hidden: Tensor, rotary: Rotary) -> Iterator[Step]:
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
    batches: Sequence[tuple[Tensor, Tensor]]  # tokens, and which of them count, (n, length)
    weight: float  # w_t, > 0

    @property
    def tokens(self) -> int:
        """How many tokens count, n_t."""
        return sum(int(used.sum()) for _, used in self.batches)


@dataclass
class _Streams:
    """The residual streams of the merge and of a teacher on one batch, (n, length, features)."""

    number: int  # of the teacher
    used: Tensor  # (n, length): which tokens count
    share: float  # w_t / n_t
    rotary: Rotary
    merged: Tensor
    own: Tensor


class Calibration:
    """The way from a merge to what its teachers do, with one decoder layer in memory at a time.

    Of `model`, the architecture, no weights are looked at. A `ConfigError` says that its layers
    are not `KNOWN_LAYERS`.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device):
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
        streams = []
        for number, teacher in enumerate(teachers):
            share = teacher.weight / teacher.tokens
            for ids, used in teacher.batches:
                merged, own = (self._embed(weights, ids) for weights in (start, teacher.weights))
                positions = torch.arange(ids.shape[1], device=self.device)[None]
                rotary, used = self._rotary(own, positions), used.to(self.device)
                streams.append(_Streams(number, used, share, rotary, merged, own))
        for place in range(len(self.model.model.layers)):
            merge = self._load(place, start)
            experts = [self._load(place, teacher.weights) for teacher in teachers]
            runs = [
                zip(
                    decoder_steps(merge, one.merged, one.rotary),
                    decoder_steps(experts[one.number], one.own, one.rotary),
                    strict=True,
                )
                for one in streams
            ]
            for group in GROUPS:
                steps = map(self._next, runs)
                self._solve(group, merge, experts, zip(streams, steps, strict=True))
            for one, run in zip(streams, runs, strict=True):
                (one.merged, _), (one.own, _) = self._next(run)
            solved = {name: merge.get_submodule(name).weight for group in GROUPS for name in group}
            yield {f"model.layers.{place}.{name}.weight": w.cpu() for name, w in solved.items()}

    def _next(self, run: Iterator[tuple[Step, Step]]) -> tuple[Step, Step]:
        """Go on to the next step; a GPU takes less time for products in bfloat16."""
        kind = self.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return next(run)

    def _embed(self, weights: Weights, ids: Tensor) -> Tensor:
        rows, places = ids.unique(return_inverse=True)
        return embedding(places, weights[TABLE][rows].float()).to(self.device)

    def _load(self, place: int, weights: Weights) -> nn.Module:
        """Return a decoder layer of a model, in float32."""
        skeleton = self.model.model.layers[place]
        layer = copy.deepcopy(skeleton).to_empty(device=self.device).float().eval()
        prefix = f"model.layers.{place}."
        layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
        return layer

    def _solve(
        self, group: tuple[str, ...], merge: nn.Module, experts: Sequence[nn.Module],
        steps: Iterable[tuple[_Streams, tuple[Step, Step]]],
    ) -> None:  # fmt: skip
        """Replace the weights of a group in the merge's layer, given the same of every teacher."""
        linears = [merge.get_submodule(name) for name in group]
        writes, bias = group[0] in WRITERS, linears[0].bias
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        gram, products = zero, [zero] * len(experts)
        for one, ((inputs, stream), (own_inputs, own_stream)) in steps:
            inputs, outer = inputs[one.used].float(), own_inputs[one.used].float()
            if writes:  # Y_t
                outer = experts[one.number].get_submodule(group[0])(outer)
                outer = outer + (own_stream - stream)[one.used] - (0 if bias is None else bias)
            gram = gram + one.share * (inputs.mT @ inputs).double()
            product = one.share * (outer.mT @ inputs).double()
            products[one.number] = products[one.number] + product
        if writes:
            crosses = [sum(products)]
        else:  # Y_t = X W_tᵀ, so that W_t comes out of the sum; biases stay those of the merge
            weights = ([one.get_submodule(name).weight for one in experts] for name in group)
            crosses = [
                sum(w.double() @ both for w, both in zip(own, products, strict=True))
                for own in weights
            ]
        solved = minimisers([linear.weight for linear in linears], gram, crosses)
        for linear, weight in zip(linears, solved, strict=True):
            linear.weight.copy_(weight)
