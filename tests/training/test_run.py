# SPDX-License-Identifier: Apache-2.0
"""Whole trainings of tiny families."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from checkpoints import fine_tuned, tiny_llama
from families import (
    answered,
    bert_family,
    llama_family,
    masked_family,
    mixtral_family,
    parsed,
    regression_family,
    t5_family,
    tokenizer,
    vit_family,
    write_rows,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertForMaskedLM,
    DistilBertForMaskedLM,
    RobertaForMaskedLM,
)

from mergekit_ace.files.coefficients import CoefficientFile
from mergekit_ace.files.headers import DamagedFileError
from mergekit_ace.training import family as family_module
from mergekit_ace.training import objective as objective_module
from mergekit_ace.training import run as run_module
from mergekit_ace.training import teachers as teachers_module
from mergekit_ace.training.objective import Score
from mergekit_ace.training.run import merge_config, run_training
from mergekit_ace.training.state import Diverged, TrainingError
from mergekit_ace.training.tasks import model_kind


def run(config: dict, out: Path, **options) -> CoefficientFile:
    return run_training(parsed(config), out, quiet=True, **options)


def changed(config: dict, **training) -> dict:
    config = copy.deepcopy(config)
    config["training"] |= training
    return config


def log_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> dict:
    return llama_family(tmp_path_factory.mktemp("llama"))


def test_a_training_from_config_to_merged_model(llama, tmp_path, mergekit_yaml):
    source = Path(llama["base_model"]).parent
    before = hashes(source)
    out = tmp_path / "out"
    file = run({**llama, "labels": "hard"}, out)
    assert hashes(source) == before, "base and experts are frozen"
    assert {p.name for p in out.iterdir()} >= {
        "coefficients.safetensors",
        "merge.yml",
        "inline.yml",
        "training.jsonl",
        "scores.md",
    }
    assert file.coefficients.std() > 0
    again = CoefficientFile.load(out / "coefficients.safetensors")
    assert torch.equal(again.coefficients, file.coefficients)
    # the learner in the file gives the coefficients in the file
    predicted = again.learner(again.statistics, again.depths)
    torch.testing.assert_close(predicted, again.coefficients)

    merged = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()), out="merged")
    inline = mergekit_yaml(yaml.safe_load((out / "inline.yml").read_text()), out="inline")
    tensors, others = (load_file(f / "model.safetensors") for f in (merged, inline))
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    base = load_file(Path(llama["base_model"]) / "model.safetensors")
    experts = [load_file(Path(m["model"]) / "model.safetensors") for m in llama["models"]]
    for name, tensor in tensors.items():
        column = file.columns[name]
        expected = base[name].double() + sum(
            float(file.coefficients[k, column]) * (e[name].double() - base[name].double())
            for k, e in enumerate(experts)
        )
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
    assert _loss_on_test(llama, merged, out) == pytest.approx(
        again.contents.scores["StatsMerging"]["loss"], rel=1e-5
    )


@pytest.mark.parametrize("exclude", [[], ["gate_up_proj"]])
def test_packed_experts(tmp_path, mergekit_yaml, exclude):
    """One parameter in memory, several tensors on disk: both configs merge what was trained."""
    config, out = changed(mixtral_family(tmp_path), max_steps=1), tmp_path / "out"
    config["exclude"] = exclude
    file = run(config, out)
    packed = [tensor for tensor in file.contents.tensors if len(tensor.stored) > 1]
    assert len(packed) == (2 if exclude else 4)
    generator = torch.Generator().manual_seed(0)  # whatever was learned in one step
    file.coefficients = torch.rand(file.coefficients.shape, generator=generator)
    file.save(out / "coefficients.safetensors")
    inline = merge_config(file, task="causal-lm", out_dtype=None)
    merge = yaml.safe_load((out / "merge.yml").read_text())
    paths = [config["base_model"], *(expert["model"] for expert in config["models"])]
    base, *experts = (dict(_load(path).named_parameters()) for path in paths)
    for number, settings in enumerate((merge, inline)):
        merged = dict(_load(mergekit_yaml(settings, out=f"merged{number}")).named_parameters())
        assert merged.keys() == base.keys()
        for column, tensor in enumerate(file.contents.tensors):
            start, *versions = (state[tensor.name].double() for state in (base, *experts))
            values = file.coefficients[:, column].tolist()
            pairs = zip(values, versions, strict=True)
            expected = start + sum(value * (version - start) for value, version in pairs)
            got = merged.pop(tensor.name).double()
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        assert len(merged) == len(exclude) * 2
        assert all(torch.equal(left, base[name]) for name, left in merged.items())


def _load(folder: str | Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)


def _loss_on_test(config: dict, folder: Path, out: Path) -> float:
    """The score again, from the merged checkpoint alone and the labels, by hand."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    losses = []
    for row in range(len(config["models"])):
        splits = answered(out, row)
        total, count = 0.0, 0
        for sample in splits["test"]:
            with torch.no_grad():
                logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
            logits = logits[sample["supervised"][1:]].log_softmax(-1)
            total -= float(logits.gather(1, sample["hard"][:, None]).sum())
            count += len(sample["hard"])
        losses.append(total / count)
    return sum(losses) / len(losses)


def test_labels_are_the_experts_own_answers(llama, tmp_path):
    run(changed(llama, max_steps=1), tmp_path / "out")
    for row, expert in enumerate(llama["models"]):
        model = AutoModelForCausalLM.from_pretrained(expert["model"]).eval()
        tokenizer = AutoTokenizer.from_pretrained(expert["model"])
        lines = Path(expert["data"]["path"]).read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        answers = {}
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            with torch.no_grad():
                answers[tuple(ids[0].tolist())] = model(input_ids=ids).logits[0, :-1].argmax(-1)
        splits = answered(tmp_path / "out", row)
        seen = [sample for split in splits.values() for sample in split]
        assert len(seen) == len(texts)
        for sample in seen:
            assert torch.equal(sample["hard"], answers[tuple(sample["input_ids"].tolist())])


class Killed(BaseException):
    """Like a signal: nothing in the package catches it."""


def _killed_after(monkeypatch, owner, name: str, calls: int) -> None:
    original = getattr(owner, name)
    left = [calls]

    def dying(*args, **options):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return original(*args, **options)

    monkeypatch.setattr(owner, name, dying)


@pytest.fixture(scope="module")
def uninterrupted(llama, tmp_path_factory) -> tuple[dict, Path, CoefficientFile]:
    """A training, its folder, and what came out."""
    config = changed(llama, checkpoint_every=3, epochs=3)
    out = tmp_path_factory.mktemp("whole") / "out"
    return config, out, run(config, out)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (teachers_module, "label_batch", 7),  # in the labels of the second expert
        (family_module, "measure_moments", 5),  # in the statistics
        (objective_module.Objective, "gradient", 1),  # before the first checkpoint
        (objective_module.Objective, "gradient", 5),  # after one
        (objective_module.Objective, "evaluate", 2),  # in an evaluation
        (run_module, "write_config", 1),  # while the results are written
    ],
)
def test_a_killed_run_goes_on_to_the_same_coefficients(
    uninterrupted, tmp_path, monkeypatch, owner, name, calls
):
    config, out, whole = uninterrupted
    with monkeypatch.context() as patch:
        _killed_after(patch, owner, name, calls)
        with pytest.raises(Killed):
            run(config, tmp_path / "killed")
    assert not (tmp_path / "killed" / "coefficients.safetensors").exists()
    resumed = run(config, tmp_path / "killed")
    assert torch.equal(resumed.coefficients, whole.coefficients)
    assert resumed.contents.scores == whole.contents.scores
    for name in ("training.jsonl", "scores.md"):
        assert (tmp_path / "killed" / name).read_text() == (out / name).read_text()


def test_labels_that_are_known_are_not_asked_for_again(llama, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        _killed_after(patch, objective_module.Objective, "gradient", 0)
        with pytest.raises(Killed):
            run(llama, tmp_path / "out")

    def forbidden(*_, **__):
        raise AssertionError("asked again")

    monkeypatch.setattr(teachers_module, "label_batch", forbidden)
    monkeypatch.setattr(family_module, "measure_moments", forbidden)
    run(llama, tmp_path / "out")


def test_labels_that_are_damaged_are_named(llama, tmp_path):
    run(llama, tmp_path / "out")
    labels = tmp_path / "out" / "state" / "labels-0.safetensors"
    labels.write_bytes(labels.read_bytes()[:-9])
    with pytest.raises(TrainingError, match=r"labels-0.safetensors is damaged .*; delete it to"):
        run(llama, tmp_path / "out")
    labels.unlink()
    run(llama, tmp_path / "out")


def test_another_run_s_folder_is_refused_unless_overwritten(llama, tmp_path):
    out = tmp_path / "out"
    first = run(llama, out)
    other = changed(llama, learning_rate=0.02)
    with pytest.raises(TrainingError, match=r"another run; changed .*config\.training\.learning"):
        run(other, out)
    assert torch.equal(run(llama, out).coefficients, first.coefficients)
    assert not torch.equal(run(other, out, overwrite=True).coefficients, first.coefficients)


def test_overwriting_leaves_nothing_that_looks_complete(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(changed(llama, max_steps=1), out)
    _killed_after(monkeypatch, objective_module.Objective, "gradient", 0)
    with pytest.raises(Killed):
        run(changed(llama, max_steps=2), out, overwrite=True)
    assert not (out / "coefficients.safetensors").exists()
    assert not (out / "merge.yml").exists()


def test_a_comparison_that_diverges_loses_nothing(llama, tmp_path, monkeypatch):
    original = run_module.train_learner

    def diverging(objective, config, inputs, name):
        if name == "direct":
            raise Diverged("only the comparison")
        return original(objective, config, inputs, name)

    monkeypatch.setattr(run_module, "train_learner", diverging)
    file = run({**llama, "compare": {"direct": True}}, tmp_path / "out")
    assert "StatsMerging" in file.contents.scores
    assert "coefficients learned directly" not in file.contents.scores


def test_the_best_of_several_weights_gives_a_number(llama):
    def score(coefficients: torch.Tensor, split: str) -> Score:
        weight = float(coefficients[0, 0])
        return Score(float("nan") if weight > 1 else 1 + weight, (0.5,))

    config = parsed({**llama, "compare": {"task_arithmetic": [5, 0.7, 0.3]}})
    scores = run_module._simple_merges(SimpleNamespace(config=config, score=score), (2, 1))
    assert "task arithmetic, weight 0.3 (best of 3)" in scores


def test_changed_data_is_another_run(tmp_path):
    config = llama_family(tmp_path / "family")
    run(changed(config, max_steps=1), tmp_path / "out")
    path = Path(config["models"][0]["data"]["path"])
    path.write_text(path.read_text() + json.dumps({"text": "w1 w2 w3"}) + "\n")
    with pytest.raises(TrainingError, match=r"changed since then: files\..*data0"):
        run(changed(config, max_steps=1), tmp_path / "out")


def test_an_excluded_part_of_a_backbone(tmp_path, mergekit_yaml):
    run({**bert_family(tmp_path / "family"), "exclude": ["embeddings"]}, tmp_path / "out")
    merged = mergekit_yaml(yaml.safe_load((tmp_path / "out" / "merge.yml").read_text()))
    got, base = (
        load_file(f / "model.safetensors") for f in (merged, tmp_path / "out/backbones/base")
    )
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(got[name], base[name])


def test_a_changed_checkpoint_is_another_run(tmp_path):
    config = llama_family(tmp_path / "family")
    run(changed(config, max_steps=1), tmp_path / "out")
    folder = config["models"][0]["model"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    fine_tuned(model, seed=99).save_pretrained(folder)
    with pytest.raises(TrainingError, match=r"changed since then: files\..*expert0"):
        run(changed(config, max_steps=1), tmp_path / "out")


def test_where_the_experts_lie_changes_nothing(llama, tmp_path):
    results = [
        run(changed({**llama, "expert_storage": storage}, max_steps=2), tmp_path / storage)
        for storage in ("disk", "cpu", "device")
    ]
    assert all(torch.equal(one.coefficients, results[0].coefficients) for one in results)


@pytest.mark.parametrize(
    ("granularity", "kind"), [("block", "shared"), ("kind", "concatenated"), ("task", "direct")]
)
def test_coefficients_per_block_and_task(llama, tmp_path, granularity, kind):
    learner = {"hidden": 8, "input": kind, "activation": "identity"}
    config = {**llama, "granularity": granularity, "learner": learner}
    run(changed(config, evaluate_every=1, epochs=4, learning_rate=0.03), tmp_path / "out")
    file = CoefficientFile.load(tmp_path / "out" / "coefficients.safetensors")
    for name, column in file.columns.items():
        partner = {
            "block": name.replace("q_proj", "k_proj"),
            "kind": name.replace("layers.0", "layers.1"),
            "task": "model.norm.weight",
        }[granularity]
        assert torch.equal(
            file.coefficients[:, column], file.coefficients[:, file.columns[partner]]
        )
    assert (
        file.coefficients[0].unique().numel()
        == {
            "block": 5,
            "kind": 12,
            "task": 1,
        }[granularity]
    )


@pytest.mark.parametrize("basis", ["task_vector", "ties"])
def test_the_entropy_falls_whatever_the_experts_answer(llama, tmp_path, monkeypatch, basis):
    """AdaMerging: coefficients of their own, 0.3 at first."""
    learner = {"input": "direct", "activation": "relu"}
    config = {k: v for k, v in llama.items() if k != "labels"}
    config |= {"loss": "entropy", "basis": basis, "learner": learner}
    config = changed(config, learning_rate=0.02, epochs=2, patience=0)
    one = run(config, tmp_path / "one")
    lines = log_of(tmp_path / "one")
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert min(losses) < losses[0]
    assert one.contents.basis == basis
    assert (one.coefficients >= 0).all()

    def other_answers(samples, labels):
        found = collate_labels(samples, labels)
        return {name: torch.zeros_like(label) for name, label in found.items()}

    collate_labels = objective_module.collate_labels
    monkeypatch.setattr(objective_module, "collate_labels", other_answers)
    assert torch.equal(run(config, tmp_path / "other").coefficients, one.coefficients)


@pytest.mark.parametrize(
    ("labels", "activation"), [("hard", "softmax"), ("soft", "relu"), ("soft", "identity")]
)
def test_training_lowers_the_loss(llama, tmp_path, labels, activation):
    learner = {"hidden": 8, "activation": activation}
    config = {**llama, "learner": learner, "labels": labels, "top_k": 5}
    run(changed(config, epochs=4), tmp_path / "out")
    losses = [line["loss"] for line in log_of(tmp_path / "out") if "loss" in line]
    epoch = len(losses) // 4
    assert sum(losses[-epoch:]) < sum(losses[:epoch])


def test_the_kept_network_is_that_of_the_best_evaluation(llama, tmp_path, monkeypatch):
    losses = [5.0, 4.0, 3.0, 3.5, 3.0, 6.0]
    seen = []

    def scripted(self, split):
        seen.append(split)
        return objective_module.Score(losses[min(seen.count("validation"), 6) - 1], (0.5, 0.5))

    monkeypatch.setattr(objective_module.Objective, "evaluate", scripted)
    file = run(changed(llama, evaluate_every=1, epochs=2, max_steps=5), tmp_path / "out")
    assert [e["validation_loss"] for e in log_of(tmp_path / "out") if "loss" not in e] == losses
    seen.clear()
    short = run(changed(llama, evaluate_every=1, max_steps=2), tmp_path / "short")
    assert torch.equal(file.coefficients, short.coefficients)
    seen.clear()
    longer = run(changed(llama, evaluate_every=1, max_steps=3), tmp_path / "longer")
    assert torch.equal(longer.coefficients, short.coefficients)


def test_a_training_that_was_never_evaluated_to_a_number(llama, tmp_path, monkeypatch):
    nothing = objective_module.Score(float("nan"), (0.5, 0.5))
    monkeypatch.setattr(objective_module.Objective, "evaluate", lambda *_: nothing)
    with pytest.raises(Diverged, match="NaN or Inf in every evaluation; lower"):
        run(changed(llama, max_steps=1), tmp_path / "out")


def test_patience_ends_a_training(llama, tmp_path):
    run(changed(llama, epochs=50, learning_rate=0.5, patience=2), tmp_path / "out")
    log = log_of(tmp_path / "out")
    losses = [line["validation_loss"] for line in log if "validation_loss" in line]
    assert len(losses) < 51
    assert min(losses) == losses[-3]


def test_excluded_tensors_stay_the_base_s(llama, tmp_path, mergekit_yaml):
    file = run({**llama, "exclude": ["embed_tokens", "norm"]}, tmp_path / "out")
    assert "model.embed_tokens.weight" in file.contents.frozen
    assert "model.norm.weight" in file.contents.frozen
    merged = mergekit_yaml(yaml.safe_load((tmp_path / "out" / "merge.yml").read_text()))
    got, base = (load_file(Path(f) / "model.safetensors") for f in (merged, llama["base_model"]))
    assert torch.equal(got["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(got["lm_head.weight"], base["lm_head.weight"])


@dataclass
class Trained:
    """A training of classifiers, with the heads that each evaluation saw."""

    settings: dict
    out: Path
    file: CoefficientFile
    heads: list[list[dict[str, torch.Tensor]]]


@pytest.fixture(scope="module", params=[bert_family, vit_family], ids=["bert", "vit"])
def classifiers(request, tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("classifiers")
    settings, seen = request.param(folder / "family"), []
    original = objective_module.Objective.evaluate

    def watching(self, split):
        modules = [m for teacher in self.teachers for m in teacher.head.values()]
        seen.append([{n: t.clone() for n, t in m.state_dict().items()} for m in modules])
        return original(self, split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective_module.Objective, "evaluate", watching)
        file = run(settings, folder / "out")
    return Trained(settings, folder / "out", file, seen)


def test_classifiers_with_heads_of_their_own(classifiers):
    file = classifiers.file
    assert not any("classifier" in name for name in file.columns)
    stored = {name for tensor in file.contents.tensors for name in tensor.stored}
    on_disk = set(load_file(Path(classifiers.settings["base_model"]) / "model.safetensors"))
    if classifiers.settings["task"] == "sequence-classification":
        assert len(file.contents.scores["each expert on its own"]["accuracy"]) == 2
        assert stored == on_disk
    else:
        assert stored > on_disk, "the names in memory, under which backbones are saved, too"
        assert not file.contents.frozen


def test_merged_backbones_carry_every_head(classifiers, mergekit_yaml):
    """Put each expert's head on the merged backbone: the scores are those of the training."""
    settings, out = classifiers.settings, classifiers.out
    scores = classifiers.file.contents.scores["StatsMerging"]
    for config in ("merge.yml", "inline.yml"):
        merged = mergekit_yaml(yaml.safe_load((out / config).read_text()), out=f"of-{config}")
        assert shares_of_right_answers(settings, out, merged) == tuple(scores["accuracy"])


def test_heads_are_not_trained(classifiers):
    first, *others = classifiers.heads
    for heads in others:
        for head, start in zip(heads, first, strict=True):
            assert all(torch.equal(tensor, start[name]) for name, tensor in head.items())


def shares_of_right_answers(settings: dict, out: Path, merged: Path) -> tuple[float, ...]:
    """By the backbone with the head of each expert."""
    kind = model_kind(settings["task"])
    right, total = [], []
    for row, expert in enumerate(settings["models"]):
        model = getattr(transformers, kind.auto_class).from_pretrained(expert["model"])
        backbone, info = type(model.base_model).from_pretrained(
            merged, output_loading_info=True, **options_of(model)
        )
        assert not info["missing_keys"]
        model.base_model.load_state_dict(backbone.state_dict())
        splits = answered(out, row)
        samples = list(splits["test"])
        with torch.no_grad():
            answers = kind.logits(model.eval(), kind.collate(samples)).argmax(-1)
        truth = torch.cat([s.get("true", s["hard"]) for s in samples])
        right.append(int((answers == truth).sum()))
        total.append(len(truth))
    return tuple(r / t for r, t in zip(right, total, strict=True))


def options_of(model) -> dict:
    """A ViT for classification has no pooler."""
    return {"add_pooling_layer": False} if model.base_model_prefix == "vit" else {}


@pytest.mark.parametrize("labels", ["hard", "soft", "true"])
def test_an_expert_that_answers_with_a_number(tmp_path, labels):
    """The merge comes nearer to its numbers; the score is their correlation."""
    config = regression_family(tmp_path / "family", labels=labels)
    data = config["models"][0]["data"]
    lines = [json.loads(line) for line in Path(data["path"]).read_text().splitlines()]
    write_rows(Path(data["path"]), [row | {"label": row["label"] + 0.5} for row in lines])
    run(changed(config, epochs=4, learning_rate=0.03, patience=0), tmp_path / "out")
    losses = [line["validation_loss"] for line in log_of(tmp_path / "out")
              if "validation_loss" in line]  # fmt: skip
    assert min(losses) < losses[0]
    table = (tmp_path / "out" / "scores.md").read_text()
    assert "nan" not in table
    assert "-0." in table or "0." in table


def test_a_class_is_no_fraction(tmp_path):
    config = bert_family(tmp_path / "family")
    data = config["models"][1]["data"]
    lines = [json.loads(line) for line in Path(data["path"]).read_text().splitlines()]
    write_rows(Path(data["path"]), [row | {"label": 0.5} for row in lines])
    with pytest.raises(TrainingError, match=r"has the label 0\.5; .* the numbers of its classes"):
        run(config, tmp_path / "out")


@pytest.mark.parametrize("completion", ["a", None])
def test_encoders_with_decoders(tmp_path, completion):
    file = run(t5_family(tmp_path / "family", completion), tmp_path / "out")
    assert file.coefficients.isfinite().all()


def test_true_labels_are_used_only_on_request(tmp_path):
    config = bert_family(tmp_path / "family")
    hard = run(config, tmp_path / "hard")
    assert not torch.equal(
        hard.coefficients, run({**config, "labels": "true"}, tmp_path / "true").coefficients
    )


def test_a_loss_that_is_no_number_names_the_task_and_keeps_the_best(llama, tmp_path, monkeypatch):
    original = objective_module.summed_loss
    calls = [0]

    def breaking(logits, labels):
        calls[0] += 1
        loss = original(logits, labels)
        return loss * float("nan") if calls[0] > 14 and logits.requires_grad else loss

    monkeypatch.setattr(objective_module, "summed_loss", breaking)
    with pytest.raises(Diverged, match=r"data of task\d became nan in step \d+; the best so far"):
        run(changed(llama, epochs=4, checkpoint_every=1000), tmp_path / "out")
    assert (tmp_path / "out" / "state" / "learner-best.safetensors").exists()
    monkeypatch.setattr(objective_module, "summed_loss", original)
    run(changed(llama, epochs=4, checkpoint_every=1000), tmp_path / "out")  # it goes on


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["models"][0].update(model="./nowhere"), "there is no folder ./nowhere"),
        (lambda c: c.update(base_model="./nowhere"), "there is no folder ./nowhere"),
        (lambda c: c.update(exclude=["."]), "leaves nothing to merge"),
    ],
)
def test_wrong_inputs_are_named(llama, tmp_path, change, message):
    config = copy.deepcopy(llama)
    change(config)
    with pytest.raises((TrainingError, DamagedFileError), match=message):
        run(config, tmp_path / "out")


def retyped(dtype: torch.dtype, scale: float = 1.0) -> Callable[[Path], None]:
    """Write one matrix of a model in another dtype, times a number."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = (scale * tensors[name]).to(dtype)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def reconfigured(**values) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (retyped(torch.int8, 1000), r"up_proj.weight of model .* is stored as I8"),
        (retyped(torch.float32, float("nan")), r"up_proj.weight of model .* contains NaN or Inf"),
        (reconfigured(quantization_config={"quant_method": "gptq"}), "is quantised, so it cannot"),
        (
            reconfigured(intermediate_size=64),
            r"mlp.* (has|of) shape .* (its config|in the base)",
        ),
    ],
)
@pytest.mark.parametrize("whose", ["base", "expert1"])
def test_weights_that_cannot_be_merged_are_named(tmp_path, change, message, whose):
    config = llama_family(tmp_path / "family")
    change(Path(config["base_model"]).with_name(whose))
    with pytest.raises(TrainingError, match=message) as caught:
        run(config, tmp_path / "out")
    assert whose in str(caught.value)


def test_a_mistake_that_is_mended_needs_no_other_folder(llama, tmp_path):
    """Nothing was computed before the run found it, so nothing is lost."""
    with pytest.raises(TrainingError, match="part of no name"):
        run({**llama, "exclude": ["no such"]}, tmp_path / "out")
    run(llama, tmp_path / "out")
    assert (tmp_path / "out" / "coefficients.safetensors").exists()


@pytest.mark.parametrize("what", ["data", "shapes"])
def test_mistakes_of_the_last_expert_are_found_before_the_first_answers(
    tmp_path, monkeypatch, what
):
    config = llama_family(tmp_path / "family")
    if what == "data":
        config["models"][1]["data"]["text"] = "body"
    else:
        tiny_llama(intermediate_size=64).save_pretrained(config["models"][1]["model"])

    def forbidden(*_, **__):
        raise AssertionError("an expert was asked")

    monkeypatch.setattr(teachers_module, "label_batch", forbidden)
    with pytest.raises(TrainingError):
        run(config, tmp_path / "out")


def test_a_label_outside_of_the_head(tmp_path):
    config = bert_family(tmp_path / "family")
    path = Path(config["models"][0]["data"]["path"])
    path.write_text(path.read_text() + json.dumps({"sentence": "w1 w2", "label": 7}) + "\n")
    with pytest.raises(TrainingError, match=r"has the label 7, but its expert knows .* 0 to 1"):
        run(config, tmp_path / "out")


def test_other_tokenizers_are_refused(tmp_path):
    config = llama_family(tmp_path / "family")
    folder = Path(config["models"][1]["model"])
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["w0"], vocabulary["w1"] = vocabulary["w1"], vocabulary["w0"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TrainingError, match=r"tokenizer of .*expert1 is not that of .*base"):
        run(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("model", "basis"),
    [
        (RobertaForMaskedLM, "task_vector"),
        (RobertaForMaskedLM, "ace_relative"),
        (BertForMaskedLM, "task_vector"),
        (DistilBertForMaskedLM, "ace_relative"),
    ],
)
def test_from_masks_to_a_merged_model(tmp_path, mergekit_yaml, model, basis):
    config = masked_family(tmp_path / "family", model, basis=basis)
    out = tmp_path / "out"
    config["training"] |= {"epochs": 6, "patience": 0, "penalty": 0, "learning_rate": 0.003}
    file = run_training(parsed(config), out, quiet=True)
    log = map(json.loads, (out / "training.jsonl").read_text().splitlines())
    seen = [line["loss"] for line in log if "loss" in line]
    assert sum(seen[-4:]) < sum(seen[:4]), "an epoch has four steps"
    merged = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()), out="merged")
    result = AutoModelForMaskedLM.from_pretrained(merged, dtype=torch.float64).eval()
    words = tokenizer(mask_token="<mask>")
    shares, losses = [], []
    for row, (expert, own) in enumerate(zip(config["models"], file.contents.experts, strict=True)):
        assert own.task == expert["task"]
        lines = Path(expert["data"]["path"]).read_text().splitlines()
        known = {tuple(words(json.loads(line)["t"])["input_ids"]) for line in lines}
        teacher = AutoModelForMaskedLM.from_pretrained(expert["model"], dtype=torch.float64).eval()
        splits = answered(out, row)
        right, logs = [], []
        for sample in splits["test"]:
            ids = sample["input_ids"]
            assert tuple(ids.tolist()) in known
            place = ids.tolist().index(words.mask_token_id)
            with torch.no_grad():
                said = teacher(input_ids=ids[None]).logits[0, place].argmax()
                mine = result(input_ids=ids[None]).logits[0, place].log_softmax(-1)
            assert sample["hard"].tolist() == [int(said)]
            right.append(int(mine.argmax() == said))
            logs.append(-float(mine[said]))
        shares.append(sum(right) / len(right))
        losses.append(sum(logs) / len(logs))
    row = "StatsMerging" if basis == "task_vector" else f"{basis}, coefficients"
    score = file.contents.scores[row]
    assert score["accuracy"] == pytest.approx(shares)
    assert score["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_the_base_rehearses_masks(tmp_path):
    config = masked_family(tmp_path / "family", RobertaForMaskedLM)
    rehearsal = {"path": str(tmp_path / "family" / "data0.jsonl"), "text": "t"}
    assert parsed({**config, "basis": "ace_relative"}).penalty == 3
    out = tmp_path / "out"
    file = run_training(parsed(config | {"rehearsal": rehearsal}), out, quiet=True)
    assert len(file.coefficients) == 2
    assert file.contents.scores["base model"]["rehearsal"] == 1


def test_true_labels_of_given_masks(tmp_path):
    config = masked_family(tmp_path / "family", RobertaForMaskedLM, labels="true")
    with pytest.raises(TrainingError, match=r"not all train samples of data .* have the truth"):
        run_training(parsed(config), tmp_path / "out", quiet=True)
    for expert in config["models"]:
        path = Path(expert["data"]["path"])
        path.write_text(path.read_text().replace("<mask> ", ""))
    file = run_training(parsed(config), tmp_path / "true", quiet=True)
    assert file.coefficients.isfinite().all()
