# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mergekit_ace.naming import (
    block_of,
    module_of,
    natural_order,
    relative_depths,
    short_names,
    within_block,
    without_numbers,
)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.11.mlp.up_proj.weight", "model.layers.11"),
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers.3"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "encoder.block.0"),
        ("0.weight", "0"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("shared", "shared"),
        ("model.layers2.weight", "model.layers2"),
    ],
)
def test_the_first_number_is_the_block(name, block):
    assert block_of(name) == block


def test_depth_runs_from_embeddings_to_head():
    names = [f"model.layers.{n}.mlp.weight" for n in (2, 0, 1)]
    depths = relative_depths(["lm_head.weight", "model.norm.weight", *names, "model.embed.weight"])
    assert depths["model.embed.weight"] == 0
    assert [depths[f"model.layers.{n}.mlp.weight"] for n in range(3)] == [0.25, 0.5, 0.75]
    assert depths["model.norm.weight"] == depths["lm_head.weight"] == 1


def test_encoder_and_decoder_are_two_stacks():
    depths = relative_depths(["encoder.block.0.a", "decoder.block.0.a", "decoder.block.2.a"])
    assert list(depths.values()) == [0.5, 0.25, 0.75]


@pytest.mark.parametrize(
    "name", ["wte.weight", "transformer.wpe.weight", "shared.weight", "vit.embeddings.cls_token"]
)
def test_input_sides_of_many_architectures(name):
    assert relative_depths([name])[name] == 0


@pytest.mark.parametrize(
    ("name", "pattern", "place", "module"),
    [
        ("h.11.experts.3.w1.weight", "h.*.experts.*.w1.weight", ".experts.3.w1.weight", "w1"),
        ("0.experts.gate_up", "*.experts.gate_up", ".experts.gate_up", "gate_up"),
        ("lm_head.weight", "lm_head.weight", "lm_head.weight", "lm_head"),
        ("fc1", "fc1", "fc1", "fc1"),
    ],
)
def test_what_tensors_of_all_layers_have_in_common(name, pattern, place, module):
    assert (without_numbers(name), within_block(name), module_of(name)) == (pattern, place, module)


def test_layer_ten_comes_behind_layer_nine():
    names = ["h.10.b", "h.9.b", "a.weight", "h.9.a10", "h.9.a9"]
    ordered = ["a.weight", "h.9.a9", "h.9.a10", "h.9.b", "h.10.b"]
    assert sorted(names, key=natural_order) == ordered


def test_short_names():
    assert short_names(["./a/law/", "org/math", "code"]) == ["law", "math", "code"]
    assert short_names(["/x/a/final", "/x/b/final"]) == ["a/final", "b/final"]
    assert short_names(["final", "/b/final"]) == ["final", "b/final"]
    assert short_names(["a/b", "a/b", ""]) == ["a/b", "a/b", ""]
