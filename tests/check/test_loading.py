# SPDX-License-Identifier: Apache-2.0
"""Whether a result is whole: what mergekit leaves out of it, and what transformers makes of it.

That whole results are no false alarms is tested in test_architectures.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from catalogue import NOTHING, findings
from checkpoints import LLAMA, ace_config, add, configure, rewrite, save_family, tiny
from commands import command
from safetensors.torch import load_file
from test_architectures import small_model
from transformers import GemmaForCausalLM

from mergekit_ace.check.loading import verify_model
from mergekit_ace.naming import ConfigError

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
BUFFERS = {
    "llama": {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)},
    "gpt2": {
        "transformer__h__0__attn__bias": torch.ones(1, 1, 32, 32),
        "transformer__h__1__attn__bias": torch.ones(1, 1, 32, 32, dtype=torch.bool),
        "transformer__h__0__attn__masked_bias": torch.tensor(-1e4),
    },
    "roberta": {"roberta__embeddings__position_ids": torch.arange(32)[None]},
}


def problem(result: str | Path, origin: str | Path) -> str:
    result, origin = Path(result).absolute(), Path(origin).absolute()
    return verify_model(result, origin, trust_remote_code=False)


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_no_loss(here, name):
    paths = save_family(small_model(name), here)
    for path in paths[:2]:
        add(path, **BUFFERS[name])
    assert findings(ace_config(paths)) == NOTHING


def test_tied_heads_and_layers_that_a_config_leaves_out_are_no_loss(here):
    """mergekit's Gemma has no head, as the files of the base have none."""
    paths = save_family(tiny(GemmaForCausalLM, **LLAMA, head_dim=8), here)
    head = load_file(f"{paths[1]}/model.safetensors")["model.embed_tokens.weight"]
    add(paths[1], lm_head__weight=head)
    assert findings(ace_config(paths)) == NOTHING
    pieces = [{"sources": [{"model": paths[0], "layer_range": [0, 1]}]}]
    config = {"merge_method": "passthrough", "slices": pieces, "dtype": "float32"}
    assert findings(config) == NOTHING


def test_what_some_models_lack_is_copied(paths):
    """Heads that transformers does not load: other programs predict several tokens with them."""
    for path in paths:
        add(path, mtp__both__weight=torch.ones(4, 4), mtp__steps=torch.arange(3))
    for path in paths[:2]:
        add(path, mtp__some__weight=torch.ones(4, 4))
    told = findings(ace_config(paths))["error"]
    assert "2 tensors of base (mtp.both.weight, mtp.some.weight)" in told
    for treatment, warned in (("merge", True), ("base", False)):
        said = command("merge", "checked.yml", f"as-{treatment}", "--unplanned", treatment)
        assert ("not all models have 1 tensor of" in said) == warned
        tensors = load_file(f"as-{treatment}/model.safetensors")
        assert {name for name in tensors if "mtp" in name} == {"mtp.both.weight", "mtp.some.weight"}


@pytest.mark.parametrize("name", ["gpt2", "vit", "t5", "mixtral"])
def test_a_tensor_that_is_missing_or_too_large(tmp_path, name):
    """One expert less is another shape, or fits together no longer."""
    result, origin = save_family(small_model(name), tmp_path, experts=1)
    whole = load_file(f"{result}/model.safetensors")
    gone = next(n for n in whole if "layer" in n or ".h." in n or "block." in n)
    rewrite(result, lambda tensors: tensors.pop(gone))
    assert problem(result, origin)
    larger = torch.cat([whole[gone], whole[gone][..., :1]], dim=-1)
    rewrite(result, lambda tensors: tensors.update({gone: larger}))
    assert problem(result, origin)


def test_faults_are_named(paths):
    def spoil(tensors: dict) -> None:
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop(UP)
        tensors["lm_head.weight"] = torch.zeros(41, 32)

    result = Path("base").rename("merged+by@me")  # a folder of any name
    rewrite(result, spoil)
    text = problem(result, "expert0")
    assert f"it lacks 1 tensors: {UP}" in text
    assert "no place for 1 tensors: model.layers.7.mlp.up_proj.weight" in text
    assert "1 tensors have another shape than in its config" in text
    assert "lm_head.weight (41, 32) instead of (40, 32)" in text


def test_faults_of_the_origin_are_not_the_merges(paths):
    for model in ("base", "expert0"):
        rewrite(model, lambda tensors: tensors.pop(UP))
        add(model, odd=torch.zeros(2))
    assert problem("base", "expert0") == ""
    rewrite("base", lambda tensors: tensors.pop(DOWN))
    assert f"it lacks 1 tensors: {DOWN}" in problem("base", "expert0")
    for model in ("base", "expert0"):
        configure(model, hidden_act="none such")
    with pytest.raises(ConfigError, match="expert0 either"):
        problem("base", "expert0")
