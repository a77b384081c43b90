# SPDX-License-Identifier: Apache-2.0
"""A merge says first what is wrong with it, and at the end whether its result is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA, ace_config, save_family, tiny_llama
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from sharded import (
    SHARDS,
    command,
    contents,
    linear,
    refusal,
    save_llamas,
    save_tokenizer,
    write_config,
)
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mergekit_ace.cli import main
from mergekit_ace.merging.manifest import Manifest

NO_MERGE = "Nothing was merged; --no-check leaves this check out"


@pytest.fixture
def paths(tmp_path) -> list[str]:
    return save_llamas(tmp_path)


@pytest.mark.parametrize("name", ["check", "inspect", "merge", "adapter"])
def test_a_device_that_is_not_there(tmp_path, paths, name):
    config = write_config(tmp_path / "merge.yml", ace_config(paths))
    out = [] if name == "check" else [str(tmp_path / "out")]
    result = CliRunner().invoke(main, [name, str(config), *out, "--device", "cuda:99"])
    assert result.exit_code == 1
    assert "Error: torch cannot compute on 'cuda:99' here: " in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": {"epsilom": 1}}, "did you mean 'epsilon'?"),
        ({"tokeniser": {"source": "base"}}, "did you mean 'tokenizer'?"),
    ],
)
def test_errors_end_it_before_it_starts(tmp_path, paths, change, message):
    config = write_config(tmp_path / "merge.yml", ace_config(paths) | change)
    text = refusal(config, tmp_path / "merged")
    assert message in text
    assert NO_MERGE in text
    assert not (tmp_path / "merged").exists()


def test_no_check_goes_on(tmp_path, paths):
    """As `mergekit-yaml` does, which drops what it does not know."""
    plain = write_config(tmp_path / "plain.yml", ace_config(paths))
    odd = write_config(tmp_path / "odd.yml", {**ace_config(paths), "parametes": {"a": 1}})
    command(plain, tmp_path / "plain", *SHARDS)
    command(odd, tmp_path / "odd", *SHARDS, "--no-check")
    weights = {n: data for n, data in contents(tmp_path / "plain").items() if "tensors" in n}
    assert weights.items() <= contents(tmp_path / "odd").items()


def test_warnings_are_said_and_stop_nothing(tmp_path, paths):
    settings = ace_config(paths, dtype="bfloat16")
    config = write_config(tmp_path / "merge.yml", settings)
    for flag, expected in (("--no-write-model-card", True), ("--quiet", False)):
        arguments = ["merge", str(config), str(tmp_path / flag), flag]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        assert ("warning: `dtype: bfloat16` rounds" in result.stderr) == expected


def test_folders_that_might_be_on_the_hub(tmp_path, paths, monkeypatch):
    """The end of mergekit-yaml, without a network; a merge of ours asks nobody then."""
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path / "merge.yml", linear([Path(path).name for path in paths]))
    for arguments, expected in ((["check"], True), (["merge"], False)):
        out = [] if expected else ["merged"]
        result = CliRunner().invoke(main, [*arguments, str(config), *out])
        assert result.exit_code == 0
        assert ("write ./expert1, or merge by mergekit-ace merge" in result.output) == expected


def test_a_full_disk_is_the_business_of_what_is_left(tmp_path, paths, monkeypatch):
    """A merge that is nearly done needs less room than `check` would ask for."""
    config = write_config(tmp_path / "merge.yml", ace_config(paths))
    command(config, tmp_path / "merged", *SHARDS)
    usage = type("Usage", (), {"total": 10**9, "free": 0})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert "is complete" in command(config, tmp_path / "merged", *SHARDS)


def leave_out(paths: list[str]) -> dict:
    """A config that merges only some modules of its models."""
    config = linear(paths)
    models = config.pop("models")
    return {**config, "modules": {"decoder": {"models": models}}}


def test_a_result_that_lacks_tensors_is_an_error(tmp_path):
    from test_architectures import MODELS

    torch.manual_seed(0)
    paths = save_family(MODELS["t5"][0](), tmp_path)
    config = write_config(tmp_path / "merge.yml", leave_out(paths))
    out = tmp_path / "merged"
    text = refusal(config, out)
    assert f"{out} is no model that transformers loads whole: it lacks" in text
    assert "encoder.block.0" in text
    assert Manifest.read(out).complete
    assert (out / "config.json").is_file()
    # said again, not forgotten
    assert "transformers loads whole" in refusal(config, out)
    assert "is complete" in command(config, out, "--no-check")


def test_what_the_base_lacks_the_result_may_lack(tmp_path, paths):
    """A backbone without the head that its config names is such a model."""
    for path in paths:
        index = json.loads(Path(path, "model.safetensors.index.json").read_text())
        file = Path(path, index["weight_map"].pop("lm_head.weight"))
        tensors = load_file(file)
        del tensors["lm_head.weight"]
        save_file(tensors, file, {"format": "pt"})
        Path(path, "model.safetensors.index.json").write_text(json.dumps(index))
    config = write_config(tmp_path / "merge.yml", linear(paths))
    command(config, tmp_path / "merged")


def test_more_layers_of_two_kinds(tmp_path):
    """mergekit-yaml fails over these at its very end."""
    kinds = ["full_attention", "sliding_attention"]
    settings = {**LLAMA, "layer_types": kinds, "use_sliding_window": True}
    paths = save_family(Qwen2ForCausalLM(Qwen2Config(**settings)), tmp_path)
    pieces = [
        {"sources": [{"model": path, "layer_range": place}]}
        for path, place in zip(paths[1:], ([0, 2], [1, 2]), strict=True)
    ]
    merge = {"merge_method": "passthrough", "slices": pieces, "dtype": "float32"}
    config = write_config(tmp_path / "merge.yml", merge)
    result = CliRunner().invoke(main, ["check", str(config)])
    assert result.exit_code == 1
    assert (
        "the result has 3 layers, and its config.json would have 2 `layer_types`" in result.output
    )
    command(config, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.layer_types == [*kinds, "sliding_attention"]


CONFIGURATION = """
from transformers import LlamaConfig

class TinyConfig(LlamaConfig):
    model_type = "tiny-code"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_tiny import TinyConfig

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


def bring_code(paths: list[str], **changes) -> None:
    """Let models bring the code that builds them."""
    for path in paths:
        Path(path, "configuration_tiny.py").write_text(CONFIGURATION)
        Path(path, "modeling_tiny.py").write_text(MODELING)
        file = Path(path, "config.json")
        content = json.loads(file.read_text())
        auto = {
            "AutoConfig": "configuration_tiny.TinyConfig",
            "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
        }
        content |= {"auto_map": auto, **changes}
        file.write_text(json.dumps(content))


def test_models_that_bring_code(tmp_path, monkeypatch):
    """With --trust-remote-code they are checked as well, and the result brings the code."""
    cache = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(cache, str(tmp_path / "modules"))
    paths = save_family(tiny_llama(), tmp_path)
    for path in paths:
        save_tokenizer(path, 40)
    bring_code(paths, architectures=["TinyForCausalLM"], model_type="tiny-code")
    config, out = write_config(tmp_path / "merge.yml", ace_config(paths)), tmp_path / "merged"
    said = command(config, out, "--trust-remote-code", "--try", "t1 t2")
    assert "not checked" not in said
    assert "mean loss" in said
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(model).__name__ == "TinyForCausalLM"


def test_code_is_not_run_unasked(tmp_path):
    """Where transformers has an architecture of its own, code that models bring is none of ours."""
    paths = save_family(tiny_llama(), tmp_path)
    for path in paths:
        save_tokenizer(path, 40)
    bring_code(paths)
    for path in paths:
        for name in ("configuration_tiny.py", "modeling_tiny.py"):
            Path(path, name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = write_config(tmp_path / "merge.yml", ace_config(paths))
    command(config, tmp_path / "merged", "--try", "t1 t2")
    assert not (tmp_path / "ran").exists()


def test_architectures_that_transformers_does_not_know(tmp_path):
    """Nobody can say what they need; their code is not run, and the merge is complete."""
    paths = save_family(tiny_llama(), tmp_path)
    for path in paths:
        file = Path(path, "config.json")
        content = json.loads(file.read_text())
        content |= {"architectures": ["LLaMaForCausalLM"], "model_type": "vit"}
        file.write_text(json.dumps(content))
    config = write_config(tmp_path / "merge.yml", linear(paths))
    said = command(config, tmp_path / "merged", "--no-check")
    assert "whether the result loads was not checked" in said
