# SPDX-License-Identifier: Apache-2.0
"""Whether a result is whole: what mergekit leaves out of it, and what transformers makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from catalogue import findings
from checkpoints import LLAMA, ace_config, add, configure, rewrite, save_family, tiny_llama
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from test_architectures import MODELS, SAVE, small_model
from transformers import GemmaConfig, GemmaForCausalLM

from mergekit_ace.check.check import treat_unplanned
from mergekit_ace.check.loading import merged_model, verify_model
from mergekit_ace.files.models import read_checkpoint
from mergekit_ace.merge_config import Finding
from mergekit_ace.naming import ConfigError
from mergekit_ace.planning import UnplannedTensor, plan_merge, read_merge_config

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def left_out(
    folder: Path, config: dict, treatment: str = "error"
) -> tuple[list[UnplannedTensor], list[Finding]]:
    """Return what is planned beside mergekit's plan, and what is said of it."""
    path = folder / "merge.yml"
    path.write_text(yaml.safe_dump(config))
    parsed, source = read_merge_config(path)
    plan = plan_merge(parsed, source, MergeOptions())
    checkpoints = {model: read_checkpoint(model) for model in parsed.referenced_models()}
    return treat_unplanned(plan, checkpoints, treatment)


def saved(name: str, folder: Path, **save) -> list[str]:
    return save_family(small_model(name), folder, **save)


def problem(result: str | Path, origin: str | Path) -> str:
    origin = Path(origin)
    return verify_model(Path(result), merged_model(origin), origin, trust_remote_code=False)


@pytest.mark.parametrize("name", MODELS)
def test_what_mergekit_knows_is_whole(tmp_path, name):
    """Renamed, packed and tied tensors are no false alarms, nor are shards."""
    paths = saved(name, tmp_path, max_shard_size="20KB", **SAVE.get(name, {}))
    assert left_out(tmp_path, ace_config(paths)) == ([], [])
    assert problem(paths[0], "never looked at") == ""


def test_biases_that_the_architecture_does_not_name(tmp_path):
    """However few entries they have: transformers would draw them at random."""
    paths = save_family(tiny_llama(mlp_bias=True), tmp_path)
    _, (finding,) = left_out(tmp_path, ace_config(paths))
    assert "_proj.bias" in finding.message


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
    ],
)
def test_buffers_are_no_loss(tmp_path, name, buffers):
    paths = saved(name, tmp_path)
    for path in paths[:2]:
        add(path, **buffers)
    assert left_out(tmp_path, ace_config(paths)) == ([], [])


def test_tied_heads_and_layers_that_a_config_leaves_out_are_no_loss(tmp_path):
    """mergekit's Gemma has no head, as the files of the base have none."""
    torch.manual_seed(0)
    paths = save_family(GemmaForCausalLM(GemmaConfig(**LLAMA, head_dim=8)), tmp_path)
    head = load_file(f"{paths[1]}/model.safetensors")["model.embed_tokens.weight"]
    add(paths[1], lm_head__weight=head)
    assert left_out(tmp_path, ace_config(paths)) == ([], [])
    pieces = [{"sources": [{"model": paths[0], "layer_range": [0, 1]}]}]
    config = {"merge_method": "passthrough", "slices": pieces, "dtype": "float32"}
    assert left_out(tmp_path, config) == ([], [])


@pytest.mark.parametrize("treatment", ["error", "merge"])
def test_what_only_an_expert_has(tmp_path, treatment):
    paths = save_family(tiny_llama(), tmp_path)
    add(paths[2], v_head__summary__weight=torch.ones(1, 32))
    extra, (finding,) = left_out(tmp_path, ace_config(paths), treatment)
    assert not extra
    assert finding.level == "warning"
    assert f"1 tensor of {paths[2]} (v_head.summary.weight)" in finding.message
    assert f"in the same way as {paths[0]}" in finding.remedy


def test_an_expert_with_other_names(tmp_path):
    """As transformers has them in memory, and as the Hub has them."""
    saved("vit", tmp_path / "memory", **SAVE["vit"])
    saved("vit", tmp_path / "hub")
    config = ace_config([str(tmp_path / "memory" / "base"), str(tmp_path / "hub" / "expert0")])
    told = findings(tmp_path, config)
    assert "expert0 lacks 32 of" in told["error"]
    assert "the result lacks 32 tensors of hub/expert0" in told["warning"]


def test_what_some_models_lack_is_copied(tmp_path):
    """Heads that transformers does not load: other programs predict several tokens with them."""
    paths = save_family(tiny_llama(), tmp_path)
    for path in paths:
        add(path, mtp__both__weight=torch.ones(4, 4), mtp__steps=torch.arange(3))
    for path in paths[:2]:
        add(path, mtp__some__weight=torch.ones(4, 4))
    _, (finding,) = left_out(tmp_path, ace_config(paths))
    assert finding.level == "error"
    assert "2 tensors of" in finding.message
    assert "(mtp.both.weight, mtp.some.weight)" in finding.message
    extra, (finding,) = left_out(tmp_path, ace_config(paths), "merge")
    models = {tensor.name: sorted(map(str, tensor.models)) for tensor in extra}
    assert models == {"mtp.both.weight": paths, "mtp.some.weight": paths[:1]}
    assert [tensor.merged for tensor in extra] == [name == "mtp.both.weight" for name in models]
    assert f"not all models have 1 tensor of {paths[0]}" in finding.message
    copied, told = left_out(tmp_path, ace_config(paths), "base")
    assert [tensor.merged for tensor in copied] == [False, False]
    assert not told


@pytest.mark.parametrize("name", ["gpt2", "vit", "t5", "mixtral"])
def test_a_tensor_that_is_missing_or_too_large(tmp_path, name):
    """One expert less is another shape, or fits together no longer."""
    result, origin = saved(name, tmp_path, experts=1)
    whole = load_file(f"{result}/model.safetensors")
    gone = next(n for n in whole if "layer" in n or ".h." in n or "block." in n)
    rewrite(result, lambda tensors: tensors.pop(gone))
    assert problem(result, origin)
    larger = torch.cat([whole[gone], whole[gone][..., :1]], dim=-1)
    rewrite(result, lambda tensors: tensors.update({gone: larger}))
    assert problem(result, origin)


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """A result and the model whose config it has."""
    return save_family(tiny_llama(), tmp_path, experts=1)


def test_faults_are_named(folders):
    def spoil(tensors: dict) -> None:
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop(UP)
        tensors["lm_head.weight"] = torch.zeros(41, 32)

    rewrite(folders[0], spoil)
    text = problem(*folders)
    assert f"it lacks 1 tensors: {UP}" in text
    assert "no place for 1 tensors: model.layers.7.mlp.up_proj.weight" in text
    assert "lm_head.weight (41, 32) instead of (40, 32)" in text


def test_faults_of_the_origin_are_not_the_merges(folders):
    for folder in folders:
        rewrite(folder, lambda tensors: tensors.pop(UP))
        add(folder, odd=torch.zeros(2))
    assert problem(*folders) == ""
    rewrite(folders[0], lambda tensors: tensors.pop(DOWN))
    assert f"it lacks 1 tensors: {DOWN}" in problem(*folders)


def test_a_model_that_transformers_does_not_load_either(folders):
    for folder in folders:
        rewrite(folder, lambda tensors: tensors.clear())
        configure(folder, hidden_act="none such")
    with pytest.raises(ConfigError, match="expert0 either"):
        problem(*folders)


def test_folders_of_any_name(folders, tmp_path):
    result = Path(folders[0]).rename(tmp_path / "merged+by@me")
    assert problem(result, folders[1]) == ""
    configure(result, intermediate_size=50)
    assert "6 tensors have another shape than in its config" in problem(result, folders[1])
