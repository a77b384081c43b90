# SPDX-License-Identifier: Apache-2.0
"""Parameters mapped from checkpoints; `test_basis.py` has those of other names and packing."""

from __future__ import annotations

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama

from mergekit_ace.training.mapped_weights import map_weights, stored_headers, stored_names


@pytest.mark.parametrize("changed", [False, True])
def test_only_the_values_of_the_model_are_mapped(tmp_path, changed):
    """Where loading changes values, the files are not the parameters, whatever their names."""
    model, copy = tiny_llama(tie_word_embeddings=True), tmp_path / "copy.safetensors"
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len({header.file for header in stored_headers(tmp_path / "m").values()}) > 1
    model = fine_tuned(model, seed=1) if changed else model
    parameters = dict(model.named_parameters())
    mapped = map_weights(model, parameters, tmp_path / "m", copy)
    assert copy.exists() == changed
    assert all(torch.equal(mapped[n], p) for n, p in parameters.items())
    stored = stored_names(model, parameters, tmp_path / "m")
    assert {s for group in stored.values() for s in group} == set(stored_headers(tmp_path / "m"))
