# SPDX-License-Identifier: Apache-2.0
"""Every architecture, merged by all programs that can, compared tensor by tensor, and loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers as tf
import yaml
from checkpoints import ace_config, check_merge, save_family
from commands import command, run_config
from configs import EXAMPLES
from tiny_models import tiny_model

from mergekit_ace.check.loading import verify_model

# Classes by model types: those that mergekit describes, and models without embeddings, of both
# CLIP towers and of convolutions, some of them depthwise.
MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "roberta": "RobertaForSequenceClassification",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "clip_vision_model": "CLIPVisionModelWithProjection",
    "clip_text_model": "CLIPTextModelWithProjection",
}
WITHOUT = {
    "clip": "CLIPModel",
    "resnet": "ResNetForImageClassification",
    "mobilenet_v2": "MobileNetV2ForImageClassification",
}
# mergekit does not know that transformers 5 saves ViT under other names than it has in memory, and
# would leave them out: the checkpoint must be saved with the names in memory.
SAVE = {"vit": {"save_original_format": False}}


def small_model(model_type: str) -> tf.PreTrainedModel:
    """Build one of these models, always with the same weights."""
    return tiny_model((MODELS | WITHOUT)[model_type], model_type, layers=2)


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
    """Renamed, packed and tied tensors raise no false alarm of `check` or of the result."""
    model = small_model(name)
    paths = save_family(model, tmp_path, **SAVE.get(name, {}))
    merged = mergekit_yaml(ace_config(paths))
    check_merge(type(model), paths, merged)
    assert not [r for r in caplog.records if r.name.startswith("mergekit_ace")]
    assert "the result lacks" not in command("check", tmp_path / "merged.yml")
    assert verify_model(merged, Path("never looked at"), trust_remote_code=False) == ""


@pytest.mark.parametrize("name", ["clip", "vit"])
def test_mergekit_pytorch(name, tmp_path, mergekit_yaml):
    """It reads what mergekit-yaml cannot: both CLIP towers at once, and ViT as it is on the Hub."""
    model = small_model(name)
    paths = save_family(model, tmp_path)
    files = [f"{path}/model.safetensors" for path in paths]
    out = mergekit_yaml(ace_config(files), script="merge_raw_pytorch")
    shutil.copy(f"{paths[0]}/config.json", out)
    check_merge(type(model), paths, out)


def merge_and_check(model, paths: list[str], folder: Path) -> None:
    run_config("merge", ace_config(paths), folder / "merged")
    check_merge(type(model), paths, folder / "merged", 1e-4)


def check(config: dict, folder: Path) -> str:
    return run_config("check", config, folder / "merged", quiet=False)


@pytest.mark.parametrize("name", NAMED)
def test_mergekit_ace(name, tmp_path):
    """`check` passes the config that the examples have for its kind."""
    model_type, example = NAMED[name]
    linear_attention = "qwen3_5" in model_type or model_type == "qwen3_next"  # in three of four
    model = tiny_model(name, model_type, layers=4 if linear_attention else 2)
    paths = save_family(model, tmp_path)
    merge_and_check(model, paths, tmp_path)
    if linear_attention:
        entries = [{"filter": "attn", "value": 0.1}, {"value": 0.2}]
        said = check(ace_config(paths, parameters={"epsilon": entries}), tmp_path)
        assert "the filter 'attn' takes tensors of linear_attn, too" in said
    if example:
        config = yaml.safe_load((EXAMPLES / "configs" / f"{example}.yml").read_text("utf-8"))
        config |= {"base_model": paths[0], "models": [{"model": path} for path in paths[1:]]}
        said = check(config, tmp_path)
        assert "filter" not in said, "every filter of the config takes tensors"


@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_embeddings(name, tmp_path):
    """They go by the names of their tensors, which only `mergekit-ace merge` does.

    BatchNorm keeps the base's counters, and gets the mean of the experts' statistics.
    """
    model = small_model(name)
    paths = save_family(model, tmp_path)
    merge_and_check(model, paths, tmp_path)
    said = check(ace_config(paths), tmp_path)
    assert "mergekit has no description of" in said
    assert "merge by `mergekit-ace merge`" in said
    if name != "mobilenet_v2":  # its many layers take long
        run_config("inspect", ace_config(paths), tmp_path / "inspected")
