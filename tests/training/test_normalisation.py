# SPDX-License-Identifier: Apache-2.0
"""Statistics of BatchNorm layers, beside a naive computation."""

from __future__ import annotations

import copy

import pytest
import torch
import yaml
from checkpoints import seen_batches
from families import RESNET, parsed, resnet_family
from safetensors.torch import load_file
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ResNetModel

from mergekit_ace.naming import is_running_statistic
from mergekit_ace.training import loop
from mergekit_ace.training.data import load_examples
from mergekit_ace.training.normalisation import (
    measure_batch_statistics,
    normalising_layers,
    write_batch_statistics,
)
from mergekit_ace.training.run import run_training


def resnet(seed: int = 0) -> ResNetModel:
    torch.manual_seed(seed)
    return seen_batches(ResNetModel(ResNetConfig(**RESNET)), seed=seed + 1).eval()


def normalised_by_hand(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean over batches of the means and variances of every layer's inputs, in float64.

    Every layer normalises each batch by the batch's own statistics.
    """
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str, layer: nn.BatchNorm2d):
        def forward(_, inputs):
            (x,) = inputs
            rows = x.transpose(0, 1).flatten(1)
            mean, variance = rows.mean(1), rows.var(1)
            for key, value in (("running_mean", mean), ("running_var", variance)):
                sums[f"{name}.{key}"] = sums.get(f"{name}.{key}", 0) + value / len(batches)
            biased = variance * (rows.shape[1] - 1) / rows.shape[1]
            layer.running_mean, layer.running_var = mean, biased

        return forward

    model = copy.deepcopy(model).double()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(hook(name, layer))
    with torch.no_grad():
        for batch in batches:
            model(pixel_values=batch.double())
    return sums


def test_statistics_beside_a_naive_computation():
    model = resnet()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    batches = [torch.rand(6, 1, 8, 8), 2 * torch.rand(6, 1, 8, 8)]
    expected = normalised_by_hand(model, batches)
    layers = normalising_layers(model)
    assert len(layers) > 4
    measure_batch_statistics(layers, [lambda b=b: model(pixel_values=b) for b in batches])
    got = dict(model.named_buffers())
    assert expected.keys() == {name for name in got if is_running_statistic(name)}
    for name, value in expected.items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(got[name], before[name]) for name in got.keys() - expected.keys())
    assert not any(layer.training for layer in layers)
    assert {layer.momentum for layer in layers} == {0.1}


def test_models_without_batchnorm_have_no_such_layers():
    assert normalising_layers(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == []
    assert normalising_layers(nn.BatchNorm1d(2, track_running_stats=False)) == []


def test_statistics_go_to_checkpoints_and_nothing_else_does(tmp_path):
    model, others = resnet(), [resnet(1), resnet(2)]
    folders = [tmp_path / "1", tmp_path / "2"]
    for other, folder in zip(others, folders, strict=True):
        other.save_pretrained(folder)
    write_batch_statistics(model, folders)
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


def test_a_merge_has_statistics_of_its_own(trained, mergekit_yaml):
    """mergekit-yaml writes the model that was scored: its statistics are those of its inputs."""
    _, out = trained
    merged = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()))
    model = ResNetModel.from_pretrained(merged).eval()
    images = [
        load_examples(out / "state" / f"labels-{row}.safetensors")[0]["train"] for row in (0, 1)
    ]
    count = min(map(len, images))
    assert count < loop.NORMALISING
    samples = [split.field("pixel_values", n) for split in images for n in range(count)]
    halves = torch.cat(samples).view(2, count, 1, 8, 8)
    batches = [part.flatten(0, 1) for part in halves.split(4, dim=1)]  # see `resnet_family`
    expected = normalised_by_hand(model, batches)
    for name, buffer in model.named_buffers():
        if is_running_statistic(name):
            torch.testing.assert_close(buffer.double(), expected[name], rtol=1e-3, atol=1e-5)
        else:
            base = load_file(out / "backbones" / "base" / "model.safetensors")
            assert torch.equal(buffer, base[name])


def test_a_merge_of_backbones_answers_as_the_scores_say(trained, mergekit_yaml):
    file, out = trained
    merged = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()))
    backbone = ResNetModel.from_pretrained(merged).eval()
    shares = []
    for row, expert in enumerate(file.contents.experts):
        model = ResNetForImageClassification.from_pretrained(expert.model).eval()
        model.resnet = backbone
        test = load_examples(out / "state" / f"labels-{row}.safetensors")[0]["test"]
        pixels = torch.cat([test.field("pixel_values", n) for n in range(len(test))])
        answers = torch.cat([test.field("hard", n) for n in range(len(test))])
        with torch.no_grad():
            given = model(pixel_values=pixels).logits.argmax(-1)
        shares.append(float((given == answers).float().mean()))
    assert file.contents.scores["ace, coefficients"]["accuracy"] == pytest.approx(shares)
