# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace adapter` given what cannot be merged: a message, and nothing is changed on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import tiny_llama
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from test_adapter_run import config_of, save_adapter

from mergekit_ace.cli import main


@pytest.fixture
def family(tmp_path) -> list[str]:
    base = str(tmp_path / "base")
    tiny_llama().save_pretrained(base)
    return [base, *(save_adapter(base, tmp_path / f"adapter{t}", t) for t in range(2))]


def run(config: dict | str, folder: Path, *flags: str, out: str = "out") -> Result:
    path = folder / "config.yml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return CliRunner().invoke(main, ["adapter", str(path), str(folder / out), *flags])


def refused(result: Result, out: Path, *words: str) -> None:
    """The command ended with one message that has these words, and left nothing."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    for word in words:
        assert word in result.output, result.output
    assert not out.exists()


def edit_config(path: str, **changes) -> None:
    file = Path(path, "adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(path: str, change) -> None:
    file = Path(path, "adapter_model.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def a_name(tensors: dict, part: str) -> str:
    return next(name for name in tensors if part in name)


def spoil(tensors: dict) -> None:
    tensors[a_name(tensors, "layers.1.mlp.up_proj.lora_B")][0, 0] = float("nan")


def test_what_the_reader_refuses(family, tmp_path):
    """Before anything is merged; `test_bad_adapters.py` has all of it."""
    edit_config(family[2], use_dora=True)
    words = [family[2], "use_dora", "mergekit-yaml"]
    refused(run(config_of(family, "ace"), tmp_path), tmp_path / "out", *words)


def test_numbers_that_are_none(family, tmp_path):
    """Found when their turn comes."""
    edit_tensors(family[2], spoil)
    refused(run(config_of(family, "ace"), tmp_path), tmp_path / "out", family[2], "NaN")


def test_an_adapter_of_another_base(family, tmp_path):
    other = tmp_path / "other"
    tiny_llama(hidden_size=48).save_pretrained(other)
    save_adapter(str(other), tmp_path / "foreign", 4)
    paths = [*family, str(tmp_path / "foreign")]
    words = ["foreign", "ask for", "the base that the adapter was trained on"]
    refused(run(config_of(paths, "ace"), tmp_path), tmp_path / "out", *words)


def test_a_full_model_among_the_experts(family, tmp_path):
    config = config_of(family, "ace")
    tiny_llama(seed=3).save_pretrained(tmp_path / "full")
    config["models"].append({"model": str(tmp_path / "full")})
    refused(run(config, tmp_path), tmp_path / "out", "is a full model", "mergekit-yaml")


def test_adapters_of_two_bases(family, tmp_path):
    config = config_of(family, "linear", weight=0.5)
    shutil.copytree(family[0], tmp_path / "copy")
    config["models"][1]["model"] = f"{tmp_path / 'copy'}+{family[2]}"
    refused(run(config, tmp_path), tmp_path / "out", "belong to different models")


def test_no_adapters(family, tmp_path):
    config = {"merge_method": "linear", "models": [{"model": family[0]}], "dtype": "float32"}
    config["parameters"] = {"weight": 1.0}
    refused(run(config, tmp_path), tmp_path / "out", "no expert of the config is an adapter")


def test_weights_that_scale_the_base(family, tmp_path):
    config = config_of(family, "linear", weight=0.3, normalize=False)
    refused(run(config, tmp_path), tmp_path / "out", "sum to 0.6", "the base itself")


@pytest.mark.parametrize("end", [1, 2])
def test_layers_that_are_moved_or_left_out(family, tmp_path, end):
    whole = config_of(family, "ace")
    sources = [{"model": one["model"], "layer_range": [0, 2]} for one in whole.pop("models")]
    sources.append({"model": family[0], "layer_range": [0, 2]})
    cut = [{**source, "layer_range": [2 - end, 3 - end]} for source in sources]
    config = {**whole, "slices": [{"sources": cut}]}
    refused(run(config, tmp_path), tmp_path / "out", "layers", "mergekit-yaml")
    config = {**whole, "slices": [{"sources": sources}]}
    assert run(config, tmp_path).exit_code == 0


def test_a_base_without_a_config(family, tmp_path):
    Path(family[0], "config.json").unlink()
    refused(run(config_of(family, "ace"), tmp_path), tmp_path / "out", "config.json")


@pytest.mark.parametrize("text", ["models: [", "merge_method: ace\n", "- 1\n"])
def test_no_config(tmp_path, text):
    refused(run(text, tmp_path), tmp_path / "out", "config.yml")


@pytest.mark.parametrize("parameters", [{"epsilon": -1}, {"layout": "round"}, {"lambda": "x"}])
def test_values_out_of_range(family, tmp_path, parameters):
    (name,) = parameters
    refused(run(config_of(family, "ace", **parameters), tmp_path), tmp_path / "out", name)


def test_adapters_that_change_nothing(family, tmp_path):
    for path in family[1:]:
        edit_tensors(path, lambda tensors: [t.zero_() for n, t in tensors.items() if "_B" in n])
    refused(run(config_of(family, "ace"), tmp_path), tmp_path / "out", "change nothing")


def test_an_adapter_whose_b_is_zero_takes_no_part(family, tmp_path):
    edit_tensors(family[2], lambda tensors: [t.zero_() for n, t in tensors.items() if "_B" in n])
    assert run(config_of(family, "ace"), tmp_path).exit_code == 0
    before = load_file(Path(family[1], "adapter_model.safetensors"))
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for name, tensor in before.items():
        scale = 2 if "lora_B" in name else 1  # alpha 4 at rank 2
        assert torch.equal(after[name], scale * tensor)


def test_the_result_is_an_input(family, tmp_path):
    before = {path: path.read_bytes() for path in Path(family[1]).iterdir()}
    result = run(config_of(family, "ace"), tmp_path, "--overwrite", out="adapter0")
    assert result.exit_code == 1
    assert "which is merged; choose another folder" in result.output
    assert {path: path.read_bytes() for path in Path(family[1]).iterdir()} == before


def test_another_adapter_is_only_replaced_when_asked_for(family, tmp_path):
    assert run(config_of(family, "ace"), tmp_path).exit_code == 0
    weights = tmp_path / "out" / "adapter_model.safetensors"
    before = weights.read_bytes()
    result = run(config_of(family, "ace_relative"), tmp_path)
    assert result.exit_code == 1
    assert "--overwrite" in result.output
    edit_tensors(family[2], spoil)  # found on the way: the old one stays whole
    assert run(config_of(family, "ace_relative"), tmp_path, "--overwrite").exit_code == 1
    assert weights.read_bytes() == before
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    assert run(config_of(family[:2], "ace"), tmp_path, "--overwrite").exit_code == 0
    assert weights.read_bytes() != before
    assert not (tmp_path / "out" / "tokenizer.json").exists(), "no adapter carries one"


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md"])
def test_what_somebody_else_has_put_there_is_only_replaced_when_asked_for(family, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    result = run(config_of(family, "ace"), tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path / 'out'} holds {name}; --overwrite replaces what is there" in result.output
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["{}"]


def test_a_model_is_never_replaced(family, tmp_path):
    result = run(config_of(family, "ace"), tmp_path, "--overwrite", out="base")
    assert result.exit_code == 1
    assert "holds a model" in result.output
    assert (tmp_path / "base" / "model.safetensors").is_file()


def test_whole_tensors_need_the_base(family, tmp_path):
    path = save_adapter(family[0], tmp_path / "saved", 3, modules_to_save=["lm_head"])
    Path(family[0], "model.safetensors").unlink()
    config = config_of([*family, path], "ace")
    refused(run(config, tmp_path), tmp_path / "out", "lm_head.weight", "weights of")


def test_what_is_seldom_meant_is_said(family, tmp_path):
    config = config_of(family, "ace", spectral_refinement="always", adaptive_normalization="never")
    result = run(config, tmp_path)
    assert result.exit_code == 0
    assert "warning: config: spectral_refinement: always" in result.output


def test_several_adapters_at_a_lambda_of_one(family, tmp_path):
    words = "may together undo what the base knew"
    assert words not in run(config_of(family, "ace"), tmp_path).output
    paths = [*family, save_adapter(family[0], tmp_path / "third", 3)]
    assert words in run(config_of(paths, "ace"), tmp_path, "--overwrite").output
    for method, parameters in (("ace", {"lambda": 0.5}), ("cart", {})):
        config = config_of(paths, method, **parameters)
        assert words not in run(config, tmp_path, "--overwrite").output


def test_a_filter_that_reaches_nothing(family, tmp_path):
    layouts = [{"filter": "no_such_part", "value": "matrix"}, {"value": "auto"}]
    config = config_of(family, "ace", layout=layouts)
    refused(run(config, tmp_path), tmp_path / "out", "no_such_part")


def test_a_misspelt_parameter(family, tmp_path):
    config = config_of(family, "ace", epsilom=1e-3)
    refused(run(config, tmp_path), tmp_path / "out", "'epsilom'", "did you mean 'epsilon'")
