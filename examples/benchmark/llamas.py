# SPDX-License-Identifier: Apache-2.0
"""Families of Llama-shaped checkpoints, written tensor by tensor: nothing is downloaded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

_SETTINGS = """hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads vocab_size""".split()
_SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 256),  # to see that a program runs
    "53M": (512, 1536, 12, 8, 8, 8192),
    "160M": (768, 3072, 12, 12, 12, 32000),
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "3B": (3072, 8192, 28, 24, 8, 128256),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}
# Settings of LlamaConfig; the heads of 1B and 3B are their embeddings.
SIZES = {
    size: dict(zip(_SETTINGS, shape, strict=True), tie_word_embeddings=size in ("1B", "3B"))
    for size, shape in _SHAPES.items()
}


def make_config(size: str, **changes: int | bool) -> LlamaConfig:
    """Return the config of a size with changed settings; weights are stored in bfloat16."""
    settings = {**SIZES[size], **changes}
    return LlamaConfig(dtype="bfloat16", architectures=["LlamaForCausalLM"], **settings)


def write_family(
    folder: Path, size: str, experts: int, heterogeneous: bool, **changes: int
) -> list[Path]:
    """Write a base and its experts in bfloat16, sharded; return their folders, the base's first.

    Task vectors are of rank 16 plus noise, and in a heterogeneous family differ in scale by a
    factor of 30. A model that is there already is left alone.
    """
    config = make_config(size, **changes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths = [folder / "base", *(folder / f"expert{model + 1}" for model in range(experts))]
    for model, path in enumerate(paths):
        if (path / "config.json").exists():
            continue
        scale = 30 ** ((model - 1) / max(experts - 1, 1) - 0.5) if heterogeneous and model else 1.0
        write_model(path, config, partial(make_tensor, model=model, scale=scale, device=device))
    return paths


def empty_weights(config: LlamaConfig) -> dict[str, Tensor]:
    """Return the weights of a Llama by name, without their numbers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    return dict(model.named_parameters())


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's weights by name."""
    return {name: tuple(weight.shape) for name, weight in empty_weights(config).items()}


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


def write_model(path: Path, config: LlamaConfig, make: Callable[..., Tensor]) -> None:
    """Write shards of the tensors that `make(name, shape)` returns, their index and the config."""
    plan = split_torch_state_dict_into_shards(empty_weights(config), max_shard_size="1GB")
    path.mkdir(parents=True, exist_ok=True)
    known = shapes(config)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: make(name, known[name]) for name in names}, path / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.save_pretrained(path)
