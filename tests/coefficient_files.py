# SPDX-License-Identifier: Apache-2.0
"""Coefficient files for tests, with random coefficients and an untrained but stirred learner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mergekit_ace.algebra.learner import Learner, LearnerConfig
from mergekit_ace.files.statistics import Expert, MergedTensor
from mergekit_ace.methods.coefficients import CoefficientFile, Contents


def make_file(
    names: Sequence[str],
    models: Sequence[str],
    *,
    tasks: Sequence[str] | None = None,
    frozen: Sequence[str] = (),
    learner: LearnerConfig | None = None,
    **contents,
) -> CoefficientFile:
    config = learner or LearnerConfig(input="shared", hidden=8)
    shape = (len(models), len(names))
    torch.manual_seed(6)
    network = Learner(config, *shape)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    pairs = zip(tasks or models, models, strict=True)
    experts = tuple(Expert(task=task, model=model) for task, model in pairs)
    tensors = tuple(MergedTensor(name=name, stored=(name,)) for name in names)
    known = {"base_model": "base", "frozen": tuple(frozen), "learner": config, **contents}
    contents = Contents(experts=experts, tensors=tensors, **known)
    coefficients = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    return CoefficientFile(contents, coefficients, network.state_dict())
