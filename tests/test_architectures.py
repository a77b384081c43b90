# SPDX-License-Identifier: Apache-2.0
"""Every architecture, merged by all programs that can, compared tensor by tensor, and loaded."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers as tf
import yaml
from checkpoints import LLAMA, ace_config, check_merge, save_family
from commands import command
from configs import EXAMPLES
from sweep import merge_outcome
from tiny_models import tiny_model

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
QWEN = {**MOE, **HEAD, "num_experts": 3, "moe_intermediate_size": 24}
PROJECTION = {"projection_dim": 16}
BERT = {**TEXT, **HEADS, "max_position_embeddings": 32}
CLIP = {"text_config": TOWER, "vision_config": VISION, **PROJECTION}
MODELS = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | HEAD),
    "gemma3": ("Gemma3ForCausalLM", LLAMA | HEAD | {"layer_types": ["sliding_attention"] * 2}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "mixtral": ("MixtralForCausalLM", MOE | {"num_local_experts": 3}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", QWEN),
    "roberta": ("RobertaForSequenceClassification", BERT | LABELS),
    "t5": ("T5ForConditionalGeneration", T5),
    "vit": ("ViTForImageClassification", VISION | LABELS),
    "clip_vision": ("CLIPVisionModelWithProjection", VISION | PROJECTION),
    "clip_text": ("CLIPTextModelWithProjection", TOWER | PROJECTION),
}
# Models without embeddings: both CLIP towers, and convolutions, some of them depthwise.
WITHOUT = {
    "clip": ("CLIPModel", CLIP),
    "resnet": ("ResNetForImageClassification", RESNET | LABELS),
    "mobilenet": (
        "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "min_depth": 4, **LABELS}
    ),
}  # fmt: skip
# mergekit does not know that transformers 5 saves ViT under other names than it has in memory, and
# would leave them out: the checkpoint must be saved with the names in memory.
SAVE = {"vit": {"save_original_format": False}}


def small_model(name: str) -> tf.PreTrainedModel:
    """Build one of these models, always with the same weights."""
    name, settings = (MODELS | WITHOUT)[name]
    kind = getattr(tf, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**settings))


# Classes with their model types, and what they are in the examples; the others have no config.
NAMED = {
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3.5-vision"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3.5-vision"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3-next-moe"),
    "Qwen3NextForCausalLM": ("qwen3_next", "qwen3-next-moe"),
    "GptOssForCausalLM": ("gpt_oss", "gpt-oss-20b"),
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma-3-4b-vision"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma-3-4b-vision"),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral-small-3.1"),
    "Glm4ForCausalLM": ("glm4", "olmo-3-7b"),
    "Glm4MoeForCausalLM": ("glm4_moe", "glm-4.5-air-moe"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "glm-4.5-air-moe"),
    "Kimi_K25ForConditionalGeneration": ("kimi_k25", "glm-4.5-air-moe"),
    "Llama4ForConditionalGeneration": ("llama4", "llama-4-scout"),
    "Phi3ForCausalLM": ("phi3", "olmo-3-7b"),
    "Olmo3ForCausalLM": ("olmo3", "olmo-3-7b"),
    "SmolLM3ForCausalLM": ("smollm3", "olmo-3-7b"),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", "granite-4-hybrid"),
    "FalconH1ForCausalLM": ("falcon_h1", "lfm2-hybrid"),
    "Lfm2ForCausalLM": ("lfm2", "lfm2-hybrid"),
    "Mamba2ForCausalLM": ("mamba2", "lfm2-hybrid"),
    "HunYuanVLForConditionalGeneration": ("hunyuan_vl", ""),
    "QianfanOCRForConditionalGeneration": ("qianfan_ocr", ""),
    "MixtralForCausalLM": ("mixtral", ""),
    "Qwen3MoeForCausalLM": ("qwen3_moe", ""),
    "ViTForImageClassification": ("vit", ""),
    "BertModel": ("bert", ""),
    "BertForMaskedLM": ("bert", ""),
}


@pytest.mark.parametrize("name", MODELS)
def test_mergekit_yaml(name, tmp_path, mergekit_yaml, caplog):
    model = small_model(name)
    paths = save_family(model, tmp_path, **SAVE.get(name, {}))
    check_merge(type(model), paths, mergekit_yaml(ace_config(paths)))
    assert not [r for r in caplog.records if r.name.startswith("mergekit_ace")]


@pytest.mark.parametrize("name", ["clip", "vit"])
def test_mergekit_pytorch(name, tmp_path, mergekit_pytorch):
    """It reads what mergekit-yaml cannot: both CLIP towers at once, and ViT as it is on the Hub."""
    model = small_model(name)
    paths = save_family(model, tmp_path)
    out = mergekit_pytorch(ace_config([f"{path}/model.safetensors" for path in paths]))
    shutil.copy(f"{paths[0]}/config.json", out)
    check_merge(type(model), paths, out)


@pytest.mark.parametrize("name", NAMED)
def test_mergekit_ace(name, tmp_path):
    """`check` passes the config that the examples have for its kind."""
    model_type, example = NAMED[name]
    linear_attention = "qwen3_5" in model_type or model_type == "qwen3_next"  # in three of four
    model = tiny_model(name, model_type, layers=4 if linear_attention else 2)
    paths = save_family(model, tmp_path)
    assert merge_outcome(type(model), paths, tmp_path) == ("works", "")
    if example:
        config = yaml.safe_load((EXAMPLES / "configs" / f"{example}.yml").read_text("utf-8"))
        config |= {"base_model": paths[0], "models": [{"model": path} for path in paths[1:]]}
        (tmp_path / "merge.yml").write_text(yaml.safe_dump(config))
        said = command("check", tmp_path / "merge.yml")
        assert "filter" not in said, "every filter of the config takes tensors"


@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_embeddings(name, tmp_path):
    """They go by the names of their tensors, which only `mergekit-ace merge` does.

    BatchNorm keeps the base's counters, and gets the mean of the experts' statistics.
    """
    model = small_model(name)
    assert merge_outcome(type(model), save_family(model, tmp_path), tmp_path) == ("works", "")
    said = command("check", tmp_path / "merge.yml")
    assert "mergekit has no description of" in said
    assert "merge by `mergekit-ace merge`" in said
    if name != "mobilenet":  # its many layers take long
        command("inspect", tmp_path / "merge.yml", tmp_path / "inspected")
