# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, PeftModel
from peft_models import CASES, SMALL, changed, largest_difference, merged_by_peft, mixtral, trained
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mergekit_ace.adapters.peft_adapter import read_adapter
from mergekit_ace.adapters.writing import write_adapter
from mergekit_ace.files.headers import DamagedFileError


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


def test_conv1d_is_told_by_the_base_even_where_the_config_is_wrong(tmp_path):
    """PEFT sets `fan_in_fan_out` by the module that it wrapped last."""
    made = trained("transposed", tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(path.read_text().replace('"fan_in_fan_out": true', '"fan_in_fan_out": false'))
    adapter = read_adapter(str(tmp_path), made.network())
    assert largest_difference(changed(adapter, made.weights), made.merged) < 2e-6


def test_factors_are_float64_with_the_scale_within(tmp_path):
    made = trained("rslora", tmp_path)
    adapter = read_adapter(str(tmp_path), made.network())
    name = "model.layers.1.self_attn.v_proj.weight"
    factors = adapter.low_rank(name)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    place = "base_model.model.model.layers.1.self_attn.v_proj.lora_{}.weight"
    product = stored[place.format("B")].double() @ stored[place.format("A")].double()
    assert factors.left.dtype == factors.right.dtype == torch.float64
    torch.testing.assert_close(factors.dense(), 7 / 2 * product, rtol=1e-14, atol=0)


def test_old_bin_files(tmp_path):
    made = trained("table", tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    torch.save(load_file(path), tmp_path / "adapter_model.bin")
    path.unlink()
    adapter = read_adapter(str(tmp_path), made.network())
    assert largest_difference(changed(adapter, made.weights), made.merged) < 2e-6


def test_a_bin_file_executes_nothing(tmp_path):
    made = trained("linear", tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()

    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harm",))

    torch.save({"x": Harm()}, tmp_path / "adapter_model.bin")
    with pytest.raises(DamagedFileError, match=r"adapter_model\.bin"):
        read_adapter(str(tmp_path), made.network())
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_names_on_the_hub(tmp_path, monkeypatch, weights):
    made = trained("linear", tmp_path / "snapshot")
    stored = tmp_path / "snapshot" / "adapter_model.safetensors"
    if weights.endswith(".bin"):
        torch.save(load_file(stored), tmp_path / "snapshot" / weights)
        stored.unlink()
    asked = []

    def download(repository, name, revision=None):
        asked.append((repository, name, revision))
        if not (made.folder / name).exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError(name)
        return str(made.folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    adapter = read_adapter("someone/adapter@v2", made.network())
    assert adapter.name == "someone/adapter@v2"
    assert adapter.folder == made.folder
    assert asked[0] == ("someone/adapter", "adapter_config.json", "v2")
    assert asked[-1] == ("someone/adapter", weights, "v2")


def test_a_head_that_only_the_task_has(tmp_path):
    """A classifier is trained on a language model, whose checkpoint has no `score`."""
    trained("classifier", tmp_path)
    adapter = read_adapter(str(tmp_path), LlamaForCausalLM(LlamaConfig(**SMALL)).to("meta"))
    assert adapter.changes["score.weight"].kind == "saved"
    assert adapter.changes["score.weight"].shape == (3, 16)


def test_velora_and_other_starts_of_a_training_change_nothing(tmp_path):
    """These are about the gradients, or the first values of the factors."""
    made = trained("linear", tmp_path)
    path = tmp_path / "adapter_config.json"
    content = json.loads(path.read_text())
    for start in ("gaussian", "orthogonal", "eva", "mica"):
        path.write_text(json.dumps({**content, "init_lora_weights": start, "velora_config": {}}))
        adapter = read_adapter(str(tmp_path), made.network())
        assert largest_difference(changed(adapter, made.weights), made.merged) < 2e-6


def test_code_that_a_config_names_is_not_imported(tmp_path):
    made = trained("linear", tmp_path)
    path = tmp_path / "adapter_config.json"
    content = json.loads(path.read_text())
    content |= {
        "megatron_core": "this_would_run",
        "auto_mapping": {"base_model_class": "X", "parent_library": "this_would_run"},
    }
    path.write_text(json.dumps(content))
    (tmp_path / "this_would_run.py").write_text("raise SystemExit")
    assert len(read_adapter(str(tmp_path), made.network()).changes) == 4


def test_experts_of_older_versions_of_peft(tmp_path):
    """They took every stack of matrices for (E, i, o)."""
    made = trained("second of the experts", tmp_path)
    place = "base_model.model.model.layers.{}.mlp.experts.lora_{}.weight"
    path = tmp_path / "adapter_model.safetensors"
    old = {}
    for layer in range(2):  # of a parameter (3, 16, 24)
        old[place.format(layer, "A")] = torch.randn(6, 16)
        old[place.format(layer, "B")] = torch.randn(24, 6)
    assert old.keys() == load_file(path).keys()
    save_file(old, path)
    adapter = read_adapter(str(tmp_path), made.network())
    delta = adapter.low_rank("model.layers.1.mlp.experts.down_proj").dense()
    first = old[place.format(1, "A")].double().reshape(3, 2, 16)
    second = old[place.format(1, "B")].double().reshape(24, 2, 3)
    expected = 7 / 2 * torch.einsum("ore,eri->eio", second, first)
    torch.testing.assert_close(delta, expected)
    changes = [(change, adapter.low_rank(name)) for name, change in adapter.changes.items()]
    write_adapter(tmp_path / "out", [adapter], changes, "base", torch.float64)
    merged = merged_by_peft(made.base, tmp_path / "out")
    name = "model.layers.1.mlp.experts.down_proj"
    torch.testing.assert_close(
        (merged[name] - made.weights[name]).double(), delta, rtol=0, atol=1e-5
    )
