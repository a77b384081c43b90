# SPDX-License-Identifier: Apache-2.0
"""Full models from adapters: as mergekit makes them, but no adapter is merged into its base."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import tiny_llama
from commands import command
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from peft import PeftModel
from peft_models import (
    CASES,
    EXPERTS,
    LINEAR,
    compare_changes,
    config_of,
    gpt2,
    mixtral,
    of_full_models,
    opt,
    save_adapters,
    tied_llama,
    train_by_chance,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from mergekit_ace.merging.output import Manifest
from mergekit_ace.naming import FileError
from mergekit_ace.training.models import local_folder

SHARDS = ("--out-shard-size", "6K")


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[str]:
    """A llama, and adapters of different ranks and targets."""
    every, some = {"target_modules": LINEAR, "r": 3}, {"target_modules": ["q_proj", "up_proj"]}
    folder = tmp_path_factory.mktemp("family")
    return save_adapters(folder, tiny_llama, every, {**every, "r": 2}, {**some, "r": 4})


def merge(config: dict, out: Path, *flags: object, fails: bool = False) -> str:
    """Merge by a config; what the command says."""
    path = out.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config))
    return command("merge", path, out, "--no-copy-tokenizer", *flags, fails=fails)


def weights(folder: Path) -> dict[str, Tensor]:
    return {
        n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()
    }


def compare(config: dict, base: str, folder: Path, theirs: dict | None = None) -> None:
    """Merge a config, and compare task vectors with those that mergekit makes of full models."""
    options = MergeOptions(
        lora_merge_cache=str(folder / "cache"), lora_merge_dtype="float32", quiet=True,
        copy_tokenizer=False,
    )  # fmt: skip
    full = MergeConfiguration.model_validate(theirs or config)
    run_merge(full, str(folder / "theirs"), options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelReference, "merged", _only_full)
        merge(config, folder / "ours")
    expected, got = weights(folder / "theirs"), weights(folder / "ours")
    assert all(got[name].dtype == tensor.dtype for name, tensor in expected.items())
    compare_changes(got, expected, weights(Path(base)))


original = ModelReference.merged


def _only_full(self, *arguments, **named):
    assert self.lora is None, f"{self} was merged into its base"
    return original(self, *arguments, **named)


METHODS = [  # `test_adapter_command.py` has those that stay in the span
    ("linear", {"weight": 0.3, "normalize": False}),  # which scales the base
    ("ties", {"weight": 0.5, "density": 0.4}),
    ("slerp", {"t": 0.3}),
]


@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_the_same_weights_as_from_full_models(family, tmp_path, method, parameters):
    paths = family[:2] if method == "slerp" else family
    compare(config_of(paths, method, **parameters), family[0], tmp_path)


KINDS = {
    "table": (tiny_llama, {"target_modules": ["embed_tokens"]}),
    "saved": (tiny_llama, CASES["saved"][1]),
    "transposed": (gpt2, CASES["transposed"][1]),
    "experts": (mixtral, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_adapter_may_hold(tmp_path, kind):
    build, options = KINDS[kind]
    paths = save_adapters(tmp_path, build, options, options)
    compare(config_of(paths, "ace_relative"), paths[0], tmp_path)


def test_experts_that_the_base_stores_one_by_one(tmp_path):
    """PEFT changes them as one tensor."""
    paths = save_adapters(tmp_path, *KINDS["experts"])
    base = mixtral()
    base.load_state_dict(load_file(Path(paths[0], "model.safetensors")))
    base.save_pretrained(paths[0])
    said = merge(config_of(paths, "ace_relative"), tmp_path / "ours", fails=True)
    assert "mlp.experts.gate_up_proj" in said
    assert "merge_and_unload" in said


def test_an_architecture_that_mergekit_infers(tmp_path):
    """mergekit itself infers none of adapters."""
    options = {"target_modules": ["q_proj", "fc1", "fc2"]}
    paths = save_adapters(tmp_path, opt, options, options)
    config = config_of(paths, "ace")
    theirs = of_full_models(config, tmp_path / "cache")
    compare(config, paths[0], tmp_path, theirs=theirs)


def test_layers_elsewhere_and_full_models(family, tmp_path):
    """Each adapter has its own layer there, the other way round in the result."""
    full = str(tmp_path / "full")
    tiny_llama(seed=5).save_pretrained(full)
    experts = [f"{family[0]}+{path}" for path in family[1:3]]
    slices = [
        {"sources": [{"model": model, "layer_range": [n, n + 1]} for model in models]}
        for n, models in ((1, [family[0], *experts]), (0, [family[0], experts[1], full]))
    ]
    config = {"merge_method": "ace", "base_model": family[0], "slices": slices, "dtype": "float32"}
    config["parameters"] = {"weight": 0.7}
    compare(config, family[0], tmp_path)


def test_dtypes_and_lines_of_a_report(family, tmp_path):
    report = tmp_path / "report.jsonl"
    config = config_of(family, "ace", report=str(report))
    config |= {"dtype": "bfloat16", "out_dtype": "float16"}
    merge(config, tmp_path / "out", *SHARDS)
    merged = weights(tmp_path / "out")
    assert {tensor.dtype for tensor in merged.values()} == {torch.float16}
    lines = {line["tensor"]: line for line in map(json.loads, report.read_text().splitlines())}
    assert lines.keys() == merged.keys()
    assert lines["model.norm.weight"]["rule"] == "base"
    assert lines["model.layers.0.self_attn.k_proj.weight"]["weight"] == [1, 1, 0]
    assert lines["model.layers.0.self_attn.q_proj.weight"]["shape"] == [32, 32]


def test_a_merge_that_goes_on(family, tmp_path):
    """What is finished is kept, unless an adapter was trained further."""
    paths = [family[0], str(tmp_path / "own"), family[2]]
    options = {"target_modules": LINEAR, "r": 3, "lora_alpha": 1}
    train_by_chance(tiny_llama, Path(paths[1]), 7, **options)
    config, out = config_of(paths, "ace"), tmp_path / "out"
    merge(config, out, *SHARDS)
    whole = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    lost = sorted(whole)[1::2]
    for name in lost:
        (out / name).unlink()
    said = merge(config, out, *SHARDS, "--resume", "--workers", 2)
    assert f"{len(whole) - len(lost)} of {len(whole)} shards are finished and kept" in said
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == whole
    assert Manifest.read(out).complete
    train_by_chance(tiny_llama, Path(paths[1]), 8, **options)
    said = merge(config, out, *SHARDS, "--resume", fails=True)
    assert "own/adapter_model.safetensors" in said


TIED = [
    {"target_modules": ["embed_tokens", "q_proj"]},
    {"target_modules": ["lm_head"]},
    {"target_modules": ["lm_head", "embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("options", TIED, ids=str)
def test_tied_tensors_are_merged_on_an_untied_base(tmp_path, options):
    """The remedy of the error gives what PEFT's model answers."""
    paths = save_adapters(tmp_path, tied_llama, options)
    said = merge(config_of(paths, "ace"), tmp_path / "out", fails=True)
    assert "model.embed_tokens.weight and lm_head.weight tied, as one tensor" in said
    # mergekit-yaml and training merge by PEFT, which unties what is saved whole
    factors = "modules_to_save" not in options
    checked = command("check", tmp_path / "out.yml", fails=factors)
    assert ("tied, as one tensor" in checked) == factors
    with pytest.raises(FileError, match="tied") if factors else nullcontext():
        local_folder(f"{paths[0]}+{paths[1]}", tmp_path, False)

    base = LlamaForCausalLM.from_pretrained(paths[0])
    untied = tiny_llama(tie_word_embeddings=False)
    untied.load_state_dict(base.state_dict())
    untied.save_pretrained(tmp_path / "untied")
    merge(config_of([str(tmp_path / "untied"), paths[1]], "ace"), tmp_path / "out")
    tokens = torch.arange(3, 15)[None]
    expected = PeftModel.from_pretrained(base, paths[1])(tokens).logits
    got = LlamaForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
