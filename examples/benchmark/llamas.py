# SPDX-License-Identifier: Apache-2.0
"""Families of Llama-shaped checkpoints, written tensor by tensor: nothing is downloaded."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

_SETTINGS = """hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads vocab_size""".split()
_SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 256),  # to see that a program runs
    "53M": (512, 1536, 12, 8, 8, 8192),
    "160M": (768, 3072, 12, 12, 12, 32000),
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}
# Settings of LlamaConfig; the head of 1B is its embedding.
SIZES = {
    size: dict(zip(_SETTINGS, shape, strict=True), tie_word_embeddings=size == "1B")
    for size, shape in _SHAPES.items()
}
SHARD_BYTES = 2**30
INDEX = "model.safetensors.index.json"


def make_config(size: str, **changes: int | bool) -> LlamaConfig:
    """Return the config of a size with changed settings; weights are stored in bfloat16."""
    settings = {**SIZES[size], **changes}
    return LlamaConfig(dtype="bfloat16", architectures=["LlamaForCausalLM"], **settings)


def write_family(
    folder: Path, size: str, experts: int, heterogeneous: bool, layers: int | None = None
) -> list[Path]:
    """Write a base and its experts in bfloat16, sharded; return their folders, the base's first.

    Task vectors are of rank 16 plus noise, and in a heterogeneous family differ in scale by a
    factor of 30. A model that is there already is left alone.
    """
    config = make_config(size, **({} if layers is None else {"num_hidden_layers": layers}))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths = [folder / "base", *(folder / f"expert{model + 1}" for model in range(experts))]
    for model, path in enumerate(paths):
        if (path / INDEX).exists():
            continue
        scale = 30 ** ((model - 1) / max(experts - 1, 1) - 0.5) if heterogeneous and model else 1.0
        tensors = (
            (name, make_tensor(name, shape, model, scale, device)) for name, shape in shapes(config)
        )
        write_model(path, config, tensors)
    return paths


def shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a Llama's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    narrow = hidden // config.num_attention_heads * config.num_key_value_heads
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", narrow), ("v", narrow), ("o", hidden)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def make_tensor(name: str, shape: tuple[int, ...], model: int, scale: float, device: str) -> Tensor:
    """Return a tensor of the base (model 0) or of an expert, the same whenever it is made."""
    rng = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    tensor = 0.02 * torch.randn(shape, generator=rng, device=device)
    if model > 0:
        rng.manual_seed(zlib.crc32(f"{name} {model}".encode()))
        delta = torch.randn(shape, generator=rng, device=device)
        if len(shape) == 2:
            left = torch.randn(shape[0], 16, generator=rng, device=device)
            right = torch.randn(16, shape[1], generator=rng, device=device)
            delta.addmm_(left, right, alpha=0.25)
        tensor.add_(delta, alpha=1e-3 * scale)
    return tensor.bfloat16().cpu()


def write_model(path: Path, config: LlamaConfig, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write shards, their index and the config."""
    path.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    number, total = 0, 0

    def flush() -> None:
        nonlocal number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        size = sum(t.numel() for t in shard.values()) + tensor.numel()
        if shard and 2 * size > SHARD_BYTES:
            flush()
        shard[name] = tensor
        total += 2 * math.prod(tensor.shape)
    flush()
    config.save_pretrained(path)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (path / INDEX).write_text(json.dumps(index), encoding="utf-8")
