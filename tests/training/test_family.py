# SPDX-License-Identifier: Apache-2.0
"""Adapters, precision, device maps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from families import llama_family, parsed, tokenizer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mergekit_ace.training.family import Family, ModelFolders
from mergekit_ace.training.objective import Objective
from mergekit_ace.training.run import run_training
from mergekit_ace.training.state import TrainingRun


def test_experts_that_are_adapters(tmp_path, mergekit_yaml):
    config = llama_family(tmp_path / "family")
    base = AutoModelForCausalLM.from_pretrained(config["base_model"])
    torch.manual_seed(3)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer().save_pretrained(tmp_path / "adapter")
    config["models"][0]["model"] = f"{config['base_model']}+{tmp_path / 'adapter'}"
    file = run_training(parsed(config), tmp_path / "out", quiet=True)

    merge = yaml.safe_load((tmp_path / "out" / "merge.yml").read_text())
    flags = ("--lora-merge-cache", str(tmp_path / "cache"), "--lora-merge-dtype", "float32")
    got = load_file(mergekit_yaml(merge, *flags) / "model.safetensors")
    origin = load_file(Path(config["base_model"]) / "model.safetensors")
    other = load_file(Path(config["models"][1]["model"]) / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    whole = adapted.merge_and_unload().state_dict()[name]
    first, second = file.coefficients[:, file.columns[name]].double()
    zero = origin[name].double()
    expected = zero + first * (whole.double() - zero) + second * (other[name].double() - zero)
    torch.testing.assert_close(got[name].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> dict:
    return llama_family(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def no_accelerator():
    """accelerate knows one precision a process; a user has one process a training."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def first_gradient(config: dict, folder: Path) -> torch.Tensor:
    settings = parsed(config)
    AcceleratorState._reset_state(reset_partial_state=True)
    run = TrainingRun(folder, settings.mixed_precision, quiet=True)
    run.state.mkdir(parents=True)
    family = Family(settings, ModelFolders.find(settings, run), run)
    start = torch.full((2, len(family.names)), 0.3)
    return Objective(family).gradient(start, 0)[0]


@pytest.mark.usefixtures("no_accelerator")
def test_the_first_gradient_is_nearly_that_of_float32(llama, tmp_path):
    exact = first_gradient(llama, tmp_path / "exact")
    for number, (settings, bar) in enumerate((
        ({"mixed_precision": "bf16"}, 0.05),
        ({"dtype": "bfloat16"}, 0.05),
        ({"device_map": "auto"}, 0.0),
    )):  # fmt: skip
        rough = first_gradient({**llama, **settings}, tmp_path / str(number))
        assert (rough - exact).norm() <= bar * exact.norm(), settings
