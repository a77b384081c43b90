# SPDX-License-Identifier: Apache-2.0
"""`side`: covariances of a layer's inputs, or of the gradients at its outputs."""

from __future__ import annotations

import json

import pytest
import torch
from matrices import REFINED, family
from mergekit.common import ModelReference
from mergekit.merge_methods import merge_state_dicts, merge_tensors
from reference import naive_plus, task_vector_error
from torch import Tensor

METHODS = pytest.mark.parametrize("method", ["ace", "ace_plus"])
WEIGHTED = {"weight": [2.0, 2.0, 1.0], "lambda": 0.7}
ADAPTERS = ["base+one", "base+two", "base+three"]


def merge(method: str, tensors: list[Tensor], **parameters) -> Tensor:
    return merge_tensors(tensors, method, base_index=0, parameters=parameters)


def members(rng: torch.Generator, shape: tuple[int, int] = (24, 40)) -> list[Tensor]:
    base, experts = family(rng, *shape, 3, scales=[1.0, 3.0, 0.5])
    return [0.02 * tensor.double() for tensor in (base, *experts)]


@pytest.mark.parametrize(
    ("method", "given"),
    [("ace", {}), ("ace", REFINED), ("ace", WEIGHTED), ("ace_plus", WEIGHTED)],
)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (6, 90)])
def test_outputs_are_the_inputs_of_the_transposes(rng, method, given, shape):
    tensors = members(rng, shape)
    got = merge(method, tensors, side="outputs", **given)
    turned = [tensor.mT.contiguous() for tensor in tensors]
    wanted = merge(method, turned, **given).mT
    if method == "ace_plus":  # which flattens more there
        flattening = {"lambda_": given["lambda"], "flattening": (0.7 * 1.5, 0.05)}
        wanted = naive_plus(turned[0], turned[1:], given["weight"], **flattening).mT
    assert task_vector_error(got, wanted, tensors[0]) <= 1e-9
    assert task_vector_error(got, merge(method, tensors, **given), tensors[0]) >= 0.01


@METHODS
def test_every_layout_has_another_side(rng, method):
    tensors = members(rng)
    wanted = merge(method, tensors, side="outputs")
    stacked = [torch.stack([tensor, 2 * tensor]) for tensor in tensors]
    for layout, given in (("transposed", tensors), ("transposed", stacked), ("stacked", stacked)):
        turned = [t.mT.contiguous() if layout == "transposed" else t for t in given]
        got = merge(method, turned, side="outputs", layout=layout)
        got = got.mT if layout == "transposed" else got
        assert task_vector_error(got if got.ndim == 2 else got[0], wanted, tensors[0]) <= 1e-9
    kernels = [tensor.reshape(24, 10, 2, 2) for tensor in tensors]
    for layout in ("mean", "flattened"):
        kept = [merge(method, kernels, side=s, layout=layout) for s in ("inputs", "outputs")]
        assert torch.equal(*kept)


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        (ADAPTERS, {}, "outputs"),
        ([*ADAPTERS[:2], "full"], {}, "inputs"),
        (ADAPTERS, {"side": "inputs"}, "inputs"),
        (["one", "two", "full"], {"side": "outputs"}, "outputs"),
    ],
)
@METHODS
def test_adapters_are_read_from_their_outputs(rng, tmp_path, method, names, given, expected):
    tensors, report = members(rng), tmp_path / "lines.jsonl"
    base, *experts = map(ModelReference.parse, ["base", *names])
    models = dict(zip([base, *experts], ({"w": tensor} for tensor in tensors), strict=True))
    parameters = {**given, "report": str(report)}
    merged = merge_state_dicts(models, method, base=base, parameters=parameters)["w"]
    line = json.loads(report.read_text())
    assert (line["side"], line["layout"]) == (expected, "matrix")
    assert torch.equal(merged, merge(method, tensors, side=expected))
