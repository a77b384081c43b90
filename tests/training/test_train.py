# SPDX-License-Identifier: Apache-2.0
"""Trainings of tiny families: what is learned, and that the merge is what was trained."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from families import (
    answered,
    bert_family,
    changed,
    llama_family,
    log_of,
    logits_by_hand,
    merge_of,
    parsed,
    resnet_family,
    tensors,
    train,
    vit_family,
)
from peft_models import train_by_chance
from torch import Tensor
from transformers import AutoModelForCausalLM

from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.naming import ConfigError, is_running_statistic
from mergekit_ace.training import train as train_module
from mergekit_ace.training.family import load_family
from mergekit_ace.training.models import claim_models
from mergekit_ace.training.state import TrainingRun
from mergekit_ace.training.tasks import model_kind
from mergekit_ace.training.train import Objective, Score

load = AutoModelForCausalLM.from_pretrained


def losses_of(out: Path) -> list[float]:
    return [line["validation_loss"] for line in log_of(out) if "validation_loss" in line]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> dict:
    return llama_family(tmp_path_factory.mktemp("llama"))


def test_a_training_from_config_to_merged_model(llama, tmp_path, mergekit_yaml):
    source, out = Path(llama["base_model"]).parent, tmp_path / "out"
    before = {path: path.read_bytes() for path in source.rglob("*.safetensors")}
    file = train({**llama, "labels": "hard"}, out)
    assert all(path.read_bytes() == old for path, old in before.items()), "they are frozen"
    again = CoefficientFile.load(out / "coefficients.safetensors")
    assert again.contents == file.contents
    assert torch.equal(again.coefficients, file.coefficients)
    predicted = again.learner(again.statistics, again.depths)
    torch.testing.assert_close(predicted, again.coefficients, msg="the learner's are the file's")
    merged = mergekit_yaml(merge_of(out))
    uniform = "uniform (mean of the experts)"
    names = ["each expert on its own", "base model", uniform, "StatsMerging"]
    assert list(file.contents.scores) == names
    # labels and scores are what experts and merged checkpoint answer alone
    losses, shares, result = [], [], load(merged, dtype=torch.float64).eval()
    for row, expert in enumerate(llama["models"]):
        teacher = load(expert["model"], dtype=torch.float64).eval()
        logs, right = [], []
        for sample in answered(out, row)["test"]:
            mine, own = (logits_by_hand(model, sample) for model in (result, teacher))
            assert torch.equal(sample["hard"], own.argmax(-1))
            logs.append(mine.log_softmax(-1).gather(1, sample["hard"][:, None]))
            right.append(mine.argmax(-1) == sample["true"])
        losses.append(-float(torch.cat(logs).mean()))
        shares.append(float(torch.cat(right).double().mean()))
    score = file.contents.scores["StatsMerging"]
    assert score["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert score["accuracy"] == pytest.approx(shares)


def test_the_base_answers_the_rehearsal(llama, tmp_path):
    """Losses are means over experts and base, in which the base counts w times all experts; so for
    two w, and without the base, they lie on one line in w / (1 + w)."""
    alone = changed(llama, max_steps=1, batch_size=16)
    rehearsed = {**alone, "rehearsal": llama["models"][0]["data"]}
    configs = (alone, rehearsed, changed(rehearsed, rehearsal_weight=3.0))
    files = [train(config, tmp_path / str(n)) for n, config in enumerate(configs)]
    logs = [log_of(tmp_path / str(n)) for n in range(3)]
    losses = [(start["validation_loss"], step["loss"]) for start, step, *_ in logs]
    for of_experts, even, more in zip(*losses, strict=True):
        of_base = 2 * even - of_experts
        assert abs(of_base - of_experts) > 0.01
        assert more == pytest.approx((of_experts + 3 * of_base) / 4, rel=1e-4)
    assert len(files[1].coefficients) == 2, "the base is no expert"
    header, _, samples, *_ = (tmp_path / "1" / "scores.md").read_text().splitlines()
    assert header == "| accuracy on the test split | mean | task0 | task1 | rehearsal | loss |"
    assert samples == "| samples | 4 | 2 | 2 | 2 |  |"
    own, unchanged, *_ = (score["accuracy"] for score in files[1].contents.scores.values())
    assert unchanged[-1] == pytest.approx(own[-1])
    assert 0 <= logs[1][-1]["validation_rehearsal"] <= 1
    base = load(llama["base_model"]).eval()
    for sample in answered(tmp_path / "1", 2)["test"]:
        assert torch.equal(sample["hard"], logits_by_hand(base, sample).argmax(-1))


@pytest.mark.parametrize(
    ("granularity", "kind", "partner", "count"),
    [
        ("block", "shared", lambda name: name.replace("q_proj", "k_proj"), 5),
        ("kind", "concatenated", lambda name: name.replace("layers.0", "layers.1"), 12),
        ("task", "direct", lambda name: "model.norm.weight", 1),
    ],
)
def test_coefficients_in_common(llama, tmp_path, granularity, kind, partner, count):
    config = {**llama, "granularity": granularity, "learner": {"hidden": 8, "input": kind}}
    file = train(changed(config, learning_rate=0.03), tmp_path / "out")
    for name, column in file.columns.items():
        other = file.columns[partner(name)]
        assert torch.equal(file.coefficients[:, column], file.coefficients[:, other])
    assert file.coefficients[0].unique().numel() == count


WRITTEN = {"prompt": "text", "max_new_tokens": 5}


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ({"labels": "hard", "learner": {"hidden": 8, "activation": "softmax"}}, WRITTEN),
        ({"labels": "soft", "top_k": 5, "learner": {"activation": "relu"}}, {"text": "text"}),
        ({"loss": "entropy", "learner": {"input": "direct"}}, {"text": "text"}),
        ({"labels": "true"}, {**WRITTEN, "completion": "text"}),
    ],
    ids=["hard", "soft", "entropy", "true"],
)
def test_training_lowers_the_loss(llama, tmp_path, settings, columns):
    config = copy.deepcopy(llama) | settings
    for expert in config["models"]:
        expert["data"] = {"path": expert["data"]["path"], **columns}
    train(changed(config, epochs=4, patience=0), tmp_path / "out")
    losses = losses_of(tmp_path / "out")
    assert min(losses) < losses[0]


def test_the_kept_network_is_that_of_the_best_evaluation(llama, tmp_path, monkeypatch):
    losses, seen = [5.0, 4.0, 3.0, 3.5, 3.0, 6.0], []

    def scripted(self, coefficients, split):
        seen.append(split)
        return Score(losses[min(seen.count("validation"), 6) - 1], (0.5, 0.5))

    monkeypatch.setattr(Objective, "score", scripted)
    results = []
    for steps in (5, 2):
        seen.clear()
        config = changed(llama, evaluate_every=1, epochs=2, max_steps=steps)
        results.append(train(config, tmp_path / str(steps)).coefficients)
    assert losses_of(tmp_path / "5") == losses
    assert torch.equal(*results)
    seen.clear()
    train(changed(llama, evaluate_every=1, epochs=50, patience=2), tmp_path / "patient")
    assert losses_of(tmp_path / "patient") == losses[:5], "two without improvement"


def test_a_loss_that_is_no_number_names_the_task(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "summed_loss", lambda logits, *_: logits.sum() * torch.nan)
    monkeypatch.setattr(Objective, "score", lambda *_: Score(1.0, (0.5, 0.5)))
    with pytest.raises(ConfigError, match=r"data of task0 became nan in step 0; lower"):
        train(llama, tmp_path / "out")


def test_a_penalty_keeps_coefficients_where_they_start(llama, tmp_path):
    config = {**llama, "learner": {"input": "direct", "activation": "softmax"}}
    away = []
    for penalty in (0.0, 1e4):
        penalised = changed(config, epochs=3, learning_rate=0.02, penalty=penalty)
        file = train(penalised, tmp_path / f"out{penalty}")
        away.append(float((file.coefficients - 0.5).abs().mean()))
    assert 0 < 2 * away[1] < away[0]


@pytest.mark.parametrize("family", [bert_family, vit_family, resnet_family])
def test_classifiers_with_heads_of_their_own(tmp_path, mergekit_yaml, family):
    """Put each expert's head on the merged backbone: the scores are those of the training."""
    config, out = family(tmp_path / "family", exclude=["bias"]), tmp_path / "out"
    file = train(config, out)
    assert not any("classifier" in name for name in file.columns)
    got, base = tensors(mergekit_yaml(merge_of(out))), tensors(out / "backbones" / "base")
    kept = [name for name in base if name.endswith("bias")]
    assert kept
    assert all(torch.equal(got[name], base[name]) for name in kept)
    kind, shares, buffers = model_kind(config["task"]), [], []
    for row, expert in enumerate(config["models"]):
        model = getattr(transformers, kind.auto_class).from_pretrained(expert["model"])
        buffers.append({n: b.clone() for n, b in model.base_model.named_buffers()})
        model.base_model.load_state_dict(got, strict=family is not bert_family)
        samples = list(answered(out, row)["test"])
        with torch.no_grad():
            answers = kind.logits(model.eval(), kind.collate(samples)).argmax(-1)
        truth = torch.cat([s.get("true", s["hard"]) for s in samples])
        shares.append(float((answers == truth).double().mean()))
    assert shares == pytest.approx(file.contents.scores["StatsMerging"]["accuracy"])
    for name in filter(is_running_statistic, got):  # BatchNorm's are the mean of the experts'
        mean = sum(own[name] for own in buffers) / len(buffers)
        torch.testing.assert_close(got[name], mean)


def test_experts_that_are_adapters(llama, tmp_path, mergekit_yaml):
    config, adapter = copy.deepcopy(llama), tmp_path / "adapter"
    options = {"r": 2, "target_modules": ["q_proj", "up_proj"]}
    trained = train_by_chance(partial(load, config["base_model"]), adapter, **options)
    config["models"][0]["model"] = f"{config['base_model']}+{adapter}"
    file = train(config, tmp_path / "out")
    flags = ("--lora-merge-cache", str(tmp_path / "cache"), "--lora-merge-dtype", "float32")
    got = tensors(mergekit_yaml(merge_of(tmp_path / "out"), *flags))
    name = "model.layers.1.mlp.up_proj.weight"
    first, second = file.coefficients[:, file.columns[name]].double()
    folders = config["base_model"], config["models"][1]["model"]
    zero, other = (tensors(folder)[name].double() for folder in folders)
    expected = zero + first * (trained.merged[name].double() - zero) + second * (other - zero)
    torch.testing.assert_close(got[name].double(), expected, rtol=1e-5, atol=1e-6)


def first_gradient(config: dict, folder: Path) -> Tensor:
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process
    settings = parsed(config)
    run = TrainingRun(folder, settings.mixed_precision, quiet=True)
    family = load_family(claim_models(settings, run, overwrite=False))
    start = torch.full((2, len(family.depths)), 0.3)
    return Objective(family).gradient(start, 0)[0]


def test_the_first_gradient_is_nearly_that_of_float32(llama, tmp_path):
    exact = first_gradient(llama, tmp_path / "exact")
    for number, settings in enumerate(({"mixed_precision": "bf16"}, {"dtype": "bfloat16"})):
        rough = first_gradient({**llama, **settings}, tmp_path / str(number))
        assert (rough - exact).norm() <= 0.05 * exact.norm(), settings
    whole = first_gradient({**llama, "granularity": "task"}, tmp_path / "task")
    torch.testing.assert_close(whole, exact.sum(1, keepdim=True), msg="it adds up over tensors")
