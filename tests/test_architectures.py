# SPDX-License-Identifier: Apache-2.0
"""Every architecture, merged by mergekit-yaml, compared tensor by tensor, loaded and run."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers as tf
import yaml
from checkpoints import LLAMA, ace_config, check_merge, save_family
from click.testing import CliRunner

from mergekit_ace.cli import main

TEXT = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}
MOE = {**LLAMA, "num_experts_per_tok": 2}
IMAGE = {"image_size": 16, "patch_size": 8}


def _tokens() -> dict:
    return {"input_ids": torch.arange(2, 14).reshape(2, 6)}


def _pixels() -> dict:
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}


TOWER = {**TEXT, **HEADS, "max_position_embeddings": 16, "eos_token_id": 39}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **HEADS, **IMAGE}
T5 = {
    "vocab_size": 40,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}


MODELS = {
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)), _tokens),
    "mistral": (lambda: tf.MistralForCausalLM(tf.MistralConfig(**LLAMA)), _tokens),
    "qwen3": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**LLAMA, head_dim=8)), _tokens),
    "gemma3": (
        lambda: tf.Gemma3ForCausalLM(
            tf.Gemma3TextConfig(**LLAMA, head_dim=8, layer_types=["sliding_attention"] * 2)
        ),
        _tokens,
    ),
    "gpt2": (
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=4)
        ),
        _tokens,
    ),
    "mixtral": (
        lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**MOE, num_local_experts=3)),
        _tokens,
    ),
    "qwen3_moe": (
        lambda: tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(**MOE, num_experts=3, moe_intermediate_size=24, head_dim=8)
        ),
        _tokens,
    ),
    "roberta": (
        lambda: tf.RobertaForSequenceClassification(
            tf.RobertaConfig(**TEXT, **HEADS, max_position_embeddings=32, num_labels=3)
        ),
        _tokens,
    ),
    # mergekit knows the gated T5 of version 1.1
    "t5": (
        lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
        lambda: {**_tokens(), "labels": torch.arange(3, 15).reshape(2, 6)},
    ),
    "vit": (lambda: tf.ViTForImageClassification(tf.ViTConfig(**VISION, num_labels=3)), _pixels),
    "clip_vision": (
        lambda: tf.CLIPVisionModelWithProjection(tf.CLIPVisionConfig(**VISION, projection_dim=16)),
        _pixels,
    ),
    "clip_text": (
        lambda: tf.CLIPTextModelWithProjection(tf.CLIPTextConfig(**TOWER, projection_dim=16)),
        _tokens,
    ),
}
HAS = {"gpt2": "transposed", "mixtral": "stacked", "qwen3_moe": "stacked"}
RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 2],
    "layer_type": "basic",
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


def _whole_clip() -> tf.CLIPModel:
    return tf.CLIPModel(tf.CLIPConfig(text_config=TOWER, vision_config=VISION, projection_dim=16))


def _vit() -> tf.ViTForImageClassification:
    return MODELS["vit"][0]()


def _resnet() -> tf.ResNetForImageClassification:
    return tf.ResNetForImageClassification(tf.ResNetConfig(**RESNET, num_labels=3))


def _mobilenet() -> tf.MobileNetV2ForImageClassification:
    """Depthwise convolutions, kernels (o, 1, 3, 3)."""
    config = tf.MobileNetV2Config(depth_multiplier=0.25, min_depth=4, num_labels=3)
    return tf.MobileNetV2ForImageClassification(config)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (_whole_clip, lambda: {**_tokens(), **_pixels()}),
        (_resnet, _pixels),
        (_mobilenet, _pixels),
    ],
    ids=["clip", "resnet", "mobilenet"],
)
def test_models_without_embeddings_go_by_the_names_of_their_tensors(build, inputs, tmp_path):
    """BatchNorm keeps the base's counters, and gets the mean of the experts' statistics."""
    torch.manual_seed(0)
    model = build()
    paths = save_family(model, tmp_path)
    config = tmp_path / "merge.yml"
    config.write_text(yaml.safe_dump(ace_config(paths)))
    answer = CliRunner().invoke(main, ["merge", str(config), str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output
    merged, layouts = check_merge(type(model), paths, tmp_path / "out")
    assert ("flattened" in layouts) == (build is not _whole_clip)
    assert _finite(merged, inputs())
    answer = CliRunner().invoke(main, ["check", str(config)])
    assert answer.exit_code == 1
    assert "has no embeddings, and mergekit-yaml plans no merge of such models" in answer.output
    assert "merge by `mergekit-ace merge`" in answer.output
    answer = CliRunner().invoke(main, ["inspect", str(config), str(tmp_path / "inspected")])
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    ("build", "inputs"),
    [(_whole_clip, lambda: {**_tokens(), **_pixels()}), (_vit, _pixels)],
    ids=["clip", "vit"],
)
def test_checkpoints_that_mergekit_yaml_cannot_read_go_through_mergekit_pytorch(
    build, inputs, tmp_path, mergekit_pytorch
):
    """Both CLIP towers at once, and ViT as it lies on the Hub."""
    torch.manual_seed(0)
    model = build()
    paths = save_family(model, tmp_path)
    out = mergekit_pytorch(ace_config([f"{path}/model.safetensors" for path in paths]))
    shutil.copy(f"{paths[0]}/config.json", out)
    merged, layouts = check_merge(type(model), paths, out)
    assert layouts["matrix"] >= 10
    assert _finite(merged, inputs())
