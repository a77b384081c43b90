# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mergekit_ace.naming import relative_depths, short_names


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
