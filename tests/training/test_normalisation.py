# SPDX-License-Identifier: Apache-2.0
"""Statistics of BatchNorm layers: the merge that is trained has those of the merge on disk."""

from __future__ import annotations

import torch
import yaml
from families import resnet_family, train
from transformers import ResNetForImageClassification, ResNetModel

from mergekit_ace.naming import is_running_statistic


def test_a_merge_has_the_mean_of_the_experts(tmp_path, mergekit_yaml):
    """By mergekit-yaml, which refuses counters that differ."""
    out = tmp_path / "out"
    file = train(resnet_family(tmp_path, basis="ace", learner={"input": "direct"}), out)
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
