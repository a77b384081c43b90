# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: what it says of a merge, what the merge takes, and models on the Hub."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from catalogue import NOTHING, answer, findings, rewrite, save_tokenizer
from checkpoints import ace_config, save_family, tiny_llama
from click.testing import CliRunner
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_architectures import MODELS

from mergekit_ace.cli import main
from mergekit_ace.plugin import our_methods

Info = namedtuple("Info", "dtype shape")


@pytest.fixture
def paths(tmp_path) -> list[str]:
    return save_family(tiny_llama(), tmp_path)


def test_a_merge_that_is_all_right(tmp_path, paths, mergekit_yaml):
    config = ace_config(paths)
    told = answer(tmp_path, config)
    assert told["findings"] == []
    tensors = load_file(Path(paths[0]) / "model.safetensors")
    assert told["tensors"] == len(tensors)
    assert [model["role"] for model in told["models"]] == ["base", "expert", "expert"]
    estimate, whole = told["estimate"], sum(t.nbytes for t in tensors.values())
    assert estimate["rules"] == {
        "matrix": sum(t.ndim == 2 for t in tensors.values()),
        "mean": sum(t.ndim == 1 for t in tensors.values()),
    }
    assert estimate["read"] == 3 * whole
    assert estimate["written"] == whole
    assert 7e8 + 5 * max(t.nbytes for t in tensors.values()) < estimate["memory"] < 1e9 + 10 * whole
    assert estimate["device_memory"] is None
    by_name = {part["name"]: part for part in estimate["tensors"]}
    assert by_name.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert by_name[name]["shape"] == list(tensor.shape)
        assert by_name[name]["rule"] == ("matrix" if tensor.ndim == 2 else "mean")
        assert by_name[name]["inputs"] == 3 * tensor.nbytes
    mergekit_yaml(config)


def test_the_verdict_for_people(tmp_path, paths):
    path = tmp_path / "a.yml"
    rewrite(paths[1], lambda t: t.update({n: x.bfloat16().float() for n, x in t.items()}))
    path.write_text(yaml.safe_dump(ace_config(paths)))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 0
    starts = [line.split()[0] for line in result.output.splitlines() if line]
    assert starts == ["nothing", "work", "memory", "disk", "method", "base", "expert", "expert"]
    assert "nothing to complain about" in result.output
    assert f"{paths[1]}: 21 tensors" in result.output
    assert "F32 with BF16 values" in result.output
    path.write_text(yaml.safe_dump(ace_config(paths, parameters={"epsilom": 1})))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 1
    assert "error: config: parameters: there is no parameter 'epsilom' of ace" in result.output
    assert "→ did you mean 'epsilon'?" in result.output
    assert "errors: 1, warnings: 0" in result.output


@pytest.mark.parametrize("tokenizer", [True, False])
def test_files_that_mergekit_leaves_out(tmp_path, paths, tokenizer):
    save_tokenizer(paths[0], ["a", "b", "c", "d"])
    (Path(paths[0]) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    settings = {"tokenizer": {"source": "base"}} if tokenizer else {}
    told = findings(tmp_path, ace_config(paths, **settings))
    assert not told["error"]
    left = "leaves generation_config.json of base out of the result"
    assert (left in told["warning"]) == ("`mergekit-ace card OUT`" in told["warning"]) == tokenizer


def test_adapters(tmp_path, paths):
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = paths[0]
    adapter, cache = tmp_path / "adapter", tmp_path / "cache"
    model.save_pretrained(adapter)
    config = ace_config([paths[0], paths[1], f"{paths[0]}+{adapter}"])
    before = set(LoaderCache().loaders)  # other tests of this process may have loaded adapters
    told = findings(tmp_path, config)
    assert not told["error"]
    assert "mergekit-yaml merges adapters into their base first: adapter" in told["warning"]
    assert (
        "merge by mergekit-ace merge, which need not; or give --lora-merge-cache" in told["warning"]
    )
    assert findings(tmp_path, config, "--lora-merge-cache", str(cache)) == NOTHING
    assert not cache.exists()  # nothing was merged for it
    assert not any(model.lora for model in LoaderCache().loaders.keys() - before)
    (adapter / "adapter_config.json").unlink()
    assert "holds no adapter_config.json" in findings(tmp_path, config)["error"]


def test_room_on_the_disk(tmp_path, paths, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10, 9, 1000))
    told = findings(tmp_path, ace_config(paths), "--out", "/a/b/c")
    assert "but / has 1 kB left" in told["error"]


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


def test_a_model_on_the_hub_is_judged_by_its_headers(tmp_path, paths, hub):
    headers = hub()
    stored = load_file(Path(paths[1], "model.safetensors"))
    config = ace_config([*paths, "org/expert"])
    told = answer(tmp_path, config)
    assert told["ok"], told
    assert told["models"][-1] == {
        "model": "org/expert", "role": "expert", "tensors": 21, "dtypes": ["F32"],
        "precision": None, "bytes": sum(t.nbytes for t in stored.values()),
        "vocabulary": None, "place": "on the Hub",
    }  # fmt: skip
    headers["model.norm.weight"] = Info("F32", [31])
    assert "shapes: org/expert has 1 tensors" in findings(tmp_path, config)["error"]


def test_a_model_of_the_hub_that_was_looked_at(tmp_path, paths, hub):
    """To ask for its headers brings the index into the cache, and nothing that it names."""
    tiny_llama(1).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    hub(tmp_path / "sharded" / "model.safetensors.index.json")
    told = answer(tmp_path, ace_config([*paths, "org/expert"]))
    assert told["ok"], told
    assert told["models"][-1]["place"] == "on the Hub"


def test_an_old_model_of_the_hub_that_was_downloaded(tmp_path, paths, hub):
    file = tmp_path / "pytorch_model.bin"
    torch.save(load_file(Path(paths[1]) / "model.safetensors"), file)
    hub(file, Path(paths[1]) / "config.json")
    told = answer(tmp_path, ace_config([*paths, "org/expert"]))
    assert told["ok"], told
    assert told["models"][-1]["place"].endswith("snapshots/5a")


def test_a_tokenizer_that_was_not_downloaded_yet(tmp_path, paths, hub, monkeypatch):
    """As after `AutoModel.from_pretrained`."""
    save_tokenizer(paths[0], list("abcd"))
    hub(Path(paths[1]) / "model.safetensors")
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda repo, name, **_: str(Path(paths[0], name).resolve(strict=True)),
    )
    config = ace_config(["org/expert", *paths[1:]], tokenizer={"source": "base"})
    assert "has no tokenizer" not in findings(tmp_path, config)["error"]


def test_other_rules(tmp_path, paths):
    """Methods read matrices, tables or entries, and take as much."""

    def estimate(method: str, **parameters) -> dict:
        config = ace_config(paths, merge_method=method, parameters=parameters)
        return answer(tmp_path, config)["estimate"]

    tables = estimate("ace_relative", epsilon=0.1)
    relative = estimate("ace_relative", epsilon=0.1, layout="matrix")
    assert tables["rules"]["table"] == 1, "the embeddings"
    assert relative["rules"] == {"matrix": tables["rules"]["matrix"] + 1, "mean": 5}
    assert tables["operations"] < relative["operations"] < estimate("ace")["operations"]
    assert estimate("tsv_m")["rules"] == relative["rules"]
    assert estimate("ties", weight=0.5, density=0.5)["rules"] == {"ties": 21}


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_what_every_method_does_and_warns_of(tmp_path, paths, method):
    """One layer of another shape: under slices: that need not be the layer that is merged."""
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(paths[2], lambda tensors: tensors.update({name: tensors[name][:-8].contiguous()}))
    told = answer(tmp_path, ace_config(paths, merge_method=method.spec.name))
    assert told["method"] == method.about
    warnings = [f["message"] for f in told["findings"] if f["level"] == "warning"]
    assert any(f"{method.spec.name}: tensor {name} has shape" in text for text in warnings)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_are_packed_in_memory(tmp_path, name):
    """Many tensors on disk, which mergekit merges as few: they count, and are compared."""
    torch.manual_seed(0)
    paths = save_family(MODELS[name][0](), tmp_path)
    told = answer(tmp_path, ace_config(paths))
    assert told["ok"], told
    stored, estimate = load_file(Path(paths[0]) / "model.safetensors"), told["estimate"]
    assert estimate["rules"]["stacked"] == 4, "gate and up, down; two layers"
    assert estimate["written"] == sum(tensor.nbytes for tensor in stored.values())
    assert estimate["read"] == 3 * estimate["written"]
    part = next(p for p in estimate["tensors"] if p["name"].endswith("0.mlp.experts.down_proj"))
    ends = (".w2.weight", ".down_proj.weight")
    separate = [n for n in stored if ".layers.0." in n and n.endswith(ends)]
    assert part["shape"] == [len(separate), *stored[separate[0]].shape]
    rewrite(paths[2], lambda t: t.update({n: torch.cat([t[n]] * 2) for n in separate}))
    told = findings(tmp_path, ace_config(paths))
    assert "layers.0.mlp.experts.down_proj" in told["error"]
