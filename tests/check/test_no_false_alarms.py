# SPDX-License-Identifier: Apache-2.0
"""Merges that are all right, of which `check` says nothing, or a warning that names the matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from catalogue import NAMES, NOTHING, family_config, findings, save_tokenizer
from checkpoints import LLAMA, ace_config, add, configure, rewrite, save_family, tiny_llama
from measured_files import measured_checkpoints, needs_statistics
from safetensors.torch import load_file
from test_architectures import VISION, small_model
from test_mistakes import each, first, listing, method, modules, parameters, slices, top
from test_mistakes_in_checkpoints import Make, adapter, words
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from mergekit_ace.plugin import our_methods

EXAMPLES = Path(__file__).parents[2] / "examples"
# A token for each row of the embedding, of which one is for unknown words.
ALL = ["a", *(f"t{n}" for n in range(1, LLAMA["vocab_size"]))]
ON_MLP = {"filter": "mlp", "value": 1e-3}

CONFIGS = {
    "rounded at the end": top(out_dtype="bfloat16"),
    "filters": parameters(epsilon=[{"filter": "mlp.up", "value": 1}, ON_MLP, {"value": 1e-5}]),
    "a star": parameters(epsilon=[ON_MLP, {"filter": "*", "value": 1}]),
    "normalised and refined": parameters(
        spectral_refinement="always", adaptive_normalization="always"
    ),
    "no parameters": top(parameters=None),
    "weights": each(weight=[{"filter": "mlp", "value": 0}, {"value": 0.5}]),
    "one of no weight": first(parameters={"weight": 0}),
    "the base among the models": listing(lambda m, base: m.insert(0, {"model": base})),
    "a module's filters": modules("default", parameters={"epsilon": [ON_MLP]}),
    "weights of slices": slices(lambda p, sources: sources[1].update(parameters={"weight": 2})),
    "ties": method("ties", weight=0.5, density=0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(family, name):
    assert findings(family, CONFIGS[name](family_config(family))) == NOTHING


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_method_at_its_defaults(family, tmp_path, method):
    config = family_config(family) | {"merge_method": method.spec.name}
    if method.spec.name == "statsmerging":
        config = each(weight=0.3)(config)
    if needs_statistics(method):
        paths = [config["base_model"], *(model["model"] for model in config["models"])]
        config["parameters"] = {"statistics": measured_checkpoints(tmp_path, paths)}
    assert findings(family, config) == NOTHING


def test_passthrough_and_slerp(family):
    base, expert = (str(family / name) for name in ("base", "expert0"))
    pair = {"merge_method": "slerp", "base_model": base, "parameters": {"t": [0, 0.5, 1]}}
    pair |= {"models": [{"model": base}, {"model": expert}], "dtype": "float32"}
    assert findings(family, pair) == NOTHING
    copied = {"sources": [{"model": base, "layer_range": [0, 2]}]}
    plain = {"merge_method": "passthrough", "slices": [copied], "dtype": "float32"}
    assert findings(family, plain) == NOTHING


def tokenizer_source(source: str, *letters: list[str]) -> Make:
    def make(paths, config):
        words(*letters)(paths, config)
        config["tokenizer"] = {"source": source}

    return make


def template(paths, config) -> None:
    words("abcd", "abcd", "abcd")(paths, config)
    config["chat_template"] = "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"


def without_head_in_the_config(paths, config) -> None:
    for path in paths:
        configure(path, tie_word_embeddings=True)
        rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))


def sharded(paths, config) -> None:
    shutil.rmtree(paths[1])
    tiny_llama(3).save_pretrained(paths[1], max_shard_size="20KB")


def of_transformers_4(paths, config) -> None:
    """Rotary positions, which transformers 5 writes into `rope_parameters`."""
    file = Path(paths[1]) / "config.json"
    content = json.loads(file.read_text())
    theta = content.pop("rope_parameters")["rope_theta"]
    file.write_text(json.dumps(content | {"rope_theta": theta, "rope_scaling": None}))


def counters(paths, config) -> None:
    """In whole numbers, such as the batches that a batch norm counts."""
    for path in paths:
        add(path, model__norm__weight=torch.ones(32, dtype=torch.int64))


CHECKPOINTS: dict[str, Make] = {
    "the base's tokens": tokenizer_source("base", ALL, ALL[::-1], [*ALL, "b"]),
    "all tokens": tokenizer_source("union", ALL, ALL[::-1], [*ALL, "b"]),
    "a template": template,
    "tied": without_head_in_the_config,
    "shards": sharded,
    "an adapter": adapter(),
    "an adapter of a quantised copy": adapter("x/base-bnb-4bit"),
    "a config of transformers 4": of_transformers_4,
    "counters": counters,
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(family, tmp_path, name):
    shutil.copytree(family, tmp_path, dirs_exist_ok=True)
    config = family_config(tmp_path)
    flags = CHECKPOINTS[name]([str(tmp_path / name) for name in NAMES], config) or ()
    assert findings(tmp_path, config, *flags) == NOTHING


@pytest.mark.parametrize("stored", [(0,), (1,)])
def test_tied_heads_that_some_models_store(tmp_path, stored):
    paths = save_family(tiny_llama(tie_word_embeddings=True), tmp_path)
    config = ace_config(paths)
    for n in stored:
        head = load_file(f"{paths[n]}/model.safetensors")["model.embed_tokens.weight"]
        add(paths[n], lm_head__weight=head.clone())
    config["parameters"] = {"layout": [{"filter": "lm_head", "value": "mean"}, {"value": "auto"}]}
    assert findings(tmp_path, config) == NOTHING


@pytest.mark.parametrize("name", ["mixtral-8x7b-moe", "lora-experts", "gemma-3-4b-vision"])
def test_examples(tmp_path, monkeypatch, name):
    """The configs of the examples, on tiny models of the same architecture."""
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((EXAMPLES / "configs" / f"{name}.yml").read_text())
    torch.manual_seed(0)
    if name == "mixtral-8x7b-moe":
        model = small_model("mixtral")
    elif name == "gemma-3-4b-vision":
        text = {**LLAMA, "head_dim": 8}
        settings = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
        model = Gemma3ForConditionalGeneration(settings)
    else:
        model = tiny_llama()
    paths = save_family(model, tmp_path, experts=len(config["models"]))
    for path in paths:
        save_tokenizer(path, ALL)
    flags = ()
    if name == "lora-experts":
        single = ace_config(paths)
        flags = adapter()(paths, single) or ()
        paths = [paths[0], single["models"][0]["model"]]
        config["models"] = config["models"][:1]
    config["base_model"] = paths[0]
    config["models"] = [{"model": path} for path in paths[1:]]
    told = findings(tmp_path, config, *flags)
    of_mergekit = told.pop("warning")
    assert told == {"error": ""}
    by_files = name != "lora-experts"
    assert of_mergekit.startswith("warning: mergekit has no description" if by_files else "")
    assert of_mergekit.count("→") == by_files
