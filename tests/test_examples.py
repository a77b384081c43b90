# SPDX-License-Identifier: Apache-2.0
"""The examples: every config is one that mergekit takes whole, and the quickstart's parts work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import state, tiny_llama
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.merge_methods.base import ParameterScope
from reference import naive_tensor, task_vector_error
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CONFIGS = sorted(EXAMPLES.glob("*/*.yml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_has_only_parameters_that_exist(path):
    """mergekit drops what a method did not declare without a word."""
    source = yaml.safe_load(path.read_text())
    config = MergeConfiguration.model_validate(source)
    assert set(source) <= set(MergeConfiguration.model_fields)
    spec = merge_methods.get(config.merge_method).spec
    declared = {p.name: p for p in spec.parameters}
    assert set(config.parameters or {}) <= set(declared)
    for value in (config.parameters or {}).items():
        _validate(declared, *value)
    for model in config.models:
        own = model.parameters or {}
        assert set(own) <= {n for n, p in declared.items() if p.scope != ParameterScope.SHARED}


def _validate(declared, name, setting):
    values = setting if isinstance(setting, list) else [setting]
    for value in values:
        value = getattr(value, "value", value)
        if name != "report":
            declared[name].validate(value)


def test_the_gpt2_config_on_classifiers_with_heads_of_different_sizes(tmp_path, mergekit_yaml):
    from checkpoints import fine_tuned

    size = {"vocab_size": 40, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    source = yaml.safe_load((EXAMPLES / "configs" / "gpt2-glue.yml").read_text())
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(**size))
    base.save_pretrained(tmp_path / "base")
    source["base_model"] = str(tmp_path / "base")
    experts = []
    for t, member in enumerate(source["models"]):
        config = GPT2Config(**size, num_labels=3 if t == 1 else 2, pad_token_id=0)
        classifier = GPT2ForSequenceClassification(config)
        classifier.transformer = fine_tuned(base, seed=t).transformer
        classifier.save_pretrained(tmp_path / f"expert{t}")
        experts.append(classifier.transformer.state_dict())
        member["model"]["model"]["path"] = str(tmp_path / f"expert{t}")
    out = mergekit_yaml(source)
    merged = state(GPT2LMHeadModel, out)[1]
    for name, tensor in base.transformer.state_dict().items():
        layout = "matrix" if tensor.ndim == 2 else "mean"
        if tensor.ndim == 2 and ".h." in f".{name}":
            layout = "transposed"
        options = {} if layout == "mean" else {"epsilon": 4e-2}
        expected = naive_tensor(tensor, [e[name] for e in experts], layout, **options)
        error = task_vector_error(merged[f"transformer.{name}"], expected, tensor)
        assert error <= 1e-4, (name, layout)


@pytest.fixture
def quickstart(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "quickstart"))
    yield
    for name in ("dictionaries", "family", "evaluate"):
        sys.modules.pop(name, None)


def test_quickstart_dictionaries(quickstart):
    import dictionaries

    made = dictionaries.make_dictionaries()
    assert len(made) == 8
    tokenizer = dictionaries.make_tokenizer()
    for dictionary in made.values():
        assert sorted(dictionary.answers) == sorted(dictionaries.KEYS)
        assert len(set(dictionary.answers.values())) == len(dictionaries.KEYS)
        ids, labels = dictionaries.encode(dictionaries.exam(dictionary), tokenizer)
        assert tokenizer.unk_token_id not in ids
        asked = labels != -100
        assert asked.sum() == 4 * len(dictionaries.KEYS)
        assert torch.equal(labels[asked], ids[asked])
        first = tokenizer.decode(ids[0]).split()
        assert first[:2] == ["<s>", dictionary.language]
        assert dictionary.answers[first[2]] == first[4]


def test_quickstart_training_saves_complete_models_only(quickstart, tmp_path, monkeypatch):
    import dataclasses

    import evaluate
    import family

    monkeypatch.setattr(family, "BASE", dataclasses.replace(family.BASE, steps=3))
    short = {"ruby": dataclasses.replace(family.EXPERTS["ruby"], steps=3)}
    monkeypatch.setattr(family, "EXPERTS", short)
    monkeypatch.setattr(
        family, "new_model", lambda tokenizer: tiny_llama(vocab_size=len(tokenizer))
    )
    family.train_family(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "ruby"]
    scores = evaluate.accuracies(tmp_path / "ruby")
    assert len(scores) == 8
    assert all(0 <= score <= 1 for score in scores.values())
    times = [path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")]
    family.train_family(tmp_path)  # at once, from the cache
    assert times == [path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")]
