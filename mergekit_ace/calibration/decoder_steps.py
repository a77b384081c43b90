# SPDX-License-Identifier: Apache-2.0
"""A decoder layer of the Llama kind in steps: what each group of linears reads, before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

# Linears with the same input, in the order of the forward pass.
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
# What these write is added to the residual stream.
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
Rotary: TypeAlias = tuple[Tensor, Tensor]


class DecoderStep(NamedTuple):
    """What a group of linears reads, (n, length, i), and the residual stream there."""

    inputs: Tensor
    stream: Tensor


def decoder_steps(layer: nn.Module, hidden: Tensor, rotary: Rotary) -> Iterator[DecoderStep]:
    """Run a decoder layer; stop before each of `GROUPS`, whose weights may be replaced meanwhile.

    The last step is the output of the layer.

    Args:
        layer: with norms before attention and MLP, and linears of the names in `GROUPS`.
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
