# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes are those of one; checkpoints that are damaged."""

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
from families import distil, image_distillation, llama_family, parsed, record
from measured_files import measure

from mergekit_ace.cli import main
from mergekit_ace.files.coefficients import CoefficientFile
from mergekit_ace.training.run import run_training
from mergekit_ace.training.state import (
    TrainingError,
    TrainingRun,
    load_checkpoint,
    save_checkpoint,
)


def train_and_distil(folder: Path) -> None:
    """Run both commands in this process, one of two; what it prints goes to a file of its own."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    rank = torch.distributed.get_rank()
    with (folder / f"printed-{rank}").open("w") as file, redirect_stdout(file):
        for command, out in (("train", "trained"), ("distill", "distilled")):
            arguments = [command, str(folder / f"{command}.yml"), str(folder / out)]
            main(arguments, standalone_mode=False)


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory) -> tuple[Path, str, dict, dict]:
    """A training and a distillation by two processes, which need not import everything anew."""
    folder = tmp_path_factory.mktemp("two")
    train = llama_family(folder / "family", rows=23)
    train["training"] |= {"batch_size": 3, "epochs": 3}
    _, distill = image_distillation(folder / "images")
    distill["training"] |= {"epochs": 2, "batch_size": 4}
    for name, config in (("train", train), ("distill", distill)):
        (folder / f"{name}.yml").write_text(yaml.safe_dump(config))
    debug_launcher(train_and_distil, (folder,))
    printed = "".join((folder / f"printed-{rank}").read_text() for rank in range(2))
    return folder, printed, train, distill


def test_two_processes_train_like_one_with_twice_the_batch(in_two_processes):
    folder, printed, config, _ = in_two_processes
    assert printed.count("StatsMerging") == 1, "one process talks"
    two = CoefficientFile.load(folder / "trained" / "coefficients.safetensors")
    config["training"]["batch_size"] = 6
    one = run_training(parsed(config), folder / "trained by one", quiet=True)
    torch.testing.assert_close(two.coefficients, one.coefficients, rtol=1e-5, atol=1e-5)
    assert one.coefficients.std() > 0.01
    for name, score in two.contents.scores.items():
        other = one.contents.scores[name]
        assert score["accuracy"] == pytest.approx(other["accuracy"], abs=1e-5)
        assert score["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_two_processes_distil_like_one_with_twice_the_batch(in_two_processes):
    folder, _, _, config = in_two_processes
    config["training"]["batch_size"] = 8
    one = record(distil(config, folder / "distilled by one"))
    two = record(folder / "distilled")
    for line, other in zip(one["log"], two["log"], strict=True):
        assert line == pytest.approx(other, rel=1e-3)
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-3)


def test_the_module_that_launchers_start_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("mergekit_ace.train", run_name="__main__")
    assert "Learn merging coefficients" in capsys.readouterr().out


def test_accumulated_gradients_are_one_with_twice_the_batch(tmp_path):
    config = llama_family(tmp_path / "family", rows=23)
    config["training"] |= {"batch_size": 3, "gradient_accumulation": 2}
    two = run_training(parsed(config), tmp_path / "two", quiet=True)
    config["training"] |= {"batch_size": 6, "gradient_accumulation": 1}
    one = run_training(parsed(config), tmp_path / "one", quiet=True)
    torch.testing.assert_close(two.coefficients, one.coefficients, rtol=1e-5, atol=1e-5)


def test_checkpoints(tmp_path):
    path = tmp_path / "c.safetensors"
    assert load_checkpoint(path) is None
    save_checkpoint(path, {"a": torch.arange(3)}, {"step": 1})
    tensors, facts = load_checkpoint(path)
    assert (tensors["a"].tolist(), facts) == ([0, 1, 2], {"step": 1})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TrainingError, match=r"c\.safetensors is damaged .*; delete it"):
        load_checkpoint(path)


def test_two_runs_into_one_folder(tmp_path):
    out = tmp_path / "out"
    train, distill = image_distillation(tmp_path)
    with TrainingRun.start(out):
        for start in (
            lambda: run_training(parsed(train), out, quiet=True),
            lambda: distil(distill, out),
            lambda: measure(train, out),
        ):
            with pytest.raises(TrainingError, match=f"another run is writing to {out}; wait"):
                start()
    assert not out.exists(), "nothing was written"


def test_a_checkpoint_that_cannot_be_written(tmp_path):
    """safetensors has an error of its own for a full disk."""
    with pytest.raises(OSError, match=r"c\.safetensors cannot be written"):
        save_checkpoint(tmp_path / "nowhere" / "c.safetensors", {"a": torch.arange(3)}, {})


@pytest.mark.parametrize("place", ["state/expert", "backbones/expert-0"])
def test_overwriting_does_not_drop_what_is_needed(tmp_path, place):
    config = llama_family(tmp_path / "family")
    expert = tmp_path / "out" / place
    shutil.copytree(config["models"][0]["model"], expert)
    config["models"][0]["model"] = str(expert)
    before = sorted(path.name for path in expert.iterdir())
    with pytest.raises(TrainingError, match=f"--overwrite would drop {expert}, which this run"):
        run_training(parsed(config), tmp_path / "out", overwrite=True, quiet=True)
    assert sorted(path.name for path in expert.iterdir()) == before


@pytest.mark.parametrize("place", ["base", "base/coefficients", "link"])
def test_a_run_does_not_write_into_what_it_reads(tmp_path, place):
    config = llama_family(tmp_path / "family")
    (tmp_path / "family" / "link").symlink_to(config["base_model"])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TrainingError, match=r"base.* or lies in it, which this run reads"):
        run_training(parsed(config), tmp_path / "family" / place, quiet=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_student_does_not_replace_a_model(tmp_path):
    """Neither the base that it starts from nor any other, unless the user says so."""
    _, config = image_distillation(tmp_path / "images")
    config["training"] |= {"epochs": 1}
    student, other = Path(config["student"]), tmp_path / "images" / "expert1"
    for place, message in ((student, "which this run reads"), (other, "holds config.json, which")):
        before = (place / "model.safetensors").read_bytes()
        with pytest.raises(TrainingError, match=message):
            distil(config, place)
        assert (place / "model.safetensors").read_bytes() == before
    assert record(distil(config, other, overwrite=True))
    assert distil(config, other) == other, "its own student is there"


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
        with pytest.raises(TrainingError, match=f"out holds {kind}.* which is not of this run"):
            measure(config, out)
        (out / "statistics.json").unlink(missing_ok=True)
    measure(config, out, overwrite=True)
    assert first.read_bytes() != before
