# SPDX-License-Identifier: Apache-2.0
"""Statistics of BatchNorm layers: the merge that is trained has those of the merge on disk."""

from __future__ import annotations

import pytest
import torch
import yaml
from checkpoints import seen_batches
from families import RESNET, answered, parsed, resnet_family
from safetensors.torch import load_file
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ResNetModel

from mergekit_ace.naming import is_running_statistic
from mergekit_ace.training.models import (
    average_statistics,
    running_statistics,
    write_statistics_of_batches,
)
from mergekit_ace.training.train import run_training


def resnet(seed: int = 0) -> ResNetModel:
    torch.manual_seed(seed)
    return seen_batches(ResNetModel(ResNetConfig(**RESNET)), seed=seed + 1).eval()


def test_a_model_gets_the_mean_of_the_experts_and_nothing_else():
    model, one, other = resnet(), resnet(1), resnet(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average_statistics(model, [running_statistics(one), running_statistics(other)])
    pairs = dict(one.named_buffers()), dict(other.named_buffers())
    for name, tensor in model.state_dict().items():
        expected = before[name]
        if is_running_statistic(name):
            expected = (pairs[0][name] + pairs[1][name]) / 2
            assert not torch.equal(expected, before[name])
        torch.testing.assert_close(tensor, expected)


def test_models_without_batchnorm_stay_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert running_statistics(model) == {}
    average_statistics(model, [{}, {}])


def test_statistics_go_to_checkpoints_and_nothing_else_does(tmp_path):
    model, others = resnet(), [resnet(1), resnet(2)]
    folders = [tmp_path / "1", tmp_path / "2"]
    for other, folder in zip(others, folders, strict=True):
        other.save_pretrained(folder)
    write_statistics_of_batches(model, folders)
    buffers = dict(model.named_buffers())
    for other, folder in zip(others, folders, strict=True):
        stored = load_file(folder / "model.safetensors")
        for name, tensor in other.state_dict().items():
            assert torch.equal(stored[name], buffers.get(name, tensor)), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A family of ResNets whose statistics differ, its coefficients, and where they lie."""
    folder = tmp_path_factory.mktemp("resnets")
    config = parsed(resnet_family(folder / "family", basis="ace", learner={"input": "direct"}))
    return run_training(config, folder / "out", quiet=True), folder / "out"


def test_a_merge_has_the_mean_of_the_experts(trained, mergekit_yaml):
    """By mergekit-yaml, which refuses counters that differ."""
    file, out = trained
    merged = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()))
    got = dict(ResNetModel.from_pretrained(merged).named_buffers())
    experts = [
        dict(ResNetForImageClassification.from_pretrained(e.model).resnet.named_buffers())
        for e in file.contents.experts
    ]
    base = ResNetModel.from_pretrained(file.contents.base_model)
    for name, buffer in base.named_buffers():
        mean = sum(expert[name] for expert in experts) / len(experts)
        torch.testing.assert_close(got[name], mean if is_running_statistic(name) else buffer)


def test_a_merge_of_backbones_answers_as_the_scores_say(trained, mergekit_yaml):
    file, out = trained
    merged = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()))
    backbone = ResNetModel.from_pretrained(merged).eval()
    shares = []
    for row, expert in enumerate(file.contents.experts):
        model = ResNetForImageClassification.from_pretrained(expert.model).eval()
        model.resnet = backbone
        test = answered(out, row)["test"]
        pixels = torch.cat([sample["pixel_values"] for sample in test])
        answers = torch.cat([sample["hard"] for sample in test])
        with torch.no_grad():
            given = model(pixel_values=pixels).logits.argmax(-1)
        shares.append(float((given == answers).float().mean()))
    assert file.contents.scores["ace, coefficients"]["accuracy"] == pytest.approx(shares)
