# SPDX-License-Identifier: Apache-2.0
"""Every config of the examples is one that mergekit takes whole; the small programs run."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from configs import EXAMPLES, check_config, read_config
from transformers import LlamaConfig

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
    source = read_config((EXAMPLES / "quickstart" / "train.yml").read_text())
    for name, data in TrainConfig.model_validate(source).sources:
        lines = (tmp_path / data.path).read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)[data.prompt].split() for line in lines]
        known = set(dictionaries.OLD_LANGUAGES if name == "rehearsal" else (name,))
        assert len(texts) == questions.COUNT
        assert {text[0] for text in texts} == known
        words = {word for text in texts for word in text}
        assert words <= {"=", *known, *dictionaries.ASKED}


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
    (_, near, same, count), (_, far, *_) = found
    assert float(near) < 1e-5 < float(far)
    assert int(same) >= 0.99 * int(count)


@pytest.fixture
def tiny_quickstart(quickstart, in_process, tmp_path, monkeypatch):
    """The quickstart's own family after a few steps of training, its merges in this process."""
    quickstart("family").train_family(tmp_path / "family", steps=3)
    program = quickstart("quickstart")

    def one_after_the_other(workers):
        """An output runner that swaps sys.stdout cannot be shared by threads."""
        return contextlib.nullcontext(SimpleNamespace(map=map))

    for path in (EXAMPLES / "quickstart").glob("*.yml"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(program, "HERE", tmp_path)
    monkeypatch.setattr(program, "FAMILY", tmp_path / "family")
    monkeypatch.setattr(program, "MERGED", tmp_path / "merged")
    monkeypatch.setattr(program, "ThreadPoolExecutor", one_after_the_other)
    return program


def test_quickstart_from_end_to_end(tiny_quickstart, run_example, tmp_path):
    table = run_example("quickstart", "quickstart")
    rows = "base, expert topaz, linear, task_arithmetic, ties, dare_ties, ace, ace_plus"
    for row in rows.split(", "):
        assert f"\n{row}" in table
    assert table.count("(best)") == table.count("\ntask_arithmetic") == 1
    assert (tmp_path / "merged" / "task_arithmetic-0_5").is_dir()
    assert "ruby moon = " in run_example("quickstart", "quickstart", "--ask", "ruby moon =")
    config = {"merge_method": "ace", "models": [{"model": "./nowhere/at/all"}]}
    with pytest.raises(SystemExit, match=r"(?s)mergekit-yaml bad.yml failed.*nowhere"):
        tiny_quickstart.merge(config, tmp_path / "bad")


def test_routers(run_example, tmp_path):
    flags = ["--folder", tmp_path, "--steps", 1, "--seeds", 0, "--methods", "ace"]
    shown = run_example("quickstart", "routers", *flags)
    assert all(f"\n| `ace` | {routers} | " in shown for routers in ("method", "mean", "base"))
