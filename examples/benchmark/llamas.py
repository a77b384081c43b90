# SPDX-License-Identifier: Apache-2.0
"""Families of Llama-shaped checkpoints, written tensor by tensor: nothing is downloaded."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

SIZES = {
    "tiny": {  # to see that a program runs
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
    "53M": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
    },
    "160M": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "405B": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
SHARD_BYTES = 2**30


def write_family(
    folder: Path, size: str, experts: int, heterogeneous: bool, layers: int | None = None
) -> list[Path]:
    """Write a base and its experts in bfloat16, sharded; return their folders, the base's first.

    Task vectors are of rank 16 plus noise, and in a heterogeneous family differ in scale by a
    factor of 30. A model that is there already is left alone.
    """
    settings = dict(SIZES[size])
    if layers is not None:
        settings["num_hidden_layers"] = layers
    config = LlamaConfig(dtype="bfloat16", architectures=["LlamaForCausalLM"], **settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths = []
    for model in range(experts + 1):
        path = folder / ("base" if model == 0 else f"expert{model}")
        paths.append(path)
        if (path / "model.safetensors.index.json").exists():
            continue
        scale = 30 ** ((model - 1) / max(experts - 1, 1) - 0.5) if heterogeneous and model else 1.0
        tensors = (
            (name, make_tensor(name, shape, model, scale, device)) for name, shape in shapes(config)
        )
        write_model(path, config, tensors)
    return paths


def write_headers(folder: Path, size: str, experts: int) -> list[Path]:
    """Write the same family without weights: files of full length that take no room on the disk."""
    config = LlamaConfig(dtype="bfloat16", architectures=["LlamaForCausalLM"], **SIZES[size])
    paths = []
    for model in range(experts + 1):
        path = folder / ("base" if model == 0 else f"expert{model}")
        path.mkdir(parents=True, exist_ok=True)
        places, shard, number = {}, {}, 1
        for name, shape in [*shapes(config), ("", ())]:
            begin = max((entry["data_offsets"][1] for entry in shard.values()), default=0)
            end = begin + 2 * math.prod(shape)
            if shard and (not name or end > 5 * SHARD_BYTES):
                write_hollow(path / f"model-{number:05d}.safetensors", shard)
                shard, number, begin, end = {}, number + 1, 0, end - begin
            if name:
                shard[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
                places[name] = f"model-{number:05d}.safetensors"
        config.save_pretrained(path)
        index = json.dumps({"metadata": {}, "weight_map": places})
        (path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
        paths.append(path)
    return paths


def write_hollow(path: Path, entries: dict) -> None:
    """Write a safetensors file whose weights are a hole in the file."""
    header = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + max(e["data_offsets"][1] for e in entries.values()))


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
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
