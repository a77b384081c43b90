# SPDX-License-Identifier: Apache-2.0
"""Every architecture, merged by all programs that can, compared tensor by tensor, and loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from checkpoints import ace_config, check_merge, save_family
from commands import command
from configs import EXAMPLES
from sweep import merge_outcome
from tiny_models import tiny_model

# Classes that mergekit-yaml can read, with the model types of their configs.
DESCRIBED = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "GPT2LMHeadModel": "gpt2",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "RobertaForSequenceClassification": "roberta",
    "T5ForConditionalGeneration": "t5",
    "ViTForImageClassification": "vit",
    "CLIPVisionModelWithProjection": "clip_vision_model",
    "CLIPTextModelWithProjection": "clip_text_model",
}
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
# Models without embeddings: both CLIP towers, and convolutions, some of them depthwise. BatchNorm
# keeps the base's counters, and gets the mean of the experts' statistics.
WITHOUT = {
    "CLIPModel": "clip",
    "ResNetForImageClassification": "resnet",
    "MobileNetV2ForImageClassification": "mobilenet_v2",
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_mergekit_yaml(name, tmp_path, mergekit_yaml, caplog):
    model = tiny_model(name, DESCRIBED[name], layers=2)
    # mergekit does not know that transformers 5 saves ViT under other names than it has in memory,
    # and would leave them out: the checkpoint must be saved with the names in memory.
    save = {"save_original_format": False} if DESCRIBED[name] == "vit" else {}
    paths = save_family(model, tmp_path, **save)
    check_merge(type(model), paths, mergekit_yaml(ace_config(paths)))
    assert not [r for r in caplog.records if r.name.startswith("mergekit_ace")]


@pytest.mark.parametrize(
    ("name", "model_type"), [("CLIPModel", "clip"), ("ViTForImageClassification", "vit")]
)
def test_mergekit_pytorch(name, model_type, tmp_path, mergekit_pytorch):
    """It reads what mergekit-yaml cannot: both CLIP towers at once, and ViT as it is on the Hub."""
    model = tiny_model(name, model_type, layers=2)
    paths = save_family(model, tmp_path)
    out = mergekit_pytorch(ace_config([f"{path}/model.safetensors" for path in paths]))
    shutil.copy(f"{paths[0]}/config.json", out)
    check_merge(type(model), paths, out)


def merge_tiny(name: str, model_type: str, folder: Path) -> Path:
    """Let `mergekit-ace merge` merge a family of a class; the config."""
    linear_attention = "qwen3_5" in model_type or model_type == "qwen3_next"  # in three of four
    model = tiny_model(name, model_type, layers=4 if linear_attention else 2)
    assert merge_outcome(type(model), save_family(model, folder), folder) == ("works", "")
    return folder / "merge.yml"


@pytest.mark.parametrize("name", NAMED)
def test_mergekit_ace(name, tmp_path):
    """`check` passes the config that the examples have for its kind."""
    model_type, example = NAMED[name]
    path = merge_tiny(name, model_type, tmp_path)
    if example:
        config = yaml.safe_load((EXAMPLES / "configs" / f"{example}.yml").read_text("utf-8"))
        own = yaml.safe_load(path.read_text())
        config |= {key: own[key] for key in ("base_model", "models")}
        path.write_text(yaml.safe_dump(config))
        assert "filter" not in command("check", path), "every filter of the config takes tensors"


@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_embeddings(name, tmp_path):
    """They go by the names of their tensors, which only `mergekit-ace merge` does."""
    path = merge_tiny(name, WITHOUT[name], tmp_path)
    said = command("check", path)
    assert "mergekit has no description of" in said
    assert "merge by `mergekit-ace merge`" in said
    if name != "MobileNetV2ForImageClassification":  # its many layers take long
        command("inspect", path, tmp_path / "inspected")
