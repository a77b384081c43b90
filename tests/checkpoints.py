# SPDX-License-Identifier: Apache-2.0
"""Tiny, randomly initialised checkpoint families, and what ACE should make of them."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from reference import naive_tensor, task_vector_error
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from mergekit_ace.methods.storage import empty_network, read_names

LLAMA = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def tiny(kind: type, seed: int = 0, **config) -> Any:
    """A model of a class of transformers, always with the same weights."""
    torch.manual_seed(seed)
    return kind(kind.config_class(**config)).eval()


def tiny_llama(seed: int = 0, **config) -> LlamaForCausalLM:
    return tiny(LlamaForCausalLM, seed, **{**LLAMA, **config})


@torch.no_grad()
def fine_tuned(model: PreTrainedModel, seed: int, scale: float = 0.02) -> PreTrainedModel:
    """A copy whose every floating parameter has moved, by low rank plus noise."""
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


def rewrite(
    path: str | Path, change: Callable[[dict[str, Tensor]], object], name: str = "model.safetensors"
) -> None:
    """Change the tensors of a model."""
    file = Path(path) / name
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def add(path: str | Path, **tensors: Tensor) -> None:
    """Add tensors to a model; a double underscore in a name stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    rewrite(path, lambda stored: stored.update(named))


def configure(path: str | Path, name: str = "config.json", /, **changes: object) -> None:
    """Change a file of a model in JSON; None removes a key."""
    file = Path(path, name)
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: v for key, v in content.items() if v is not None}))


def save_tokenizer(
    path: str | Path, words: Iterable[str], added: Sequence[str] = (), template: str | None = None
) -> None:
    """Save a tokenizer of words, which are numbered in their order; the first is for all others."""
    vocabulary = {word: n for n, word in enumerate(words)}
    unknown = next(iter(vocabulary))
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)
    fast.add_tokens(list(added))
    fast.chat_template = template
    fast.save_pretrained(path)


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
    assert not any(loading_faults(model_class, path).values())
    model = model_class.from_pretrained(path, dtype=torch.float32).eval()
    return model, model.state_dict()


def loading_faults(model_class: type, path: str | Path) -> dict[str, list[str]]:
    """What transformers misses in a model, or does not know."""
    _, info = model_class.from_pretrained(path, output_loading_info=True)
    return {what: sorted(map(str, names)) for what, names in info.items()}


def special_layouts(folder: str, names: set[str]) -> dict[str, str]:
    """Layouts of tensors of files that their names do not tell, from the modules in memory."""
    network = empty_network(ModelReference.model_validate(folder))
    memory = read_names(network, names).memory
    flat = any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules())
    modules = dict(network.named_modules())
    found = {}
    for name in names:
        owner = modules.get(memory.get(name, "").rpartition(".")[0])
        turned = getattr(owner, "is_transposed", False) or "Llama4TextExperts" in str(type(owner))
        if (isinstance(owner, Conv1D) and name.endswith("weight")) or turned:
            found[name] = "transposed"
        elif flat:
            found[name] = "flattened"
    return found


def expected_layout(name: str, tensor: Tensor, special: dict[str, str]) -> str:
    """How the reference reads a tensor of files."""
    of_experts = "experts" in name.split(".")
    if of_experts and tensor.ndim == 2:  # of one expert, or biases of all
        return "mean" if name.endswith("bias") else "matrix"
    if tensor.ndim > 3:
        return special.get(name, "mean")
    if of_experts and tensor.ndim == 3:
        return special.get(name, "stacked")
    if tensor.ndim != 2 or len(tensor) == 1:
        return "mean"
    layout = special.get(name, "matrix")
    return "matrix" if layout == "flattened" else layout


def check_merge(
    model_class: type,
    paths: list[str],
    merged: str | Path,
    bar: float = 5e-5,
    options_of: Callable[[str], dict[str, Any]] = lambda name: {},
) -> Counter[str]:
    """Compare the files of a merged checkpoint with the reference, and load it.

    A tensor may have options, and a layout, of its own. What no expert changed is the base's.
    Returns how many tensors each layout had.
    """
    faults = loading_faults(model_class, paths[0])
    assert loading_faults(model_class, merged) == faults, "transformers loads it otherwise"
    read = [load_file(f"{path}/model.safetensors") for path in (*paths, merged)]
    if read[0].keys() != read[-1].keys():  # mergekit-yaml packs the experts of a mixture
        read = [state(model_class, path)[1] for path in (*paths, merged)]
    base, *experts, got = read
    assert got.keys() == base.keys(), f"other names: {sorted(got.keys() ^ base.keys())[:2]}"
    special = special_layouts(paths[0], set(base))
    seen: Counter[str] = Counter()
    for name, tensor in base.items():
        inputs = [expert[name] for expert in experts]
        if not tensor.is_floating_point() or all(torch.equal(tensor, own) for own in inputs):
            assert torch.equal(got[name], tensor), f"{name} is not the base's"
            continue
        options = {"layout": expected_layout(name, tensor, special), **options_of(name)}
        expected = naive_tensor(tensor, inputs, **options)
        # a float32 file rounds every entry once, however small the task vector
        rounding = 2**-24 * float(expected.norm() / (expected - tensor.double()).norm())
        error = task_vector_error(got[name], expected, tensor)
        assert error <= bar + rounding, f"{name} {tuple(tensor.shape)} {error:.1e} {options}"
        seen[options["layout"]] += 1
    return seen
