# SPDX-License-Identifier: Apache-2.0
"""What mergekit-yaml may hand over: formats, vocabularies, slices, filters, dtypes and flags."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from checkpoints import ace_config, check_merge, save_family, tiny_llama
from families import tensors
from reference import naive_tensor
from transformers import LlamaForCausalLM


def test_pickles_and_flags_change_nothing(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(), tmp_path)
    expected = tensors(mergekit_yaml(ace_config(paths), out="expected"))
    pickled = [shutil.copytree(path, f"{path}-pickled") for path in paths]
    for path in pickled:
        torch.save(tensors(path), Path(path) / "pytorch_model.bin")
        (Path(path) / "model.safetensors").unlink()
    for out, flags in {"eager": (), "lazy": ("--lazy-unpickle", "--async-write")}.items():
        got = tensors(mergekit_yaml(ace_config(pickled), *flags, out=out))
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_a_tied_head_and_a_base_that_is_listed_among_the_models(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in tensors(paths[0])
    out = mergekit_yaml(ace_config([paths[0], *paths]))
    check_merge(LlamaForCausalLM, paths, out)


def test_filters_and_gradients(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(num_hidden_layers=3), tmp_path)
    config = ace_config(
        paths,
        parameters={
            "lambda": [{"filter": "self_attn", "value": [0.2, 1.0]}, {"value": 0.7}],
            "epsilon": "1e-3",  # what YAML makes of 1e-3
            "layout": [{"filter": "embed_tokens", "value": "mean"}, {"value": "auto"}],
        },
    )
    config["models"][0]["parameters"] = {"weight": [{"filter": "mlp", "value": 3}, {"value": 1}]}

    def options_of(name: str) -> dict:
        scale = (0.2, 0.6, 1.0)[int(name.split(".")[2])] if "self_attn" in name else 0.7
        options = {"lambda_": scale, "weight": [3.0 if "mlp" in name else 1.0, 1.0]}
        layout = {"layout": "mean"} if "embed_tokens" in name else {}
        return {**options, **layout, "epsilon": 1e-3}

    check_merge(LlamaForCausalLM, paths, mergekit_yaml(config), 1e-4, options_of)


def test_dtypes(tmp_path, mergekit_yaml):
    """Rounded once: no entry is further from the exact merge than half a unit of the last place."""
    paths = save_family(tiny_llama().bfloat16(), tmp_path)
    base, *experts = (tensors(p) for p in paths)
    for dtype, out_dtype, stored in (
        ("bfloat16", None, torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16),
        ("float32", "float16", torch.float16),
        (None, None, torch.bfloat16),
    ):
        config = ace_config(paths, dtype=dtype, out_dtype=out_dtype)
        out = tensors(mergekit_yaml(config, out=f"{dtype}-{out_dtype}"))
        for name, tensor in base.items():
            assert tensor.dtype == torch.bfloat16
            assert out[name].dtype == stored
            layout = "matrix" if tensor.ndim == 2 else "mean"
            expected = naive_tensor(tensor, [e[name] for e in experts], layout)
            half_step = torch.finfo(stored).eps / 2 * 1.01
            atol = 1e-4 * float((expected - tensor.double()).abs().max())
            torch.testing.assert_close(out[name].double(), expected, rtol=half_step, atol=atol)
