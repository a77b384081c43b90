# SPDX-License-Identifier: Apache-2.0
"""What an adapter changes is what PEFT makes of it; what is wrong with it is said at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from checkpoints import configure, tiny_llama
from peft_models import CASES, Trained, edit_tensors, read, train_by_chance
from torch import Tensor, nn

from mergekit_ace.naming import ConfigError, FileError

CONFIG = "adapter_config.json"
Q = "base_model.model.model.layers.0.self_attn.q_proj"

A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Trained:
    build, options = CASES["linear"]
    return train_by_chance(build, tmp_path_factory.mktemp("good"), **options)


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A good adapter, to be changed."""
    return shutil.copytree(made.folder, tmp_path / "adapter")


@pytest.mark.parametrize(
    "values",
    [
        {"init_lora_weights": "gaussian", "velora_config": {}},
        {"some_new_number": 16, "use_something_new": False, "something_config": None},
        {
            "megatron_core": "this_would_run",
            "auto_mapping": {"base_model_class": "X", "parent_library": "this_would_run"},
        },
    ],
    ids=str,
)
def test_settings_that_change_nothing(made, folder, monkeypatch, values):
    """And the code that a config names is not imported."""
    configure(folder, CONFIG, **values)
    monkeypatch.syspath_prepend(folder)
    (folder / "this_would_run.py").write_text("raise SystemExit")
    weights = {name: tensor.double() for name, tensor in made.base.state_dict().items()}
    changes = read(folder).changes
    weights |= {name: change.apply(weights[name]) for name, change in changes.items()}
    merged = {name: tensor.double() for name, tensor in made.merged.items()}
    torch.testing.assert_close(weights, merged, rtol=0, atol=2e-6)


def test_a_bin_file_is_not_opened(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"cposix\nsystem\n(S'touch harm'\ntR.")
    with pytest.raises(FileError, match=r"adapter_model\.bin"):
        read(folder)
    assert not (folder / "harm").exists()


FILES = ("adapter_config.json", "adapter_model.safetensors")


def test_names_on_the_hub(made, monkeypatch):
    asked = []

    def download(repo_id, revision=None, allow_patterns=(), cache_dir=None):
        asked.append((repo_id, revision, {"tokenizer.json", *FILES} <= {*allow_patterns}))
        return str(made.folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    adapter = read("someone/adapter@v2")
    assert (adapter.name, adapter.file.parent) == ("someone/adapter@v2", made.folder)
    assert asked == [("someone/adapter", "v2", True)]


def refuse(folder: Path, *words: str, network=None) -> None:
    """Read an adapter, which fails with an error that names what it has to."""
    with pytest.raises((ConfigError, FileError)) as caught:
        read(folder, network)
    message = str(caught.value)
    assert [word for word in (str(folder), *words) if word not in message] == [], message


def moved(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}.lora_A.default.weight"] = tensors.pop(A)


CONFIGS = [
    ({"peft_type": "LOHA"}, ["LOHA", "save_as_lora", "merge_and_unload"]),
    ({"use_dora": True}, ["use_dora", "save_as_lora", "merge_and_unload"]),
    ({"lora_bias": True}, ["lora_bias", "merge_and_unload"]),
    ({"bias": "all"}, ["`bias`: all", "merge_and_unload"]),
    ({"trainable_token_indices": [3]}, ["trainable_token_indices"]),
    ({"megatron_config": {"a": 1}, "megatron_core": "os"}, ["megatron_config"]),
    ({"init_lora_weights": "pissa_niter_4"}, ["path_initial_model_for_weight_conversion"]),
    ({"use_something_new": True}, ["use_something_new", "update peft"]),
    ({"r": 0}, ["`r` should be a positive integer", "correct its config"]),
    ({"lora_alpha": "16"}, ["PEFT cannot put", "str"]),
    ({"r": 8}, ["lora_", "(4, ", "(8, ", "rank_pattern"]),
    ({"target_modules": "("}, ["PEFT cannot put", "unterminated"]),
    ({"task_type": "NONE_SUCH"}, ["NONE_SUCH"]),
    ({"peft_type": None}, ["peft_type"]),
    ({"target_modules": ["v_proj"]}, ["targets", "down_proj"]),
]
TENSORS = [
    (lambda tensors: tensors.pop(B), [f"lacks {B}"]),
    (lambda tensors: tensors.clear(), ["no tensors"]),
    ({A: torch.ones(3, 32)}, ["(3, 32)", "(4, 32)", "q_proj"]),
    ({"base_model.model.lm_head.weight": torch.ones(0)}, ["lm_head", "empty", "ZeRO-3"]),
    (moved, ["no such tensor", "q_proj"]),
    ({f"{Q}.lora_magnitude_vector": torch.ones(32)}, ["lora_magnitude_vector"]),
    ({A: torch.ones(4, 32).char()}, [A, "is in I8", "quantised"]),
]


@pytest.mark.parametrize(("change", "words"), CONFIGS)
def test_configs_that_cannot_be_merged(folder, change, words):
    configure(folder, CONFIG, **change)
    refuse(folder, *words)


@pytest.mark.parametrize(("change", "words"), TENSORS)
def test_tensors_that_cannot_be_merged(folder, change, words):
    edit_tensors(folder, change if callable(change) else lambda tensors: tensors.update(change))
    refuse(folder, *words)


def test_a_scale_of_zero_is_warned_of(folder, caplog):
    configure(folder, CONFIG, lora_alpha=0)
    read(folder)
    assert "adapter_config.json has a `lora_alpha` or an `alpha_pattern` of 0" in caplog.text


def test_saved_modules_of_a_larger_vocabulary(tmp_path):
    build, options = CASES["saved"]
    train_by_chance(build, tmp_path, **options)
    network = tiny_llama(vocab_size=41)
    refuse(tmp_path, "(40, 32)", "(41, 32)", "vocabulary", network=network)


def test_a_convolution(folder):
    network = nn.ModuleDict({"q_proj": nn.Conv1d(4, 5, 3)})
    refuse(folder, "q_proj is a Conv1d", "merge_and_unload", network=network)
