# SPDX-License-Identifier: Apache-2.0
"""Merges of adapters by `mergekit-ace adapter`, beside mergekit's merges of the full models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import tiny_llama
from coefficient_files import make_file
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from peft import LoraConfig, PeftModel, get_peft_model
from peft_models import (
    CASES,
    changed,
    gpt2,
    gpt_oss,
    merged_by_peft,
    mixtral,
    qwen,
    tied_llama,
)  # fmt: skip
from peft_models import trained as trained_by_chance
from torch import Tensor
from transformers import LlamaForCausalLM

from mergekit_ace.adapters.adapter_run import merge_adapters
from mergekit_ace.adapters.peft_adapter import read_adapter
from mergekit_ace.algebra.ace import AceOptions, RelativeOptions, merge_tensor
from mergekit_ace.algebra.task_vectors import other_side
from mergekit_ace.methods.architecture import is_table, stored_layout
from mergekit_ace.planning import ConfigError
from mergekit_ace.report.record import read_records

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
def cache(tmp_path_factory) -> Path:
    """Where mergekit keeps adapters that it has merged into the base."""
    return tmp_path_factory.mktemp("cache")


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


def check_same(
    base: str, got: dict[str, Tensor], expected: dict[str, Tensor], bar: float = 5e-5
) -> None:
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
def test_the_same_config_gives_the_same_weights(family, cache, tmp_path, method, parameters):
    config = config_of(family, method, **parameters)
    expected = full_merge(config, tmp_path / "full", cache)
    check_same(family[0], applied(family[0], adapter_merge(config, tmp_path)), expected)


SETTINGS = {
    "gradient": {"lambda": [0.2, 1.0]},
    "filters": {
        "lambda": [{"filter": "q_proj", "value": 0.3}, {"filter": "mlp", "value": [1.5, 0.5]}],
        "epsilon": [{"filter": "down_proj", "value": "1e-3"}, {"value": 1e-5}],
    },
    "layouts": {
        "layout": [
            {"filter": "q_proj", "value": "mean"},
            {"filter": "up_proj", "value": "transposed"},
            {"value": "auto"},
        ]
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_parameters_mean_the_same(family, cache, tmp_path, setting):
    config = config_of(family, "ace", weights=[1.0, 0.5, [0.1, 2.0]], **SETTINGS[setting])
    expected = full_merge(config, tmp_path / "full", cache)
    check_same(family[0], applied(family[0], adapter_merge(config, tmp_path)), expected)


def test_weights_of_statsmerging(family, cache, tmp_path):
    config = config_of(family, "statsmerging", weights=[0.4, [-0.5, 1.0], 0.3])
    expected = full_merge(config, tmp_path / "full", cache)
    check_same(family[0], applied(family[0], adapter_merge(config, tmp_path)), expected)


@pytest.mark.parametrize("basis", ["task_vector", "ace_relative"])
def test_learned_coefficients(family, cache, tmp_path, basis):
    names = list(LlamaForCausalLM.from_pretrained(family[0]).state_dict())
    models = [f"{family[0]}+{path}" for path in family[1:]]
    parameters = RelativeOptions().model_dump(mode="json") if basis == "ace_relative" else {}
    file = make_file(names, models, basis=basis, parameters=parameters)
    file.save(tmp_path / "coefficients.safetensors")
    method = "statsmerging" if basis == "task_vector" else basis
    config = config_of(family, method, coefficients=str(tmp_path / "coefficients.safetensors"))
    expected = full_merge(config, tmp_path / "full", cache)
    check_same(family[0], applied(family[0], adapter_merge(config, tmp_path)), expected)


def test_the_base_of_linear_takes_part(family, cache, tmp_path):
    config = config_of(family, "linear", weight=0.3)
    config["models"].append({"model": family[0], "parameters": {"weight": 0.5}})
    expected = full_merge(config, tmp_path / "full", cache)
    check_same(family[0], applied(family[0], adapter_merge(config, tmp_path)), expected)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_one_adapter_alone_comes_out_as_it_is(family, tmp_path, dtype):
    config = config_of(family[:2], "ace", **({"lambda": 1.0}))
    config |= {"dtype": dtype or "float32", "out_dtype": dtype}
    out = adapter_merge(config, tmp_path)
    before, after = (
        {name: adapter.low_rank(name).dense() for name in adapter.changes}
        for adapter in (
            read_adapter(str(path), tiny_llama().to("meta")) for path in (family[1], out)
        )
    )
    assert before.keys() == after.keys()
    for name, delta in before.items():
        bar = 1e-2 if dtype == "bfloat16" else 1e-6
        assert float((after[name] - delta).norm()) <= bar * float(delta.norm()), name


def test_the_base_that_the_adapters_name(family, tmp_path):
    config = config_of(family, "ace")
    named = applied(family[0], adapter_merge(config, tmp_path))
    del config["base_model"]
    (tmp_path / "other").mkdir()
    config["models"] = [{"model": path} for path in family[1:]]
    got = applied(family[0], adapter_merge(config, tmp_path / "other"))
    assert all(torch.equal(got[name], tensor) for name, tensor in named.items())


def test_adapters_alone_and_a_base_without_weights(family, tmp_path):
    """The base's weights are not needed."""
    bare = tmp_path / "base"
    bare.mkdir()
    shutil.copy(Path(family[0], "config.json"), bare)
    whole = config_of(family, "ace")
    expected = applied(family[0], adapter_merge(whole, tmp_path))
    config = {**whole, "base_model": str(bare), "models": [{"model": p} for p in family[1:]]}
    (tmp_path / "other").mkdir()
    got = applied(family[0], adapter_merge(config, tmp_path / "other"))
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_the_base_is_the_one_that_the_adapters_name(family, tmp_path):
    config = {"merge_method": "linear", "models": [{"model": p} for p in family[1:]]}
    config["parameters"] = {"weight": 0.5}
    out = adapter_merge(config, tmp_path)
    assert (
        json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
        == (family[0])
    )


def test_a_merged_adapter_merges_again(family, cache, tmp_path):
    first = adapter_merge(config_of(family[:3], "ace"), tmp_path)
    paths = [family[0], str(first), family[3]]
    config = config_of(paths, "ace_relative")
    (tmp_path / "again").mkdir()
    expected = full_merge(config, tmp_path / "full", cache)
    got = applied(family[0], adapter_merge(config, tmp_path / "again"))
    check_same(family[0], got, expected)


def test_a_rank_cuts_the_smallest_directions(family, tmp_path):
    whole = adapter_merge(config_of(family, "ace"), tmp_path)
    (tmp_path / "cut").mkdir()
    cut = adapter_merge(config_of(family, "ace"), tmp_path / "cut", rank=3)
    network = tiny_llama().to("meta")
    first, second = read_adapter(str(whole), network), read_adapter(str(cut), network)
    assert first.changes.keys() == second.changes.keys()
    assert {change.rank for change in second.changes.values()} == {3}
    for name in first.changes:
        full, less = first.low_rank(name).dense(), second.low_rank(name).dense()
        left, values, right = torch.linalg.svd(full, full_matrices=False)
        nearest = (left[:, :3] * values[:3]) @ right[:3]
        assert float((less - nearest).norm()) <= 1e-6 * float(full.norm())


@pytest.mark.parametrize("method", ["ties", "consensus_ta", "wudi"])
def test_methods_by_entries_need_a_rank(family, cache, tmp_path, method):
    parameters = {"weight": 1.0, "density": 0.5} if method == "ties" else {}
    config = config_of(family, method, **parameters)
    with pytest.raises(ConfigError, match=f"merge_method: {method} makes no adapter: .*--rank"):
        adapter_merge(config, tmp_path)
    assert not (tmp_path / "adapter").exists()
    expected = full_merge(config, tmp_path / "full", cache)
    out = adapter_merge(config, tmp_path, rank=32)  # all that the smallest side has
    check_same(family[0], applied(family[0], out), expected, 1e-4)


def test_methods_on_weights_make_no_adapter(family, tmp_path):
    config = config_of(family, "karcher")
    with pytest.raises(ConfigError, match="depends on the weights themselves"):
        adapter_merge(config, tmp_path, rank=4)


def test_the_report_is_that_of_the_full_merge(family, cache, tmp_path):
    reports = [tmp_path / f"{name}.jsonl" for name in ("full", "adapter")]
    for path in reports:
        config = config_of(family, "ace", report=str(path))
        if path.stem == "full":
            full_merge(config, tmp_path / "out", cache)
        else:
            adapter_merge(config, tmp_path)
    full, ours = ({line.tensor: line for line in read_records(path)} for path in reports)
    assert ours.keys() == {name for name, line in full.items() if any(line.matrices[0].tau)}
    for name, line in ours.items():
        for field in ("layout", "shape", "models"):
            assert getattr(line, field) == getattr(full[name], field), (name, field)
        (one,), (other,) = line.matrices, full[name].matrices
        for field in ("rule", "heterogeneous", "normalized"):
            assert getattr(one, field) == getattr(other, field), (name, field)
        assert one.tau == pytest.approx(other.tau, rel=1e-4)


def test_the_card_says_how_it_was_made(family, tmp_path):
    out = adapter_merge(config_of(family, "ace"), tmp_path)
    head, text = (out / "README.md").read_text().split("---\n")[1:3]
    told = yaml.safe_load(head)
    assert told["library_name"] == "peft"
    assert told["base_model"] == family[0]
    assert "lora" in told["tags"]
    assert "merge_method: ace" in text
    assert "xu2026ace" in text
    assert "rank 5 to 9" in text
    assert "| share of all change |" in text


def test_programs_get_a_line_per_tensor(family, tmp_path, capsys):
    out = adapter_merge(config_of(family, "ace"), tmp_path, rank=3, as_json=True)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    *tensors, last = events
    adapter = read_adapter(str(out), tiny_llama().to("meta"))
    assert {event["tensor"] for event in tensors} == adapter.changes.keys()
    assert all(event["rank"] == 3 and 0 < event["lost"] < 1 for event in tensors)
    assert last["event"] == "complete"
    assert last["modules"] == len(tensors)


def test_the_tokenizer_of_an_adapter_is_kept(family, tmp_path):
    for name in ("tokenizer_config.json", "tokenizer.json"):
        Path(family[2], name).write_text("{}")
    out = adapter_merge(config_of(family, "ace"), tmp_path)
    assert (out / "tokenizer.json").read_text() == "{}"


KINDS = [
    case
    for case in CASES
    if CASES[case][0] in (tiny_llama, tied_llama, gpt2, qwen, mixtral, gpt_oss)
]


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("method", ["ace", "ace_relative"])
def test_every_kind_is_merged_as_its_full_tensors(tmp_path, case, method):
    trained = [trained_by_chance(case, tmp_path / str(seed), seed) for seed in range(3)]
    first, base = trained[0], tmp_path / "base"
    first.base.save_pretrained(base)
    paths = [str(base), *(str(one.folder) for one in trained)]
    out = adapter_merge(config_of(paths, method), tmp_path)
    got = merged_by_peft(first.base, out)
    network = first.network()
    versions = [changed(read_adapter(path, network), first.weights) for path in paths[1:]]
    heads = {"lm_head.weight"} if case == "saved and tied" else set()
    assert all(torch.equal(got[name], got["model.embed_tokens.weight"]) for name in heads)
    for name, tensor in first.weights.items():
        if name in heads:  # the same parameter as the table, and merged as such
            continue
        wanted = expected_tensor(method, name, str(base), tensor, [v[name] for v in versions])
        origin, found = tensor.double(), got[name].double()
        size = float((wanted - origin).norm())
        assert float((found - wanted).norm()) <= 2e-5 * size + 2**-22 * float(origin.norm()), name


def expected_tensor(
    method: str, name: str, base: str, tensor: Tensor, versions: list[Tensor]
) -> Tensor:
    """What a method makes of full tensors in float64, by their outputs as of adapters."""
    reference = ModelReference.parse(base)
    layout = stored_layout("auto", reference, name, tensor.ndim, tables=method == "ace_relative")
    if not is_table(reference, name):
        layout = other_side(layout, tensor.ndim)
    options = AceOptions() if method == "ace" else RelativeOptions()
    return merge_tensor(tensor.double(), versions, options=options, layout=layout)[0]
