# SPDX-License-Identifier: Apache-2.0
"""Losses, the order of samples, samples on disk, mapped weights, pictures."""

from __future__ import annotations

import sys

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from coefficient_files import make_file
from families import MIXTRAL, vit_family
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForImageClassification, MixtralConfig, MixtralForCausalLM

from mergekit_ace.training.data import Examples, load_examples, save_examples, step_indices
from mergekit_ace.training.loop import collate_labels, summed_loss
from mergekit_ace.training.mapped_weights import map_weights, stored_names, stored_tensors
from mergekit_ace.training.results import draw_pictures


def test_hard_labels_are_cross_entropy(rng):
    logits = torch.randn(5, 7, generator=rng)
    labels = torch.tensor([1, 0, 6, 3, 3])
    loss = summed_loss(logits, {"classes": labels})
    assert float(loss) == pytest.approx(float(cross_entropy(logits, labels, reduction="sum")))


def test_soft_labels_are_the_divergence_from_the_teacher(rng):
    logits, teacher = (torch.randn(5, 7, generator=rng) for _ in range(2))
    expected = kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True
    )
    best = teacher.log_softmax(-1).topk(7)
    labels = {"log_probabilities": best.values, "classes": best.indices}
    assert float(summed_loss(logits, labels)) == pytest.approx(float(expected), rel=1e-5)


def test_what_the_teacher_leaves_counts_as_one_class(rng):
    logits, teacher = (torch.randn(5, 7, generator=rng) for _ in range(2))
    best = teacher.log_softmax(-1).topk(3)
    labels = {"log_probabilities": best.values, "classes": best.indices}
    p = torch.cat([best.values.exp(), 1 - best.values.exp().sum(-1, keepdim=True)], -1)
    mine = logits.softmax(-1).gather(-1, best.indices)
    q = torch.cat([mine, 1 - mine.sum(-1, keepdim=True)], -1)
    expected = (p * (p / q).log()).sum()
    assert float(summed_loss(logits, labels)) == pytest.approx(float(expected), rel=1e-4)
    same = {"log_probabilities": best.values, "classes": best.indices}
    assert float(summed_loss(teacher, same)) == pytest.approx(0, abs=1e-5)


def test_the_truth_is_what_counts_as_right_where_it_is_known():
    samples = [{"hard": torch.tensor([1]), "true": torch.tensor([2])}] * 2
    labels = collate_labels(Examples.pack(samples), [0, 1], "hard")
    assert labels["classes"].tolist() == [1, 1]
    assert labels["target"].tolist() == [2, 2]
    unknown = collate_labels(Examples.pack([{"hard": torch.tensor([1])}]), [0], "hard")
    assert unknown["target"].tolist() == [1]


@pytest.mark.parametrize(("batch", "count"), [(4, 10), (3, 9), (8, 5), (1, 1)])
def test_every_round_sees_every_sample_once(batch, count):
    seen = [n for step in range(3 * count) for n in step_indices(5, 1, step, batch, count)]
    for start in range(0, 3 * count, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_rounds_tasks_and_seeds_differ():
    def order(seed, task, turn):
        return tuple(step_indices(seed, task, turn, 50, 50))

    orders = {order(s, t, r) for s in range(3) for t in range(3) for r in range(3)}
    assert len(orders) == 27


def test_samples_of_any_length_survive_the_disk(tmp_path):
    samples = [
        {"a": torch.arange(3), "b": torch.ones(1, 2, 2)},
        {"a": torch.arange(0), "b": torch.zeros(1, 2, 2)},
        {"a": torch.arange(5), "b": torch.ones(1, 2, 2), "c": torch.ones(1)},
    ]
    save_examples({"train": Examples.pack(samples)}, tmp_path / "e.safetensors", {"x": "y"})
    splits, metadata = load_examples(tmp_path / "e.safetensors")
    assert metadata["x"] == "y"
    assert len(splits["train"]) == 3
    for got, sample in zip(splits["train"], samples, strict=True):
        assert set(got) == {"a", "b"}, "what not all samples have is dropped"
        assert torch.equal(got["a"], sample["a"])
        assert torch.equal(got["b"], sample["b"])
    assert [splits["train"].length("a", n) for n in range(3)] == [3, 0, 5]
    assert len(Examples.pack([])) == 0


def parameters(model) -> dict:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_checkpoints_are_mapped_as_they_are_where_names_agree(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    names = list(parameters(model))
    mapped = map_weights(model, names, tmp_path / "m", tmp_path / "copy.safetensors")
    assert not (tmp_path / "copy.safetensors").exists()
    assert len({path for path, _ in stored_tensors(tmp_path / "m").values()}) > 1
    assert all(torch.equal(mapped[n], p) for n, p in parameters(model).items())
    stored = stored_names(model, names, tmp_path / "m")
    assert {s for group in stored.values() for s in group} == set(stored_tensors(tmp_path / "m"))


def test_other_names_on_disk_are_found_and_converted(tmp_path):
    config = vit_family(tmp_path)
    folder = config["models"][0]["model"]
    model = AutoModelForImageClassification.from_pretrained(folder)
    names = list(parameters(model))
    mapped = map_weights(model, names, folder, tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").exists()
    assert all(torch.equal(mapped[n], p) for n, p in parameters(model).items())
    stored = stored_names(model, names, folder)
    on_disk = stored_tensors(folder)
    assert {s for group in stored.values() for s in group} == set(on_disk)
    assert all(len(group) == 1 for group in stored.values())


def test_a_parameter_packed_from_many_tensors_names_them_all(tmp_path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL))
    model.save_pretrained(tmp_path / "m")
    model = MixtralForCausalLM.from_pretrained(tmp_path / "m")
    names = list(parameters(model))
    stored = stored_names(model, names, tmp_path / "m")
    assert {s for group in stored.values() for s in group} == set(stored_tensors(tmp_path / "m"))
    assert max(len(group) for group in stored.values()) >= 3
    mapped = map_weights(model, names, tmp_path / "m", tmp_path / "copy.safetensors")
    assert all(torch.equal(mapped[n], p) for n, p in parameters(model).items())


def test_same_names_with_other_values_are_not_trusted(tmp_path):
    """Where loading changes values, the files are not the parameters."""
    model = tiny_llama()
    model.save_pretrained(tmp_path / "m")
    other = fine_tuned(model, seed=1)
    mapped = map_weights(other, list(parameters(other)), tmp_path / "m", tmp_path / "c.safetensors")
    assert all(torch.equal(mapped[n], p) for n, p in parameters(other).items())


def test_pictures(tmp_path):
    log = [{"step": 0, "validation_loss": 2.0}, {"step": 1, "loss": 1.0}]
    file = make_file(["embed.weight", "layers.0.up.weight"], ["./a/math/", "code"])
    assert "coefficients.png" in draw_pictures(file, log, tmp_path)
    for name in ("coefficients.png", "training.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_says_how_to_get_pictures(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = make_file(["embed.weight"], ["a"])
    assert "pip install 'mergekit-ace[plots]'" in draw_pictures(file, [], tmp_path)
    assert not list(tmp_path.iterdir())
