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
from catalogue import NOTHING, findings, save_tokenizer, write_config
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


def checked(config: dict) -> Preflight:
    return check_merge(write_config(config), MergeOptions())


def test_what_a_merge_takes(paths):
    result = checked(ace_config(paths))
    assert not result.findings
    tensors = load_file("base/model.safetensors").values()
    estimate, whole = result.estimate, sum(t.nbytes for t in tensors)
    assert (estimate.read, estimate.written) == (3 * whole, whole)
    assert 7e8 + 5 * max(t.nbytes for t in tensors) < estimate.memory < 1e9 + 10 * whole
    assert estimate.device_memory is None


def test_operations_depend_on_the_rule(paths):
    def operations(method: str, **parameters) -> float:
        config = ace_config(paths, merge_method=method, parameters=parameters)
        return checked(config).estimate.operations

    tables = operations("ace_relative", epsilon=0.1)
    relative = operations("ace_relative", epsilon=0.1, layout="matrix")
    assert operations("ties", weight=0.5, density=0.5) < tables < relative < operations("ace")


def test_experts_that_are_packed_in_memory(here):
    """They are merged one by one, under the names in the files."""
    paths = save_family(small_model("mixtral"), here)
    stored = load_file(f"{paths[0]}/model.safetensors")
    result = checked(ace_config(paths))
    (finding,) = result.findings
    assert finding.level == "warning"
    assert "mergekit-yaml fails" in finding.message
    assert result.estimate.written == sum(tensor.nbytes for tensor in stored.values())
    assert result.estimate.read == 3 * result.estimate.written
    separate = [name for name in stored if ".layers.0." in name and name.endswith(".w2.weight")]
    rewrite(paths[2], lambda t: t.update({n: torch.cat([t[n]] * 2) for n in separate}))
    assert separate[0] in findings(ace_config(paths))["error"]


def test_the_verdict_for_people(paths):
    path = write_config(ace_config(paths))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 0
    starts = [line.split()[0] for line in result.output.splitlines() if line]
    assert starts == ["nothing", "work", "memory", "disk", "method", "base", "expert", "expert"]
    assert "method  ACE-Merging: Solves" in result.output
    assert f"expert  {Path.cwd()}/expert0: 21 tensors, 72.3 kB, F32, vocabulary 40" in result.output
    write_config(ace_config(paths, parameters={"epsilom": 1}))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 1
    verdict = "error: parameters: there is no parameter 'epsilom' of ace; mergekit would ignore it "
    verdict += "without a word\n    → did you mean 'epsilon'?\nerrors: 1, warnings: 0\n"
    assert result.output.startswith(verdict)


def test_files_that_mergekit_leaves_out(paths):
    save_tokenizer("base", ["a", "b", "c", "d"])
    Path("base", "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert findings(ace_config(paths)) == NOTHING
    told = findings(ace_config(paths, tokenizer={"source": "base"}))
    assert not told["error"]
    assert "leaves generation_config.json of base out of the result" in told["warning"]
    assert "`mergekit-ace card OUT`" in told["warning"]


def save_adapter(base: str, revision: str | None = None) -> Path:
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    settings = model.peft_config["default"]
    settings.base_model_name_or_path, settings.revision = base, revision
    model.save_pretrained("adapter")
    return Path("adapter", "adapter_config.json")


def test_adapters(paths):
    settings = save_adapter(str(Path("base").absolute()))
    config = ace_config([*paths[:2], "./base+./adapter"])
    before = set(LoaderCache().loaders)  # other tests of this process may have loaded adapters
    told = findings(config)
    assert not told["error"]
    assert "merges adapters into their base first: adapter → merge by mergekit" in told["warning"]
    assert findings(config, "--lora-merge-cache", "cache") == NOTHING
    assert not Path("cache").exists()  # nothing was merged for it
    assert not any(model.lora for model in LoaderCache().loaders.keys() - before)
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps(content | {"use_dora": True}))
    assert "adapter → give --lora-merge-cache DIR" in findings(config)["warning"]
    settings.unlink()
    assert "adapter_config.json is missing" in findings(config)["error"]


def test_room_on_the_disk(paths, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10, 9, 1000))
    assert "but / has 1 kB left" in findings(ace_config(paths), "/a/b/c")["error"]


@pytest.fixture
def hub(paths, here, monkeypatch) -> Callable[..., dict[str, Info]]:
    """Imitate `org/expert` on the Hub: there is no network here.

    The function takes names of files that the cache holds already, from a folder, and returns the
    headers that the Hub answers with.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "hub"))
    tensors = load_file("expert0/model.safetensors")
    headers = {name: Info("F32", list(tensor.shape)) for name, tensor in tensors.items()}
    files = {"model.safetensors": SimpleNamespace(tensors=headers)}
    monkeypatch.setattr(
        "huggingface_hub.get_safetensors_metadata",
        lambda name, revision: SimpleNamespace(files_metadata=files),
    )
    config_of, base = ModelReference.config, str(here / "base")

    def config(self, trust_remote_code=False):
        known = self.model.path != "org/expert"
        return config_of(self if known else ModelReference.parse(base), trust_remote_code)

    monkeypatch.setattr(ModelReference, "config", config)

    def imitate(*cached: Path) -> dict[str, Info]:
        place = here / "hub" / "models--org--expert"
        (place / "snapshots" / "5a").mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("5a")
        for path in cached:
            shutil.copyfile(path, place / "snapshots" / "5a" / path.name)
        return headers

    return imitate


def test_a_model_on_the_hub_is_judged_by_its_headers(paths, hub):
    """To have looked at it before brings the index into the cache, and nothing that it names."""
    tiny_llama(1).save_pretrained("sharded", max_shard_size="20KB")
    headers = hub(Path("sharded", "model.safetensors.index.json"))
    result = checked(ace_config([*paths, "org/expert"]))
    assert result.ok, result.text
    assert "expert  org/expert: 21 tensors, 72.3 kB, F32" in result.text
    headers["model.norm.weight"] = Info("F32", [31])
    told = findings(ace_config([*paths, "org/expert"]))
    assert "org/expert has 1 tensors of another shape" in told["error"]


def test_a_tokenizer_that_was_not_downloaded_yet(paths, hub, monkeypatch):
    """As after `AutoModel.from_pretrained`."""
    save_tokenizer("base", list("abcd"))
    hub(Path("expert0", "model.safetensors"))
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda repo, name, **_: str(Path("base", name).resolve(strict=True)),
    )
    config = ace_config(["org/expert", *paths[1:]], tokenizer={"source": "base"})
    assert "has no tokenizer" not in findings(config)["error"]


@pytest.mark.parametrize(("trained", "told"), [("v2", True), ("v1", False), (None, False)])
def test_adapters_of_another_revision_of_their_base(hub, trained, told):
    hub()
    save_adapter("org/expert", trained)
    answer = findings(ace_config(["org/expert@v1", "org/expert@v1+./adapter"]))
    expected = "was trained on revision v2 of org/expert → write org/expert@v2+"
    assert (expected in answer["warning"].replace("\n", "")) == told
