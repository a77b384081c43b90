# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: whatever is wrong with a merge is said before it starts."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from checkpoints import ace_config, fine_tuned, save_family, tiny_llama
from click.testing import CliRunner
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_architectures import MODELS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, ViTConfig, ViTModel

from mergekit_ace.check import check as check_module
from mergekit_ace.cli import READING_FLAGS, main
from mergekit_ace.plugin import our_methods

Info = namedtuple("Info", "dtype shape")


@pytest.fixture
def check(tmp_path):
    """Run the command on a config; its JSON."""

    def run(config: dict, *flags: str) -> dict:
        path = tmp_path / "checked.yml"
        path.write_text(yaml.safe_dump(config))
        result = CliRunner().invoke(main, ["check", str(path), "--json", *flags])
        answer = json.loads(result.output[result.output.index("{") :])
        assert result.exit_code == (0 if answer["ok"] else 1), result.output
        assert answer["ok"] == all(f["level"] != "error" for f in answer["findings"])
        return answer

    return run


def texts(answer: dict, level: str | None = None) -> str:
    return "\n".join(
        f"{f['subject']}: {f['message']} → {f['remedy']}"
        for f in answer["findings"]
        if level in (None, f["level"])
    )


def rewrite(path: str, change) -> None:
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def configure(path: str, **changes) -> None:
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def paths(tmp_path) -> list[str]:
    return save_family(tiny_llama(), tmp_path)


def test_a_merge_that_is_all_right(check, paths, mergekit_yaml):
    config = ace_config(paths)
    answer = check(config)
    assert answer["findings"] == []
    tensors = load_file(Path(paths[0]) / "model.safetensors")
    assert answer["tensors"] == len(tensors)
    estimate = answer["estimate"]
    assert estimate["rules"] == {
        "matrix": sum(t.ndim == 2 for t in tensors.values()),
        "mean": sum(t.ndim == 1 for t in tensors.values()),
    }
    assert estimate["read"] == 3 * sum(t.nbytes for t in tensors.values())
    assert estimate["written"] == sum(t.nbytes for t in tensors.values())
    by_name = {part["name"]: part for part in estimate["tensors"]}
    assert by_name.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert by_name[name]["shape"] == list(tensor.shape)
        assert by_name[name]["rule"] == ("matrix" if tensor.ndim == 2 else "mean")
        assert by_name[name]["inputs"] == 3 * tensor.nbytes
    assert estimate["operations"] > 0
    assert [model["role"] for model in answer["models"]] == ["base", "expert", "expert"]
    mergekit_yaml(config)


def test_for_people(tmp_path, paths):
    path = tmp_path / "a.yml"
    path.write_text(yaml.safe_dump(ace_config(paths)))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 0
    assert "nothing to complain about" in result.output
    assert "15 matrix" in result.output or "matrix" in result.output
    path.write_text(yaml.safe_dump(ace_config(paths, parameters={"epsilom": 1})))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 1
    assert "error: config: parameters: there is no parameter 'epsilom' of ace" in result.output
    assert "→ did you mean 'epsilon'?" in result.output
    assert "errors: 1, warnings: 0" in result.output


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"spectral_refinement": "always", "adaptive_normalization": "never"},
            "a residual of the third power of the weights",
        ),
        ({"refinement_mean": "ridged", "epsilon": 10}, ""),
        ({"spectral_refinement": "always", "adaptive_normalization": "always"}, ""),
    ],
)
def test_settings_that_are_seldom_meant(check, paths, parameters, message):
    answer = check(ace_config(paths, parameters=parameters))
    assert answer["ok"]
    assert len(answer["findings"]) == bool(message)
    assert message in texts(answer, "warning")


def test_tensors_that_nobody_merges(check, tmp_path):
    """mergekit-yaml overlooks the encoder of ViT under the names that it has on the Hub."""
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
        image_size=8, patch_size=4,
    )  # fmt: skip
    torch.manual_seed(0)
    paths = save_family(ViTModel(config, add_pooling_layer=False), tmp_path)
    answer = check(ace_config(paths))
    assert not answer["ok"]
    assert "mergekit plans no merge of" in texts(answer, "error")
    assert "save_original_format=False" in texts(answer, "error")
    assert "mergekit-ace merge --unplanned merge" in texts(answer, "error")
    small = save_family(tiny_llama(), tmp_path / "small")
    rewrite(small[1], lambda t: t.update(rotary=torch.zeros(1)))
    answer = check(ace_config(small))
    assert answer["ok"]
    assert "rotary" in texts(answer, "warning")


@pytest.mark.parametrize("tokenizer", [True, False])
def test_files_that_mergekit_leaves_out(check, paths, tokenizer):
    save_tokenizer(paths[0], ["a", "b", "c", "d"])
    (Path(paths[0]) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    settings = {"tokenizer": {"source": "base"}} if tokenizer else {}
    answer = check(ace_config(paths, **settings))
    assert answer["ok"]
    found = texts(answer, "warning")
    assert (f"leaves generation_config.json of {paths[0]} out of the result" in found) == tokenizer
    assert ("`mergekit-ace card OUT`" in found) == tokenizer


def test_shapes_where_the_method_does_not_end_the_plan(check, paths):
    tiny_llama(intermediate_size=64).save_pretrained(paths[1])
    linear = ace_config(paths, merge_method="task_arithmetic", parameters={"weight": 1})
    found = texts(check(linear), "error")
    assert f"shapes: {paths[1]} has 6 tensors of another shape" in found


def save_tokenizer(path: str, words: list[str]) -> None:
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def test_dtypes(check, tmp_path):
    paths = save_family(tiny_llama(), tmp_path)
    fine_tuned(tiny_llama(), seed=2).bfloat16().save_pretrained(paths[2])
    config = ace_config(paths)
    assert check(config)["ok"]
    del config["dtype"]
    assert "have different dtypes" in texts(check(config), "warning")
    answer = check({**config, "dtype": "bfloat16"})
    assert answer["ok"]
    told = f"dtypes: `dtype: bfloat16` rounds {paths[1]}, stored as F32"
    assert told in texts(answer, "warning")
    assert paths[2] not in texts(answer, "warning")
    assert "out_dtype: bfloat16" in texts(answer, "warning")
    rewrite(paths[2], lambda t: t.update({n: (1.01 * x.float()).half() for n, x in t.items()}))
    assert f"rounds {paths[2]}, stored as F16" in texts(check({**config, "dtype": "bfloat16"}))
    rewrite(paths[1], lambda t: t.update({n: x.to(torch.int8) for n, x in t.items()}))
    assert "stored as I8, which cannot be merged" in texts(check(config), "error")


def test_the_precision_of_values(check, tmp_path):
    """A checkpoint in float32 whose values are those of bfloat16 loses nothing by bfloat16."""
    paths = save_family(tiny_llama(), tmp_path)
    rewrite(paths[1], lambda t: t.update({n: x.bfloat16().float() for n, x in t.items()}))
    answer = check({**ace_config(paths), "dtype": "bfloat16"})
    assert [model["dtypes"] for model in answer["models"]] == [["F32"]] * 3
    assert [model["precision"] for model in answer["models"]] == ["F32", "BF16", "F32"]
    assert f"rounds {paths[2]}, stored as F32" in texts(answer, "warning")
    assert paths[1] not in texts(answer, "warning")
    result = CliRunner().invoke(main, ["check", str(tmp_path / "checked.yml")])
    assert f"{paths[1]}: 21 tensors" in result.output
    assert "F32 with BF16 values" in result.output


def test_adapters(check, paths, tmp_path):
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = "somewhere/else"
    adapter = tmp_path / "adapter"
    model.save_pretrained(adapter)
    config = ace_config([paths[0], paths[1], f"{paths[0]}+{adapter}"])
    answer = check(config)
    assert answer["ok"], answer
    found = texts(answer, "warning")
    assert f"mergekit-yaml merges adapters into their base first: {adapter}" in found
    assert "--lora-merge-cache DIR" in found
    assert "merge by mergekit-ace merge, which need not" in found
    cache = tmp_path / "cache"
    before = set(LoaderCache().loaders)  # other tests of this process may have loaded adapters
    answer = check(config, "--lora-merge-cache", str(cache))
    assert answer["ok"], answer
    found = texts(answer, "warning")
    assert "was trained on somewhere/else" in found
    assert "--lora-merge-cache" not in found
    assert not cache.exists()  # nothing was merged for it
    assert not any(model.lora for model in LoaderCache().loaders.keys() - before)
    (adapter / "adapter_config.json").unlink()
    assert "holds no adapter_config.json" in texts(check(config), "error")


def test_rotary_positions_as_transformers_4_and_5_write_them(check, paths):
    file = Path(paths[1]) / "config.json"
    config = json.loads(file.read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    file.write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": None}))
    assert check(ace_config(paths))["findings"] == []
    configure(paths[1], rope_theta=2 * theta)
    found = texts(check(ace_config(paths)), "warning")
    assert f"rope_theta: {2 * theta} instead of {theta}" in found
    configure(paths[1], rope_theta=theta, rope_scaling={"type": "linear", "factor": 2.0})
    found = texts(check(ace_config(paths)), "warning")
    assert "rope_type: linear instead of default" in found


def test_models_that_are_not_there(check, paths, tmp_path):
    missing = ace_config([*paths, str(tmp_path / "none")])
    found = texts(check(missing), "error")
    assert f"there is no folder {tmp_path / 'none'}" in found
    (tmp_path / "empty").mkdir()
    assert "holds no weights" in texts(check(ace_config([*paths, str(tmp_path / "empty")])))
    found = texts(check(ace_config([*paths, "org/unknown"])), "error")
    assert (
        f"org/unknown is no folder in {Path.cwd()}, and no model of the Hub that can be read"
        in found
    )


def test_room_on_the_disk(check, paths, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10, 9, 1000))
    found = texts(check(ace_config(paths), "--out", "/a/b/c"), "error")
    assert "but / has 1 kB left" in found


@pytest.fixture
def hub(paths, tmp_path, monkeypatch) -> Callable[..., dict[str, Info]]:
    """Imitate `org/expert` on the Hub: there is no network here.

    The function takes names of files that the cache holds already, from a folder, and returns the
    headers that the Hub answers with.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tensors = load_file(Path(paths[1]) / "model.safetensors")
    headers = {name: Info("F32", list(tensor.shape)) for name, tensor in tensors.items()}
    files = {"model.safetensors": SimpleNamespace(tensors=headers)}
    monkeypatch.setattr(
        "huggingface_hub.get_safetensors_metadata",
        lambda name, revision: SimpleNamespace(files_metadata=files),
    )
    config_of = ModelReference.config

    def config(self, trust_remote_code=False):
        known = ModelReference.parse(paths[0]) if self.model.path == "org/expert" else self
        return config_of(known, trust_remote_code)

    monkeypatch.setattr(ModelReference, "config", config)

    def imitate(*cached: Path) -> dict[str, Info]:
        place = tmp_path / "hub" / "models--org--expert"
        (place / "snapshots" / "5a").mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("5a")
        for path in cached:
            shutil.copyfile(path, place / "snapshots" / "5a" / path.name)
        return headers

    return imitate


def test_a_model_on_the_hub_is_judged_by_its_headers(check, paths, hub):
    headers = hub()
    size = Path(paths[1], "model.safetensors")
    found = check(ace_config([*paths, "org/expert"]))
    assert found["ok"], found
    assert found["models"][-1] | {"dtypes": None} == {
        "model": "org/expert", "role": "expert", "tensors": 21, "dtypes": None,
        "precision": None, "bytes": sum(t.nbytes for t in load_file(size).values()),
        "vocabulary": None, "place": "on the Hub",
    }  # fmt: skip
    headers["model.norm.weight"] = Info("F32", [31])
    assert "shapes: org/expert has 1 tensors" in texts(check(ace_config([*paths, "org/expert"])))


def test_a_model_of_the_hub_that_was_looked_at(check, paths, tmp_path, hub):
    """To ask for its headers brings the index into the cache, and nothing that it names."""
    tiny_llama(1).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    hub(tmp_path / "sharded" / "model.safetensors.index.json")
    found = check(ace_config([*paths, "org/expert"]))
    assert found["ok"], found
    assert found["models"][-1]["place"] == "on the Hub"


def test_an_old_model_of_the_hub_that_was_downloaded(check, paths, tmp_path, hub):
    file = tmp_path / "pytorch_model.bin"
    torch.save(load_file(Path(paths[1]) / "model.safetensors"), file)
    hub(file, Path(paths[1]) / "config.json")
    found = check(ace_config([*paths, "org/expert"]))
    assert found["ok"], found
    assert found["models"][-1]["place"].endswith("snapshots/5a")


def test_a_tokenizer_that_was_not_downloaded_yet(check, paths, hub, monkeypatch):
    """As after `AutoModel.from_pretrained`."""
    save_tokenizer(paths[0], list("abcd"))
    hub(Path(paths[1]) / "model.safetensors")
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda repo, name, **_: str(Path(paths[0], name).resolve(strict=True)),
    )
    config = ace_config(["org/expert", *paths[1:]], tokenizer={"source": "base"})
    assert "has no tokenizer" not in texts(check(config))


def test_other_methods(check, paths):
    config = ace_config(paths, merge_method="ties", parameters={"weight": 0.5, "density": 0.5})
    answer = check(config)
    assert answer["ok"]
    assert answer["estimate"]["rules"] == {"ties": 21}


def test_methods_that_read_matrices(check, paths):
    config = ace_config(paths, merge_method="ace_relative", parameters={"epsilon": 0.1})
    tables = check(config)["estimate"]
    assert tables["rules"]["table"] == 1, "the embeddings"
    config["parameters"]["layout"] = "matrix"
    relative = check(config)["estimate"]
    assert relative["rules"]["matrix"] == tables["rules"]["matrix"] + 1
    assert tables["operations"] < relative["operations"]
    assert set(relative["rules"]) == {"matrix", "mean"}
    assert relative["operations"] < check(ace_config(paths))["estimate"]["operations"], "refined"
    peer = check(ace_config(paths, merge_method="tsv_m"))["estimate"]
    assert peer["rules"] == relative["rules"]
    answer = check(ace_config(paths, merge_method="wudi", parameters={"solver": "newton"}))
    assert "one of adam, exact" in texts(answer, "error")


def test_the_verdict_comes_before_what_the_merge_takes(tmp_path, paths):
    path = tmp_path / "a.yml"
    path.write_text(yaml.safe_dump(ace_config(paths)))
    lines = CliRunner().invoke(main, ["check", str(path)]).output.splitlines()
    starts = [line.split()[0] for line in lines if line]
    assert starts == ["nothing", "work", "memory", "disk", "method", "base", "expert", "expert"]


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_what_every_method_does_and_warns_of(check, paths, method):
    """One layer of another shape: under slices: that need not be the layer that is merged."""
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(paths[2], lambda tensors: tensors.update({name: tensors[name][:-8].contiguous()}))
    answer = check(ace_config(paths, merge_method=method.spec.name))
    assert answer["method"] == method.about
    assert f"plan: {method.spec.name}: tensor {name} has shape" in texts(answer, "warning")


def test_flags_are_mergekits_own():
    assert set(READING_FLAGS) <= set(MergeOptions.model_fields)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_are_packed_in_memory(check, tmp_path, name):
    """Many tensors on disk, which mergekit merges as few: they count, and are compared."""
    torch.manual_seed(0)
    paths = save_family(MODELS[name][0](), tmp_path)
    answer = check(ace_config(paths))
    assert answer["ok"], answer
    stored = load_file(Path(paths[0]) / "model.safetensors")
    estimate = answer["estimate"]
    assert estimate["rules"]["stacked"] == 4, "gate and up, down; two layers"
    assert estimate["written"] == sum(tensor.nbytes for tensor in stored.values())
    assert estimate["read"] == 3 * estimate["written"]
    part = next(p for p in estimate["tensors"] if p["name"].endswith("0.mlp.experts.down_proj"))
    separate = [
        n for n in stored if ".layers.0." in n and n.endswith((".w2.weight", ".down_proj.weight"))
    ]
    assert part["shape"] == [len(separate), *stored[separate[0]].shape]

    def widen(tensors: dict) -> None:
        for tensor in separate:
            tensors[tensor] = torch.cat([tensors[tensor]] * 2)

    rewrite(paths[2], widen)
    assert "layers.0.mlp.experts.down_proj" in texts(check(ace_config(paths)), "error")


def test_the_estimate_covers_what_a_merge_takes(paths, tmp_path):
    """Memory: what the largest tensor needs, and the shard that is being filled."""
    path = tmp_path / "a.yml"
    path.write_text(yaml.safe_dump(ace_config(paths)))
    result = check_module.check_merge(path, MergeOptions())
    tensors = load_file(Path(paths[0]) / "model.safetensors")
    whole = sum(t.nbytes for t in tensors.values())
    largest = max(t.nbytes for t in tensors.values())
    assert result.estimate.memory > 7e8 + largest * 5
    assert result.estimate.memory < 1e9 + 10 * whole
    assert result.estimate.device_memory is None
