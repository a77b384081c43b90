# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, and what is wrong is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from mergekit_ace.cli import main
from mergekit_ace.training.config import TrainConfig

GOOD = {
    "base_model": "org/base",
    "models": [
        {"model": "org/math", "data": {"path": "m.jsonl", "prompt": "q", "completion": None}},
        {"model": "org/code", "data": {"path": "org/code-data", "text": "content", "samples": 9}},
    ],
    "task": "causal-lm",
}


def changed(changes: dict[str, Any]) -> dict:
    config = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = config
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target.setdefault(name, {})
        target[last] = value
    return config


def test_the_defaults_are_the_paper_s():
    config = TrainConfig.model_validate(changed({"training.penalty": "1e-4"}))  # text, to YAML
    training = config.training
    assert (training.epochs, training.learning_rate, training.penalty) == (500, 1e-3, 1e-4)
    assert (training.scheduler.step, training.scheduler.gamma) == (100, 0.1)
    assert config.granularity == "tensor"
    assert (config.learner.layers, config.learner.rank) == (2, 3)
    assert [expert.task for expert in config.models] == ["org/math", "org/code"]


DATA = {"path": "d", "text": "t"}
CLASSES = {"task": "sequence-classification", "models": [{"model": "m", "data": DATA}]}
IMAGES = {"task": "image-classification"}
IMAGES["models"] = [{"model": "m", "data": {"path": "d", "image": "i"}}]
WRONG = [
    ({"epochs": 3}, "Extra inputs"),
    ({"training.epochs": 0}, "greater than or equal to 1"),
    ({"training.learning_rate": True}, "not a boolean"),
    ({"models": []}, "at least 1 item"),
    ({"models.0.data.text": "t"}, "names text and prompt of the columns"),
    ({"models.0.data.prompt": None}, "names none of the columns"),
    ({"models.1.data.completion": "c"}, "completion goes with prompt"),
    ({"models.1.task": "org/math"}, "two experts are called 'org/math'"),
    ({"models.1.data": None}, "org/code has no data: add samples of what it is for"),
    ({"task": "image-classification"}, "needs the column image"),
    ({"task": "masked-lm"}, "causal-lm"),
    ({"labels": "true"}, "needs the `completion` column of org/math"),
    ({**CLASSES, "labels": "true"}, "needs the `label` column of m"),
    ({**CLASSES, "rehearsal": DATA}, "rehearsal is for language models"),
    ({"ace": {"epsilon": 1.0}}, "parameters of another basis than task_vector"),
    ({"basis": "ace", "ace": {"scale": 2.0}}, "scale cannot be chosen"),
    ({"basis": "ace", "ace": {"epsilom": 1.0}}, "epsilom"),
    ({"loss": "entropy", "labels": "soft"}, "leave out labels"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_wrong_is_said(changes, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(changed(changes))


@pytest.mark.parametrize(
    ("columns", "labels"),
    [({"text": "t"}, "soft"), ({"messages": "m"}, "soft"), ({"prompt": "p"}, "hard")],
)
def test_the_default_labels(columns, labels):
    """Free text has no one right answer; a completion has."""
    models = [{"model": "m", "data": {"path": "d", **columns}}]
    config = TrainConfig.model_validate(changed({"models": models}))
    assert config.labels_of(config.models[0].data) == labels


@pytest.mark.parametrize(
    ("changes", "start", "penalty"),
    [
        ({}, 0.3, 0),
        ({"basis": "ace_relative"}, 1, 3),
        ({"basis": "ace", "learner.initial": 0.9}, 0.9, 3),
        ({"basis": "ace", "rehearsal": DATA}, 1, 0),
        ({"basis": "ace", "training.penalty": 0}, 1, 0),
        ({"basis": "ace", **IMAGES}, 1, 0),
    ],
)
def test_where_coefficients_start_and_what_holds_them_there(changes, start, penalty):
    config = TrainConfig.model_validate(changed(changes))
    assert (config.learner.initial, config.penalty) == (start, penalty)


def invoke(tmp_path, command: str, text: str | bytes) -> str:
    path = tmp_path / "config.yml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = CliRunner().invoke(main, [command, str(path), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()
    return result.output


@pytest.mark.parametrize("command", ["train", "distill"])
def test_the_command_says_every_mistake_and_where(tmp_path, command):
    text = "task: causal-lm\nepochz: 4\ntraining: {epochs: 0, batchsize: 2}\n"
    text += "models: 3\n" if command == "train" else "teacher: org/teacher\n"
    output = invoke(tmp_path, command, text)
    assert "epochz: there is no such setting (found: 4)" in output
    assert "training.batchsize: there is no such setting" in output
    assert "training.epochs: Input should be greater than or equal to 1 (found: 0)" in output


@pytest.mark.parametrize("text", [b"a: [", b"", b"\x88\xff", b"task: a\ntask: b"])
def test_files_that_hold_no_config(tmp_path, text):
    assert "config.yml" in invoke(tmp_path, "train", text)
