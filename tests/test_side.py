# SPDX-License-Identifier: Apache-2.0
"""`side`: covariances of a layer's inputs, or of the gradients at its outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from matrices import family
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.merge_methods import merge_tensors
from test_low_rank_merge import settings_of
from torch import Tensor

from mergekit_ace.methods.base import TensorSettings

METHODS = pytest.mark.parametrize("method", ["ace", "ace_relative"])
KNOWN = pytest.mark.parametrize("known", ["coefficients", "covariances"])
REFINED = {"adaptive_normalization": "always", "spectral_refinement": "always"}
WEIGHTED = {"weight": [1.0, 2.0, 0.5], "lambda": 0.7}


def merge(method: str, tensors: list[Tensor], **parameters) -> Tensor:
    return merge_tensors(tensors, method, base_index=0, parameters=parameters)


def members(rng: torch.Generator, shape: tuple[int, int] = (24, 40)) -> list[Tensor]:
    base, experts = family(rng, *shape, 3, scales=[1.0, 3.0, 0.5])
    return [0.02 * tensor.double() for tensor in (base, *experts)]


def far(one: Tensor, other: Tensor, base: Tensor) -> float:
    """The difference of two merges, in units of the task vector of the second."""
    return float((one - other).norm() / (other - base).norm())


@pytest.mark.parametrize(
    ("method", "given"),
    [("ace", {}), ("ace", REFINED), ("ace", WEIGHTED), ("ace_relative", WEIGHTED)],
)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (6, 90)])
def test_outputs_are_the_inputs_of_the_transposes(rng, method, given, shape):
    tensors = members(rng, shape)
    got = merge(method, tensors, side="outputs", **given)
    wanted = merge(method, [tensor.mT.contiguous() for tensor in tensors], **given).mT
    assert far(got, wanted, tensors[0]) <= 1e-9
    assert far(got, merge(method, tensors, **given), tensors[0]) >= 0.01


@METHODS
def test_every_layout_has_another_side(rng, method):
    tensors = members(rng)
    wanted = merge(method, tensors, side="outputs")
    stacked = [torch.stack([tensor, 2 * tensor]) for tensor in tensors]
    for layout, given in (("transposed", tensors), ("transposed", stacked), ("stacked", stacked)):
        turned = [t.mT.contiguous() if layout == "transposed" else t for t in given]
        got = merge(method, turned, side="outputs", layout=layout)
        got = got.mT if layout == "transposed" else got
        assert far(got if got.ndim == 2 else got[0], wanted, tensors[0]) <= 1e-9
    kernels = [tensor.reshape(24, 10, 2, 2) for tensor in tensors]
    for layout in ("mean", "flattened"):
        kept = [merge(method, kernels, side=s, layout=layout) for s in ("inputs", "outputs")]
        assert torch.equal(*kept)


def of_models(method: str, names: list[str], **parameters) -> TensorSettings:
    """Settings of a merge of models by these references."""
    settings = settings_of(merge_methods.get(method), len(names), **parameters)
    models = tuple(ModelReference.parse(name) for name in names)
    own = {
        name: dict(zip(models, value.values(), strict=True)) if isinstance(value, dict) else value
        for name, value in settings.parameters.items()
    }
    return replace(settings, experts=models, parameters=own)


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        (["base+one", "base+two", "base+three"], {}, "outputs"),
        (["base+one", "base+two", "full"], {}, "inputs"),
        (["base+one", "base+two", "base+three"], {"side": "inputs"}, "inputs"),
        (["one", "two", "full"], {"side": "outputs"}, "outputs"),
    ],
)
@METHODS
def test_adapters_are_read_from_their_outputs(rng, method, names, given, expected):
    tensors = members(rng)
    settings = of_models(method, names, **given)
    merged, record = merge_methods.get(method).merge(tensors, settings)
    assert record.matrices[0].side == expected
    assert record.layout == "matrix"
    assert torch.equal(merged, merge(method, tensors, side=expected))


@METHODS
@KNOWN
def test_what_was_measured_or_learned_belongs_to_inputs(method, known):
    merger, names, shape = merge_methods.get(method), ["base+one", "base+two"], (900, 100)
    inputs, outputs = (
        merger.work(of_models(method, names, side=side), shape, 2) for side in ("inputs", "outputs")
    )
    adapters = of_models(method, names)
    assert merger.work(adapters, shape, 2) == outputs != inputs
    given = replace(adapters, parameters={**adapters.parameters, known: "file"})
    assert merger.work(given, shape, 2) == inputs
    given = replace(given, parameters={**given.parameters, "side": "outputs"})
    with pytest.raises(ValueError, match=f"`{known}` belongs to covariances of inputs"):
        merger.check_settings(given)
