# SPDX-License-Identifier: Apache-2.0
"""What mergekit-yaml may hand over: formats, vocabularies, slices, filters, dtypes and flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, check_merge, fine_tuned, save_family, save_tokenizer, tiny_llama
from reference import naive_tensor, task_vector_error
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def checkpoint(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def test_pickles_and_flags_change_nothing(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(), tmp_path)
    expected = checkpoint(mergekit_yaml(ace_config(paths), out="expected"))
    pickled = [shutil.copytree(path, f"{path}-pickled") for path in paths]
    for path in pickled:
        torch.save(checkpoint(path), Path(path) / "pytorch_model.bin")
        (Path(path) / "model.safetensors").unlink()
    for out, flags in {"eager": (), "lazy": ("--lazy-unpickle", "--async-write")}.items():
        got = checkpoint(mergekit_yaml(ace_config(pickled), *flags, out=out))
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_a_tied_head_and_a_base_that_is_listed_among_the_models(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in checkpoint(paths[0])
    out = mergekit_yaml(ace_config([paths[0], *paths]))
    check_merge(LlamaForCausalLM, paths, out)


WORDS = [f"w{n}" for n in range(29)]


@pytest.fixture
def two_vocabularies(tmp_path) -> list[str]:
    """An expert whose tokens are shuffled and three more than the base's."""
    model = tiny_llama(vocab_size=30)
    larger = fine_tuned(model, seed=1)
    larger.resize_token_embeddings(33)
    members = {"base": model, "shuffled": larger, "other": fine_tuned(model, seed=2)}
    for name, member in members.items():
        member.save_pretrained(tmp_path / name)
        words = ["x0", *reversed(WORDS), "x1", "x2"] if name == "shuffled" else WORDS
        save_tokenizer(tmp_path / name, ["<unk>", *words])
    return [str(tmp_path / name) for name in members]


def vocabulary_of(path: str | Path) -> dict[str, int]:
    return PreTrainedTokenizerFast.from_pretrained(path).get_vocab()


@pytest.mark.parametrize(("source", "count"), [("base", 30), ("union", 33)])
def test_vocabularies_are_aligned_by_mergekit(two_vocabularies, mergekit_yaml, source, count):
    out = mergekit_yaml(ace_config(two_vocabularies, tokenizer={"source": source}))
    vocabulary = vocabulary_of(out)
    assert len(vocabulary) == count
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(vocabulary)
    ids = [vocabulary_of(p) for p in two_vocabularies]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors = [checkpoint(p)[name] for p in two_vocabularies]
        rows = []
        for token in vocabulary:
            # a token that only the larger vocabulary has gets its row in all models
            own = [t[i[token]] if token in i else tensors[1][ids[1][token]]
                   for t, i in zip(tensors, ids, strict=True)]  # fmt: skip
            rows.append(torch.stack(own))
        base, *experts = torch.stack(rows, dim=1)
        got = checkpoint(out)[name][list(vocabulary.values())]
        assert task_vector_error(got, naive_tensor(base, experts), base) <= 5e-5


def test_slices_with_parameters_of_their_own(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(), tmp_path)
    config, scales = ace_config(paths), (0.5, 0.7)
    del config["models"]
    config["slices"] = [
        {
            "sources": [{"model": path, "layer_range": [n, n + 1]} for path in paths],
            "parameters": {"lambda": scale},
        }
        for n, scale in enumerate(scales)
    ]
    later = ("model.layers.1.", "model.norm", "lm_head")
    options = lambda name: {"lambda_": scales[name.startswith(later)]}  # noqa: E731
    check_merge(LlamaForCausalLM, paths, mergekit_yaml(config), 1e-4, options)


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
    base, *experts = (checkpoint(p) for p in paths)
    for dtype, out_dtype, stored in (
        ("bfloat16", None, torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16),
        ("float32", "float16", torch.float16),
        (None, None, torch.bfloat16),
    ):
        config = ace_config(paths, dtype=dtype, out_dtype=out_dtype)
        out = checkpoint(mergekit_yaml(config, out=f"{dtype}-{out_dtype}"))
        for name, tensor in base.items():
            assert tensor.dtype == torch.bfloat16
            assert out[name].dtype == stored
            layout = "matrix" if tensor.ndim == 2 else "mean"
            expected = naive_tensor(tensor, [e[name] for e in experts], layout)
            half_step = torch.finfo(stored).eps / 2 * 1.01
            atol = 1e-4 * float((expected - tensor.double()).abs().max())
            torch.testing.assert_close(out[name].double(), expected, rtol=half_step, atol=atol)
