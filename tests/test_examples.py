# SPDX-License-Identifier: Apache-2.0
"""The examples: every config is one that mergekit takes whole, and the quickstart's parts work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from checkpoints import fine_tuned, state, tiny_llama
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.merge_methods.base import ParameterScope
from reference import naive_tensor, task_vector_error
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from mergekit_ace.training.config import DistillConfig, TrainConfig

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
OURS = {"train": TrainConfig, "distill": DistillConfig}
CONFIGS = sorted(p for p in EXAMPLES.glob("*/*.yml") if p.stem.split("-")[0] not in OURS)
TRAININGS = sorted(p for p in EXAMPLES.glob("*/*.yml") if p.stem.split("-")[0] in OURS)
README = EXAMPLES.parent / "README.md"


@pytest.mark.parametrize("path", TRAININGS, ids=lambda path: path.stem)
def test_training_configs_are_valid(path):
    OURS[path.stem.split("-")[0]].model_validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("name", OURS)
def test_the_readme_s_configs_are_valid(name):
    blocks = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"# {name}.yml")]
    OURS[name].model_validate(yaml.safe_load(block))


def test_the_questions_of_the_quickstart(monkeypatch, tmp_path):
    """What train.yml reads: questions of one language each, without a single answer."""
    monkeypatch.syspath_prepend(EXAMPLES / "quickstart")
    import questions
    from dictionaries import NEW_LANGUAGES, OLD_LANGUAGES, invented_words

    monkeypatch.setattr(questions, "FOLDER", tmp_path / "questions")
    questions.main()
    config = TrainConfig.model_validate(
        yaml.safe_load((EXAMPLES / "quickstart" / "train.yml").read_text())
    )
    assert [name for name, _ in config.sources] == [*NEW_LANGUAGES, "rehearsal"]
    for name, data in config.sources:
        lines = (tmp_path / data.path).read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)[data.prompt] for line in lines]
        assert len(texts) == questions.COUNT
        known = set(OLD_LANGUAGES if name == "rehearsal" else (name,))
        assert {text.split()[0] for text in texts} == known
        assert not {word for text in texts for word in text.split()} & set(invented_words())


def test_the_images_of_the_vision_family(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "statsmerging")
    import images

    for name in images.MAKERS:
        parts = images.splits(name)
        pictures = torch.cat([part[0] for part in parts.values()])
        assert pictures.shape[1:] == (1, 8, 8)
        assert 0 <= pictures.min() < pictures.max() <= 1
        assert len(pictures) == len(images.MAKERS[name]()[0]), "every image is in one share"
        kinds = [set(part[1].tolist()) for part in parts.values()]
        assert all(kind == kinds[0] for kind in kinds)
        assert len(kinds[0]) > 1


@pytest.mark.parametrize("family", ["images", "languages"])
def test_every_row_of_the_table_is_a_valid_training(monkeypatch, family):
    monkeypatch.syspath_prepend(EXAMPLES / "statsmerging")
    monkeypatch.syspath_prepend(EXAMPLES / "quickstart")
    import images
    import languages
    import statsmerging

    monkeypatch.setattr(images, "train_family", lambda folder: None)
    monkeypatch.setattr(languages, "prepare", lambda folder: "base")
    monkeypatch.setattr(statsmerging, "distil_wines", lambda folder: None)
    monkeypatch.setattr(statsmerging, "distil_gpt2", lambda folder, base: "student")
    table = statsmerging.rows(family)
    seen = []
    for change in table.values():
        config = TrainConfig.model_validate(statsmerging.settings(family, change))
        assert config not in seen, "two rows are the same training"
        seen.append(config)


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


@pytest.fixture
def quickstart(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "quickstart"))
    yield
    for name in ("dictionaries", "family", "evaluate", "quickstart", "dtype"):
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


@pytest.fixture
def tiny_family(quickstart, tmp_path, monkeypatch) -> Path:
    """The quickstart's own training, a few steps of it, in a folder of its own."""
    import family

    def short(recipe):
        return dataclasses.replace(recipe, steps=3)

    monkeypatch.setattr(family, "BASE", short(family.BASE))
    monkeypatch.setattr(family, "EXPERTS", {n: short(r) for n, r in family.EXPERTS.items()})
    monkeypatch.setattr(
        family, "new_model", lambda tokenizer: tiny_llama(vocab_size=len(tokenizer))
    )
    folder = tmp_path / "family"
    family.train_family(folder)
    return folder


def test_quickstart_training_saves_complete_models_only(tiny_family):
    import family

    assert sorted(path.name for path in tiny_family.iterdir()) == sorted(["base", *family.EXPERTS])
    times = [path.stat().st_mtime_ns for path in tiny_family.rglob("*.safetensors")]
    family.train_family(tiny_family)  # at once, from the cache
    assert times == [path.stat().st_mtime_ns for path in tiny_family.rglob("*.safetensors")]


@pytest.fixture
def tiny_quickstart(tiny_family, monkeypatch):
    """The quickstart on the tiny family, its merges in this process."""
    import quickstart as program
    from click.testing import CliRunner
    from mergekit.scripts.run_yaml import main

    def run(command, cwd, **options):
        monkeypatch.chdir(cwd)
        CliRunner().invoke(main, [str(part) for part in command[1:]], catch_exceptions=False)
        return SimpleNamespace(returncode=0)

    def one_after_the_other(workers):
        """An output runner that swaps sys.stdout cannot be shared by threads."""
        return contextlib.nullcontext(SimpleNamespace(map=map))

    here = tiny_family.parent
    for path in (EXAMPLES / "quickstart").glob("*.yml"):
        shutil.copy(path, here)
    monkeypatch.setattr(program, "HERE", here)
    monkeypatch.setattr(program, "FAMILY", tiny_family)
    monkeypatch.setattr(program, "MERGED", here / "merged")
    monkeypatch.setattr(program.subprocess, "run", run)
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


def test_what_dtype_costs(tiny_quickstart, monkeypatch, capsys):
    import dtype

    tiny_quickstart.merge_all()
    for name in ("FAMILY", "MERGED"):
        monkeypatch.setattr(dtype, name, getattr(tiny_quickstart, name))
    monkeypatch.setattr(dtype, "ROUNDED", tiny_quickstart.HERE / "family-bfloat16")
    capsys.readouterr()
    dtype.main()
    errors = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(errors) == 4
    assert errors[0] > errors[1]  # float32 checkpoints lose digits to dtype: bfloat16
    assert errors[2] == errors[3]  # bfloat16 ones have none to lose


def test_a_failed_merge_ends_the_quickstart(quickstart, tmp_path):
    import quickstart as program

    config = tmp_path / "bad.yml"
    config.write_text("merge_method: ace\nmodels: [{model: ./nowhere/at/all}]\n")
    with pytest.raises(SystemExit, match=r"(?s)mergekit-yaml bad.yml failed.*nowhere"):
        program.merge(config, tmp_path / "out")
