# SPDX-License-Identifier: Apache-2.0
"""A merge says first what is wrong with it, and at the end whether its result is whole.

With `--try`, base and result continue a prompt.
"""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path

import pytest
import torch
from checkpoints import (
    LLAMA,
    ace_config,
    add,
    configure,
    rewrite,
    save_family,
    save_tokenizer,
    tiny,
    tiny_llama,
)
from commands import command
from safetensors.torch import load_file
from sharded import SHARDS, VOCABULARY, linear
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from mergekit_ace.merging.output import Manifest

PROMPT = "t1 t2 t3"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def paths(tmp_path) -> list[str]:
    """A family with tokenizers, each model in one file."""
    return save_talkers(tmp_path, tiny_llama())


def save_talkers(folder: Path, model) -> list[str]:
    paths = save_family(model, folder)
    for path in paths:
        save_tokenizer(path, VOCABULARY)
    return paths


def test_errors_end_it_before_it_starts_and_warnings_stop_nothing(tmp_path, paths, merge):
    text = merge(ace_config(paths, parameters={"epsilom": 1}), fails=True)
    assert "did you mean 'epsilon'?" in text
    assert "Nothing was merged; --no-check leaves this check out" in text
    assert not (tmp_path / "merged").exists()
    for flag in ("--no-write-model-card", "--quiet"):
        said = merge(ace_config(paths, dtype="bfloat16"), flag, "--overwrite")
        assert ("warning: `dtype: bfloat16` rounds" in said) == (flag != "--quiet")


def test_a_result_that_lacks_tensors_is_refused_before_it_is_written(tmp_path, merge):
    """Of a config that merges only some modules of its models."""
    model = tiny_model("T5ForConditionalGeneration", "t5", layers=1)
    settings = linear(save_family(model, tmp_path))
    settings["modules"] = {"decoder": {"models": settings.pop("models")}}
    text, out = merge(settings, fails=True), tmp_path / "merged"
    assert "whole: it lacks" in text
    assert "encoder.block.0" in text
    assert not out.exists()
    told = merge(settings, "--no-check")
    assert f"{out} is no model that transformers loads whole: it lacks" in told
    assert Manifest.read(out).complete


@pytest.mark.parametrize("module", ["", "default"])
def test_more_layers_of_two_kinds(tmp_path, merge, module):
    """mergekit-yaml fails over these at its very end."""
    kinds = ["full_attention", "sliding_attention"]
    settings = {**LLAMA, "layer_types": kinds, "use_sliding_window": True}
    paths = save_family(tiny(Qwen2ForCausalLM, **settings), tmp_path)
    pieces = [
        {"sources": [{"model": path, "layer_range": place}]}
        for path, place in zip(paths[1:], ([0, 2], [1, 2]), strict=True)
    ]
    form = {"modules": {module: {"slices": pieces}}} if module else {"slices": pieces}
    merge({"merge_method": "passthrough", "dtype": "float32", **form})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.layer_types == [*kinds, "sliding_attention"]
    said = command("check", tmp_path / "merge.yml", fails=True)
    assert "the result has 3 layers, and its config.json would have 2 `layer_types`" in said


@pytest.mark.parametrize(("moved", "flags"), [(0.0, ()), (0.02, SHARDS)])
def test_heads_that_experts_of_a_tied_base_store(tmp_path, moved, flags, merge):
    paths = save_family(tiny_llama(tie_word_embeddings=True), tmp_path)
    noise = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    for path in paths[1:]:
        tied = load_file(Path(path, "model.safetensors"))[EMBEDDING]
        add(path, lm_head__weight=tied + moved * noise)
    merge(ace_config(paths), *flags)
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written["tie_word_embeddings"] is (moved == 0)


def test_tensors_that_all_models_keep_in_float32(tmp_path, paths, merge):
    """Nobody has changed them, and they are in the result bit for bit."""
    norm = torch.rand(32, generator=torch.Generator().manual_seed(1))
    for path in paths:
        rewrite(path, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
        add(path, model__norm__weight=norm)
    merge(ace_config(paths, dtype="bfloat16", out_dtype="bfloat16"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged.pop("model.norm.weight"), norm)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path(RAN).touch()

class TinyConfig(LlamaConfig):
    model_type = "tiny-code"

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""
AUTO_MAP = {"AutoConfig": "tiny.TinyConfig", "AutoModelForCausalLM": "tiny.TinyForCausalLM"}


@pytest.mark.parametrize("trusted", [True, False])
def test_models_that_bring_code(tmp_path, paths, monkeypatch, merge, trusted):
    """With --trust-remote-code they are checked as well, and the result brings the code.

    Without, and where transformers has an architecture of its own, it is not run.
    """
    cache = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(cache, str(tmp_path / "modules"))
    own = {"architectures": ["TinyForCausalLM"], "model_type": "tiny-code"} if trusted else {}
    for path in paths:
        Path(path, "tiny.py").write_text(CODE.replace("RAN", repr(str(tmp_path / "ran"))))
        configure(path, auto_map=AUTO_MAP, **own)
    said = merge(ace_config(paths), *["--trust-remote-code"] * trusted, "--try", "t1 t2")
    assert "not checked" not in said
    assert "loss per token" in said
    assert (tmp_path / "ran").exists() == trusted
    if trusted:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
        assert type(model).__name__ == "TinyForCausalLM"


def test_architectures_that_transformers_does_not_know(paths, merge):
    """Nobody can say what they need, and the merge is complete."""
    for path in paths:
        configure(path, architectures=["LLaMaForCausalLM"], model_type="vit")
    said = merge(linear(paths), "--no-check")
    assert "whether the result loads was not checked" in said


def trials(text: str) -> list[tuple[str, str, float]]:
    """What base and result have said, and their losses."""
    lines = re.findall(r"^(.*?): (['\"].*), loss per token (.*)$", text, re.MULTILINE)
    return [(model, ast.literal_eval(said), float(loss)) for model, said, loss in lines]


@torch.no_grad()
def test_a_trial_says_what_transformers_says(tmp_path, paths, merge):
    found = trials(merge(ace_config(paths), "--try", PROMPT))
    assert [model for model, *_ in found] == [paths[0], str(tmp_path / "merged")]
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    ids, whole = (
        tokenizer(text, return_tensors="pt").input_ids for text in (PROMPT, PROMPT + found[0][1])
    )
    for folder, said, loss in found:
        model = AutoModelForCausalLM.from_pretrained(folder)
        written = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        assert said == tokenizer.decode(written, skip_special_tokens=True)
        logits = model(whole).logits[0, :-1].double().log_softmax(-1)
        mean = -logits.gather(1, whole[0, 1:, None]).mean()
        assert math.isclose(loss, float(mean), rel_tol=1e-4)


@pytest.mark.parametrize(
    ("kind", "prompt"), [("t5", PROMPT), ("vit", PROMPT), ("llama", " "), ("llama", "t39")]
)
def test_other_trials(tmp_path, kind, prompt, merge):
    """Of an encoder with a decoder; and some that fail, though the merge is complete.

    These are of models without text, prompts of nothing, and tokens without a row.
    """
    if kind == "t5":
        model = tiny_model("T5ForConditionalGeneration", "t5", layers=1)
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
        paths = save_talkers(tmp_path, model)
    elif kind == "vit":
        paths = save_family(tiny_model("ViTForImageClassification", "vit", layers=1), tmp_path)
    else:
        paths = save_talkers(tmp_path, tiny_llama(vocab_size=30))
    fails = kind != "t5"
    text = merge(linear(paths), "--unplanned", "base", "--try", prompt, fails=fails)
    assert ("complete, and --try failed, which needs a model that generates" in text) == fails
    assert [math.isfinite(loss) for *_, loss in trials(text)] == ([] if fails else [True, True])
    assert Manifest.read(tmp_path / "merged").complete
