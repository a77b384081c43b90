# SPDX-License-Identifier: Apache-2.0
"""Trainings of tiny families: what is learned, and that the merge is what was trained."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import families
import pytest
import torch
import transformers
from checkpoints import rewrite
from commands import run_config
from peft_models import train_by_chance
from reference import task_vector_error
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, CLIPModel, CLIPVisionModel, MixtralForCausalLM

from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.naming import ConfigError, is_running_statistic
from mergekit_ace.training import train as train_module
from mergekit_ace.training.tasks import MODEL_KINDS
from mergekit_ace.training.train import Objective, Score

load = AutoModelForCausalLM.from_pretrained
REFINED = {"epsilon": 1e-3, "spectral_refinement": "always"}


def losses_of(out: Path) -> list[float]:
    return [line["validation_loss"] for line in families.log_of(out) if "validation_loss" in line]


def with_basis(config: dict, basis: str, **parameters) -> dict:
    return {**config, "basis": basis, **({basis: parameters} if parameters else {})}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> dict:
    return families.llama(tmp_path_factory.mktemp("llama"))


def test_a_training_from_config_to_merged_model(llama, tmp_path, mergekit_yaml):
    source, out = Path(llama["base_model"]).parent, tmp_path / "out"
    before = {path: path.read_bytes() for path in source.rglob("*.safetensors")}
    file = families.train({**llama, "labels": "hard"}, out)
    assert all(path.read_bytes() == old for path, old in before.items()), "they are frozen"
    again = CoefficientFile.load(out / "coefficients.safetensors")
    assert again.contents == file.contents
    assert torch.equal(again.coefficients, file.coefficients)
    for name, tensor in file.learner_state.items():
        assert torch.equal(again.learner_state[name], tensor), name
    uniform = "uniform (mean of the experts)"
    names = ["each expert on its own", "base model", uniform, "StatsMerging"]
    assert list(file.contents.scores) == names
    # labels and scores are what experts and merged checkpoint answer alone
    losses, shares = [], []
    result = load(mergekit_yaml(families.merge_of(out)), dtype=torch.float64).eval()
    for row, expert in enumerate(llama["models"]):
        teacher = load(expert["model"], dtype=torch.float64).eval()
        logs, right = [], []
        for sample in families.answered(out, row)["test"]:
            mine, own = (families.logits_by_hand(model, sample) for model in (result, teacher))
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
    rehearsed = {**llama, "rehearsal": llama["models"][0]["data"]}
    runs = ((llama, {}), (rehearsed, {}), (rehearsed, {"rehearsal_weight": 3.0}))
    files = [
        families.train(config, tmp_path / str(n), max_steps=1, batch_size=16, **more)
        for n, (config, more) in enumerate(runs)
    ]
    logs = [families.log_of(tmp_path / str(n)) for n in range(3)]
    losses = [(start["validation_loss"], step["loss"]) for start, step, *_ in logs]
    for of_experts, even, more in zip(*losses, strict=True):
        of_base = 2 * even - of_experts
        assert abs(of_base - of_experts) > 0.01
        assert more == pytest.approx((of_experts + 3 * of_base) / 4, rel=1e-4)
    assert len(files[1].coefficients) == 2, "the base is no expert"
    header, _, samples, *_ = (tmp_path / "1" / "scores.md").read_text().splitlines()
    assert header == "| accuracy on the test split | mean | task0 | task1 | rehearsal | loss |"
    assert samples == "| samples | 4 | 2 | 2 | 2 |  |"
    assert 0 <= logs[1][-1]["validation_rehearsal"] <= 1
    base = load(llama["base_model"]).eval()
    for sample in families.answered(tmp_path / "1", 2)["test"]:
        assert torch.equal(sample["hard"], families.logits_by_hand(base, sample).argmax(-1))


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
    file = families.train(config, tmp_path / "out", learning_rate=0.03, max_steps=3)
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
        ({"mixed_precision": "bf16"}, {"text": "text"}),
        ({"dtype": "bfloat16"}, {"text": "text"}),
    ],
)
def test_training_lowers_the_loss(llama, tmp_path, settings, columns):
    config = copy.deepcopy(llama) | settings
    for expert in config["models"]:
        expert["data"] = {"path": expert["data"]["path"], **columns}
    families.train(config, tmp_path / "out", epochs=4, patience=0)
    losses = losses_of(tmp_path / "out")
    assert min(losses) < losses[0]
    if settings.keys() & {"mixed_precision", "dtype"}:  # nearly those of float32
        families.train(llama, tmp_path / "exact", epochs=4, patience=0)
        assert losses == pytest.approx(losses_of(tmp_path / "exact"), rel=0.01)


def test_the_kept_network_is_that_of_the_best_evaluation(llama, tmp_path, monkeypatch):
    losses, seen = [5.0, 4.0, 3.0, 3.5, 3.0, 6.0], []

    def scripted(self, coefficients, split):
        seen.append(split)
        return Score(losses[min(seen.count("validation"), 6) - 1], (0.5, 0.5))

    monkeypatch.setattr(Objective, "score", scripted)
    results = []
    for name, steps, patience in (("whole", 5, 20), ("best", 2, 20), ("patient", 50, 2)):
        seen.clear()
        settings = {"evaluate_every": 1, "epochs": 50, "max_steps": steps, "patience": patience}
        results.append(families.train(llama, tmp_path / name, **settings).coefficients)
    assert losses_of(tmp_path / "whole") == losses
    assert losses_of(tmp_path / "patient") == losses[:5], "two without improvement"
    assert all(torch.equal(one, results[1]) for one in results)


def test_a_loss_that_is_no_number_names_the_task(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "summed_loss", lambda logits, *_: logits.sum() * torch.nan)
    monkeypatch.setattr(Objective, "score", lambda *_: Score(1.0, (0.5, 0.5)))
    with pytest.raises(ConfigError, match=r"data of task0 became nan in step 0; lower"):
        families.train(llama, tmp_path / "out")


def test_a_penalty_keeps_coefficients_where_they_start(llama, tmp_path):
    config = {**llama, "learner": {"input": "direct", "activation": "softmax"}}
    away = []
    for penalty in (0.0, 1e4):
        settings = {"learning_rate": 0.02, "penalty": penalty}
        file = families.train(config, tmp_path / f"out{penalty}", **settings)
        away.append(float((file.coefficients - 0.5).abs().mean()))
    assert 0 < 2 * away[1] < away[0]


@pytest.mark.parametrize("family", [families.bert, families.vit, families.resnet])
def test_classifiers_with_heads_of_their_own(tmp_path, mergekit_yaml, family):
    """Put each expert's head on the merged backbone: the scores are those of the training."""
    config, out = family(tmp_path / "family", exclude=["bias"]), tmp_path / "out"
    file = families.train(config, out)
    assert not any("classifier" in name for name in file.columns)
    got, base = (
        families.tensors(mergekit_yaml(families.merge_of(out))),
        families.tensors(out / "backbones" / "base"),
    )
    kept = [name for name in base if name.endswith("bias")]
    assert kept
    assert all(torch.equal(got[name], base[name]) for name in kept)
    kind, shares, buffers = MODEL_KINDS[config["task"]], [], []
    for row, expert in enumerate(config["models"]):
        model = getattr(transformers, kind.auto_class).from_pretrained(expert["model"])
        buffers.append({n: b.clone() for n, b in model.base_model.named_buffers()})
        model.base_model.load_state_dict(got, strict=family is not families.bert)
        samples = list(families.answered(out, row)["test"])
        with torch.no_grad():
            answers = kind.logits(model.eval(), kind.collate(samples)).argmax(-1)
        truth = torch.cat([s.get("true", s["hard"]) for s in samples])
        shares.append(float((answers == truth).double().mean()))
    assert shares == pytest.approx(file.contents.scores["StatsMerging"]["accuracy"])
    for name in filter(is_running_statistic, got):  # BatchNorm's are the mean of the experts'
        mean = sum(own[name] for own in buffers) / len(buffers)
        torch.testing.assert_close(got[name], mean)


@torch.no_grad()
def clip_by_hand(folder: str, tower: CLIPVisionModel, pixels: Tensor, prompts: list) -> Tensor:
    """What CLIP answers to images, where a class with several prompts has their mean."""
    model, words = CLIPModel.from_pretrained(folder).eval(), families.tokenizer()
    rows = []
    for texts in ([p] if isinstance(p, str) else p for p in prompts):
        each = [model.text_model(**words(t, return_tensors="pt")).pooler_output for t in texts]
        rows.append(sum(normalize(model.text_projection(e), dim=-1)[0] for e in each))
    seen = model.visual_projection(tower.eval()(pixel_values=pixels).pooler_output)
    return (normalize(seen, dim=-1) @ normalize(torch.stack(rows), dim=-1).T).argmax(-1)


def test_image_towers_of_clip_with_prompts_as_heads(tmp_path, mergekit_yaml):
    """Labels are the answers of each tower with its prompts, and scores those of the merge."""
    config, out = families.clip(tmp_path), tmp_path / "out"
    scores = families.train(config, out).contents.scores
    merged = mergekit_yaml(families.merge_of(out))
    tower, info = CLIPVisionModel.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"]
    shares, folder = [], config["base_model"]
    for row, expert in enumerate(config["models"]):
        own = CLIPVisionModel.from_pretrained(expert["model"])
        samples, prompts = families.answered(out, row)["test"], expert["data"]["prompts"]
        seen = torch.cat([sample["pixel_values"] for sample in samples])
        answers = torch.cat([sample["hard"] for sample in samples])
        assert torch.equal(clip_by_hand(folder, own, seen, prompts), answers)
        mine = clip_by_hand(folder, tower, seen, prompts)
        shares.append(float((mine == answers).float().mean()))
    assert scores["StatsMerging"]["accuracy"] == pytest.approx(shares)
    rewrite(folder, lambda tensors: tensors.pop("visual_projection.weight"))
    with pytest.raises(ConfigError, match="give a whole CLIPModel with its tokenizer"):
        families.train(config, tmp_path / "other")


def test_experts_that_are_adapters(llama, tmp_path, mergekit_yaml):
    config, adapter = copy.deepcopy(llama), tmp_path / "adapter"
    options = {"r": 2, "target_modules": ["q_proj", "up_proj"]}
    trained = train_by_chance(partial(load, config["base_model"]), adapter, **options)
    config["models"][0]["model"] = f"{config['base_model']}+{adapter}"
    file = families.train(config, tmp_path / "out")
    flags = ("--lora-merge-cache", str(tmp_path / "cache"), "--lora-merge-dtype", "float32")
    got = families.tensors(mergekit_yaml(families.merge_of(tmp_path / "out"), *flags))
    name = "model.layers.1.mlp.up_proj.weight"
    first, second = file.coefficients[:, file.columns[name]].double()
    folders = config["base_model"], config["models"][1]["model"]
    zero, other = (families.tensors(folder)[name].double() for folder in folders)
    expected = zero + first * (trained.merged[name].double() - zero) + second * (other - zero)
    torch.testing.assert_close(got[name].double(), expected, rtol=1e-5, atol=1e-6)


def weights(folder: str | Path, family) -> dict[str, Tensor]:
    """Tensors on disk; in memory where they are packed otherwise there."""
    if family is not families.mixtral:
        return families.tensors(folder)
    return dict(MixtralForCausalLM.from_pretrained(folder).requires_grad_(False).named_parameters())


@pytest.mark.parametrize(
    ("family", "basis", "parameters"),
    [
        (families.llama, "ace_plus", {"compute_dtype": "float64"}),
        (families.gpt2, "ace", {}),
        (families.gpt2, "ace_plus", {}),
        (families.bert, "ace_plus", {}),
        (families.vit, "ace", REFINED),
        (families.mixtral, "ace", REFINED),
        (families.mixtral, "task_vector", {}),
    ],
)
def test_the_method_merges_what_was_trained(tmp_path, mergekit_yaml, family, basis, parameters):
    """Every tensor of the merge is what the model in training had."""
    config, out = with_basis(family(tmp_path), basis, **parameters), tmp_path / "out"
    file = families.train(config, out, max_steps=1)
    assert file.coefficients.shape[0] == 2 + (basis == "ace")
    generator = torch.Generator().manual_seed(0)  # whatever was learned in one step
    file.coefficients += 0.5 * torch.randn(file.coefficients.shape, generator=generator)
    file.save(out / "coefficients.safetensors")
    merge = families.merge_of(out)
    merged, base = (weights(f, family) for f in (mergekit_yaml(merge), merge["base_model"]))
    experts = [weights(m["model"], family) for m in merge["models"] if basis == "task_vector"]
    compared = 0
    for name, tensor in merged.items():
        column = file.columns.get(name)
        if column is None:
            assert torch.equal(tensor, base[name])
            continue
        parts = [expert[name].double() - base[name].double() for expert in experts]
        if not experts:
            stored = load_file(out / "state" / "components" / f"{column:05d}.safetensors")
            parts = [stored[str(row)].double() for row in range(len(stored))]
        pairs = zip(file.coefficients[:, column].tolist(), parts, strict=True)
        total = sum(value * part for value, part in pairs)
        expected = base[name].double() + total
        if total.any():
            rounding = 2**-23 * float(expected.norm() / total.norm())
            assert task_vector_error(tensor, expected, base[name]) <= 1e-4 + rounding, name
            compared += 1
    assert compared > 10


def test_a_report_has_what_was_learned(llama, tmp_path, mergekit_yaml):
    """A tensor that training left out stays the base's."""
    config = {**with_basis(llama, "ace_plus"), "exclude": ["embed_tokens"]}
    file = families.train(config, tmp_path / "out", max_steps=1)
    merge, report = families.merge_of(tmp_path / "out"), tmp_path / "report.jsonl"
    merge["parameters"]["report"] = str(report)
    merged, base = map(families.tensors, (mergekit_yaml(merge), config["base_model"]))
    lines = {line["tensor"]: line for line in map(json.loads, report.read_text().splitlines())}
    learned, excluded = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"
    assert lines[learned]["coefficients"] == file.coefficients[:, file.columns[learned]].tolist()
    assert (lines[excluded]["coefficients"], lines[excluded]["rule"]) == ([0.0, 0.0], "base")
    assert torch.equal(merged[excluded], base[excluded])


def test_training_starts_at_the_merge(llama, tmp_path, mergekit_yaml):
    """With all coefficients 1 the file merges as the method does without it."""
    config = with_basis(llama, "ace", **REFINED)
    file = families.train(config, tmp_path / "out", learning_rate=1e-12, max_steps=1)
    torch.testing.assert_close(file.coefficients, torch.ones_like(file.coefficients))
    plain, learned = list(file.contents.scores.items())[-2:]
    assert (plain[0], learned[0]) == ("ace, without data", "ace, coefficients")
    assert learned[1]["loss"] == pytest.approx(plain[1]["loss"])
    merge = families.merge_of(tmp_path / "out")
    with_file = families.tensors(mergekit_yaml(merge, out="with"))
    del merge["parameters"]["coefficients"]
    merge["models"] = [{"model": model["model"]} for model in merge["models"]]
    for name, tensor in families.tensors(mergekit_yaml(merge, out="without")).items():
        torch.testing.assert_close(with_file[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trained(llama, tmp_path_factory) -> dict:
    """The `merge.yml` of a training over components of `ace_plus`."""
    out = tmp_path_factory.mktemp("trained") / "out"
    families.train(with_basis(llama, "ace_plus"), out, max_steps=1)
    return families.merge_of(out)


@pytest.mark.parametrize(
    ("method", "parameters", "count", "message"),
    [
        ("statsmerging", {}, 2, "learned for components of ace_plus"),
        ("ace", {}, 2, "write merge_method: ace_plus"),
        ("ace_plus", {"compute_dtype": "float64"}, 2, "float64 instead of float32"),
        ("ace_plus", {"layout": "matrix"}, 2, "layout: matrix instead of auto"),
        ("ace_plus", {}, 1, "learned for 2 experts together, and there are 1"),
    ],
)
def test_another_merge_is_refused(
    trained, mergekit_yaml, tmp_path, method, parameters, count, message
):
    merge = copy.deepcopy(trained) | {"merge_method": method}
    known = merge["parameters"] if method == "ace_plus" else {}
    given = {"coefficients": merge["parameters"]["coefficients"]}
    merge |= {"parameters": known | given | parameters, "models": merge["models"][:count]}
    with pytest.raises(ConfigError, match=message):
        mergekit_yaml(merge)
    assert message in run_config("check", merge, tmp_path / "changed", fails=True, quiet=False)


@pytest.mark.parametrize(("weights", "count"), [((2.0, 2.0), 0), ((1.0, 0.5), 1)])
def test_a_check_mentions_weights_that_were_not_trained(trained, tmp_path, weights, count):
    """Only their ratio matters."""
    config = copy.deepcopy(trained)
    for expert, weight in zip(config["models"], weights, strict=True):
        expert["parameters"]["weight"] = weight
    said = run_config("check", config, tmp_path / "changed", quiet=False)
    assert said.count("different weights") == count
