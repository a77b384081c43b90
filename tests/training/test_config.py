# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, and what is wrong is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from commands import command
from pydantic import ValidationError

from mergekit_ace.training.config import TrainConfig

MATH = {"model": "org/math", "data": {"path": "m.jsonl", "prompt": "q", "completion": None}}
CODE = {"model": "org/code", "data": {"path": "org/code-data", "text": "content", "samples": 9}}
GOOD = {"base_model": "org/base", "models": [MATH, CODE], "task": "causal-lm"}
DATA = {"path": "d", "text": "t"}
CLASSES = {"task": "sequence-classification", "models": [{"model": "m", "data": DATA}]}
IMAGES = {"models": [{"model": "m", "data": {"path": "d", "image": "i"}}]}
IMAGES |= {"task": "image-classification"}


def parsed(changes: dict[str, Any]) -> TrainConfig:
    """A good config with changes by dotted names."""
    config = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = config
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target.setdefault(name, {})
        target[last] = value
    return TrainConfig.model_validate(config)


def test_the_defaults_are_the_paper_s():
    config = parsed({"training.penalty": "1e-4"})  # text, to YAML
    training = config.training
    assert (training.epochs, training.learning_rate, training.penalty) == (500, 1e-3, 1e-4)
    assert (training.scheduler.step, training.scheduler.gamma) == (100, 0.1)
    assert (config.granularity, config.learner.layers, config.learner.rank) == ("tensor", 2, 3)
    assert [expert.task for expert in config.models] == ["org/math", "org/code"]
    labels = [config.labels_of(data) for _, data in config.sources]
    assert labels == ["hard", "soft"], "free text has no one right answer"


WRONG = [
    ({"training.learning_rate": True}, "not a boolean"),
    ({"learner.statistics": ["mean", "mean"]}, "statistics must be different ones of mean"),
    ({"models": []}, "at least 1 item"),
    ({"models.0.data.text": "t"}, "give one of the columns text, prompt, messages and image"),
    ({"models.1.data.completion": "c"}, "completion goes with prompt"),
    ({"models.1.task": "org/math"}, "two experts are called 'org/math'"),
    ({"models.1.data": None}, "org/code has no data: add samples of what it is for"),
    ({"task": "image-classification"}, "needs the column image"),
    ({"models.0.data.prompts": ["a", "b"]}, "`prompts` belong to task: zero-shot"),
    ({**IMAGES, "task": "zero-shot-image-classification"}, "`prompts` belong to task: zero-shot"),
    ({"labels": "true"}, "needs the `completion` column of org/math"),
    ({**CLASSES, "labels": "true"}, "needs the `label` column of m"),
    ({**CLASSES, "rehearsal": DATA}, "rehearsal is for language models"),
    ({"ace": {"epsilon": 1.0}}, "parameters of another basis than task_vector"),
    ({"basis": "ace", "ace": {"scale": 2.0}}, "scale cannot be chosen"),
    ({"loss": "entropy", "labels": "soft"}, "leave out labels"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_wrong_is_said(changes, message):
    with pytest.raises(ValidationError, match=message):
        parsed(changes)


@pytest.mark.parametrize(
    ("changes", "start", "penalty"),
    [
        ({}, 0.3, 0),
        ({"basis": "ace", "learner.initial": 0.9}, 0.9, 3),
        ({"basis": "ace", "rehearsal": DATA}, 1, 0),
        ({"basis": "ace", "training.penalty": 0}, 1, 0),
        ({"basis": "ace", **IMAGES}, 1, 0),
    ],
)
def test_where_coefficients_start_and_what_holds_them_there(changes, start, penalty):
    config = parsed(changes)
    assert (config.learner.initial, config.penalty) == (start, penalty)


MISTAKES = b"task: causal-lm\nepochz: 4\ntraining: {epochs: 0, batchsize: 2}\nmodels: 3\n"
SAID = (
    "epochz: there is no such setting (found: 4)",
    "training.batchsize: there is no such setting",
    "training.epochs: Input should be greater than or equal to 1 (found: 0)",
)


@pytest.mark.parametrize("text", [MISTAKES, b"a: [", b"", b"\x88\xff", b"task: a\ntask: b"])
@pytest.mark.parametrize("name", ["train", "distill"])
def test_the_command_says_every_mistake_and_where(tmp_path, name, text):
    path = tmp_path / "config.yml"
    path.write_bytes(text)
    told = command(name, path, tmp_path / "out", fails=True)
    said = SAID if text is MISTAKES else ()
    assert [part for part in ("config.yml", *said) if part not in told] == []
    assert not (tmp_path / "out").exists()
