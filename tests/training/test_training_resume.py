# SPDX-License-Identifier: Apache-2.0
"""Runs that were killed, folders of other runs, and several processes."""

from __future__ import annotations

import runpy
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import debug_launcher
from accelerate.state import AcceleratorState
from families import (
    Killed,
    changed,
    distil,
    image_distillation,
    killed_after,
    llama_family,
    parsed,
    record,
    train,
)
from measured_files import measure

from mergekit_ace.cli import main
from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.naming import ConfigError
from mergekit_ace.training import family as family_module
from mergekit_ace.training import train as train_module
from mergekit_ace.training.data import SampleReader
from mergekit_ace.training.state import TrainingRun
from mergekit_ace.training.train import Objective, run_training


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> dict:
    return llama_family(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[dict, dict]:
    return image_distillation(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def uninterrupted(llama, tmp_path_factory) -> tuple[dict, Path, CoefficientFile]:
    """A training, its folder, and what came out."""
    config = changed(llama, checkpoint_every=3, epochs=3)
    out = tmp_path_factory.mktemp("whole") / "out"
    return config, out, train(config, out)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (SampleReader, "logits", 7),  # in the labels of the second expert
        (family_module, "measure_moments", 5),  # in the statistics
        (Objective, "gradient", 1),  # before the first checkpoint
        (Objective, "gradient", 5),  # after one
        (train_module, "merge_config", 0),  # while the results are written
    ],
)
def test_a_killed_run_goes_on_to_the_same_coefficients(
    uninterrupted, tmp_path, monkeypatch, owner, name, calls
):
    config, out, whole = uninterrupted
    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:
        killed_after(patch, owner, name, calls)
        with pytest.raises(Killed):
            train(config, killed)
    assert not (killed / "coefficients.safetensors").exists()
    if owner is Objective:  # what is known is not asked for again
        monkeypatch.delattr(family_module, "answer_data")
        monkeypatch.delattr(family_module, "measure_moments")
    resumed = train(config, killed)
    assert torch.equal(resumed.coefficients, whole.coefficients)
    assert resumed.contents == whole.contents
    for file in ("training.jsonl", "scores.md"):
        assert (killed / file).read_bytes() == (out / file).read_bytes()


def test_components_are_not_computed_twice(llama, tmp_path, monkeypatch, capsys):
    config, split = {**llama, "basis": "ace_relative"}, family_module.split_tensor
    with monkeypatch.context() as patch:
        killed_after(patch, family_module, "split_tensor", 4)
        with pytest.raises(Killed):
            run_training(parsed(config), tmp_path / "out")
    assert "2 components of 21 tensors: " in capsys.readouterr().out
    calls = []
    monkeypatch.setattr(family_module, "split_tensor", lambda *a: calls.append(a) or split(*a))
    file = train(config, tmp_path / "out")
    assert len(calls) == len(file.contents.tensors) - 4


def test_labels_that_are_damaged_are_named(uninterrupted, tmp_path):
    config, out, whole = uninterrupted
    out = shutil.copytree(out, tmp_path / "out")
    labels = out / "state" / "labels-0.pt"
    labels.write_bytes(labels.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"labels-0.pt is damaged .*; delete it to"):
        train(config, out)
    labels.unlink()
    assert torch.equal(train(config, out).coefficients, whole.coefficients)


def test_another_run_s_folder_is_refused_unless_overwritten(uninterrupted, tmp_path, monkeypatch):
    config, out, first = uninterrupted
    out = shutil.copytree(out, tmp_path / "out")
    other = changed(config, learning_rate=0.02)
    with pytest.raises(ConfigError, match=r"another run; changed .*config\.training\.learning"):
        train(other, out)
    again = train(changed(config, checkpoint_every=7), out)
    assert torch.equal(again.coefficients, first.coefficients)
    with monkeypatch.context() as patch:
        killed_after(patch, Objective, "gradient", 0)
        with pytest.raises(Killed):
            train(other, out, overwrite=True)
    for name in ("coefficients.safetensors", "merge.yml"):
        assert not (out / name).exists(), "it would look complete"


def test_changed_inputs_are_another_run(tmp_path):
    config = changed(llama_family(tmp_path / "family"), max_steps=1)
    train(config, tmp_path / "out")
    expert = config["models"][0]
    for path in map(Path, (expert["data"]["path"], f"{expert['model']}/model.safetensors")):
        path.write_bytes(path.read_bytes())  # at another time
        with pytest.raises(ConfigError, match=rf"changed since then: files\.{path}"):
            train(config, tmp_path / "out")


def test_two_runs_into_one_folder(images, tmp_path):
    out, (family, distillation) = tmp_path / "out", images
    with TrainingRun.start(out):
        for start, config in ((train, family), (distil, distillation), (measure, family)):
            with pytest.raises(ConfigError, match=f"another run is writing to {out}; wait"):
                start(config, out)
    assert not out.exists(), "nothing was written"


def test_a_run_drops_or_changes_nothing_that_it_reads(tmp_path):
    config = llama_family(tmp_path / "family")
    expert = tmp_path / "out" / "backbones" / "mine"
    shutil.copytree(config["models"][0]["model"], expert)
    config["models"][0]["model"] = str(expert)
    before = sorted(tmp_path.rglob("*"))
    outs = {expert: tmp_path / "out", "base": tmp_path / "family" / "base" / "coefficients"}
    for name, out in outs.items():
        with pytest.raises(ConfigError, match=f"{name}, which this run reads, holds .* writes"):
            train(config, out, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_student_does_not_replace_a_model(images, tmp_path):
    config, other = changed(images[1], epochs=1), tmp_path / "expert1"
    shutil.copytree(Path(config["student"]).with_name("expert1"), other)
    before = (other / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"holds config.json, which"):
        distil(config, other)
    assert (other / "model.safetensors").read_bytes() == before
    assert record(distil(config, other, overwrite=True))


def test_results_without_their_record_are_not_taken_for_this_run_s(tmp_path):
    """`state` may be deleted to have its room; what was measured of other data must not stay."""
    config = llama_family(tmp_path / "family")
    out = tmp_path / "out"
    measure(config, out)
    first = out / "experts" / "0-covariances.safetensors"
    before = first.read_bytes()
    shutil.rmtree(out / "state")
    data = Path(config["models"][0]["data"]["path"])
    data.write_text(data.read_text().replace("w1", "w2"))
    for kind in ("statistics.json", "experts/"):
        with pytest.raises(ConfigError, match=f"out holds {kind}.* which is not of this run"):
            measure(config, out)
        (out / "statistics.json").unlink(missing_ok=True)
    measure(config, out, overwrite=True)
    assert first.read_bytes() != before


def train_and_distil(folder: Path) -> None:
    """Run both commands in this process, one of two; what it prints goes to a file of its own."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    rank = torch.distributed.get_rank()
    with (folder / f"printed-{rank}").open("w") as file, redirect_stdout(file):
        for command, out in (("train", "trained"), ("distill", "distilled")):
            arguments = [command, str(folder / f"{command}.yml"), str(folder / out)]
            main(arguments, standalone_mode=False)


def test_two_processes_are_like_one_with_twice_the_batch(images, tmp_path):
    """They need not import everything anew."""
    training = changed(llama_family(tmp_path / "family", rows=23), batch_size=3, epochs=3)
    distillation = changed(images[1], epochs=2, batch_size=4)
    for name, config in (("train", training), ("distill", distillation)):
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(config))
    debug_launcher(train_and_distil, (tmp_path,))
    printed = "".join((tmp_path / f"printed-{rank}").read_text() for rank in range(2))
    assert printed.count("StatsMerging") == 1, "one process talks"
    two = CoefficientFile.load(tmp_path / "trained" / "coefficients.safetensors")
    one = train(changed(training, batch_size=6), tmp_path / "trained by one")
    torch.testing.assert_close(two.coefficients, one.coefficients, rtol=1e-5, atol=1e-5)
    assert one.coefficients.std() > 0.01
    for name, score in two.contents.scores.items():
        other = one.contents.scores[name]
        assert score["accuracy"] == pytest.approx(other["accuracy"], abs=1e-5)
        assert score["loss"] == pytest.approx(other["loss"], abs=1e-5)
    one = record(distil(changed(distillation, batch_size=8), tmp_path / "distilled by one"))
    two = record(tmp_path / "distilled")
    for line, other in zip(one["log"], two["log"], strict=True):
        assert line == pytest.approx(other, rel=1e-3)
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-3)


def test_the_module_that_launchers_start_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("mergekit_ace.train", run_name="__main__")
    assert "Learn merging coefficients" in capsys.readouterr().out
