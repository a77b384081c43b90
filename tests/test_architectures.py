# SPDX-License-Identifier: Apache-2.0
"""Every architecture, merged by mergekit-yaml, compared tensor by tensor, loaded and run."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import transformers as tf
import yaml
from checkpoints import LLAMA, ace_config, check_merge, save_family
from click.testing import CliRunner
from configs import EXAMPLES
from sweep import merge_outcome
from tiny_models import tiny_model

from mergekit_ace.cli import main

TEXT = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}
HEAD = {"head_dim": 8}
MOE = {**LLAMA, "num_experts_per_tok": 2}
TOWER = {**TEXT, **HEADS, "max_position_embeddings": 16, "eos_token_id": 39}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **HEADS,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
T5 = {
    "vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu",  # mergekit knows the gated T5 of version 1.1
    "decoder_start_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
LABELS = {"num_labels": 3}
SMALLEST = {"depth_multiplier": 0.25, "min_depth": 4}
_MOBILENET = "MobileNetV2ForImageClassification"


def _tokens() -> dict:
    return {"input_ids": torch.arange(2, 14).reshape(2, 6)}


def _pixels() -> dict:
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}


def _pairs() -> dict:
    return {**_tokens(), "labels": torch.arange(3, 15).reshape(2, 6)}


def _model(kind: str, config: type, inputs: Callable[[], dict], **settings) -> tuple:
    """Return what builds a model of a class of transformers, and what makes its inputs."""
    return lambda: getattr(tf, kind)(config(**settings)), inputs


_SLIDING = {"layer_types": ["sliding_attention"] * 2}
_FEW = {"num_experts": 3, "moe_intermediate_size": 24}
_BERT = {**TEXT, **HEADS, **LABELS, "max_position_embeddings": 32}
MODELS = {
    "llama": _model("LlamaForCausalLM", tf.LlamaConfig, _tokens, **LLAMA),
    "mistral": _model("MistralForCausalLM", tf.MistralConfig, _tokens, **LLAMA),
    "qwen3": _model("Qwen3ForCausalLM", tf.Qwen3Config, _tokens, **LLAMA, **HEAD),
    "gemma3": _model(
        "Gemma3ForCausalLM", tf.Gemma3TextConfig, _tokens, **LLAMA, **HEAD, **_SLIDING
    ),
    "gpt2": _model("GPT2LMHeadModel", tf.GPT2Config, _tokens, **GPT2),
    "mixtral": _model("MixtralForCausalLM", tf.MixtralConfig, _tokens, **MOE, num_local_experts=3),
    "qwen3_moe": _model("Qwen3MoeForCausalLM", tf.Qwen3MoeConfig, _tokens, **MOE, **HEAD, **_FEW),
    "roberta": _model("RobertaForSequenceClassification", tf.RobertaConfig, _tokens, **_BERT),
    "t5": _model("T5ForConditionalGeneration", tf.T5Config, _pairs, **T5),
    "vit": _model("ViTForImageClassification", tf.ViTConfig, _pixels, **VISION, **LABELS),
    "clip_vision": _model(
        "CLIPVisionModelWithProjection", tf.CLIPVisionConfig, _pixels, **VISION, projection_dim=16
    ),
    "clip_text": _model(
        "CLIPTextModelWithProjection", tf.CLIPTextConfig, _tokens, **TOWER, projection_dim=16
    ),
}
HAS = {"gpt2": "transposed", "mixtral": "stacked", "qwen3_moe": "stacked"}
# Models without embeddings: both CLIP towers, and convolutions, some of them depthwise.
WITHOUT = {
    "clip": (
        lambda: tf.CLIPModel(
            tf.CLIPConfig(text_config=TOWER, vision_config=VISION, projection_dim=16)
        ),
        lambda: {**_tokens(), **_pixels()},
    ),
    "resnet": _model("ResNetForImageClassification", tf.ResNetConfig, _pixels, **RESNET, **LABELS),
    "mobilenet": _model(_MOBILENET, tf.MobileNetV2Config, _pixels, **SMALLEST, **LABELS),
}


# mergekit does not know that transformers 5 saves ViT under other names than it has in memory, and
# would leave them out: the checkpoint must be saved with the names in memory.
SAVE = {"vit": {"save_original_format": False}}


def _finite(model, inputs: dict) -> bool:
    with torch.no_grad():
        output = model(**inputs)
    values = output.get("logits", output[0])
    return bool(torch.isfinite(values).all())


@pytest.mark.parametrize("name", MODELS)
def test_merge_of_an_architecture(name, tmp_path, mergekit_yaml, caplog):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build()
    paths = save_family(model, tmp_path, **SAVE.get(name, {}))
    out = mergekit_yaml(ace_config(paths))
    merged, layouts = check_merge(type(model), paths, out)
    assert layouts["matrix"] >= 2
    assert layouts["mean"] >= 2
    if name in HAS:
        assert layouts[HAS[name]] >= 4
    assert _finite(merged, inputs())
    assert not [r for r in caplog.records if r.name.startswith("mergekit_ace")]


@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_embeddings_go_by_the_names_of_their_tensors(name, tmp_path):
    """BatchNorm keeps the base's counters, and gets the mean of the experts' statistics."""
    build, inputs = WITHOUT[name]
    torch.manual_seed(0)
    model = build()
    paths = save_family(model, tmp_path)
    config = tmp_path / "merge.yml"
    config.write_text(yaml.safe_dump(ace_config(paths)))
    answer = CliRunner().invoke(main, ["merge", str(config), str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output
    merged, layouts = check_merge(type(model), paths, tmp_path / "out")
    assert ("flattened" in layouts) == (name != "clip")
    assert _finite(merged, inputs())
    answer = CliRunner().invoke(main, ["check", str(config)])
    assert answer.exit_code == 0
    assert "mergekit has no description of" in answer.output
    assert "merge by `mergekit-ace merge`" in answer.output
    if name != "mobilenet":  # its many layers take long
        answer = CliRunner().invoke(main, ["inspect", str(config), str(tmp_path / "inspected")])
        assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize("name", ["clip", "vit"])
def test_checkpoints_that_mergekit_yaml_cannot_read_go_through_mergekit_pytorch(
    name, tmp_path, mergekit_pytorch
):
    """Both CLIP towers at once, and ViT as it lies on the Hub."""
    build, inputs = (MODELS | WITHOUT)[name]
    torch.manual_seed(0)
    model = build()
    paths = save_family(model, tmp_path)
    out = mergekit_pytorch(ace_config([f"{path}/model.safetensors" for path in paths]))
    shutil.copy(f"{paths[0]}/config.json", out)
    merged, layouts = check_merge(type(model), paths, out)
    assert layouts["matrix"] >= 10
    assert _finite(merged, inputs())


# Models of 2026 by their model types, with their classes, and their configs in the examples.
NAMED = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3.5-vision"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3.5-vision"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3-next-moe"),
    "qwen3_next": ("Qwen3NextForCausalLM", "qwen3-next-moe"),
    "gpt_oss": ("GptOssForCausalLM", "gpt-oss-20b"),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma-3-4b-vision"),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma-3-4b-vision"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral-small-3.1"),
    "glm4": ("Glm4ForCausalLM", "olmo-3-7b"),
    "glm4_moe": ("Glm4MoeForCausalLM", "glm-4.5-air-moe"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "glm-4.5-air-moe"),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", "glm-4.5-air-moe"),
    "llama4": ("Llama4ForConditionalGeneration", "llama-4-scout"),
    "phi3": ("Phi3ForCausalLM", "olmo-3-7b"),
    "olmo3": ("Olmo3ForCausalLM", "olmo-3-7b"),
    "smollm3": ("SmolLM3ForCausalLM", "olmo-3-7b"),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "granite-4-hybrid"),
    "falcon_h1": ("FalconH1ForCausalLM", "lfm2-hybrid"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2-hybrid"),
    "mamba2": ("Mamba2ForCausalLM", "lfm2-hybrid"),
    "hunyuan_vl": ("HunYuanVLForConditionalGeneration", ""),
    "qianfan_ocr": ("QianfanOCRForConditionalGeneration", ""),
}


@pytest.mark.parametrize("model_type", NAMED)
def test_models_of_2026(model_type, tmp_path):
    """All tensors in files are those of the reference; `check` passes the config of the kind."""
    name, example = NAMED[model_type]
    linear_attention = "qwen3_5" in model_type or model_type == "qwen3_next"  # in three of four
    model = tiny_model(name, model_type, layers=4 if linear_attention else 2)
    paths = save_family(model, tmp_path)
    assert merge_outcome(type(model), paths, tmp_path) == ("works", "")
    if not example:
        return
    config = yaml.safe_load((EXAMPLES / "configs" / f"{example}.yml").read_text("utf-8"))
    config |= {"base_model": paths[0], "models": [{"model": path} for path in paths[1:]]}
    (tmp_path / "merge.yml").write_text(yaml.safe_dump(config))
    answer = CliRunner().invoke(main, ["check", str(tmp_path / "merge.yml")])
    assert answer.exit_code == 0, answer.output
    assert "filter" not in answer.output, "every filter of the config takes tensors"
