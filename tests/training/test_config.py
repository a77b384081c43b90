# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, and what is wrong is said."""

from __future__ import annotations

import copy

import pytest
from click.testing import CliRunner
from families import parsed, rehearsed_family, vit_family
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
    assert config.labels_of(config.models[0].data) == "hard"
    assert config.granularity == "tensor"
    assert (config.learner.layers, config.learner.rank) == (2, 3)
    assert [expert.task for expert in config.models] == ["org/math", "org/code"]


def test_yaml_s_numbers_in_scientific_notation():
    config = {**GOOD, "training": {"learning_rate": "1e-4"}}
    assert TrainConfig.model_validate(config).training.learning_rate == 1e-4


def changed(path: str, value) -> dict:
    config = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    target = config
    for name in parents:
        target = target[int(name)] if isinstance(target, list) else target.setdefault(name, {})
    target[last] = value
    return config


WRONG = [
    ("epochs", 3, "Extra inputs"),
    ("training.epoch", 3, "Extra inputs"),
    ("training.epochs", 0, "greater than or equal to 1"),
    ("training.epochs", "many", "valid integer"),
    ("training.learning_rate", True, "not a boolean"),
    ("training.learning_rate", -1, "greater than 0"),
    ("models", [], "at least 1 item"),
    ("models.0.data.text", "t", "names text and prompt of the columns"),
    ("models.0.data.prompt", None, "names none of the columns"),
    ("models.1.data.completion", "c", "completion goes with prompt"),
    ("models.1.task", "org/math", "two experts are called 'org/math'"),
    ("task", "image-classification", "needs the column image"),
    ("task", "seq2seq-lm", "data of org/code needs the column prompt"),
    ("task", "speech", "causal-lm"),
    ("loss", "margin", "answers"),
    ("labels", "true", "needs the `completion` column of org/math"),
    ("learner.hidden", 3, "greater than or equal to 4"),
    ("expert_storage", "disk", "`expert_storage` no longer exists; leave it out"),
    ("compare", {}, "`compare` no longer exists; leave it out"),
    ("basis", "ties", "basis: ties no longer exists"),
    ("learner.network", "transformer", "`network` no longer exists"),
    ("device_map", "cpu", "auto"),
    ("ace", {"epsilon": 1.0}, "parameters of ace, but basis"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_what_is_wrong_is_said(path, value, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(changed(path, value))


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


def test_the_entropy_takes_no_answers():
    entropy = changed("loss", "entropy")
    assert TrainConfig.model_validate(entropy).loss == "entropy"
    with pytest.raises(ValidationError, match="leave out labels: soft"):
        TrainConfig.model_validate({**entropy, "labels": "soft"})
    rehearsed = {**entropy, "rehearsal": entropy["models"][0]["data"]}
    with pytest.raises(ValidationError, match="leave out the rehearsal"):
        TrainConfig.model_validate(rehearsed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ace": {"scale": 2.0}}, "scale cannot be chosen"),
        ({"learner": {"activation": "softmax"}}, "softmax"),
        ({"ace": {"epsilom": 1.0}}, "epsilom"),
    ],
)
def test_what_is_wrong_about_components_is_said(change, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({**GOOD, "basis": "ace", **change})


def test_coefficients_start_where_the_basis_says():
    starts = {"task_vector": 0.3, "ace": 1.0, "ace_relative": 1.0}
    for basis, start in starts.items():
        assert TrainConfig.model_validate(changed("basis", basis)).learner.initial == start
    chosen = {**GOOD, "basis": "ace", "learner": {"initial": 0.9}}
    assert TrainConfig.model_validate(chosen).learner.initial == 0.9


def test_a_device_map_is_for_language_models():
    data = {"path": "d", "text": "t"}
    config = {**GOOD, "task": "sequence-classification", "device_map": "auto"}
    with pytest.raises(ValidationError, match="device_map is for language models"):
        TrainConfig.model_validate({**config, "models": [{"model": "m", "data": data}]})


def test_true_classes_need_a_column():
    config = {
        **GOOD,
        "task": "sequence-classification",
        "labels": "true",
        "models": [{"model": "m", "data": {"path": "d", "text": "t"}}],
    }
    with pytest.raises(ValidationError, match="needs the `label` column of m"):
        TrainConfig.model_validate(config)


def invoke(tmp_path, command: str, text: str) -> str:
    path = tmp_path / "config.yml"
    path.write_text(text)
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


@pytest.mark.parametrize("text", ["a: [", "", "just words"])
def test_files_that_hold_no_config(tmp_path, text):
    assert "config.yml" in invoke(tmp_path, "train", text)


@pytest.mark.parametrize("command", ["train", "distill"])
def test_keys_that_stand_twice(tmp_path, command):
    text = "task: causal-lm\ntraining: {epochs: 1, epochs: 2}\nteacher: org/teacher\n"
    output = invoke(tmp_path, command, text if command == "distill" else text[:-21])
    assert "config.yml: the key 'epochs' stands in line 2 and again in line 2" in output


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x88\xff")
    result = CliRunner().invoke(main, ["train", str(path), str(tmp_path / "out")])
    assert isinstance(result.exception, SystemExit)
    assert f"{path} cannot be read" in result.output


def test_errors_of_a_run_are_one_line(tmp_path):
    import yaml

    output = invoke(tmp_path, "train", yaml.safe_dump(changed("base_model", "./nowhere")))
    assert output.startswith("Error: there is no folder ./nowhere in ")


@pytest.fixture
def rehearsed(tmp_path) -> dict:
    return rehearsed_family(tmp_path)


def test_the_default_penalty(rehearsed, tmp_path):
    """Where components of a language model are learned and nothing is rehearsed, it is 3."""
    relative = {**rehearsed, "basis": "ace_relative"}
    alone = {name: value for name, value in relative.items() if name != "rehearsal"}
    assert parsed(relative).penalty == 0
    assert parsed(alone).penalty == 3
    assert parsed({**alone, "basis": "task_vector"}).penalty == 0
    assert parsed({**alone, "training": {"penalty": 0.5}}).penalty == 0.5
    assert parsed({**alone, "training": {"penalty": 0}}).penalty == 0
    assert parsed({**vit_family(tmp_path / "images"), "basis": "ace"}).penalty == 0


def test_classifiers_have_no_rehearsal(tmp_path):
    config = vit_family(tmp_path)
    data = {key: v for key, v in config["models"][0]["data"].items() if key != "label"}
    with pytest.raises(ValueError, match="rehearsal is for language models"):
        parsed(config | {"rehearsal": data})
