# SPDX-License-Identifier: Apache-2.0
"""Tiny models with an adapter of every kind, trained as far as random numbers go."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from checkpoints import ace_config, rewrite, tiny, tiny_llama
from families import GPT2, MIXTRAL, SMALL
from matrices import dense
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, GptOssForCausalLM, MixtralForCausalLM, OPTForCausalLM

from mergekit_ace.adapters.read import Adapter, read_adapter

tied_llama = partial(tiny_llama, tie_word_embeddings=True)
gpt2 = partial(tiny, GPT2LMHeadModel, **GPT2, tie_word_embeddings=False)
opt = partial(tiny, OPTForCausalLM, **SMALL, ffn_dim=24, word_embed_proj_dim=16)
mixtral = partial(tiny, MixtralForCausalLM, **MIXTRAL)
gpt_oss = partial(tiny, GptOssForCausalLM, **MIXTRAL, head_dim=8)


def _lora(targets: list[str] | str = (), **options) -> dict:
    return {"target_modules": targets or [], "r": 4, "lora_alpha": 7, **options}


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# The model, and the options of the adapter.
CASES = {
    "linear": (tiny_llama, _lora(["q_proj", "down_proj"], task_type="CAUSAL_LM")),
    "patterns": (
        tiny_llama,
        _lora(
            r".*\.(q|k|v)_proj",
            use_rslora=True,
            rank_pattern={"layers.1.self_attn.q_proj": 2, "v_proj": 6},
            alpha_pattern={r"^model\.layers\.0\.self_attn\.k_proj": 3, "v_proj": 11},
        ),
    ),
    "some layers": (tiny_llama, _lora(r"model\.layers\.1\.self_attn\.q_proj|.*\.up_proj")),
    "transposed": (gpt2, _lora(["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    "transposed and linear": (gpt2, _lora(["c_proj", "lm_head"])),
    "table": (tiny_llama, _lora(["embed_tokens", "lm_head", "q_proj"], use_rslora=True)),
    "experts": (mixtral, _lora(["q_proj"], target_parameters=EXPERTS)),
    "some experts": (mixtral, _lora(target_parameters=["layers.1.mlp.experts.down_proj"])),
    "transposed experts": (gpt_oss, _lora(target_parameters=EXPERTS)),
    "router": (mixtral, _lora(target_parameters=["gate.weight", *EXPERTS])),
    "saved": (tiny_llama, _lora(["q_proj"], modules_to_save=["lm_head", "norm", "embed_tokens"])),
    "inferred": (opt, _lora(["q_proj", "fc1"])),
}


class Trained(NamedTuple):
    """A base, the folder of an adapter of it, and the weights with the adapter merged by PEFT."""

    base: nn.Module
    folder: Path
    merged: dict[str, Tensor]


@torch.no_grad()
def train_by_chance(build, folder: Path, seed: int = 0, **options) -> Trained:
    """Save an adapter of random numbers, and merge it; all that PEFT would train is changed."""
    torch.manual_seed(99)
    base = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**options))
        rng = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=rng))
        model.save_pretrained(folder)
        merged = dict(model.merge_and_unload().state_dict())
    return Trained(base, folder, merged)


def compare_changes(got: dict, expected: dict, origin: dict, bar: float = 5e-5) -> None:
    """Compare task vectors, up to the rounding of the weights that they are taken from."""
    assert got.keys() == expected.keys()
    changed = 0
    for name, tensor in expected.items():
        zero = origin[name].double() if name in origin else torch.zeros(()).double()
        wanted, found = tensor.double() - zero, got[name].double() - zero
        rounding = 2**-23 * float(tensor.norm())
        assert float((found - wanted).norm()) <= bar * float(wanted.norm()) + rounding, name
        changed += bool(wanted.any())
    assert changed


edit_tensors = partial(rewrite, name="adapter_model.safetensors")


def read(folder: str | Path, network: nn.Module | None = None) -> Adapter:
    """Read an adapter of a base, by default the tiny Llama."""
    return read_adapter(str(folder), (network or tiny_llama()).to("meta"))


def dense_changes(folder: str | Path) -> dict[str, Tensor]:
    """What an adapter of the tiny Llama adds to its weights."""
    changes = read(folder).changes
    return {name: dense(change.factors()).float() for name, change in changes.items()}


def save_adapters(folder: Path, build, *options: dict) -> list[str]:
    """Save a base, by its names in memory, and an adapter for each of some options."""
    paths = [str(folder / "base")]
    for seed, own in enumerate(options):
        paths.append(str(folder / f"adapter{seed}"))
        trained = train_by_chance(build, paths[-1], seed, **{"lora_alpha": 1, **own})
        trained.base.save_pretrained(paths[0], save_original_format=False)
    return paths


def config_of(paths: list[str], method: str, **parameters) -> dict:
    """A config that merges the adapters of a base, the first path."""
    adapted = [f"{paths[0]}+{path}" for path in paths[1:]]
    config = ace_config([paths[0], *adapted], merge_method=method, parameters=parameters)
    if method == "linear":
        del config["base_model"]
    return config
