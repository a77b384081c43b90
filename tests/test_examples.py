# SPDX-License-Identifier: Apache-2.0
"""Every config of the examples is one that mergekit takes whole; the small programs run."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from checkpoints import fine_tuned, state
from configs import check_config, read_config
from example_modules import EXAMPLES, examples
from reference import naive_tensor, task_vector_error
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, LlamaConfig

from mergekit_ace.training.config import TrainConfig

CONFIGS = sorted({*EXAMPLES.glob("*/*.yml")} - {EXAMPLES / "evidence" / "sources.yml"})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_valid(path):
    check_config(read_config(path.read_text(encoding="utf-8")))


def small_llama(**settings) -> LlamaConfig:
    """Return the config of the quickstart's models with fewer numbers."""
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    return LlamaConfig(**settings | size)


@pytest.fixture
def quickstart(example):
    """Import a module of the quickstart, whose models are small."""
    example("quickstart", "family").LlamaConfig = small_llama
    return partial(example, "quickstart")


def test_the_questions_of_the_quickstart(quickstart, tmp_path):
    """What train.yml reads: questions of one language each, without a single answer."""
    questions, dictionaries = quickstart("questions"), quickstart("dictionaries")
    questions.write_questions(tmp_path / "questions")
    config = TrainConfig.model_validate(
        read_config((EXAMPLES / "quickstart" / "train.yml").read_text())
    )
    assert [name for name, _ in config.sources] == [*dictionaries.NEW_LANGUAGES, "rehearsal"]
    for name, data in config.sources:
        lines = (tmp_path / data.path).read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)[data.prompt] for line in lines]
        assert len(texts) == questions.COUNT
        known = set(dictionaries.OLD_LANGUAGES if name == "rehearsal" else (name,))
        assert {text.split()[0] for text in texts} == known
        words = {word for text in texts for word in text.split()}
        assert not words & set(dictionaries.invented_words())
        assert words & set(dictionaries.KEYS) <= set(dictionaries.ASKED)


@pytest.mark.usefixtures("in_process")
def test_adapters_merged_both_ways(example, run_example, tmp_path, monkeypatch):
    """Trained for a few steps: adapters and full merge are one model, and say so."""
    program = example("adapters", "run")
    example("quickstart", "family").LlamaConfig = small_llama
    shutil.copy(EXAMPLES / "adapters" / "ace.yml", tmp_path)
    monkeypatch.setattr(program, "HERE", tmp_path)
    monkeypatch.setattr(program, "train_family", partial(program.train_family, steps=3))
    monkeypatch.chdir(tmp_path)  # back in the end
    shown = run_example("adapters", "run")
    for row in ("base", "adapter topaz", "full merge", "merged adapter", "merged, rank 16"):
        assert f"\n{row} " in shown
    found = re.findall(r"\n(.*): (\S+) from the full merge .* (\d+) of (\d+) answers", shown)
    (whole, near, same, count), (cut, far, *_) = found
    assert (whole, cut) == ("merged adapter", "merged, rank 16")
    assert float(near) < 1e-5 < float(far)
    assert int(same) >= 0.99 * int(count)
    sizes = [(tmp_path / "output" / name).stat().st_size for name in (
        "adapter/adapter_model.safetensors", "adapter-16/adapter_model.safetensors",
    )]  # fmt: skip
    assert sizes[0] > 2 * sizes[1]


def test_the_gpt2_config_on_classifiers_with_heads_of_different_sizes(tmp_path, mergekit_yaml):
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
        expected = naive_tensor(tensor, [e[name] for e in experts], layout)
        error = task_vector_error(merged[f"transformer.{name}"], expected, tensor)
        assert error <= 1e-4, (name, layout)


@pytest.fixture(scope="module")
def trained_quickstart(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "family"
    with examples() as load:
        family = load("quickstart", "family")
        family.LlamaConfig = small_llama
        family.train_family(folder, steps=3)
    return folder


@pytest.fixture
def tiny_family(trained_quickstart, tmp_path) -> Path:
    """The quickstart's own family, a few steps of training each, in a folder of its own."""
    return Path(shutil.copytree(trained_quickstart, tmp_path / "family"))


@pytest.fixture
def tiny_quickstart(quickstart, tiny_family, in_process, monkeypatch):
    """The quickstart on the tiny family, its merges in this process."""
    program = quickstart("quickstart")

    def one_after_the_other(workers):
        """An output runner that swaps sys.stdout cannot be shared by threads."""
        return contextlib.nullcontext(SimpleNamespace(map=map))

    here = tiny_family.parent
    for path in (EXAMPLES / "quickstart").glob("*.yml"):
        shutil.copy(path, here)
    monkeypatch.setattr(program, "HERE", here)
    monkeypatch.setattr(program, "FAMILY", tiny_family)
    monkeypatch.setattr(program, "MERGED", here / "merged")
    monkeypatch.setattr(program, "ThreadPoolExecutor", one_after_the_other)
    return program


def test_quickstart_from_end_to_end(tiny_quickstart, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    tiny_quickstart.main()
    table = capsys.readouterr().out
    rows = "base, expert topaz, expert opal, linear, task_arithmetic, ties, dare_ties, ace"
    for row in rows.split(", "):
        assert f"\n{row}" in table
    assert table.count("(best)") == table.count("\ntask_arithmetic") == 1
    assert "task_arithmetic-0_5" in {path.name for path in tiny_quickstart.MERGED.iterdir()}
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--ask", "ruby moon ="])
    tiny_quickstart.main()
    assert "ruby moon = " in capsys.readouterr().out


def test_a_failed_merge_ends_the_quickstart(quickstart, in_process, tmp_path):
    program = quickstart("quickstart")
    config = tmp_path / "bad.yml"
    config.write_text("merge_method: ace\nmodels: [{model: ./nowhere/at/all}]\n")
    with pytest.raises(SystemExit, match=r"(?s)mergekit-yaml bad.yml failed.*nowhere"):
        program.merge(config, tmp_path / "out")
