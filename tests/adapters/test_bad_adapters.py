# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an adapter is said before anything is merged, with the remedy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, PromptTuningConfig, VeraConfig
from peft_models import Convolutions, Trained, tied_llama, train_by_chance, trained
from safetensors.torch import load_file, save_file

from mergekit_ace.adapters.peft_adapter import read_adapter
from mergekit_ace.files.headers import DamagedFileError

Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Trained:
    return trained("linear", tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A good adapter, to be damaged."""
    return shutil.copytree(made.folder, tmp_path / "adapter")


def set_config(folder: Path, **values) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def set_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def refuse(folder: Path, *parts: str, network=None) -> str:
    """Read an adapter, which fails with an error that names what it has to."""
    with pytest.raises(DamagedFileError) as caught:
        read_adapter(str(folder), network or tiny_llama().to("meta"))
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert str(folder) in message
    return message


@pytest.mark.parametrize(
    "config",
    [
        LoHaConfig(target_modules=["q_proj"]),
        LoKrConfig(target_modules=["q_proj"]),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        VeraConfig(target_modules=["q_proj"]),
        AdaLoraConfig(target_modules=["q_proj"], total_step=5),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_another_type_of_adapter(folder, config):
    config.save_pretrained(folder)
    refuse(folder, config.peft_type.value, "merge_and_unload")


def test_an_adapter_that_changes_no_weights(folder):
    PromptTuningConfig(num_virtual_tokens=3).save_pretrained(folder)
    refuse(folder, "PROMPT_TUNING", "changes no weights")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"use_dora": True}, ["use_dora", "merge_and_unload"]),
        ({"use_qalora": True}, ["use_qalora"]),
        ({"use_bdlora": {"nblocks": 2}}, ["use_bdlora"]),
        ({"kasa_config": {}}, ["kasa_config"]),
        ({"lora_bias": True}, ["lora_bias", "merge_and_unload"]),
        ({"monteclora_config": {}}, ["monteclora_config"]),
        ({"arrow_config": {"top_k": 2}}, ["arrow_config"]),
        ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens"]),
        ({"trainable_token_indices": [3]}, ["trainable_token_indices"]),
        ({"layer_replication": [[0, 2], [1, 2]]}, ["layer_replication"]),
        ({"megatron_config": {"a": 1}, "megatron_core": "os"}, ["megatron_config"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["pissa_niter_4", "save_pretrained"]),
        ({"init_lora_weights": "olora"}, ["olora", "path_initial_model_for_weight_conversion"]),
        ({"use_something_new": True}, ["use_something_new", "update peft"]),
        ({"something_config": {"a": 1}}, ["something_config", "update peft"]),
        ({"r": 0}, ["`r` should be a positive integer", "correct its config"]),
        ({"rank_pattern": {"q_proj": 0}}, ["`r` should be a positive integer"]),
        ({"lora_alpha": None}, ["PEFT cannot put", "NoneType"]),
        ({"lora_alpha": "16"}, ["PEFT cannot put", "str"]),
        ({"r": 8}, ["(4, 32)", "(8, 32)", "rank_pattern"]),
        ({"rank_pattern": {"(": 4}}, ["PEFT cannot put", "unterminated"]),
        ({"target_modules": "("}, ["PEFT cannot put", "unterminated"]),
        ({"task_type": "NONE_SUCH"}, ["NONE_SUCH"]),
        ({"peft_type": None}, ["peft_type"]),
        ({"peft_type": "NONE_SUCH"}, ["NONE_SUCH"]),
        ({"target_modules": ["v_proj"]}, ["targets", "down_proj"]),
        ({"layers_to_transform": [0], "layers_pattern": 3}, ["PEFT cannot put"]),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_merged(folder, values, parts):
    set_config(folder, **values)
    refuse(folder, *parts)


@pytest.mark.parametrize(
    ("content", "part"), [(None, "no adapter_config.json"), ("", "empty"), ("{", "JSON")]
)
def test_a_config_that_is_no_file_of_json(folder, content, part):
    path = folder / "adapter_config.json"
    path.unlink() if content is None else path.write_text(content)
    refuse(folder, part)


def test_settings_of_a_newer_peft_are_said(folder):
    set_config(folder, some_new_number=16, use_something_new=False, something_config=None)
    with pytest.warns(UserWarning, match="some_new_number"):
        assert read_adapter(str(folder), tiny_llama().to("meta")).changes


def test_missing_and_truncated_weights(folder):
    path = folder / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    refuse(folder, "adapter_model.safetensors", "damaged")
    path.write_bytes(content[:50])
    refuse(folder, "damaged")
    path.unlink()
    refuse(folder, "no weights")


def renamed(old: str, new: str):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return change


def replaced(name: str, shape: tuple[int, ...]):
    def change(tensors):
        tensors[name] = torch.ones(shape)

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda tensors: tensors.pop(A), ["lora_B", "without lora_A", "q_proj"]),
        (lambda tensors: tensors.pop(B), ["lora_A", "without lora_B", "q_proj"]),
        (lambda tensors: tensors.clear(), ["no tensors"]),
        (replaced(A, (3, 32)), ["(3, 32)", "(4, 32)", "q_proj"]),
        (replaced(B, (32, 4, 1)), ["(32, 4, 1)", "q_proj"]),
        (replaced(A, (0, 32)), ["(0, 32)", "gathered"]),
        (replaced(A, (0,)), ["(0,)", "gathered"]),
        (
            renamed(A, A.removeprefix("base_model.model.")),
            ["without lora_A", "q_proj"],
        ),
        (renamed(A, f"{Q}.lora_A.default.weight"), ["without lora_A", "q_proj"]),
        (replaced(f"{Q}.lora_magnitude_vector", (32,)), ["lora_magnitude_vector"]),
        (replaced(f"{Q}.lora_embedding_A", (4, 32)), ["none that PEFT loads", "q_proj"]),
        (replaced(f"{Q}.lora_B.bias", (7,)), ["lora_B.bias", "none that PEFT loads"]),
        (lambda tensors: tensors.update({A: tensors[A].int()}), ["fractions", "q_proj"]),
        (
            lambda tensors: tensors.update({A: tensors[A].to(torch.float8_e4m3fn)}),
            ["q_proj", "is in F8_E4M3", "bfloat16, float16 or float32"],
        ),
    ],
)
def test_tensors_that_are_no_adapter(folder, change, parts):
    set_tensors(folder, change)
    refuse(folder, *parts)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none(folder, bad):
    set_tensors(folder, lambda tensors: tensors[B][0].fill_(bad))
    adapter = read_adapter(str(folder), tiny_llama().to("meta"))
    with pytest.raises(DamagedFileError, match=re.escape(B)):
        adapter.low_rank("model.layers.0.self_attn.q_proj.weight")
    adapter.low_rank("model.layers.1.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ({"hidden_size": 48}, ["q_proj", "(4, 32)", "(4, 48)"]),
        ({"num_hidden_layers": 1}, ["layers.1", "no such module"]),
    ],
)
def test_an_adapter_of_another_base(folder, other, parts):
    refuse(folder, *parts, network=tiny_llama(**other).to("meta"))


def test_an_adapter_of_another_architecture(folder):
    refuse(folder, "not found in the base", network=Convolutions().to("meta"))


def test_saved_modules_of_a_larger_vocabulary(tmp_path):
    trained("saved", tmp_path)
    network = tiny_llama(vocab_size=41).to("meta")
    refuse(tmp_path, "lm_head.weight", "(40, 32)", "(41, 32)", network=network)


def test_a_layer_of_another_kind(tmp_path):
    """A table has no factors of a matrix."""
    train_by_chance(tiny_llama, tmp_path, target_modules=["embed_tokens"], r=2)
    set_config(tmp_path, target_modules=["q_proj"])

    def change(tensors):
        table = "base_model.model.model.embed_tokens"
        for letter in "AB":
            old = tensors.pop(f"{table}.lora_embedding_{letter}")
            tensors[f"{Q}.lora_embedding_{letter}"] = old
        del tensors[f"{table}.base_layer.weight"]

    set_tensors(tmp_path, change)
    refuse(tmp_path, "lora_embedding_A", "none that PEFT loads", network=tiny_llama().to("meta"))


def test_factors_of_both_tied_tensors(tmp_path):
    targets = ["lm_head", "embed_tokens"]
    train_by_chance(tied_llama, tmp_path, target_modules=targets, r=2)
    refuse(tmp_path, "lm_head", "embed_tokens", "one tensor", network=tied_llama().to("meta"))


def test_convolutions_in_groups(tmp_path):
    def grouped():
        model = Convolutions()
        model.point = torch.nn.Conv2d(6, 4, 1, groups=2)
        return model

    with pytest.raises(RuntimeError):  # PEFT cannot merge them either
        train_by_chance(grouped, tmp_path, target_modules=["point"], r=2)
    refuse(tmp_path, "groups", "point", network=grouped().to("meta"))


def test_attention_of_torch(tmp_path):
    """Its factors belong to a weight of three matrices and to a module within."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2)

    made = train_by_chance(Attention, tmp_path, target_modules=["attention"], r=2)
    words = ("attention", "MultiheadAttention", "merge_and_unload")
    refuse(tmp_path, *words, network=made.network())


def test_factors_where_nothing_is_targeted(tmp_path):
    made = trained("experts", tmp_path)
    set_config(tmp_path, target_parameters=["experts.gate_up_proj"])
    refuse(tmp_path, "experts.lora_A", "config and base ask for", network=made.network())


def test_the_same_module_by_two_names(tmp_path):
    made = trained("all biases", tmp_path)
    plain = f"{Q}.bias"
    set_tensors(tmp_path, lambda tensors: tensors.update({plain: torch.ones(16)}))
    refuse(tmp_path, "q_proj.bias", "twice", network=made.network())


def test_names_that_are_no_adapter():
    for name in ("./none/such", "/none/such", "none_such_adapter"):
        with pytest.raises(DamagedFileError, match="none"):
            read_adapter(name, torch.nn.Module())
