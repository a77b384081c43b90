# SPDX-License-Identifier: Apache-2.0
"""A tiny model of any class of transformers, from the defaults of its config, made small."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

# The first pattern that matches the whole name of a setting says how large it is.
SIZES: dict[str, Any] = {
    r"vocab_size|.*_vocab_size|vocab_size_.*": 64,
    r"image_size|img_size|input_size": 28,
    r"patch_size": 14,
    r"spatial_merge_size|temporal_patch_size|spatial_patch_size": None,
    r"(.*_)?num_(hidden_)?layers|n_layers?|depth|.*_layers|num_blocks": "layers",
    r"qk_rope_head_dim|.*rotary_dim": 4,
    r".*head_dim|head_size|d_kv|kv_channels|attention_head_size|.*_head_size|.*d_head": 8,
    r"(.*_)?(num|n)_(.*_)?(key_value|kv)_(.*)?heads|num_kv_heads|linear_num_key_heads": 2,
    r"mamba_(n|num)_heads": 8,
    r"mamba_d_ssm": 64,
    r"(num|n)_(.*)?heads?|.*attention_heads|.*_num_heads|.*_n_heads|n_head": 4,
    r"num_experts_per_tok|.*top_?k(_experts)?|num_selected_experts|moe_k": 2,
    r"n_group|topk_group|.*n_groups|num_expert_group|n_shared_experts|num_shared_experts": 1,
    r".*num_(local_|routed_|moe_)?experts|n_routed_experts|.*_experts|moe_num_experts": 4,
    r".*lora_rank(_.*)?|.*_rank|.*lora_dim": 8,
    r".*state_size|.*d_state|ssm_state_size": 8,
    r".*conv_kernel(_size)?|.*d_conv|.*kernel_dim|conv_L_cache": None,
    r".*(intermediate|ffn|feed_forward|mlp|inner)_?(size|dim|hidden_size)?|d_ff|n_inner": 48,
    r".*(hidden|embed|embedding|model|projection|out_hidden)_(size|dim)|hidden_size.*|d_model|dim"
    r"|n_embd|lru_width|hidden_dim|projection_dim|.*_dim|.*_hidden_size": 32,
    r"max_position_embeddings|n_positions|.*max_seq.*|.*context_length|max_.*_positions": 64,
    r"sliding_window.*|attention_window_size|.*chunk_size": 16,
}  # fmt: skip


def tiny_model(name: str, model_type: str, layers: int = 4) -> PreTrainedModel:
    """Build a model of a class by its name, and the model type of its config.

    It always has the same weights.
    """
    kind = getattr(transformers, name)
    known = kind.config_class
    known = known if hasattr(known, "model_type") else CONFIG_MAPPING[model_type]
    torch.manual_seed(0)
    return kind(tiny_config(known, layers)).eval()


def tiny_config(kind: type[PreTrainedConfig], layers: int) -> PreTrainedConfig:
    """Return a config of small sizes."""
    default = kind()
    small: dict[str, Any] = {}
    for name in (field.name for field in fields(kind)):
        value = vars(default).get(name)
        if value is None and name in ("head_dim", "num_key_value_heads"):
            value = 1000
        if isinstance(value, PreTrainedConfig):
            small[name] = tiny_config(type(value), layers).to_dict()
        elif name.endswith(("_token_id", "_token_index")):
            if isinstance(value, int):
                small[name] = 1 + len(small) % 60
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((s for pattern, s in SIZES.items() if re.fullmatch(pattern, name)), None)
            size = layers if size == "layers" else size
            if size is not None:
                small[name] = min(value, size) if value > 0 else value
    return kind(**small | OWN.get(kind.model_type, {}))


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Settings that the rules above do not make fit together.
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "gemma4_text": {"hidden_size_per_layer_input": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mobilenet_v2": {"depth_multiplier": 0.25, "min_depth": 4},
    "qwen2_5_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "qwen2_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "qwen3_moe": {"num_experts": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]},
    "t5": {"feed_forward_proj": "gated-gelu"},  # of version 1.1, which mergekit knows
    "zamba2": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"]},
    "zamba": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"]},
}
