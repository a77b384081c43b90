# SPDX-License-Identifier: Apache-2.0
"""Data and models that do not go together: what is cut is said, and what cannot be is an error."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import families
import pytest
import torch
from checkpoints import configure, rewrite, tiny_llama
from commands import run_config
from transformers import BertForSequenceClassification

from mergekit_ace.training import family as family_module

LONG = " ".join(f"w{n % 36}" for n in range(60))
Change = Callable[[Path], object]


@pytest.fixture
def train(tmp_path, caplog):
    """Run the command on a config, which `fails` or not; what it has said."""

    def run(config: dict, *, fails: bool = False) -> str:
        said = run_config("train", config, tmp_path / "out", fails=fails)
        assert not (fails and list(tmp_path.glob("out/*.safetensors")))
        return said + caplog.text

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, dict]:
    configs, words = {}, families.tokenizer()
    for name in ("llama", "bert", "vit", "gpt2"):
        configs[name] = getattr(families, name)(tmp_path_factory.mktemp(name))
        configs[name]["training"]["max_steps"] = 1
    words.chat_template = TEMPLATE
    words.save_pretrained(configs["llama"]["models"][0]["model"])
    return configs


def with_rows(config: dict, folder: Path, rows: list[dict], **columns) -> dict:
    """The same training on other data."""
    config = copy.deepcopy(config)
    path = families.write_rows(folder / "rows.jsonl", rows)
    for expert in config["models"]:
        expert["data"] = {"path": path, **columns}
    return config


def with_model(config: dict, folder: Path, change: Change, whose: str = "expert0") -> dict:
    """The same training with a copy of one model that `change` has changed."""
    path = Path(config["base_model"]).with_name(whose)
    copied = shutil.copytree(path, folder / "changed" / whose)
    change(copied)
    return json.loads(json.dumps(config).replace(f'"{path}"', f'"{copied}"'))


def retyped(folder: Path, dtype: torch.dtype, scale: float) -> None:
    """Write one matrix of a model in another dtype, times a number."""
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda all_: all_.update({name: (scale * all_[name]).to(dtype)}))


def lacking(folder: Path, part: str) -> None:
    """Drop some tensors, which transformers would draw at random."""
    rewrite(folder, lambda all_: [all_.pop(name) for name in list(all_) if part in name])


def untied(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)
    lacking(folder, "lm_head")


def one_logit(folder: Path) -> None:
    BertForSequenceClassification.from_pretrained(
        folder, num_labels=1, ignore_mismatched_sizes=True
    ).save_pretrained(folder)


def other_words(folder: Path) -> None:
    path = folder / "tokenizer.json"
    swapped = {'"w0"': '"w1"', '"w1"': '"w0"'}
    path.write_text(re.sub(r'"w[01]"', lambda match: swapped[match[0]], path.read_text()))


INTEGERS = partial(retyped, dtype=torch.int8, scale=1000)
NAN = partial(retyped, dtype=torch.float32, scale=float("nan"))
QUANTISED = partial(configure, quantization_config={"quant_method": "gptq"})
NARROW = tiny_llama(intermediate_size=64).save_pretrained
NO_MATRIX, NO_HEAD = (partial(lacking, part=part) for part in ("up_proj", "classifier"))
MODELS = [
    ("llama", "base", INTEGERS, r"up_proj.weight of model .* stored as torch.int8"),
    ("llama", "base", NAN, "the base contains NaN or Inf"),
    ("llama", "expert1", NAN, r"expert .*expert1 answers NaN or Inf .* leave it out"),
    ("llama", "base", QUANTISED, "is quantised"),
    ("llama", "expert1", NARROW, r"not fine-tuned from .* differ in model.layers.0.mlp"),
    ("llama", "expert0", untied, "differ in tie_word_embeddings, True against False"),
    ("llama", "expert1", other_words, r"tokenizer of .*expert1 is not that of .*base"),
    ("llama", "expert0", NO_MATRIX, "lacks 2 parameters that task: causal-lm needs"),
    ("bert", "expert0", NO_HEAD, r"lacks 2 parameters .* such as classifier"),
    ("bert", "expert0", one_logit, r"has one output \(a regression\).*leave it out"),
]


@pytest.mark.parametrize(("family", "whose", "change", "message"), MODELS)
def test_models_that_cannot_be_merged(
    made, tmp_path, train, monkeypatch, family, whose, change, message
):
    """All but NaN is found before the first model answers."""
    if "NaN" not in message:
        monkeypatch.delattr(family_module, "answer_data")
    config = with_model(made[family], tmp_path, change, whose)
    assert re.search(message, train(config, fails=True))


TEMPLATE = (
    "{% for m in messages %}{% if loop.index0 and m['role'] == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }} {% endfor %}"
)
TEXT, LABELLED, IMAGE = {"text": "x"}, {"text": "t", "label": "x"}, {"image": "x"}
QUESTION, CHAT = {"prompt": "x", "max_new_tokens": 60}, {"messages": "x"}


def said(n: int, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": f"w{n}"}


FITS = [  # values of the column x, and what is said of them
    ("gpt2", TEXT, lambda n: f"w{n} {LONG}", "16 of 16 train .*_length: 32"),
    ("gpt2", TEXT, lambda n: " ".join([f"w{n}"] * 32), r"\A(?![\s\S]*max_length)"),
    # the written answers end where the positions do, and texts without tokens are left out
    ("bert", {"text": "x", "label": "l"}, lambda n: f"w{n} {LONG}" * (n > 0), "1[56] of 16 .*: 32"),
    ("gpt2", QUESTION, lambda n: f"w{n} {'w1 ' * 20}", ""),
    ("llama", CHAT, lambda n: [said(1), said(n, "assistant")], ""),  # by an expert's template
]
WRONG = [
    ("gpt2", QUESTION, lambda n: f"w{n} {LONG}", "no train sample has anything to .*_length: 32"),
    ("bert", LABELLED, lambda n: 7, r"has the label 7, but its expert knows .* 0 to 1"),
    ("bert", LABELLED, lambda n: "cat", "column x holds 'cat' instead of the number of a class"),
    ("vit", IMAGE, lambda n: torch.rand(1, 16, 16).tolist(), "Input image size"),
    ("vit", IMAGE, lambda n: "a/cat.png", "column x holds 'a/cat.png' instead of pixel values, or"),
    ("llama", CHAT, lambda n: [said(n), said(n, "Assistant")], "instead of messages with"),
    ("llama", CHAT, lambda n: [said(n), said(n)], "column x: .*: roles must alternate"),
]


@pytest.mark.parametrize(("family", "columns", "value", "message"), FITS + WRONG)
def test_rows_are_read_as_far_as_they_can(tmp_path, train, made, family, columns, value, message):
    rows = [{"t": f"w{n}", "x": value(n), "l": 1} for n in range(20)]
    config = with_rows(made[family], tmp_path, rows, **columns)
    fails = any(message == wrong for *_, wrong in WRONG)
    assert re.search(message, train(config, fails=fails))


def test_tokens_that_models_do_not_know(tmp_path, train, made):
    words, rows = families.tokenizer(mask_token="new"), [{"x": f"w{n} new"} for n in range(20)]
    config = with_rows(made["llama"], tmp_path, rows, **TEXT)
    for whose in ("expert0", "expert1", "base"):
        config = with_model(config, tmp_path, words.save_pretrained, whose)
    assert "token number 40, but" in train(config, fails=True)


def test_settings_are_checked_before_the_first_model_answers(train, made, monkeypatch):
    """Once a mistake is mended, the folder is free."""
    llama = made["llama"]
    first, last = llama["models"]
    with monkeypatch.context() as patch:
        patch.delattr(family_module, "answer_data")
        for settings, message in (
            ({"exclude": ["lm_head", "nosuch"]}, "exclude: 'nosuch' is part of no name"),
            ({"base_model": "./nowhere"}, "there is no folder ./nowhere"),
            ({"base_model": first["model"] + "/"}, "are the same model; list every model once"),
            ({"models": [first, {**last, "data": first["data"] | {"text": "body"}}]}, "body"),
        ):
            assert message in train({**llama, **settings}, fails=True)
    train(llama)
