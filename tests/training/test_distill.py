# SPDX-License-Identifier: Apache-2.0
"""Distilling a teacher of another architecture into the base's."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import families
import pytest
import torch
from checkpoints import configure, fine_tuned, tiny_llama
from transformers import AutoModelForImageClassification

from mergekit_ace.naming import ConfigError
from mergekit_ace.training.distill import Distillation, distillation_loss


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in families.record(out)["log"] if "loss" in line]


def test_the_loss_is_equation_8(rng):
    student, teacher = (torch.randn(5, 7, generator=rng).double() for _ in range(2))
    p, q = torch.softmax(teacher / 4, -1), torch.softmax(student / 4, -1)
    best = torch.softmax(student, -1).gather(-1, teacher.argmax(-1, keepdim=True))
    expected = -0.7 * best.log().sum() + 0.3 * 4**2 * (p * (p / q).log()).sum()
    got = distillation_loss(student, teacher, alpha=0.7, temperature=4)
    assert float(got) == pytest.approx(float(expected), rel=1e-5)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[dict, dict]:
    family, config = families.image_distillation(tmp_path_factory.mktemp("images"))
    config["training"]["checkpoint_every"] = 3
    return config, family


@pytest.fixture(scope="module")
def distilled(images, tmp_path_factory) -> Path:
    return families.distil(images[0], tmp_path_factory.mktemp("distilled") / "out")


def test_a_teacher_of_another_architecture_becomes_an_expert(images, distilled, tmp_path):
    (config, family), out = images, distilled
    assert losses(out)[-1] < losses(out)[0]
    student, info = AutoModelForImageClassification.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert (student.config.model_type, student.config.id2label[3]) == ("vit", "kind 3")
    assert not list((out / "state").glob("student*"))
    # it merges with the other experts
    student = {"model": str(out), "task": "student", "data": config["data"]}
    merged = {**family, "models": [*family["models"], student]}
    assert len(families.train(merged, tmp_path / "merge").coefficients) == 3


def test_a_killed_distillation_goes_on_to_the_same_student(
    images, distilled, tmp_path, monkeypatch
):
    config, killed = images[0], tmp_path / "killed"
    with monkeypatch.context() as patch:
        families.killed_after(patch, Distillation, "backward", 7)
        with pytest.raises(families.Killed):
            families.distil(config, killed)
    families.distil(config, killed)
    whole, resumed = families.tensors(distilled), families.tensors(killed)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert families.record(distilled) == families.record(killed)
    monkeypatch.delattr(Distillation, "backward")  # a finished run is not repeated
    assert families.distil(config, killed) == killed
    with pytest.raises(ConfigError, match=r"another run; changed .*config\.alpha"):
        families.distil({**config, "alpha": 0.5}, killed)


@pytest.mark.parametrize("columns", [{"text": "text"}, {"prompt": "q", "max_new_tokens": 4}])
def test_language_models(tmp_path, columns):
    """A larger Llama teaches a tiny one."""
    teacher = fine_tuned(tiny_llama(seed=1, hidden_size=48), seed=2, scale=0.3)
    for name, model in {"student": tiny_llama(), "teacher": teacher}.items():
        model.save_pretrained(tmp_path / name)
        families.tokenizer().save_pretrained(tmp_path / name)
    rng = random.Random(0)
    rows = [{"text": families.sentence(rng), "q": families.sentence(rng)} for _ in range(40)]
    data = {"path": families.write_rows(tmp_path / "data.jsonl", rows), **columns}
    config = {name: str(tmp_path / name) for name in ("student", "teacher")}
    config |= {"task": "causal-lm", "data": data}
    config |= {"training": {"epochs": 6, "batch_size": 8, "learning_rate": 0.003}}
    out = families.distil(config, tmp_path / "out")
    per_epoch = len(losses(out)) // 6
    assert sum(losses(out)[-per_epoch:]) < sum(losses(out)[:per_epoch])
    base, got = families.tensors(tmp_path / "student"), families.tensors(out)
    assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in base.items()}
    families.tokenizer(mask_token="<mask>").save_pretrained(tmp_path / "teacher")
    with pytest.raises(ConfigError, match=r"different tokenizers.*; fine-tune the student on what"):
        families.distil(config, tmp_path / "other")


def test_a_teacher_of_several_labels_at_once_is_refused(images, tmp_path):
    teacher = shutil.copytree(images[0]["teacher"], tmp_path / "teacher")
    configure(teacher, problem_type="multi_label_classification")
    with pytest.raises(ConfigError, match="problem_type: multi_label_classification"):
        families.distil({**images[0], "teacher": str(teacher)}, tmp_path / "out")
