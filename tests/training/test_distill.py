# SPDX-License-Identifier: Apache-2.0
"""Distilling a teacher of another architecture into the base's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from families import (
    distil,
    image_distillation,
    record,
    resnet_family,
    sentence,
    tokenizer,
    train,
    vit_family,
    write_rows,
)
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from mergekit_ace.training import distill as distill_module
from mergekit_ace.training.config import DistillConfig
from mergekit_ace.training.distill import distillation_loss
from mergekit_ace.training.state import Diverged, TrainingError

FAST = {"epochs": 6, "batch_size": 8, "learning_rate": 0.003}


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in record(out)["log"] if "loss" in line]


def test_the_loss_is_equation_8():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 7, generator=generator).double() for _ in range(2))
    alpha, temperature = 0.7, 4.0
    expected = 0.0
    for mine, theirs in zip(student, teacher, strict=True):
        p = torch.softmax(theirs / temperature, 0)
        q = torch.softmax(mine / temperature, 0)
        kl = sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True))
        ce = -float(torch.softmax(mine, 0)[theirs.argmax()].log())
        expected += alpha * ce + (1 - alpha) * temperature**2 * kl
    got = distillation_loss(student, teacher, teacher.argmax(-1), alpha, temperature)
    assert float(got) == pytest.approx(expected, rel=1e-5)
    same = distillation_loss(teacher, teacher, teacher.argmax(-1), 0.0, temperature)
    assert abs(float(same)) < 1e-5
    words = distillation_loss(student, None, teacher.argmax(-1), alpha, temperature)
    only_hard = distillation_loss(student, teacher, teacher.argmax(-1), 1.0, temperature)
    assert float(words) == pytest.approx(float(only_hard))


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[dict, dict]:
    return image_distillation(tmp_path_factory.mktemp("images"))


def test_a_convolutional_network_becomes_an_expert(images, tmp_path):
    family, config = images
    out = distil(config, tmp_path / "student")
    assert losses(out)[-1] < losses(out)[0]
    student, info = AutoModelForImageClassification.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert student.config.model_type == "vit"
    assert student.config.id2label[3] == "kind 3"
    assert not (out / "state" / "student.safetensors").exists()
    # it merges with the other experts
    heterogeneous = {"model": str(out), "task": "cnn", "data": config["data"]}
    mixed = {**family, "models": [*family["models"], heterogeneous]}
    assert len(train(mixed, tmp_path / "merge").coefficients) == 3


def test_a_transformer_becomes_a_convolutional_expert(tmp_path):
    teacher = vit_family(tmp_path / "transformers")["models"][1]
    family = resnet_family(tmp_path / "convolutional")
    data = family["models"][0]["data"]
    config = {
        "teacher": teacher["model"],
        "student": family["base_model"],
        "task": "image-classification",
        "data": data,
        "training": FAST,
    }
    out = distil(config, tmp_path / "student")
    assert losses(out)[-1] < losses(out)[0]
    student, info = AutoModelForImageClassification.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert student.config.model_type == "resnet"
    counters = {int(b) for n, b in student.named_buffers() if n.endswith("num_batches_tracked")}
    assert min(counters) > 0
    family["models"].append({"model": str(out), "task": "vit", "data": data})
    assert len(train(family, tmp_path / "merge").coefficients) == 3


def test_a_finished_run_is_not_repeated(images, tmp_path, monkeypatch):
    _, config = images
    out = distil(config, tmp_path / "out")
    monkeypatch.delattr(distill_module.Distillation, "backward")
    assert distil(config, tmp_path / "out") == out
    with pytest.raises(TrainingError, match=r"another run; changed .*config\.alpha"):
        distil({**config, "alpha": 0.5}, tmp_path / "out")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("steps", [1, 7])
def test_a_killed_distillation_goes_on_to_the_same_student(images, tmp_path, monkeypatch, steps):
    _, config = images
    config = {**config, "training": {**FAST, "checkpoint_every": 3}}
    whole = distil(config, tmp_path / "whole")
    original, left = distill_module.Distillation.backward, [steps]

    def dying(*arguments):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(distill_module.Distillation, "backward", dying)
        with pytest.raises(Killed):
            distil(config, tmp_path / "killed")
    resumed = distil(config, tmp_path / "killed")
    tensors, others = (load_file(f / "model.safetensors") for f in (whole, resumed))
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert record(whole) == record(resumed)


def other_tokenizer() -> PreTrainedTokenizerFast:
    """The same words under other numbers."""
    words = ["<pad>", "</s>", "<unk>", *[f"w{n}" for n in reversed(range(36))]]
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )


def language(folder: Path, *, same: bool, columns: dict) -> dict:
    """A larger Llama teaches a tiny one."""
    base = tiny_llama()
    base.save_pretrained(folder / "student")
    tokenizer().save_pretrained(folder / "student")
    teacher = tiny_llama(seed=1, hidden_size=48, num_attention_heads=4, vocab_size=40)
    fine_tuned(teacher, seed=2, scale=0.3).save_pretrained(folder / "teacher")
    (tokenizer() if same else other_tokenizer()).save_pretrained(folder / "teacher")
    rng = random.Random(0)
    rows = [{"text": sentence(rng), "q": sentence(rng)} for _ in range(40)]
    return {
        "teacher": str(folder / "teacher"),
        "student": str(folder / "student"),
        "task": "causal-lm",
        "data": {"path": write_rows(folder / "data.jsonl", rows), **columns},
        "training": FAST,
    }


@pytest.mark.parametrize(
    ("same", "columns", "signal"),
    [
        (True, {"text": "text"}, "auto"),
        (True, {"prompt": "q", "max_new_tokens": 4}, "logits"),
        (True, {"prompt": "q", "max_new_tokens": 4}, "text"),
        (False, {"prompt": "q", "max_new_tokens": 4}, "auto"),
    ],
)
def test_language_models(tmp_path, same, columns, signal):
    config = language(tmp_path, same=same, columns=columns)
    out = distil({**config, "signal": signal}, tmp_path / "out")
    per_epoch = len(losses(out)) // 6
    assert sum(losses(out)[-per_epoch:]) < sum(losses(out)[:per_epoch])
    student = AutoModelForCausalLM.from_pretrained(out)
    assert student.config.hidden_size == 32
    base = load_file(tmp_path / "student" / "model.safetensors")
    got = load_file(out / "model.safetensors")
    assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in base.items()}


def test_text_classifiers(tmp_path):
    """The teacher's tokenizer begins every text with a token, the student's has none for some."""
    shape = {
        "vocab_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 32,
    }
    for name, hidden, labels in (("student", 16, 2), ("teacher", 24, 3)):
        torch.manual_seed(hidden)
        config = BertConfig(**shape, hidden_size=hidden, num_labels=labels)
        BertForSequenceClassification(config).save_pretrained(tmp_path / name)
        words = tokenizer()
        if name == "teacher":
            begun = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
            words.backend_tokenizer.post_processor = begun
        words.save_pretrained(tmp_path / name)
    rng = random.Random(0)
    rows = [{"text": sentence(rng) if n % 8 else ""} for n in range(40)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    out = distil(
        {
            "teacher": str(tmp_path / "teacher"),
            "student": str(tmp_path / "student"),
            "task": "sequence-classification",
            "data": {"path": data, "text": "text"},
            "training": FAST,
        },
        tmp_path / "out",
    )
    assert BertForSequenceClassification.from_pretrained(out).config.num_labels == 3


@pytest.mark.parametrize(
    ("same", "columns", "signal", "message"),
    [
        (False, {"text": "text"}, "auto", "different tokenizers.*`prompt` column"),
        (False, {"prompt": "q"}, "logits", "signal: logits needs one tokenizer"),
    ],
)
def test_tokenizers_that_differ_are_explained(tmp_path, same, columns, signal, message):
    config = language(tmp_path, same=same, columns=columns)
    with pytest.raises(TrainingError, match=message):
        distil({**config, "signal": signal}, tmp_path / "out")


def test_a_loss_that_is_no_number(images, tmp_path, monkeypatch):
    _, config = images
    monkeypatch.setattr(distill_module.Distillation, "backward", lambda *_: float("nan"))
    with pytest.raises(
        Diverged,
        match=r"became nan in step 0; nothing was evaluated.*Lower training\.learning_rate",
    ):
        distil(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "seq2seq-lm"}, "cannot be distilled"),
        ({"alpha": 1.5}, "less than or equal to 1"),
        ({"temperature": 0}, "greater than 0"),
        ({"teachers": "x"}, "Extra inputs"),
        ({"task": "causal-lm"}, "needs the column messages or prompt or text"),
        ({"signal": "text"}, "needs the `prompt` column"),
    ],
)
def test_wrong_settings(images, change, message):
    _, config = images
    with pytest.raises(ValidationError, match=message):
        DistillConfig.model_validate({**config, **change})


def test_samples_that_the_student_cannot_read(tmp_path):
    """A teacher of convolutions reads images of any size, and the student's tokens may be more."""
    _, config = image_distillation(tmp_path)
    write_rows(Path(config["data"]["path"]), [{"pixels": torch.rand(1, 16, 16).tolist()}] * 20)
    with pytest.raises(TrainingError, match=r"more\.jsonl: .*base cannot read its samples: Input"):
        distil(config, tmp_path / "out")


def test_a_teacher_that_answers_nan(tmp_path):
    _, config = image_distillation(tmp_path)
    file = tmp_path / "teacher" / "model.safetensors"
    tensors = load_file(file)
    tensors["classifier.1.bias"][0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TrainingError, match="teacher answers NaN or Inf to a sample of data"):
        distil(config, tmp_path / "out")


@pytest.mark.parametrize("change", ["missing", "narrower"])
def test_a_student_whose_backbone_is_not_whole(tmp_path, change):
    _, config = image_distillation(tmp_path)
    file = Path(config["student"]) / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layernorm_before.weight"))
    kept = tensors.pop(name)
    if change == "narrower":
        tensors[name] = kept[1:].clone()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TrainingError, match=r"(lacks 1 param|^tensor ).*before.weight"):
        distil(config, tmp_path / "out")


def test_a_teacher_that_is_the_student(images, tmp_path):
    _, config = images
    with pytest.raises(TrainingError, match="is the student, who would learn nothing from it"):
        distil({**config, "teacher": f"{config['student']}/."}, tmp_path / "out")
