# SPDX-License-Identifier: Apache-2.0
"""Models that mergekit has no fitting description of are merged by the names in their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from checkpoints import LLAMA, ace_config, configure, fine_tuned, rewrite, save_family
from commands import run_config
from families import tensors
from reference import naive_tensor, task_vector_error
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TEXT = {**LLAMA, "head_dim": 8}


def merge(folder: Path, config: dict, *flags: str, fails: bool = False) -> str:
    """Merge into `merged`; what is said."""
    return run_config("merge", config, folder / "merged", *flags, fails=fails, quiet=False)


@pytest.mark.parametrize("multimodal", [0, 1])
def test_text_experts_of_multimodal_models(tmp_path, multimodal):
    """An error shows both names; where mixing is asked for, they are matched by these."""
    torch.manual_seed(0)
    vision = {**TEXT, "model_type": "pixtral", "image_size": 16, "patch_size": 8}
    config = tf.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"}, vision_config=vision,
        image_token_index=30, tie_word_embeddings=False,
    )  # fmt: skip
    kinds = [tf.Mistral3ForConditionalGeneration(config)]
    kinds.insert(1 - multimodal, tf.MistralForCausalLM(config.get_text_config()))
    kinds.append(fine_tuned(kinds[1], seed=1))
    paths = [str(tmp_path / f"m{n}") for n in range(3)]
    for path, model in zip(paths, kinds, strict=True):
        model.save_pretrained(path)
    text = merge(tmp_path, ace_config(paths), fails=True)
    for shown in ("base_model", "language_model.model.layers.0.", "such as model.layers.0."):
        assert shown in text
    kinds[1].model.save_pretrained(tmp_path / "bare")  # under shorter names
    bare = ace_config([paths[0], str(tmp_path / "bare")])
    text = merge(tmp_path, bare, "--allow-crimes", fails=True)
    assert "bare has no tensor in common with the base: " in text
    merge(tmp_path, ace_config(paths), "--allow-crimes")
    base, got = tensors(paths[0]), tensors(tmp_path / "merged")
    assert got.keys() == base.keys()
    longer, shorter = "language_model.model.layers.0.mlp.up_proj.weight", 15
    names = [longer, longer[shorter:]]
    own, other = names if multimodal == 0 else names[::-1]
    experts = [tensors(path)[other] for path in paths[1:]]
    expected = naive_tensor(base[own], experts)
    assert task_vector_error(got[own], expected, base[own]) <= 1e-4
    tower = [name for name in base if "vision_tower" in name]
    assert all(torch.equal(got[name], base[name]) for name in tower)


def test_heads_of_other_labels_stay_the_bases(tmp_path):
    config = tf.BertConfig(**TEXT, num_labels=2)
    torch.manual_seed(0)
    base = tf.BertForSequenceClassification(config)
    paths = save_family(base, tmp_path)
    other = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3))
    body = fine_tuned(base, seed=3).bert.state_dict()
    other.bert.load_state_dict(body)
    other.save_pretrained(paths[2])
    for flags in ((), ("--unplanned", "merge")):
        text = merge(tmp_path, ace_config(paths), *flags, fails=True)
        assert "different numbers of labels, so that classifier" in text
        assert "--unplanned base` keeps those of" in text
    merge(tmp_path, ace_config(paths), "--unplanned", "base")
    own, got = tensors(paths[0]), tensors(tmp_path / "merged")
    for name, tensor in own.items():
        assert torch.equal(got[name], tensor) == name.startswith("classifier")


def quantise(path: str, kind: str) -> dict[str, torch.Tensor]:
    """Quantise the matrices of a checkpoint to FP8, with scales by block or by row; their values.

    The last block of rows is a part of one.
    """
    rng, values = torch.Generator().manual_seed(3), {}

    def change(stored: dict[str, torch.Tensor]) -> None:
        for name, tensor in [*stored.items()]:
            stored[name] = tensor.bfloat16()
            if not name.endswith("_proj.weight"):
                continue
            down, right = (1, tensor.shape[1]) if kind == "compressed-tensors" else (16, 16)
            shape = -(-tensor.shape[0] // down), -(-tensor.shape[1] // right)
            scale = 0.001 + torch.rand(shape, generator=rng)
            spread = scale.repeat_interleave(down, 0).repeat_interleave(right, 1)
            spread = spread[: len(tensor), : tensor.shape[1]]
            stored[name] = (tensor.bfloat16() / spread).to(torch.float8_e4m3fn)
            values[name] = (stored[name].float() * spread).bfloat16().float()
            stored[name + ("_scale_inv" if kind == "fp8" else "_scale")] = scale
            if kind == "fp8":
                stored[name.replace("weight", "activation_scale")] = torch.ones(())

    rewrite(path, change)
    more = {"weight_block_size": [16, 16]} if kind == "fp8" else {"format": "float-quantized"}
    if kind == "blocks":
        more["config_groups"] = {"group_0": {"weights": {"block_structure": [16, 16]}}}
    configure(path, quantization_config={"quant_method": kind, **more})
    return values


@pytest.mark.parametrize(
    ("kind", "workers"), [("fp8", 2), ("compressed-tensors", 1), ("blocks", 1)]
)
def test_quantised_models_are_dequantised(tmp_path, kind, workers):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT | {"intermediate_size": 40}))
    paths = save_family(model, tmp_path)
    names = tensors(paths[0]).keys()
    base, *experts = (quantise(path, kind) for path in paths)
    text = merge(tmp_path, ace_config(paths), "--workers", str(workers))
    assert f"base is quantised ({kind}): its tensors are dequantised" in text
    got = tensors(tmp_path / "merged")
    assert got.keys() == names
    for name, tensor in base.items():
        expected = naive_tensor(tensor, [expert[name] for expert in experts])
        assert task_vector_error(got[name], expected, tensor) <= 1e-4
    content = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in content
    tf.LlamaForCausalLM.from_pretrained(tmp_path / "merged")


def test_experts_in_mxfp4_are_dequantised(tmp_path):
    config = tf.GptOssConfig(
        **TEXT | {"hidden_size": 64, "intermediate_size": 32}, num_local_experts=2,
        num_experts_per_tok=1,
    )  # fmt: skip
    torch.manual_seed(0)
    paths = save_family(tf.GptOssForCausalLM(config), tmp_path)
    rng = torch.Generator().manual_seed(0)

    def quantise_experts(stored: dict[str, torch.Tensor]) -> None:
        for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = stored.pop(name).shape
            shape = (experts, rows, columns // 32)
            draw = {"dtype": torch.uint8, "generator": rng}
            stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), **draw)
            stored[f"{name}_scales"] = torch.randint(115, 120, shape, **draw)

    for path in paths:
        rewrite(path, quantise_experts)
        configure(path, quantization_config={"quant_method": "mxfp4"})
    merge(tmp_path, ace_config(paths))
    loaded = tf.GptOssForCausalLM.from_pretrained(tmp_path / "merged")
    name = "model.layers.0.mlp.experts.down_proj"
    base, *experts = (
        convert_moe_packed_tensors(*(tensors(path)[name + end] for end in ("_blocks", "_scales")))
        for path in paths
    )
    expected = naive_tensor(base.float(), [expert.float() for expert in experts], "transposed")
    merged = loaded.state_dict()[name]
    assert task_vector_error(merged, expected, base.float()) <= 1e-4
