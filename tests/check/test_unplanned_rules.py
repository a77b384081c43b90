# SPDX-License-Identifier: Apache-2.0
"""Which tensors mergekit leaves out, and which of them nobody misses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import LLAMA, ace_config, save_family, tiny_llama
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file
from test_architectures import MODELS, SAVE
from transformers import GemmaConfig, GemmaForCausalLM

from mergekit_ace.check.loading import _find_unplanned, treat_unplanned
from mergekit_ace.files.models import read_checkpoint
from mergekit_ace.planning import plan_merge, read_merge_config

OPTIONS = MergeOptions()
EMBEDDING = "model.embed_tokens.weight"


def add(path: str, **tensors: torch.Tensor) -> None:
    """Add tensors to a checkpoint; a double underscore in a name stands for a dot."""
    file = Path(path) / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(file), **named}, file, {"format": "pt"})


def look(folder: Path, config: dict, treatment: str = "error"):
    """What is left out, what is planned beside mergekit's plan, and what is said."""
    path = folder / "merge.yml"
    path.write_text(yaml.safe_dump(config))
    parsed, source = read_merge_config(path)
    plan = plan_merge(parsed, source, OPTIONS)
    checkpoints = {model: read_checkpoint(model) for model in parsed.referenced_models()}
    return _find_unplanned(plan, checkpoints), *treat_unplanned(plan, checkpoints, treatment)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_out_of_what_mergekit_knows(tmp_path, name):
    """Also of experts that it packs, and of heads that are tied."""
    torch.manual_seed(0)
    paths = save_family(MODELS[name][0](), tmp_path, **SAVE.get(name, {}))
    found, extra, said = look(tmp_path, ace_config(paths))
    assert not (found.left)
    assert not (found.foreign)
    assert not extra
    assert not said


def test_vit_under_its_names_on_the_hub(tmp_path):
    torch.manual_seed(0)
    paths = save_family(MODELS["vit"][0](), tmp_path)
    found, extra, (finding,) = look(tmp_path, ace_config(paths))
    assert {str(model): len(names) for model, names in found.left.items()} == dict.fromkeys(
        paths, 32
    )
    assert not extra
    assert finding.level == "error"
    assert "no merge of 32 tensors of" in finding.message
    assert "vit.encoder.layer.0.attention.attention.key.weight" in finding.message
    assert f"copies them from {paths[0]}" in finding.remedy


@pytest.mark.parametrize("config", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_that_the_architecture_does_not_name(tmp_path, config):
    """However few entries they have: transformers would draw them at random."""
    paths = save_family(tiny_llama(**config), tmp_path)
    found, _, (finding,) = look(tmp_path, ace_config(paths))
    names = next(iter(found.left.values()))
    assert all(name.endswith("_proj.bias") for name in names)
    assert names[0] in finding.message


def test_heads_that_transformers_does_not_load(tmp_path):
    """Other programs do: vLLM predicts several tokens with them."""
    paths = save_family(MODELS["qwen3_moe"][0](), tmp_path)
    for path in paths:
        add(path, mtp__layers__0__weight=torch.ones(4, 4), mtp__norm__weight=torch.ones(4))
    found, _, (finding,) = look(tmp_path, ace_config(paths))
    assert set(found.left) == set(found.left.keys())
    assert all(names == ("mtp.layers.0.weight", "mtp.norm.weight") for names in found.left.values())
    assert finding.level == "error"


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("llama", {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}),
        (
            "gpt2",
            {
                "transformer__h__0__attn__bias": torch.ones(1, 1, 32, 32),
                "transformer__h__1__attn__bias": torch.ones(1, 1, 32, 32, dtype=torch.bool),
                "transformer__h__0__attn__masked_bias": torch.tensor(-1e4),
            },
        ),
        ("roberta", {"roberta__embeddings__position_ids": torch.arange(32)[None]}),
        ("clip_text", {"text_model__embeddings__position_ids": torch.arange(16)[None]}),
    ],
)
def test_buffers_are_no_loss(tmp_path, name, buffers):
    torch.manual_seed(0)
    paths = save_family(MODELS[name][0](), tmp_path)
    for path in paths[:2]:
        add(path, **buffers)
    found, extra, said = look(tmp_path, ace_config(paths))
    assert not (found.left)
    assert not (found.foreign)
    assert not extra
    assert not said


def test_tied_heads_that_some_files_hold_are_no_loss(tmp_path):
    """mergekit's Gemma has no head, as the files of the base have none."""
    torch.manual_seed(0)
    config = GemmaConfig(**LLAMA, head_dim=8)
    paths = save_family(GemmaForCausalLM(config), tmp_path)
    add(paths[1], lm_head__weight=load_file(f"{paths[1]}/model.safetensors")[EMBEDDING])
    found, extra, said = look(tmp_path, ace_config(paths))
    assert not (found.left)
    assert not (found.foreign)
    assert not extra
    assert not said


def test_what_only_an_expert_has_is_left_out_and_told(tmp_path):
    paths = save_family(tiny_llama(), tmp_path)
    add(paths[2], v_head__summary__weight=torch.ones(1, 32))
    for treatment in ("error", "base", "merge"):
        found, extra, (finding,) = look(tmp_path, ace_config(paths), treatment)
        assert not found.left
        assert not extra
        assert finding.level == "warning"
        assert f"1 tensor of {paths[2]}" in finding.message
        assert "v_head.summary.weight" in finding.message


@pytest.mark.parametrize("treatment", ["error", "base", "merge"])
def test_an_expert_under_other_names_is_an_error(tmp_path, treatment):
    """A merge without it would be none of this expert."""
    torch.manual_seed(0)
    paths = save_family(MODELS["vit"][0](), tmp_path, **SAVE["vit"])
    hub = save_family(MODELS["vit"][0](), tmp_path / "hub")
    _, extra, findings = look(tmp_path, ace_config([paths[0], hub[1]]), treatment)
    assert not extra
    (finding,) = [finding for finding in findings if finding.level == "error"]
    assert f"32 tensors of {hub[1]}" in finding.message
    assert f"in the same way as {paths[0]}" in finding.remedy


def test_what_some_models_lack_is_copied(tmp_path):
    paths = save_family(tiny_llama(), tmp_path)
    for path in paths:
        add(path, mtp__both__weight=torch.ones(4, 4), mtp__steps=torch.arange(3))
    for path in paths[:2]:
        add(path, mtp__some__weight=torch.ones(4, 4))
    found, extra, (finding,) = look(tmp_path, ace_config(paths), "merge")
    assert {tensor.name: tensor.merged for tensor in extra} == {
        "mtp.both.weight": True,
        "mtp.some.weight": False,
    }
    assert all(len(t.models) == (3 if t.merged else 1) for t in extra)
    assert "not all models have 1 tensor of" in finding.message
    assert str(found.donor) == paths[0]
    _, copied, said = look(tmp_path, ace_config(paths), "base")
    assert [tensor.merged for tensor in copied] == [False, False]
    assert not said


def test_layers_that_a_config_leaves_out_are_no_loss(tmp_path):
    paths = save_family(tiny_llama(), tmp_path)
    pieces = [{"sources": [{"model": paths[0], "layer_range": [0, 1]}]}]
    config = {"merge_method": "passthrough", "slices": pieces, "dtype": "float32"}
    found, extra, said = look(tmp_path, config)
    assert not (found.left)
    assert not (found.foreign)
    assert not extra
    assert not said
