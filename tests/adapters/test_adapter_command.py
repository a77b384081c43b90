# SPDX-License-Identifier: Apache-2.0
"""Merges of adapters by `mergekit-ace adapter`, beside mergekit's merges of the full models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import tiny_llama
from coefficient_files import make_file
from commands import command
from filelock import FileLock
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from peft import PeftModel
from peft_models import (
    CASES,
    LINEAR,
    changed,
    compare_changes,
    config_of,
    edit_config,
    edit_tensors,
    gpt2,
    gpt_oss,
    merged_by_peft,
    mixtral,
    opt,
    save_adapters,
    tied_llama,
    train_by_chance,
    trained,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from mergekit_ace.adapters.read import read_adapter
from mergekit_ace.algebra.ace import AceOptions, RelativeOptions, merge_tensor
from mergekit_ace.algebra.task_vectors import other_side
from mergekit_ace.methods.architecture import is_table, stored_layout
from mergekit_ace.report.record import read_records


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Where mergekit keeps adapters that it has merged into the base."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[str]:
    """A base and three adapters of different ranks and targets."""
    settings = {"target_modules": LINEAR, "lora_alpha": 0.3, "r": 2}
    some = {**settings, "target_modules": ["q_proj", "up_proj"], "r": 4}
    folder = tmp_path_factory.mktemp("family")
    return save_adapters(folder, tiny_llama, settings, {**settings, "r": 3}, some)


@pytest.fixture
def own(family, tmp_path) -> list[str]:
    """A base and two adapters, to be damaged."""
    return [str(shutil.copytree(path, tmp_path / Path(path).name)) for path in family[:3]]


def run(config: dict, folder: Path, *flags: object, fails: bool = False) -> str:
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config))
    return command("adapter", path, folder / "adapter", *flags, fails=fails)


def adapter_merge(config: dict, folder: Path, *flags: object) -> Path:
    """What `mergekit-ace adapter` makes of it; its folder."""
    folder.mkdir(exist_ok=True)
    run(config, folder, "--quiet", *flags)
    return folder / "adapter"


def full_merge(config: dict, out: Path, cache: Path) -> dict[str, Tensor]:
    """What `mergekit-yaml` makes of the full models."""
    options = MergeOptions(lora_merge_cache=str(cache), lora_merge_dtype="float32", quiet=True)
    run_merge(MergeConfiguration.model_validate(config), str(out), options)
    return LlamaForCausalLM.from_pretrained(out).state_dict()


def compare(config: dict, base: str, folder: Path, cache: Path) -> None:
    """Compare task vectors of both ways, and of `mergekit-ace merge`."""
    expected = full_merge(config, folder / "full", cache)
    origin = LlamaForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in origin.state_dict().items()}
    model = PeftModel.from_pretrained(origin, adapter_merge(config, folder))
    compare_changes(model.merge_and_unload().state_dict(), expected, before)
    command("merge", folder / "config.yml", folder / "whole")
    compare_changes(load_file(folder / "whole" / "model.safetensors"), expected, before)


def deltas(folder: str | Path) -> dict[str, Tensor]:
    """What an adapter of `family`'s base adds."""
    changes = read_adapter(str(folder), tiny_llama().to("meta")).changes
    return {name: change.factors().dense() for name, change in changes.items()}


METHODS = [
    ("ace", {}),
    ("ace", {"spectral_refinement": "always", "adaptive_normalization": "always"}),
    ("ace", {"epsilon": 1e-2, "lambda": [{"filter": "q_proj", "value": 0.3}, {"value": 1.5}]}),
    ("ace", {"layout": [{"filter": "up_proj", "value": "transposed"}, {"value": "auto"}]}),
    ("ace", {"layout": [{"filter": "q_proj", "value": "mean"}, {"value": "auto"}]}),
    ("ace_relative", {}),
    ("lines", {}),
    ("cart", {"rank_fraction": 0.1}),
    ("wudi", {"solver": "exact"}),
    ("tsv_m", {}),
    ("iso_c", {}),
    ("iso_cts", {}),
    ("task_arithmetic", {"weight": 0.6, "normalize": True, "lambda": 1.2}),
    ("linear", {"weight": 0.3}),
]


@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_the_same_config_gives_the_same_weights(family, cache, tmp_path, method, parameters):
    compare(config_of(family, method, **parameters), family[0], tmp_path, cache)


@pytest.mark.parametrize(
    ("method", "weights"),
    [("ace", [1.0, 0.5, [0.1, 2.0]]), ("statsmerging", [0.4, [-0.5, 1.0], 0.3])],
)
def test_weights_of_experts(family, cache, tmp_path, method, weights):
    config = config_of(family, method)
    for model, weight in zip(config["models"], weights, strict=True):
        model["parameters"] = {"weight": weight}
    compare(config, family[0], tmp_path, cache)


def test_learned_coefficients(family, cache, tmp_path):
    names = list(LlamaForCausalLM.from_pretrained(family[0]).state_dict())
    models = [f"{family[0]}+{path}" for path in family[1:]]
    parameters = RelativeOptions().model_dump(mode="json")
    file = make_file(names, models, basis="ace_relative", parameters=parameters)
    file.save(tmp_path / "coefficients.safetensors")
    config = config_of(
        family, "ace_relative", coefficients=str(tmp_path / "coefficients.safetensors")
    )
    compare(config, family[0], tmp_path, cache)


def test_the_base_of_linear_takes_part(family, cache, tmp_path):
    config = config_of(family, "linear", weight=0.3)
    config["models"].append({"model": family[0], "parameters": {"weight": 0.5}})
    compare(config, family[0], tmp_path, cache)


def test_a_merged_adapter_merges_again(family, cache, tmp_path):
    first = adapter_merge(config_of(family[:3], "ace"), tmp_path / "first")
    compare(config_of([family[0], str(first), family[3]], "ace"), family[0], tmp_path, cache)


def test_one_adapter_alone_comes_out_as_it_is(family, tmp_path):
    """But for the dtype; `test_adapters_that_change_nothing` has it in full precision."""
    config = config_of(family[:2], "ace") | {"out_dtype": "bfloat16"}
    before, after = deltas(family[1]), deltas(adapter_merge(config, tmp_path))
    compare_changes(after, before, {}, bar=1e-2)


def test_weights_of_the_base_are_not_needed(tmp_path):
    """Of an architecture that mergekit infers."""
    paths = save_adapters(tmp_path, opt, {"target_modules": ["q_proj", "fc1"]})
    Path(paths[0], "model.safetensors").unlink()
    out = adapter_merge(config_of(paths, "ace"), tmp_path)
    before, after = (read_adapter(str(f), opt().to("meta")).changes for f in (paths[1], out))
    assert before.keys() == after.keys()


@pytest.mark.parametrize("build", [tied_llama, tiny_llama])
@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_table_and_a_head_are_told_apart(tmp_path, build, modules):
    paths = save_adapters(tmp_path, build, {"target_modules": modules})
    out = adapter_merge(config_of(paths, "ace"), tmp_path)
    before, after = (read_adapter(str(f), build().to("meta")).changes for f in (paths[1], out))
    assert before.keys() == after.keys()
    assert sorted(name.split(".")[-2] for name in after) == sorted(modules)
    for name, change in before.items():
        torch.testing.assert_close(after[name].factors().dense(), change.factors().dense())


KINDS = [
    case
    for case in CASES
    if CASES[case][0] in (tiny_llama, gpt2, mixtral, gpt_oss) and not case.startswith("saved")
]


@pytest.mark.parametrize(
    ("case", "method"), [*((case, "ace_relative") for case in KINDS), ("table", "ace")]
)
def test_every_kind_is_merged_as_its_full_tensors(tmp_path, case, method):
    made = [trained(case, tmp_path / str(seed), seed) for seed in range(3)]
    first, base = made[0], tmp_path / "base"
    first.base.save_pretrained(base)
    paths = [str(base), *(str(one.folder) for one in made)]
    got = merged_by_peft(first.base, adapter_merge(config_of(paths, method), tmp_path))
    network = first.network()
    versions = [changed(read_adapter(path, network), first.weights) for path in paths[1:]]
    options = AceOptions() if method == "ace" else RelativeOptions()
    reference = ModelReference.parse(str(base))
    for name, tensor in first.weights.items():
        layout = stored_layout("auto", reference, name, tensor.ndim, tables=method != "ace")
        if not is_table(reference, name):  # adapters are read by their outputs
            layout = other_side(layout, tensor.ndim)
        origin, own = tensor.double(), [version[name] for version in versions]
        wanted = merge_tensor(origin, own, options=options, layout=layout)[0]
        size, found = float((wanted - origin).norm()), got[name].double()
        assert float((found - wanted).norm()) <= 2e-5 * size + 2**-22 * float(origin.norm()), name


def test_a_rank_cuts_the_smallest_directions_and_says_how_much(family, tmp_path):
    whole = deltas(adapter_merge(config_of(family, "ace"), tmp_path / "whole"))
    said = run(config_of(family, "ace"), tmp_path, "--rank", 3)
    cut = deltas(tmp_path / "adapter")
    assert whole.keys() == cut.keys()
    lost = 0.0
    for name, full in whole.items():
        left, values, right = torch.linalg.svd(full, full_matrices=False)
        nearest = (left[:, :3] * values[:3]) @ right[:3]
        assert float((cut[name] - nearest).norm()) <= 1e-6 * float(full.norm())
        lost += float(values[3:].square().sum())
    share = lost / sum(float(full.square().sum()) for full in whole.values())
    told = f"rank 3, which cuts off {share:.2%} of ‖X‖²"
    assert told in said
    assert told in (tmp_path / "adapter" / "README.md").read_text()


def test_the_report_is_that_of_the_full_merge(family, cache, tmp_path):
    reports = [tmp_path / f"{name}.jsonl" for name in ("full", "adapter")]
    full_merge(config_of(family, "ace", report=str(reports[0])), tmp_path / "full", cache)
    adapter_merge(config_of(family, "ace", report=str(reports[1])), tmp_path)
    full, ours = ({line.tensor: line for line in read_records(path)} for path in reports)
    assert ours.keys() == {name for name, line in full.items() if any(line.matrices[0].tau)}
    for name, line in ours.items():
        for field in ("layout", "shape", "models"):
            assert getattr(line, field) == getattr(full[name], field), (name, field)
        (one,), (other,) = line.matrices, full[name].matrices
        for field in ("rule", "heterogeneous", "normalized"):
            assert getattr(one, field) == getattr(other, field), (name, field)
        assert one.tau == pytest.approx(other.tau, rel=1e-4)


def test_the_card_and_the_tokenizer(own, tmp_path):
    for name in ("tokenizer_config.json", "tokenizer.json"):
        Path(own[2], name).write_text("{}")
    out = adapter_merge(config_of(own, "ace"), tmp_path)
    head, text = (out / "README.md").read_text().split("---\n")[1:3]
    settings = yaml.safe_load(head)
    assert settings["library_name"] == "peft"
    assert settings["base_model"] == own[0]
    assert "lora" in settings["tags"]
    for words in ("merge_method: ace", "xu2026ace", "14 modules of rank 5", own[1]):
        assert words in text
    assert (out / "tokenizer.json").read_text() == "{}"


def refused(config: dict, folder: Path, *words: str) -> None:
    """The command ends with one message that has these words, and leaves nothing."""
    said = run(config, folder, fails=True)
    assert [word for word in words if word not in said] == [], said
    assert not (folder / "adapter").exists()


def spoil(tensors: dict) -> None:
    name = next(name for name in tensors if "layers.1.mlp.up_proj.lora_B" in name)
    tensors[name][0, 0] = float("nan")


def silence(tensors: dict) -> None:
    """Let an adapter change nothing."""
    for name in (name for name in tensors if "_B" in name):
        tensors[name].zero_()


def test_damaged_adapters(own, tmp_path):
    """`test_adapter_read.py` has all that the reader refuses."""
    config = config_of(own, "ace")
    edit_tensors(own[2], spoil)  # found when its turn comes
    refused(config, tmp_path, own[2], "NaN")
    Path(own[0], "config.json").unlink()
    refused(config, tmp_path, "config.json")


def test_what_is_no_adapter_of_the_base(own, tmp_path):
    config = config_of(own, "ace")
    for other in (tmp_path / "full", own[1]):
        experts = [*config["models"], {"model": str(other)}]
        words = f"{other} is no adapter", "write `- model: BASE+ADAPTER`", "mergekit-ace merge"
        refused({**config, "models": experts}, tmp_path, *words)
    refused({"merge_method": "linear", "models": [{"model": own[0]}]}, tmp_path, "is no adapter")
    shutil.copytree(own[0], tmp_path / "copy")
    config["models"][1]["model"] = f"{tmp_path / 'copy'}+{own[2]}"
    refused(config, tmp_path, "belong to different models")


@pytest.mark.parametrize(
    ("method", "parameters", "words"),
    [
        ("linear", {"weight": 0.2, "normalize": False}, ["sum to 0.6", "the base itself"]),
        ("karcher", {}, ["makes no adapter", "mergekit-ace merge"]),
        ("ties", {"weight": 1.0, "density": 0.5}, ["makes no adapter", "mergekit-ace merge"]),
        ("consensus_ta", {}, ["merge_method: consensus_ta makes no adapter: "]),
        ("wudi", {}, ["merge_method: wudi makes no adapter: "]),
        ("ace", {"epsilon": -1}, ["epsilon"]),
        ("ace", {"layout": [{"filter": "no_such_part", "value": "matrix"}]}, ["no_such_part"]),
        ("ace", {"epsilom": 1e-3}, ["'epsilom'", "did you mean 'epsilon'"]),
    ],
)
def test_methods_and_parameters_that_make_no_adapter(family, tmp_path, method, parameters, words):
    refused(config_of(family, method, **parameters), tmp_path, *words)


def test_layers_that_are_moved_and_whole_tensors(family, tmp_path):
    whole = config_of(family, "ace")
    sources = [{"model": one["model"], "layer_range": [1, 2]} for one in whole.pop("models")]
    refused({**whole, "slices": [{"sources": sources}]}, tmp_path, "layers", "mergekit-ace merge")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    train_by_chance(tiny_llama, tmp_path / "saved", 3, **options)
    config = config_of([*family, str(tmp_path / "saved")], "ace")
    told = "holds lm_head.weight whole (`modules_to_save`)"
    refused(config, tmp_path, told, "mergekit-ace merge")


def test_adapters_that_change_nothing(own, tmp_path):
    edit_tensors(own[2], silence)
    found = deltas(adapter_merge(config_of(own, "ace"), tmp_path))
    assert all(torch.allclose(found[n], delta, rtol=1e-6) for n, delta in deltas(own[1]).items())
    shutil.rmtree(tmp_path / "adapter")
    edit_tensors(own[1], silence)
    refused(config_of(own, "ace"), tmp_path, "change nothing")


def test_nothing_is_replaced_unasked(own, tmp_path):
    out = tmp_path / "adapter"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    said = run(config_of(own, "ace"), tmp_path, fails=True)
    assert f"{out} holds tokenizer.json; --overwrite replaces what is there" in said
    with FileLock(out / ".adapter.lock"):
        said = run(config_of(own, "ace"), tmp_path, "--overwrite", fails=True)
        assert "another run is writing" in said
    run(config_of(own, "ace"), tmp_path, "--overwrite")
    assert not (out / "tokenizer.json").exists(), "no adapter carries one"
    before = {path: path.read_bytes() for path in out.iterdir()}
    run(config_of(own, "ace_relative"), tmp_path, fails=True)
    edit_tensors(own[2], spoil)  # found on the way: the old one stays whole
    run(config_of(own, "ace_relative"), tmp_path, "--overwrite", fails=True)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("part", [0, 1])
def test_what_is_read_is_never_replaced(own, tmp_path, part):
    before = {path: path.read_bytes() for path in Path(own[part]).iterdir()}
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(config_of(own, "ace")))
    said = command("adapter", path, own[part], "--overwrite", fails=True)
    assert ("holds a model" if part == 0 else "which is merged") in said
    assert {path: path.read_bytes() for path in Path(own[part]).iterdir()} == before


def test_what_is_seldom_meant_is_said(family, tmp_path, caplog):
    several = "may together undo what the base knew"
    assert several in run(config_of(family, "ace"), tmp_path, "--overwrite")
    for config in (config_of(family[:3], "ace"), config_of(family, "ace", **{"lambda": 0.5})):
        assert several not in run(config, tmp_path, "--overwrite")
    path = tmp_path / "other"
    shutil.copytree(family[1], path)
    edit_config(path, base_model_name_or_path="some/other-model")
    run(config_of([family[0], str(path)], "ace"), tmp_path, "--overwrite")
    assert f"the adapter {path} was trained on some/other-model, not on" in caplog.text
