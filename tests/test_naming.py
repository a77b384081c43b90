# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mergekit_ace.naming import (
    block_of,
    relative_depths,
    short_names,
    within_block,
    without_numbers,
)


@pytest.mark.parametrize(
    ("name", "block", "place", "pattern"),
    [
        ("h.1.experts.3.w1.weight", "h.1", ".experts.3.w1.weight", "h.*.experts.*.w1.weight"),
        ("e.block.0.layer.1.wi", "e.block.0", ".layer.1.wi", "e.block.*.layer.*.wi"),
        ("0.experts.up", "0", ".experts.up", "*.experts.up"),
        ("layers2.weight", "layers2", "layers2.weight", "layers2.weight"),
        ("shared", "shared", "shared", "shared"),
    ],
)
def test_the_first_number_is_the_block(name, block, place, pattern):
    assert (block_of(name), within_block(name), without_numbers(name)) == (block, place, pattern)


def test_depth_runs_from_embeddings_to_head():
    """An encoder and a decoder are two stacks."""
    names = {
        "model.embed.weight": 0, "model.layers.0.mlp": 0.25, "model.layers.1.mlp": 0.5,
        "model.layers.2.mlp": 0.75, "model.norm.weight": 1, "lm_head.weight": 1,
        "encoder.block.0.a": 0.5, "decoder.block.0.a": 0.25, "decoder.block.2.a": 0.75,
        "wte.weight": 0, "transformer.wpe.weight": 0, "shared.weight": 0, "vit.cls_token": 0,
    }  # fmt: skip
    assert relative_depths(names) == names


def test_short_names():
    assert short_names(["./a/law/", "org/math", "code"]) == ["law", "math", "code"]
    assert short_names(["/x/a/final", "/x/b/final"]) == ["a/final", "b/final"]
    assert short_names(["final", "/b/final"]) == ["final", "b/final"]
    assert short_names(["a/b", "a/b", ""]) == ["a/b", "a/b", ""]
