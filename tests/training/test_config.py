# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, and what is wrong is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
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


def test_the_defaults_are_the_paper_s():
    config = TrainConfig.model_validate(GOOD)
    training = config.training
    assert (training.epochs, training.learning_rate) == (500, 1e-3)
    assert (training.scheduler.step, training.scheduler.gamma) == (100, 0.1)
    exponent = {**GOOD, "training": {"learning_rate": "1e-4"}}  # text, to YAML
    assert TrainConfig.model_validate(exponent).training.learning_rate == 1e-4
    assert config.labels_of(config.models[0].data) == "hard"
    assert config.granularity == "tensor"
    assert (config.learner.layers, config.learner.rank) == (2, 3)
    assert [expert.task for expert in config.models] == ["org/math", "org/code"]


def changed(*changes: tuple[str, Any]) -> dict:
    config = copy.deepcopy(GOOD)
    for path, value in changes:
        *parents, last = path.split(".")
        target = config
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target.setdefault(name, {})
        target[last] = value
    return config


CLASSES = ("task", "sequence-classification")
ONE = ("models", [{"model": "m", "data": {"path": "d", "text": "t"}}])
COMPONENTS, ENTROPY = ("basis", "ace"), ("loss", "entropy")
WRONG = [
    ([("epochs", 3)], "Extra inputs"),
    ([("training.epoch", 3)], "Extra inputs"),
    ([("training.epochs", 0)], "greater than or equal to 1"),
    ([("training.epochs", "many")], "valid integer"),
    ([("training.learning_rate", True)], "not a boolean"),
    ([("training.learning_rate", -1)], "greater than 0"),
    ([("models", [])], "at least 1 item"),
    ([("models.0.data.text", "t")], "names text and prompt of the columns"),
    ([("models.0.data.prompt", None)], "names none of the columns"),
    ([("models.1.data.completion", "c")], "completion goes with prompt"),
    ([("models.1.task", "org/math")], "two experts are called 'org/math'"),
    ([("task", "image-classification")], "needs the column image"),
    ([("task", "seq2seq-lm")], "data of org/code needs the column prompt"),
    ([("task", "speech")], "causal-lm"),
    ([("loss", "margin")], "answers"),
    ([("labels", "true")], "needs the `completion` column of org/math"),
    ([CLASSES, ONE, ("labels", "true")], "needs the `label` column of m"),
    ([("learner.hidden", 3)], "greater than or equal to 4"),
    ([("basis", "ties")], "'task_vector', 'ace' or 'ace_relative'"),
    ([("device_map", "cpu")], "auto"),
    ([CLASSES, ONE, ("device_map", "auto")], "device_map is for language models"),
    ([CLASSES, ONE, ("rehearsal", ONE[1][0]["data"])], "rehearsal is for language models"),
    ([("ace", {"epsilon": 1.0})], "parameters of ace, but basis"),
    ([COMPONENTS, ("ace", {"scale": 2.0})], "scale cannot be chosen"),
    ([COMPONENTS, ("ace", {"epsilom": 1.0})], "epsilom"),
    ([COMPONENTS, ("learner.activation", "softmax")], "softmax"),
    ([ENTROPY, ("labels", "soft")], "leave out labels: soft"),
    ([ENTROPY, ("rehearsal", ONE[1][0]["data"])], "leave out the rehearsal"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_wrong_is_said(changes, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(changed(*changes))


def test_the_default_labels():
    """Free text has no one right answer; a completion, a masked word and a class do."""

    def chosen(task: str, labels: str | None = None, **columns: str) -> str:
        model = {"model": "org/one", "data": {"path": "one.jsonl", **columns}}
        given = {"base_model": "org/base", "models": [model], "task": task, "labels": labels}
        config = TrainConfig.model_validate(given)
        return config.labels_of(config.models[0].data)

    assert chosen("causal-lm", text="t") == chosen("causal-lm", messages="m") == "soft"
    assert chosen("causal-lm", prompt="p", completion="c") == "hard"
    assert chosen("masked-lm", text="t") == chosen("image-classification", image="i") == "hard"
    assert chosen("causal-lm", "hard", text="t") == "hard"


def test_coefficients_start_where_the_basis_says():
    starts = {"task_vector": 0.3, "ace": 1.0, "ace_relative": 1.0}
    for basis, start in starts.items():
        config = TrainConfig.model_validate(changed(("basis", basis)))
        assert config.learner.initial == start
    chosen = {**GOOD, "basis": "ace", "learner": {"initial": 0.9}}
    assert TrainConfig.model_validate(chosen).learner.initial == 0.9


def test_the_default_penalty():
    """Where components of a language model are learned and nothing is rehearsed, it is 3."""
    components = ("basis", "ace_relative")
    images = [{"model": "m", "data": {"path": "d", "image": "i"}}]
    for changes, penalty in (
        ([], 0),
        ([components], 3),
        ([components, ("rehearsal", ONE[1][0]["data"])], 0),
        ([components, ("training.penalty", 0.5)], 0.5),
        ([components, ("training.penalty", 0)], 0),
        ([components, ("task", "image-classification"), ("models", images)], 0),
    ):
        assert TrainConfig.model_validate(changed(*changes)).penalty == penalty


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


@pytest.mark.parametrize("text", [b"a: [", b"", b"just words", b"\x88\xff"])
def test_files_that_hold_no_config(tmp_path, text):
    assert "config.yml" in invoke(tmp_path, "train", text)


@pytest.mark.parametrize("command", ["train", "distill"])
def test_keys_that_stand_twice(tmp_path, command):
    text = "task: causal-lm\ntraining: {epochs: 1, epochs: 2}\nteacher: org/teacher\n"
    output = invoke(tmp_path, command, text if command == "distill" else text[:-21])
    assert "config.yml: the key 'epochs' stands in line 2 and again in line 2" in output


def test_errors_of_a_run_are_one_line(tmp_path):
    config = changed(("base_model", "./nowhere"))
    output = invoke(tmp_path, "train", yaml.safe_dump(config))
    assert output.startswith("Error: there is no folder ./nowhere in ")
