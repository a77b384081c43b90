# SPDX-License-Identifier: Apache-2.0
"""Merges of adapters by `mergekit-ace adapter`, beside mergekit's merges of the full models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import tiny_llama
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaForCausalLM

from mergekit_ace.adapters.adapter_run import merge_adapters

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(base: str, folder: Path, seed: int, size: float = 0.05, **config) -> str:
    """Save an adapter of random factors; its path."""
    torch.manual_seed(seed)
    settings = {"r": 2 + seed, "lora_alpha": 4, "target_modules": LINEAR, **config}
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[str]:
    """A base and three adapters of different ranks and targets."""
    folder = tmp_path_factory.mktemp("family")
    base = str(folder / "base")
    tiny_llama().save_pretrained(base)
    paths = [save_adapter(base, folder / f"adapter{t}", t) for t in range(2)]
    paths.append(save_adapter(base, folder / "adapter2", 2, target_modules=["q_proj", "up_proj"]))
    return [base, *paths]


def config_of(paths: list[str], method: str, weights: list[float] | None = None, **parameters):
    models = [{"model": f"{paths[0]}+{path}"} for path in paths[1:]]
    for model, weight in zip(models, weights or [], strict=False):
        model["parameters"] = {"weight": weight}
    config = {"merge_method": method, "models": models, "dtype": "float32"}
    if method != "linear":
        config["base_model"] = paths[0]
    return {**config, "parameters": parameters} if parameters else config


def full_merge(config: dict, out: Path, cache: Path) -> dict[str, Tensor]:
    """What `mergekit-yaml` makes of the full models."""
    options = MergeOptions(lora_merge_cache=str(cache), lora_merge_dtype="float32", quiet=True)
    run_merge(MergeConfiguration.model_validate(config), str(out), options)
    return LlamaForCausalLM.from_pretrained(out).state_dict()


def adapter_merge(config: dict, folder: Path, **options) -> Path:
    """What `mergekit-ace adapter` makes of it; its folder."""
    path, out = folder / "config.yml", folder / "adapter"
    path.write_text(yaml.safe_dump(config))
    merge_adapters(path, out, MergeOptions(quiet=True), **options)
    return out


def applied(base: str, adapter: Path) -> dict[str, Tensor]:
    """The base with an adapter merged into it by PEFT."""
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter)
    return model.merge_and_unload().state_dict()


def check_same(base: str, got: dict[str, Tensor], expected: dict[str, Tensor], bar: float):
    """Compare task vectors, up to the rounding of the weights that they were taken from."""
    origin = LlamaForCausalLM.from_pretrained(base).state_dict()
    changed = 0
    for name, tensor in origin.items():
        wanted = expected[name].double() - tensor.double()
        found = got[name].double() - tensor.double()
        size = float(wanted.norm())
        changed += size > 0
        rounding = 2**-23 * float(tensor.norm())
        assert float((found - wanted).norm()) <= bar * size + rounding, name
    assert changed


METHODS = [
    ("ace", {}),
    ("ace", {"spectral_refinement": "always", "adaptive_normalization": "always"}),
    ("ace", {"epsilon": 1e-2, "lambda": 0.7}),
    ("ace_relative", {}),
    ("lines", {}),
    ("cart", {"rank_fraction": 0.1}),
    ("wudi", {"solver": "exact"}),
    ("tsv_m", {}),
    ("iso_c", {}),
    ("iso_cts", {}),
    ("task_arithmetic", {"weight": 0.6}),
    ("task_arithmetic", {"weight": 0.6, "normalize": True, "lambda": 1.2}),
    ("linear", {"weight": 0.3}),
]


@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_the_same_config_gives_the_same_weights(family, tmp_path, method, parameters):
    config = config_of(family, method, **parameters)
    expected = full_merge(config, tmp_path / "full", tmp_path.parent / "cache")
    out = adapter_merge(config, tmp_path)
    check_same(family[0], applied(family[0], out), expected, 1e-5)
