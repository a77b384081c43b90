# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft_models import CASES, changed, largest_difference, mixtral, trained
from safetensors.torch import save_file

from mergekit_ace.adapters.peft_adapter import read_adapter


@pytest.mark.parametrize("case", CASES)
def test_changes_are_what_peft_merges(case, tmp_path):
    made = trained(case, tmp_path)
    adapter = read_adapter(str(tmp_path), made.network())
    moved = {n for n in made.weights if not torch.equal(made.weights[n], made.merged[n])}
    assert set(adapter.changes) >= moved
    assert largest_difference(changed(adapter, made.weights), made.merged) < 2e-6


OLD_EXPERTS = "base_model.model.model.layers.{}.block_sparse_moe.experts.{}.{}.lora_{}.weight"


def test_experts_of_transformers_4_are_packed_as_peft_packs_them(tmp_path):
    """Before transformers 5, every expert of Mixtral was a module of its own."""
    base = mixtral()
    names = [(n, e, w) for n in range(2) for e in range(3) for w in ("w1", "w2", "w3")]
    tensors = {}
    for layer, expert, name in names:
        inner, outer = (24, 16) if name == "w2" else (16, 24)
        tensors[OLD_EXPERTS.format(layer, expert, name, "A")] = torch.randn(2, inner)
        tensors[OLD_EXPERTS.format(layer, expert, name, "B")] = torch.randn(outer, 2)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    LoraConfig(r=2, lora_alpha=3, target_modules=["w1", "w2", "w3"]).save_pretrained(tmp_path)
    adapter = read_adapter(str(tmp_path), copy.deepcopy(base).to("meta"))
    merged = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).merge_and_unload()
    assert len(adapter.changes) == 4
    assert largest_difference(changed(adapter, dict(base.state_dict())), merged.state_dict()) < 1e-5
