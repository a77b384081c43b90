# SPDX-License-Identifier: Apache-2.0
"""Data and models that do not go together: what is cut is said, and what cannot be is an error."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from checkpoints import tiny_llama
from click.testing import CliRunner
from families import (
    bert_family,
    gpt2_family,
    image_distillation,
    llama_family,
    masked_family,
    t5_family,
    tokenizer,
    vit_family,
    write_rows,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertForMaskedLM,
    BertForSequenceClassification,
    RobertaForMaskedLM,
    T5ForConditionalGeneration,
)

from mergekit_ace.cli import main
from mergekit_ace.training.tasks import longest_input

LONG = " ".join(f"w{n % 36}" for n in range(60))


@pytest.fixture
def train(tmp_path, caplog):
    """Run the command on a config, which `fails` or not; what it has said."""

    def run(config: dict, *, fails: bool = False, command: str = "train") -> str:
        path = tmp_path / "config.yml"
        path.write_text(yaml.safe_dump(config))
        out = tmp_path / "out"
        result = CliRunner().invoke(main, [command, str(path), str(out), "--quiet"])
        assert (result.exit_code != 0) == fails, (result.output, result.exception)
        if fails:
            assert isinstance(result.exception, SystemExit), result.exception
            assert not list(out.glob("*.safetensors"))
        return result.output + caplog.text

    return run


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> dict:
    return short(llama_family(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> dict:
    return short(bert_family(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> dict:
    return short(vit_family(tmp_path_factory.mktemp("vit")))


def short(config: dict) -> dict:
    """A training of one step."""
    return {**config, "training": {**config["training"], "max_steps": 1}}


def with_rows(config: dict, folder: Path, rows: list[dict], **columns) -> dict:
    """The same training on other data."""
    config = copy.deepcopy(config)
    path = write_rows(folder / "rows.jsonl", rows)
    for expert in config["models"]:
        expert["data"] = {"path": path, **columns}
    return config


def with_expert(config: dict, folder: Path, change) -> dict:
    """The same training with a copy of the first expert that `change` has changed."""
    config = copy.deepcopy(config)
    path = shutil.copytree(config["models"][0]["model"], folder / "changed")
    change(path)
    config["models"][0]["model"] = str(path)
    return config


TEXT_ROWS = [{"text": LONG, "label": 1} for _ in range(20)]
LONG_TEXTS = {
    "gpt2": (gpt2_family, {"text": "text"}, 32),
    "llama": (llama_family, {"text": "text"}, 32),
    "bert": (bert_family, {"text": "text", "label": "label"}, 32),
    "masked bert": (lambda f: masked_family(f, BertForMaskedLM), {"text": "text"}, 32),
    "masked roberta": (lambda f: masked_family(f, RobertaForMaskedLM), {"text": "text"}, 31),
}


@pytest.mark.parametrize("kind", LONG_TEXTS)
def test_texts_are_cut_to_the_positions_of_the_model(tmp_path, train, kind):
    family, columns, positions = LONG_TEXTS[kind]
    config = with_rows(short(family(tmp_path / "family")), tmp_path, TEXT_ROWS, **columns)
    text = train(config)
    assert f"16 of 16 train samples fill the {positions} positions of " in text


def test_written_answers_end_where_the_positions_do(tmp_path, train):
    rows = [{"q": " ".join(["w1"] * (20 + n % 3))} for n in range(20)]
    config = short(gpt2_family(tmp_path / "family"))
    train(with_rows(config, tmp_path, rows, prompt="q", max_new_tokens=60))


def test_prompts_that_fill_all_positions(tmp_path, train):
    config = short(gpt2_family(tmp_path / "family"))
    text = train(with_rows(config, tmp_path, [{"q": LONG}] * 20, prompt="q"), fails=True)
    assert "no train sample has anything to predict within max_length: 32" in text


def test_longest_input():
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for kind, pad, expected in (
        (BertForMaskedLM, 0, 32),
        (RobertaForMaskedLM, 1, 30),
        (RobertaForMaskedLM, 0, 31),
    ):
        config = kind.config_class(max_position_embeddings=32, pad_token_id=pad, **shape)
        assert longest_input(kind(config)) == expected
    t5 = T5ForConditionalGeneration.config_class(d_model=8, d_kv=4, d_ff=8, num_layers=1)
    assert longest_input(T5ForConditionalGeneration(t5)) is None
    assert longest_input(tiny_llama()) == 32


CUT = [
    (
        {"prompt": "q", "completion": "a", "max_length": 12},
        r"\d+ of 16 train samples fill max_length: 12,",
    ),
    ({"text": "q", "max_length": 3}, "16 of 16 train samples fill max_length: 3,"),
]


@pytest.mark.parametrize(("columns", "message"), CUT)
def test_answers_that_are_cut_are_counted(tmp_path, train, llama, columns, message):
    rows = [{"q": " ".join(["w1"] * 8), "a": " ".join(["w2"] * (1 + n))} for n in range(20)]
    assert re.search(message, train(with_rows(llama, tmp_path, rows, **columns)))


def test_targets_that_are_cut_are_counted(tmp_path, train):
    config = short(t5_family(tmp_path / "family", "a"))
    rows = [{"q": "w1", "a": LONG if n % 2 else "w1"} for n in range(20)]
    columns = {"prompt": "q", "completion": "a", "max_length": 10}
    text = train(with_rows(config, tmp_path, rows, **columns))
    assert re.search(r"\d+ of 16 train samples fill max_length: 10, where longer", text)


def test_masks_that_are_cut_off_are_not_replaced_by_others(tmp_path, train):
    config = short(masked_family(tmp_path / "family", BertForMaskedLM))
    rows = [{"t": "w1 <mask> w2" if n % 2 else f"{LONG} <mask>"} for n in range(20)]
    text = train(with_rows(config, tmp_path, rows, text="t", max_length=20))
    assert re.search(r"0 of 16 train samples fill .*; [1-9]\d* have nothing to predict", text)


def test_texts_whose_masks_are_all_cut_off(tmp_path, train):
    config = short(masked_family(tmp_path / "family", BertForMaskedLM))
    rows = [{"t": f"{LONG} <mask>"}] * 20
    text = train(with_rows(config, tmp_path, rows, text="t", max_length=20), fails=True)
    assert "no train sample has anything to predict within max_length: 20" in text


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (lambda n: torch.rand(1, 16, 16), "cannot read its samples: Input image size (16*16)"),
        (lambda n: torch.rand(3, 8, 8), "Expected 1 but got 3"),
        (lambda n: torch.rand(1, 8 + n % 2, 8), "holds images of different sizes, (1, 8, 8) and"),
        (lambda n: torch.rand(8, 8), "holds arrays with 2 axes; pixel values have three"),
        (lambda n: "a/cat.png", "column x holds 'a/cat.png' instead of an image or pixel values"),
        (lambda n: None, "column x holds None instead of an image or pixel values"),
        (lambda n: [[[0.0, 1.0], [1.0]]], "column x holds a list that is no array: "),
    ],
)
def test_images_that_the_model_cannot_read(tmp_path, train, vit, pixels, message):
    values = [pixels(n) for n in range(20)]
    rows = [{"x": one.tolist() if isinstance(one, torch.Tensor) else one} for one in values]
    text = train(with_rows(vit, tmp_path, rows, image="x"), fails=True)
    assert message in text
    assert "rows.jsonl" in text


def one_logit(folder: str) -> None:
    model = BertForSequenceClassification.from_pretrained(
        folder, num_labels=1, ignore_mismatched_sizes=True
    )
    model.save_pretrained(folder)


def edit_config(**values):
    def change(folder: str) -> None:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_config(problem_type="regression"), "has problem_type: regression"),
        (edit_config(problem_type="multi_label_classification"), "problem_type: multi_label"),
    ],
)
def test_heads_that_do_not_choose_a_class(tmp_path, train, bert, change, message):
    text = train(with_expert(bert, tmp_path, change), fails=True)
    assert message in text
    assert "expert " in text
    assert "leave it out" in text


def test_the_entropy_of_a_number(tmp_path, train, bert):
    config = with_expert(bert, tmp_path, one_logit)
    config = {k: v for k, v in config.items() if k != "labels"} | {"loss": "entropy"}
    text = train(config, fails=True)
    assert "has a single output (a regression)" in text


def test_a_teacher_that_does_not_choose_a_class(tmp_path, train):
    _, config = image_distillation(tmp_path)
    edit_config(problem_type="multi_label_classification")(config["teacher"])
    text = train(config, fails=True, command="distill")
    assert "the teacher " in text
    assert "problem_type: multi_label_classification" in text


USER = {"role": "user", "content": "w1 w2"}
MESSAGES = [
    ([{"from": "human", "value": "w1"}], "a message with the keys from, value"),
    ([{"role": "user"}, {"role": "assistant"}], "a message with the keys role"),
    ([USER, {"role": "assistant", "content": None}], "a message with the keys role"),
    ([USER, {"role": "Assistant", "content": "w3"}], "of the role 'Assistant'; roles are"),
    (["w1", "w2"], "a message with 'w1'"),
    ("w1 w2", "holds 'w1 w2' instead of a list of messages"),
    ([], "holds [] instead of a list of messages"),
    (None, "holds None instead of a list of messages"),
    ([USER, USER], "chat template refuses messages of column m: roles must alternate"),
]
TEMPLATE = (
    "{% for m in messages %}{% if loop.index0 and m['role'] == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }} {% endfor %}"
)


@pytest.mark.parametrize(("messages", "message"), MESSAGES)
def test_messages(tmp_path, train, llama, messages, message):
    config = with_rows(llama, tmp_path, [{"m": messages}] * 20, messages="m")
    base = shutil.copytree(llama["base_model"], tmp_path / "base")
    words = AutoTokenizer.from_pretrained(base)
    words.chat_template = TEMPLATE
    words.save_pretrained(base)
    config["base_model"] = str(base)
    text = train(config, fails=True)
    assert message in text
    assert "rows.jsonl" in text


def test_a_template_that_only_an_expert_has(tmp_path, train, llama):
    words = AutoTokenizer.from_pretrained(llama["base_model"])
    words.chat_template = TEMPLATE
    rows = [{"m": [USER, {"role": "assistant", "content": f"w{n} w3"}]} for n in range(20)]
    config = with_rows(llama, tmp_path, rows, messages="m")
    train(with_expert(config, tmp_path, words.save_pretrained))


def another_llama(**shape: int):
    def change(folder: str) -> None:
        tiny_llama(**shape).save_pretrained(folder)

    return change


def untied(folder: str) -> None:
    edit_config(tie_word_embeddings=True)(folder)
    without("lm_head")(folder)


def without(*parts: str):
    """Weights that lack some tensors, which transformers would draw at random."""

    def change(folder: str) -> None:
        file = Path(folder) / "model.safetensors"
        kept = {n: t for n, t in load_file(file).items() if not any(part in n for part in parts)}
        save_file(kept, file, {"format": "pt"})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            another_llama(num_hidden_layers=3),
            "has 9 parameters that the base model lacks, such as model.layers.2.",
        ),
        (untied, "has tie_word_embeddings: True in its config, and the base model False"),
        (another_llama(num_hidden_layers=1), "has no parameter model.layers.1."),
        (another_llama(intermediate_size=64), "of shape (64, 32), which is (48, 32) in the base"),
        (without("up_proj"), "lacks 2 parameters that task: causal-lm needs"),
        (without("lm_head"), "lacks 1 parameters that task: causal-lm needs, such as lm_head"),
    ],
)
def test_experts_of_another_architecture(tmp_path, train, llama, change, message):
    text = train(with_expert(llama, tmp_path, change), fails=True)
    assert message in text
    assert "changed" in text


def test_a_classifier_without_its_head(tmp_path, train, bert):
    text = train(with_expert(bert, tmp_path, without("classifier")), fails=True)
    assert "lacks 2 parameters that task: sequence-classification needs, such as classifier" in text


SETTINGS = [
    ({"exclude": ["no_such"]}, "exclude: 'no_such' is part of no name of a parameter"),
    ({"exclude": ["lm_head", "nosuch"]}, "exclude: 'nosuch' is part of no name"),
    ({"dtype": "float16"}, "float16 is too narrow and slow on a CPU; take bfloat16"),
    ({"training": {"batch_size": True}}, "training.batch_size: expected a number, not a boolean"),
    ({"training": {"seed": False}}, "training.seed: expected a number, not a boolean"),
    ({"training": {"patience": True}}, "training.patience: expected a number, not a boolean"),
    ({"top_k": True}, "top_k: expected a number, not a boolean"),
    ({"learner": {"layers": True}}, "learner.layers: expected a number, not a boolean"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings(train, llama, settings, message):
    assert message in train({**llama, **settings}, fails=True)


def test_half_precision_on_a_cpu(train, llama):
    """accelerate alone would train without it; it has one precision a process, hence the resets."""
    AcceleratorState._reset_state()
    try:
        text = train({**llama, "mixed_precision": "fp16"}, fails=True)
    finally:
        AcceleratorState._reset_state()
    assert "mixed_precision: fp16 cannot be used on a CPU; take bf16 or no" in text


@pytest.mark.parametrize(
    ("model", "copied"),
    [(model, copied) for model in ("expert0", "base") for copied in (False, True)],
)
def test_models_that_are_the_same(tmp_path, train, llama, model, copied):
    config = copy.deepcopy(llama)
    path = Path(llama["base_model"]).parent / model
    if copied:
        path = shutil.copytree(path, tmp_path / "copy")
    config["models"][1]["model"] = f"{path}/"
    text = train(config, fails=True)
    assert f"{path}/ and {Path(llama['base_model']).with_name(model)} are the same" in text
    assert "are the same model as far as it is merged; list the base and every expert once" in text


def test_tokens_without_an_embedding(tmp_path, train, llama):
    words = tokenizer()
    words.add_tokens(["new"])
    config = with_rows(llama, tmp_path, [{"t": "w1 w2 new"}] * 20, text="t")
    paths = [config["base_model"], *(expert["model"] for expert in config["models"])]
    copies = [str(shutil.copytree(path, tmp_path / Path(path).name)) for path in paths]
    for path in copies:
        words.save_pretrained(path)
    config["base_model"] = copies[0]
    for expert, path in zip(config["models"], copies[1:], strict=True):
        expert["model"] = path
    text = train(config, fails=True)
    assert "has the token number 40, but" in text
    assert "only 40 embeddings; use the tokenizer that belongs to the model" in text


def test_texts_without_tokens_are_left_out(tmp_path, train, bert):
    rows = [{"t": "w1 w2" if n % 2 else "", "l": 0} for n in range(20)]
    train(with_rows(bert, tmp_path, rows, text="t", label="l"))
