# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: what it says of a merge, what the merge takes, and models on the Hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from catalogue import NOTHING, findings, save_adapter, write_config
from checkpoints import ace_config, configure, rewrite, save_family, save_tokenizer, tiny_llama
from commands import command
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from test_architectures import small_model

from mergekit_ace.check.check import Preflight, check_merge
from mergekit_ace.naming import in_bytes
from mergekit_ace.planning import MergeEstimate, estimate_merge


def checked(config: dict) -> Preflight:
    return check_merge(write_config(config), MergeOptions())


def test_what_a_merge_takes(paths):
    def estimate(method: str, shard: int = 10**9, **parameters) -> MergeEstimate:
        config = write_config(ace_config(paths, merge_method=method, parameters=parameters))
        result = check_merge(config, MergeOptions(out_shard_size=shard))
        assert not result.findings
        return estimate_merge(result.plan, result.checkpoints)

    tensors = load_file("base/model.safetensors").values()
    ace, whole = estimate("ace"), sum(t.nbytes for t in tensors)
    assert (ace.read, ace.written) == (3 * whole, whole)
    assert 7e8 + 5 * max(t.nbytes for t in tensors) < ace.memory < 1e9 + 10 * whole
    assert ace.device_memory is None
    held = [ace.memory - estimate("ace", shard=size).memory for size in (1, whole // 2)]
    assert 0 < held[1] < held[0] < whole, "a shard is in memory until it is written"
    ties = estimate("ties", weight=0.5, density=0.5)
    work = [each.operations for each in (ties, estimate("ace_plus"), ace)]
    assert work == sorted(set(work))


def test_experts_that_are_packed_in_memory(here):
    """They are merged one by one, under the names in the files."""
    paths = save_family(small_model("mixtral"), here)
    stored = load_file(f"{paths[0]}/model.safetensors")
    told = findings(ace_config(paths))
    assert not told["error"]
    assert "mergekit-yaml fails" in told["warning"]
    written = in_bytes(sum(tensor.nbytes for tensor in stored.values()))
    assert f"writes {written}\n" in command("check", "checked.yml")
    separate = [name for name in stored if ".layers.0." in name and name.endswith(".w2.weight")]
    rewrite(paths[2], lambda t: t.update({n: torch.cat([t[n]] * 2) for n in separate}))
    assert separate[0] in findings(ace_config(paths))["error"]


def test_the_verdict_for_people(paths):
    text = command("check", write_config(ace_config(paths)))
    starts = [line.split()[0] for line in text.splitlines() if line]
    assert starts == ["nothing", "work", "memory", "disk", "method", "base", "expert", "expert"]
    assert "method  ACE-Merging: Solves" in text
    assert f"expert  {Path.cwd()}/expert0: 21 tensors, 72.3 kB, F32, vocabulary 40" in text
    wrong = ace_config(paths, parameters={"epsilom": 1})
    verdict = "error: parameters: there is no parameter 'epsilom' of ace; mergekit would ignore it "
    verdict += "without a word\n    → did you mean 'epsilon'?\nerrors: 1, warnings: 0\n"
    assert command("check", write_config(wrong), fails=True).startswith(verdict)


def test_adapters(paths):
    settings = save_adapter()
    config = ace_config([*paths[:2], "./base+./adapter"])
    before = set(LoaderCache().loaders)  # other tests of this process may have loaded adapters
    told = findings(config)
    assert not told["error"]
    assert "merges adapters into their base first: adapter → merge by mergekit" in told["warning"]
    assert findings(config, "--lora-merge-cache", "cache") == NOTHING
    assert not Path("cache").exists()  # nothing was merged for it
    assert not any(model.lora for model in LoaderCache().loaders.keys() - before)
    configure("adapter", settings.name, use_dora=True)
    assert "adapter → give --lora-merge-cache DIR" in findings(config)["warning"]
    settings.unlink()
    assert "adapter_config.json is missing" in findings(config)["error"]


def test_room_on_the_disk(paths, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    assert "but / has 1 kB left" in findings(ace_config(paths), "/a/b/c")["error"]


@pytest.fixture
def hub(paths, here, monkeypatch) -> tuple[Path, dict[str, SimpleNamespace]]:
    """Imitate `org/expert` on the Hub, which this machine does not reach.

    Returns the folder of its cache, which holds a config alone, and the headers that the Hub tells.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "hub"))
    tensors = load_file("expert0/model.safetensors")
    headers = {n: SimpleNamespace(dtype="F32", shape=[*t.shape]) for n, t in tensors.items()}
    files = {"model.safetensors": SimpleNamespace(tensors=headers)}
    monkeypatch.setattr(
        "huggingface_hub.get_safetensors_metadata",
        lambda name, revision: SimpleNamespace(files_metadata=files),
    )
    folder = here / "hub" / "models--org--expert"
    (folder / "refs").mkdir(parents=True)
    for revision in ("main", "v1"):
        (folder / "refs" / revision).write_text("5a")
    (folder / "snapshots" / "5a").mkdir(parents=True)
    shutil.copy("expert0/config.json", folder / "snapshots" / "5a")
    return folder / "snapshots" / "5a", headers


def test_a_model_on_the_hub_is_judged_by_its_headers(paths, hub, monkeypatch):
    """To have looked at it before brings the index into the cache, and nothing that it names."""
    cache, headers = hub
    tiny_llama(1).save_pretrained("sharded", max_shard_size="20KB")
    shutil.copy("sharded/model.safetensors.index.json", cache)
    assert findings(ace_config([*paths, "org/expert"])) == NOTHING
    assert "expert  org/expert: 21 tensors, 72.3 kB, F32" in command("check", "checked.yml")
    headers["model.norm.weight"].shape = [31]
    told = findings(ace_config([*paths, "org/expert"]))
    assert "org/expert has 1 tensors of another shape" in told["error"]
    # its tokenizer was not downloaded yet, as after `AutoModel.from_pretrained`
    (cache / "model.safetensors.index.json").unlink()
    shutil.copy("expert0/model.safetensors", cache)
    save_tokenizer("base", "abcd")
    fetched = lambda filename, **_: str(Path("base", filename).resolve(strict=True))  # noqa: E731
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    config = ace_config(["org/expert", *paths[1:]], tokenizer={"source": "base"})
    assert "has no tokenizer" not in findings(config)["error"]


@pytest.mark.parametrize(("trained", "told"), [("v2", True), ("v1", False), (None, False)])
def test_adapters_of_another_revision_of_their_base(hub, trained, told):
    save_adapter("org/expert", trained)
    answer = findings(ace_config(["org/expert@v1", "org/expert@v1+./adapter"]))
    expected = "was trained on org/expert@v2, not on org/expert@v1"
    assert (expected in answer["warning"]) == told
