# SPDX-License-Identifier: Apache-2.0
"""Runs that were killed, folders of other runs, and several processes."""

from __future__ import annotations

import runpy
import shutil
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

import families
import pytest
import torch
import yaml
from accelerate import debug_launcher
from accelerate.state import AcceleratorState
from measured_files import measure

from mergekit_ace.cli import main
from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.naming import ConfigError
from mergekit_ace.training import family as family_module
from mergekit_ace.training import train as train_module
from mergekit_ace.training.data import SampleReader
from mergekit_ace.training.state import TrainingRun
from mergekit_ace.training.train import Objective


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[dict, dict]:
    return families.image_distillation(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[dict, Path, CoefficientFile]:
    """A training over components, its folder, and what came out."""
    folder = tmp_path_factory.mktemp("whole")
    config = families.llama(folder, basis="ace_plus")
    config["training"] |= {"checkpoint_every": 3, "epochs": 2}
    return config, folder / "out", families.train(config, folder / "out")


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (SampleReader, "logits", 7),  # in the labels of the second expert
        (family_module, "measure_moments", 5),  # in the statistics
        (family_module, "split_tensor", 4),  # in the components
        (Objective, "gradient", 1),  # before the first checkpoint
        (Objective, "gradient", 5),  # after one
        (train_module, "merge_config", 0),  # while the results are written
    ],
)
def test_a_killed_run_goes_on_to_the_same_coefficients(
    uninterrupted, tmp_path, monkeypatch, owner, name, calls
):
    config, out, whole = uninterrupted
    killed, split, later = tmp_path / "killed", family_module.split_tensor, []
    with monkeypatch.context() as patch:
        families.killed_after(patch, owner, name, calls)
        with pytest.raises(families.Killed):
            families.train(config, killed)
    assert not (killed / "coefficients.safetensors").exists()
    if owner is Objective:  # what is known is not asked for again
        monkeypatch.delattr(family_module, "answer_data")
        monkeypatch.delattr(family_module, "measure_moments")
    monkeypatch.setattr(family_module, "split_tensor", lambda *a: later.append(a) or split(*a))
    resumed = families.train(config, killed)
    if name == "split_tensor":
        assert len(later) == len(whole.contents.tensors) - calls
    assert torch.equal(resumed.coefficients, whole.coefficients)
    assert resumed.contents == whole.contents
    for file in ("training.jsonl", "scores.md"):
        assert (killed / file).read_bytes() == (out / file).read_bytes()


def test_another_run_s_folder_is_refused_unless_overwritten(uninterrupted, tmp_path, monkeypatch):
    """Other settings, data or models are another run, and what is damaged is named."""
    config, out, first = uninterrupted
    other, expert = {"learning_rate": 0.02}, config["models"][0]
    with pytest.raises(ConfigError, match=r"another run; changed .*config\.training\.learning"):
        families.train(config, out, **other)
    labels = out / "state" / "labels-0.pt"
    labels.write_bytes(labels.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"labels-0.pt is damaged .*; delete it to"):
        families.train(config, out)
    labels.unlink()
    again = families.train(config, out, checkpoint_every=7)
    assert torch.equal(again.coefficients, first.coefficients)
    for path in map(Path, (expert["data"]["path"], f"{expert['model']}/model.safetensors")):
        path.write_bytes(path.read_bytes())  # at another time
        with pytest.raises(ConfigError, match=rf"changed since then: .*files\.{path}"):
            families.train(config, out)
    families.killed_after(monkeypatch, Objective, "gradient", 0)
    with pytest.raises(families.Killed):
        families.train(config, out, overwrite=True, **other)
    for name in ("coefficients.safetensors", "merge.yml"):
        assert not (out / name).exists(), "it would look complete"


def test_two_runs_into_one_folder(images, tmp_path):
    out, (family, distillation) = tmp_path / "out", images
    starts = ((families.train, family), (families.distil, distillation), (measure, family))
    with TrainingRun.start(out):
        for start, config in starts:
            with pytest.raises(ConfigError, match=f"another run is writing to {out}; wait"):
                start(config, out)
    assert not out.exists(), "nothing was written"


def test_a_run_drops_or_replaces_no_model(images, tmp_path):
    config = families.llama(tmp_path / "family")
    expert = tmp_path / "out" / "backbones" / "mine"
    shutil.copytree(config["models"][0]["model"], expert)
    config["models"][0]["model"] = str(expert)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    outs = {expert: tmp_path / "out", "base": tmp_path / "family" / "base" / "coefficients"}
    for name, out in outs.items():
        with pytest.raises(ConfigError, match=f"(holds|lies in) .*{name}, which is read"):
            families.train(config, out, overwrite=True)
    with pytest.raises(ConfigError, match=r"holds config.json, which"):
        families.distil(images[1], tmp_path / "family" / "expert1")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    families.distil(images[1], tmp_path / "family" / "expert1", overwrite=True, epochs=1)


def train_and_distil(folder: Path) -> None:
    """Run both commands in this process, one of two; what it prints goes to a file of its own."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    rank = torch.distributed.get_rank()
    with (folder / f"printed-{rank}").open("w") as file, redirect_stdout(file):
        sys.argv = ["cli", "train", str(folder / "train.yml"), str(folder / "trained")]
        sys.modules.pop("mergekit_ace.cli", None)
        with suppress(SystemExit):
            runpy.run_module("mergekit_ace.cli", run_name="__main__")
        arguments = ["distill", str(folder / "distill.yml"), str(folder / "distilled")]
        main(arguments, standalone_mode=False)


def test_two_processes_are_like_one_with_twice_the_batch(images, tmp_path):
    """They need not import everything anew."""
    training = families.llama(tmp_path / "family", rows=23)
    training["training"] |= {"batch_size": 3, "epochs": 3}
    distillation = families.changed(images[1], epochs=2, batch_size=4)
    for name, config in (("train", training), ("distill", distillation)):
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(config))
    debug_launcher(train_and_distil, (tmp_path,))
    printed = "".join((tmp_path / f"printed-{rank}").read_text() for rank in range(2))
    assert printed.count("StatsMerging") == 1, "one process talks"
    two = CoefficientFile.load(tmp_path / "trained" / "coefficients.safetensors")
    assert two.coefficients.std() > 0.01
    for settings in ({"batch_size": 6}, {"gradient_accumulation": 2}):
        one = families.train(training, tmp_path / str(settings), **settings)
        torch.testing.assert_close(two.coefficients, one.coefficients, rtol=1e-5, atol=1e-5)
        for name, score in two.contents.scores.items():
            assert score["loss"] == pytest.approx(one.contents.scores[name]["loss"], abs=1e-5)
    one = families.record(families.distil(distillation, tmp_path / "by one", batch_size=8))
    two = families.record(tmp_path / "distilled")
    for line, other in zip(one["log"], two["log"], strict=True):
        assert line == pytest.approx(other, rel=1e-3)
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-3)
