# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: what it says of a merge, what the merge takes, and models on the Hub."""

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
from catalogue import NOTHING, findings, save_tokenizer
from checkpoints import ace_config, rewrite, save_family, tiny_llama
from click.testing import CliRunner
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_architectures import small_model

from mergekit_ace.check.check import Preflight, check_merge
from mergekit_ace.cli import main

Info = namedtuple("Info", "dtype shape")


@pytest.fixture
def paths(tmp_path) -> list[str]:
    return save_family(tiny_llama(), tmp_path)


def checked(folder: Path, config: dict) -> Preflight:
    path = folder / "checked.yml"
    path.write_text(yaml.safe_dump(config))
    return check_merge(path, MergeOptions())


def test_what_a_merge_takes(tmp_path, paths, mergekit_yaml):
    config = ace_config(paths)
    result = checked(tmp_path, config)
    assert not result.findings
    tensors = load_file(Path(paths[0]) / "model.safetensors").values()
    estimate, whole = result.estimate, sum(t.nbytes for t in tensors)
    assert (estimate.read, estimate.written) == (3 * whole, whole)
    assert 7e8 + 5 * max(t.nbytes for t in tensors) < estimate.memory < 1e9 + 10 * whole
    assert estimate.device_memory is None
    mergekit_yaml(config)


def test_operations_depend_on_the_rule(tmp_path, paths):
    def operations(method: str, **parameters) -> float:
        config = ace_config(paths, merge_method=method, parameters=parameters)
        return checked(tmp_path, config).estimate.operations

    tables = operations("ace_relative", epsilon=0.1)
    relative = operations("ace_relative", epsilon=0.1, layout="matrix")
    assert operations("ties", weight=0.5, density=0.5) < tables < relative < operations("ace")


def test_experts_that_are_packed_in_memory(tmp_path):
    """They are merged one by one, under the names in the files."""
    paths = save_family(small_model("mixtral"), tmp_path)
    stored = load_file(f"{paths[0]}/model.safetensors")
    result = checked(tmp_path, ace_config(paths))
    assert result.ok, result.text
    assert "mergekit-yaml fails" in result.text
    assert result.estimate.written == sum(tensor.nbytes for tensor in stored.values())
    assert result.estimate.read == 3 * result.estimate.written
    separate = [name for name in stored if ".layers.0." in name and name.endswith(".w2.weight")]
    rewrite(paths[2], lambda t: t.update({n: torch.cat([t[n]] * 2) for n in separate}))
    assert separate[0] in findings(tmp_path, ace_config(paths))["error"]


def test_the_verdict_for_people(tmp_path, paths):
    path = tmp_path / "a.yml"
    path.write_text(yaml.safe_dump(ace_config(paths)))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 0
    starts = [line.split()[0] for line in result.output.splitlines() if line]
    assert starts == ["nothing", "work", "memory", "disk", "method", "base", "expert", "expert"]
    assert "nothing to complain about" in result.output
    assert "method  ACE-Merging: Solves" in result.output
    assert f"{paths[1]}: 21 tensors, 72.3 kB, F32" in result.output
    path.write_text(yaml.safe_dump(ace_config(paths, parameters={"epsilom": 1})))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 1
    assert "error: parameters: there is no parameter 'epsilom' of ace" in result.output
    assert "\n    → did you mean 'epsilon'?" in result.output
    assert "errors: 1, warnings: 0" in result.output


def test_files_that_mergekit_leaves_out(tmp_path, paths):
    save_tokenizer(paths[0], ["a", "b", "c", "d"])
    (Path(paths[0]) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert findings(tmp_path, ace_config(paths)) == NOTHING
    told = findings(tmp_path, ace_config(paths, tokenizer={"source": "base"}))
    assert not told["error"]
    assert "leaves generation_config.json of base out of the result" in told["warning"]
    assert "`mergekit-ace card OUT`" in told["warning"]


def test_adapters(tmp_path, paths):
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = paths[0]
    adapter, cache = tmp_path / "adapter", tmp_path / "cache"
    model.save_pretrained(adapter)
    config = ace_config([paths[0], paths[1], f"{paths[0]}+{adapter}"])
    before = set(LoaderCache().loaders)  # other tests of this process may have loaded adapters
    told = findings(tmp_path, config)
    assert not told["error"]
    assert "merges adapters into their base first: adapter → merge by mergekit" in told["warning"]
    assert findings(tmp_path, config, "--lora-merge-cache", str(cache)) == NOTHING
    assert not cache.exists()  # nothing was merged for it
    assert not any(model.lora for model in LoaderCache().loaders.keys() - before)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    assert "adapter → give --lora-merge-cache DIR" in findings(tmp_path, config)["warning"]
    (adapter / "adapter_config.json").unlink()
    assert "adapter_config.json is missing" in findings(tmp_path, config)["error"]


def test_room_on_the_disk(tmp_path, paths, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10, 9, 1000))
    told = findings(tmp_path, ace_config(paths), "/a/b/c")
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
    """To have looked at it before brings the index into the cache, and nothing that it names."""
    tiny_llama(1).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    headers = hub(tmp_path / "sharded" / "model.safetensors.index.json")
    result = checked(tmp_path, ace_config([*paths, "org/expert"]))
    assert result.ok, result.text
    assert "expert  org/expert: 21 tensors, 72.3 kB, F32" in result.text
    headers["model.norm.weight"] = Info("F32", [31])
    told = findings(tmp_path, ace_config([*paths, "org/expert"]))
    assert "org/expert has 1 tensors of another shape" in told["error"]


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


@pytest.mark.parametrize(("trained", "told"), [("v2", True), ("v1", False), (None, False)])
def test_adapters_of_another_revision_of_their_base(tmp_path, hub, trained, told):
    hub()
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    settings = model.peft_config["default"]
    settings.base_model_name_or_path, settings.revision = "org/expert", trained
    model.save_pretrained(tmp_path / "adapter")
    base = "org/expert@v1"
    answer = findings(tmp_path, ace_config([base, f"{base}+{tmp_path / 'adapter'}"]))
    expected = "was trained on revision v2 of org/expert → write org/expert@v2+"
    assert (expected in answer["warning"].replace("\n", "")) == told
