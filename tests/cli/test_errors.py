# SPDX-License-Identifier: Apache-2.0
"""Bad input: what the user sees, and that nothing is read or written that should not be."""

from __future__ import annotations

import pytest
import torch
from checkpoints import ace_config, rewrite, save_family, tiny_llama
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from mergekit.merge_methods import merge_tensors


@pytest.fixture
def llamas(tmp_path) -> list[str]:
    return save_family(tiny_llama(), tmp_path)


SHAPE = (
    r"_proj.weight has shape \((40, 32|32, 40)\) in .*/expert1, but .* in the base model "
    r".*/base. Experts must be fine-tuned from this base model: replace or remove"
)


@pytest.mark.parametrize(
    ("size", "value", "message"),
    [(40, 1, SHAPE), (48, -2, "'epsilon' is -2; allowed: a number")],
)
def test_nothing_is_read_first(llamas, mergekit_yaml, monkeypatch, size, value, message):
    def fail(*arguments, **options):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(LazyTensorLoader, "get_tensor", fail)
    tiny_llama(intermediate_size=size).save_pretrained(llamas[2])
    epsilon = [{"filter": "mlp.down", "value": value}, {"value": 1e-5}]
    with pytest.raises((ValueError, RuntimeError), match=message):
        mergekit_yaml(ace_config(llamas, parameters={"epsilon": epsilon}))


def test_another_vocabulary_without_a_tokenizer_setting(llamas, mergekit_yaml):
    expert = tiny_llama(seed=3)
    expert.resize_token_embeddings(45)
    expert.save_pretrained(llamas[1])
    with pytest.raises(ValueError, match=r"\[\(4[05], 32\)") as caught:
        mergekit_yaml(ace_config(llamas))
    assert any(name in str(caught.value) for name in ("embed_tokens.weight", "lm_head.weight"))
    assert "tokenizer: {source: base}" in str(caught.value)


EYE, ONES, NAN = torch.eye(2), torch.ones(2, 2), torch.full((2, 2), float("nan"))
LARGE = [torch.zeros(40, 4).half(), *(torch.randn(2, 40, 4) * 5e3).half()]
IN_MEMORY = [
    ([EYE, ONES], {"rank_fraction": 2}, "'rank_fraction' is 2; allowed: a number from 0 to 1"),
    ([EYE, ONES], {"lambda": "nan"}, "'lambda' is 'nan'; allowed: a finite number"),
    ([EYE, ONES], {"structural_prior": "perhaps"}, "'perhaps'; allowed: true or false"),
    ([EYE, ONES], {"spectral_refinement": "often"}, "'often'; allowed: one of auto, always, never"),
    ([EYE, ONES], {"layout": "diagonal"}, "one of auto, matrix, transposed, stacked, flattened"),
    ([EYE, ONES], {"report": "/no/folder/r.jsonl"}, "there is no folder /no/folder"),
    ([EYE, ONES, torch.ones(2, 5)], {}, r"Tensor size mismatch for w: .*\(2, 5\)"),
    ([NAN, NAN.clone()], {}, "model 0 contains NaN"),
    ([EYE, ONES, NAN], {"weight": 0.0}, "tensor w of model 2 contains NaN or Inf"),
    (LARGE, {"lambda": 100.0}, r"too large for torch\.float16"),
    ([-3e38 * ONES, 3e38 * ONES, ONES], {}, r"tensor w .*write compute_dtype: float64.*0: 1, 1: 2"),
]


@pytest.mark.parametrize(("tensors", "parameters", "message"), IN_MEMORY)
def test_tensors_in_memory(tensors, parameters, message):
    with pytest.raises((ValueError, TypeError), match=message):
        merge_tensors(tensors, "ace", base_index=0, name="w", parameters=parameters)


def test_no_base_in_memory():
    with pytest.raises(ValueError, match="base_index="):
        merge_tensors([EYE, ONES], "ace")


IN_FILES = [
    ({"score.weight": torch.ones(2, 32)}, r"has no tensor .*score.weight.*but an expert has"),
    ({"model.norm.weight": torch.ones(31)}, r"shape \(31,\) in .*expert0.*, but \(32,\) in"),
]


@pytest.mark.parametrize(("changed", "message"), IN_FILES)
def test_files_without_configs(llamas, mergekit_yaml, changed, message):
    rewrite(llamas[1], lambda tensors: tensors.update(changed))
    files = [f"{path}/model.safetensors" for path in llamas]
    with pytest.raises((ValueError, RuntimeError), match=message):
        mergekit_yaml(ace_config(files), "--tensor-union", script="merge_raw_pytorch")
