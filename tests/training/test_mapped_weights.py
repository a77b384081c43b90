# SPDX-License-Identifier: Apache-2.0
"""Parameters mapped from checkpoints, whatever they are called there."""

from __future__ import annotations

import torch
from checkpoints import fine_tuned, tiny_llama
from families import MIXTRAL, vit_family
from transformers import AutoModelForImageClassification, MixtralConfig, MixtralForCausalLM

from mergekit_ace.training.mapped_weights import map_weights, stored_headers, stored_names


def parameters(model) -> dict:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_checkpoints_are_mapped_as_they_are_where_names_agree(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    names = list(parameters(model))
    mapped = map_weights(model, names, tmp_path / "m", tmp_path / "copy.safetensors")
    assert not (tmp_path / "copy.safetensors").exists()
    assert len({header.file for header in stored_headers(tmp_path / "m").values()}) > 1
    assert all(torch.equal(mapped[n], p) for n, p in parameters(model).items())
    stored = stored_names(model, names, tmp_path / "m")
    assert {s for group in stored.values() for s in group} == set(stored_headers(tmp_path / "m"))


def test_other_names_on_disk_are_found_and_converted(tmp_path):
    config = vit_family(tmp_path)
    folder = config["models"][0]["model"]
    model = AutoModelForImageClassification.from_pretrained(folder)
    names = list(parameters(model))
    mapped = map_weights(model, names, folder, tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").exists()
    assert all(torch.equal(mapped[n], p) for n, p in parameters(model).items())
    stored = stored_names(model, names, folder)
    on_disk = stored_headers(folder)
    assert {s for group in stored.values() for s in group} == set(on_disk)
    assert all(len(group) == 1 for group in stored.values())


def test_a_parameter_packed_from_many_tensors_names_them_all(tmp_path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL))
    model.save_pretrained(tmp_path / "m")
    model = MixtralForCausalLM.from_pretrained(tmp_path / "m")
    names = list(parameters(model))
    stored = stored_names(model, names, tmp_path / "m")
    assert {s for group in stored.values() for s in group} == set(stored_headers(tmp_path / "m"))
    assert max(len(group) for group in stored.values()) >= 3
    mapped = map_weights(model, names, tmp_path / "m", tmp_path / "copy.safetensors")
    assert all(torch.equal(mapped[n], p) for n, p in parameters(model).items())


def test_same_names_with_other_values_are_not_trusted(tmp_path):
    """Where loading changes values, the files are not the parameters."""
    model = tiny_llama()
    model.save_pretrained(tmp_path / "m")
    other = fine_tuned(model, seed=1)
    mapped = map_weights(other, list(parameters(other)), tmp_path / "m", tmp_path / "c.safetensors")
    assert all(torch.equal(mapped[n], p) for n, p in parameters(other).items())
