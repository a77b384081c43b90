# SPDX-License-Identifier: Apache-2.0
"""Tiny, randomly initialised checkpoint families, and what ACE should make of them.

Checkpoints are compared as transformers loads them: on disk some architectures have other tensor
names and other packing than in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reference import naive_tensor, task_vector_error
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

LLAMA = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def tiny_llama(seed: int = 0, **config) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **config})).eval()


@torch.no_grad()
def fine_tuned(model: PreTrainedModel, seed: int, scale: float = 0.02) -> PreTrainedModel:
    """A copy whose every floating parameter has moved, by low rank plus noise."""
    import copy

    expert = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(seed)
    for parameter in expert.parameters():
        delta = torch.randn(parameter.shape, generator=rng)
        if parameter.ndim >= 2:
            flat = parameter.flatten(0, -2)
            left = torch.randn(flat.shape[0], 2, generator=rng)
            low_rank = left @ torch.randn(2, flat.shape[1], generator=rng)
            delta = 0.3 * delta + low_rank.view_as(parameter)
        parameter += scale * delta
    return expert


@torch.no_grad()
def seen_batches(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The same model with other statistics in its BatchNorm layers, if it has some."""
    rng = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):
            buffer += seed
        elif name.endswith(("running_mean", "running_var")):
            buffer += torch.rand(buffer.shape, generator=rng)
    return model


def save_family(
    model: PreTrainedModel,
    folder: Path,
    experts: int = 2,
    scales: list[float] | None = None,
    **save,
) -> list[str]:
    """Save a base and its experts; their paths, the base's first."""
    paths = [str(folder / "base")]
    model.save_pretrained(paths[0], **save)
    for t in range(experts):
        paths.append(str(folder / f"expert{t}"))
        scale = scales[t] if scales else 0.02
        expert = seen_batches(fine_tuned(model, seed=10 + t, scale=scale), seed=10 + t)
        expert.save_pretrained(paths[-1], **save)
    return paths


def rewrite(path: str | Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a model."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def add(path: str | Path, **tensors: Tensor) -> None:
    """Add tensors to a model; a double underscore in a name stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    rewrite(path, lambda stored: stored.update(named))


def configure(path: str | Path, **changes: object) -> None:
    """Change `config.json` of a model."""
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def ace_config(paths: list[str], **config) -> dict:
    """A mergekit configuration that merges `paths[1:]` on the base `paths[0]` by `ace`."""
    return {
        "merge_method": "ace",
        "base_model": paths[0],
        "models": [{"model": path} for path in paths[1:]],
        "dtype": "float32",
        **config,
    }


def state(model_class: type, path: str | Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The checkpoint as a user loads it; nothing may be missing or left over."""
    model, info = model_class.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval(), model.state_dict()


def expected_layout(model: PreTrainedModel, name: str, tensor: Tensor) -> str:
    """The rule of the specification, told from the modules in memory."""
    path, _, leaf = name.rpartition(".")
    if isinstance(model.get_submodule(path), Conv1D) and leaf == "weight":
        return "transposed"
    if tensor.ndim == 3 and "experts" in name.split("."):
        return "stacked"
    if tensor.ndim > 3 and any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules()):
        return "flattened"
    return "matrix" if tensor.ndim == 2 and tensor.shape[0] > 1 else "mean"


def check_merge(
    model_class: type,
    paths: list[str],
    merged: str | Path,
    bar: float = 5e-5,
    options_of: Callable[[str], dict[str, Any]] = lambda name: {},
) -> dict[str, int]:
    """Compare a merged checkpoint with the reference; how many tensors each layout had.

    A tensor may have options, and a layout, of its own.
    """
    base_model, base = state(model_class, paths[0])
    experts = [state(model_class, path)[1] for path in paths[1:]]
    got = state(model_class, merged)[1]
    assert got.keys() == base.keys()
    seen: dict[str, int] = {}
    for name, tensor in base.items():
        if not tensor.is_floating_point():
            assert torch.equal(got[name], tensor), name
            continue
        options = {"layout": expected_layout(base_model, name, tensor), **options_of(name)}
        layout = options["layout"]
        expected = naive_tensor(tensor, [e[name] for e in experts], **options)
        # a float32 file rounds every entry once, however small the task vector
        rounding = 2**-24 * float(expected.norm() / (expected - tensor.double()).norm())
        assert task_vector_error(got[name], expected, tensor) <= bar + rounding, (name, layout)
        seen[layout] = seen.get(layout, 0) + 1
    return seen
