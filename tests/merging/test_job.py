# SPDX-License-Identifier: Apache-2.0
"""Tensors are divided into files as mergekit's writer does it; models have one order."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st
from mergekit.common import ModelReference
from mergekit.io.tensor_writer import TensorWriter

from mergekit_ace.merging.job import OrderedConfiguration, group_tensors, shard_file


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(-1, 60))
def test_files_by_the_rule_of_mergekit(tmp_path_factory, sizes, limit):
    folder = tmp_path_factory.mktemp("written")
    writer = TensorWriter(str(folder), max_shard_size=limit)
    named = {f"t{n}": size for n, size in enumerate(sizes)}
    for name, size in named.items():
        writer.save_tensor(name, torch.zeros(size, dtype=torch.uint8))
    writer.finalize()
    groups = group_tensors(named, limit)
    files = [shard_file(n, len(groups), safetensors=True) for n in range(len(groups))]
    expected = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    if len(groups) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == expected
    assert sorted(path.name for path in folder.glob("*.safetensors")) == sorted(files)


def test_models_in_order():
    """One that is named later, as where an adapter's base gives its files, comes last."""
    source = "{merge_method: linear, base_model: a, models: [{model: b}, {model: c+d}]}"
    for order in (["c+d", "a", "b"], ["b", "c+d", "a"]):
        config = OrderedConfiguration.in_order(source, order)
        assert list(map(str, config.referenced_models())) == order
        assert list(map(str, config.model_copy(deep=True).referenced_models())) == order
    own = OrderedConfiguration.in_order(source, ["another"])
    assert sorted(map(str, own.referenced_models())) == ["a", "b", "c+d"]
    changed = config.model_copy(update={"base_model": ModelReference.parse("c")})
    assert list(map(str, changed.referenced_models())) == ["b", "c+d", "c"]
