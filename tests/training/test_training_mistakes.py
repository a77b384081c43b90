# SPDX-License-Identifier: Apache-2.0
"""Data and models that do not go together: what is cut is said, and what cannot be is an error."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from checkpoints import tiny_llama
from click.testing import CliRunner
from families import (
    bert_family,
    changed,
    gpt2_family,
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
)

from mergekit_ace.cli import main
from mergekit_ace.training import teachers

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
    return changed(llama_family(tmp_path_factory.mktemp("llama")), max_steps=1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> dict:
    return changed(bert_family(tmp_path_factory.mktemp("bert")), max_steps=1)


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> dict:
    return changed(vit_family(tmp_path_factory.mktemp("vit")), max_steps=1)


def with_rows(config: dict, folder: Path, rows: list[dict], **columns) -> dict:
    """The same training on other data."""
    config = copy.deepcopy(config)
    path = write_rows(folder / "rows.jsonl", rows)
    for expert in config["models"]:
        expert["data"] = {"path": path, **columns}
    return config


Change = Callable[[Path], None]


def with_model(config: dict, folder: Path, change: Change, whose: str = "expert0") -> dict:
    """The same training with a copy of one model that `change` has changed."""
    path = Path(config["base_model"]).with_name(whose)
    copied = shutil.copytree(path, folder / "changed" / whose)
    change(copied)
    return json.loads(json.dumps(config).replace(f'"{path}"', f'"{copied}"'))


def edit_config(**values) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def retyped(dtype: torch.dtype, scale: float = 1.0) -> Change:
    """Write one matrix of a model in another dtype, times a number."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = (scale * tensors[name]).to(dtype)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def without(*parts: str) -> Change:
    """Weights that lack some tensors, which transformers would draw at random."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        kept = {n: t for n, t in load_file(file).items() if not any(part in n for part in parts)}
        save_file(kept, file, {"format": "pt"})

    return change


def another_llama(**shape: int) -> Change:
    return lambda folder: tiny_llama(**shape).save_pretrained(folder)


def untied(folder: Path) -> None:
    edit_config(tie_word_embeddings=True)(folder)
    without("lm_head")(folder)


def other_words(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["w0"], vocabulary["w1"] = vocabulary["w1"], vocabulary["w0"]
    path.write_text(json.dumps(content))


NOT_CHOOSING = edit_config(problem_type="multi_label_classification")
MODELS = [
    ("llama", "base", retyped(torch.int8, 1000), r"up_proj.weight of model .* is stored as I8"),
    ("llama", "expert1", retyped(torch.int8, 1000), r"up_proj.weight of model .* is stored as I8"),
    ("llama", "expert1", retyped(torch.float32, float("nan")), r"model .* contains NaN or Inf"),
    ("llama", "base", edit_config(quantization_config={"quant_method": "gptq"}), "is quantised"),
    ("llama", "expert0", edit_config(intermediate_size=64), r"mlp.* of shape .* in the base"),
    ("llama", "expert1", other_words, r"tokenizer of .*expert1 is not that of .*base"),
    (
        "llama",
        "expert0",
        another_llama(num_hidden_layers=3),
        r"has 9 parameters that the base model lacks, such as model.layers.2\.",
    ),
    ("llama", "expert0", another_llama(num_hidden_layers=1), "has no parameter model.layers.1"),
    ("llama", "expert0", untied, "has tie_word_embeddings: True in its config, and the base model"),
    ("llama", "expert0", without("up_proj"), "lacks 2 parameters that task: causal-lm needs"),
    ("bert", "expert0", without("classifier"), r"lacks 2 parameters .* such as classifier"),
    ("bert", "expert0", NOT_CHOOSING, r"problem_type: multi_label.*leave it out"),
]


@pytest.mark.parametrize(("family", "whose", "change", "message"), MODELS)
def test_models_that_cannot_be_merged(request, tmp_path, train, family, whose, change, message):
    config = request.getfixturevalue(family)
    text = train(with_model(config, tmp_path, change, whose), fails=True)
    assert re.search(message, text)
    assert whose in text


def test_the_entropy_of_a_number(tmp_path, train, bert):
    def one_logit(folder: Path) -> None:
        BertForSequenceClassification.from_pretrained(
            folder, num_labels=1, ignore_mismatched_sizes=True
        ).save_pretrained(folder)

    config = with_model(bert, tmp_path, one_logit) | {"loss": "entropy"}
    assert "has a single output (a regression)" in train(config, fails=True)


@pytest.mark.parametrize(("model", "copied"), [("expert0", False), ("base", True)])
def test_models_that_are_the_same(tmp_path, train, llama, model, copied):
    config = copy.deepcopy(llama)
    path = Path(llama["base_model"]).with_name(model)
    known = str(path)
    if copied:
        path = shutil.copytree(path, tmp_path / "copy")
    config["models"][1]["model"] = f"{path}/"
    text = train(config, fails=True)
    assert f"{path}/ and {known} are the same model as far as it is merged; list the base" in text


@pytest.mark.parametrize("what", ["data", "shapes"])
def test_mistakes_of_the_last_expert_are_found_before_the_first_answers(
    tmp_path, train, llama, monkeypatch, what
):
    config = copy.deepcopy(llama)
    if what == "data":
        config["models"][1]["data"]["text"] = "body"
    else:
        config = with_model(config, tmp_path, another_llama(intermediate_size=64), "expert1")
    monkeypatch.delattr(teachers, "label_batch")
    assert ("no column body" if what == "data" else "expert1") in train(config, fails=True)


def masked_bert(folder: Path) -> dict:
    return masked_family(folder, BertForMaskedLM)


def masked_roberta(folder: Path) -> dict:
    return masked_family(folder, RobertaForMaskedLM)


def t5(folder: Path) -> dict:
    return t5_family(folder, "a")


def long(_: int) -> dict:
    return {"text": LONG, "label": 1}


def with_label(n: int) -> dict:
    return {"text": "w1 w2" if n % 2 else "", "label": 0}


NOTHING = "no train sample has anything to predict within max_length: "
LENGTHS = [  # of samples, and what is said of them
    (gpt2_family, long, {"text": "text"}, "16 of 16 train samples fill the 32 positions of "),
    (
        bert_family,
        long,
        {"text": "text", "label": "label"},
        "16 of 16 .* the 32 positions of ",
    ),
    (masked_roberta, long, {"text": "text"}, "16 of 16 train samples fill the 31 positions of "),
    (
        llama_family,
        lambda n: {"q": " ".join(["w1"] * 8), "a": " ".join(["w2"] * (1 + n))},
        {"prompt": "q", "completion": "a", "max_length": 12},
        r"\d+ of 16 train samples fill max_length: 12,",
    ),
    (
        t5,
        lambda n: {"q": "w1", "a": LONG if n % 2 else "w1"},
        {"prompt": "q", "completion": "a", "max_length": 10},
        r"\d+ of 16 train samples fill max_length: 10, where longer",
    ),
    (
        masked_bert,  # masks that are cut off are not replaced by others
        lambda n: {"t": "w1 <mask> w2" if n % 2 else f"{LONG} <mask>"},
        {"text": "t", "max_length": 20},
        r"0 of 16 train samples fill .*; [1-9]\d* have nothing to predict",
    ),
    # the written answers end where the positions do, and texts without tokens are left out
    (gpt2_family, lambda n: {"q": "w1 " * (20 + n % 3)}, {"prompt": "q", "max_new_tokens": 60}, ""),
    (bert_family, with_label, {"text": "text", "label": "label"}, ""),
    (gpt2_family, lambda _: {"q": LONG}, {"prompt": "q"}, NOTHING + "32"),
    (
        masked_bert,
        lambda _: {"t": f"{LONG} <mask>"},
        {"text": "t", "max_length": 20},
        NOTHING + "20",
    ),
]


@pytest.mark.parametrize(("family", "row", "columns", "message"), LENGTHS)
def test_the_length_of_samples(tmp_path, train, family, row, columns, message):
    config = changed(family(tmp_path / "family"), max_steps=1)
    config = with_rows(config, tmp_path, [row(n) for n in range(20)], **columns)
    assert re.search(message, train(config, fails=message.startswith(NOTHING)))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (7, r"has the label 7, but its expert knows .* 0 to 1"),
        (0.5, r"has the label 0\.5; .* the numbers of its classes"),
        ("cat", "column l holds 'cat'; labels are the numbers of the classes"),
        (True, "column l holds True; labels are the numbers of the classes"),
        (None, "column l holds None; labels are the numbers of the classes"),
    ],
)
def test_labels_that_the_head_does_not_have(tmp_path, train, bert, label, message):
    rows = [{"t": f"w{n} w2", "l": label} for n in range(20)]
    text = train(with_rows(bert, tmp_path, rows, text="t", label="l"), fails=True)
    assert re.search(message, text)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (lambda n: torch.rand(1, 16, 16), "cannot read its samples: Input image size (16*16)"),
        (lambda n: torch.rand(1, 8 + n % 2, 8), "holds images of different sizes, (1, 8, 8) and"),
        (lambda n: torch.rand(8, 8), "holds arrays with 2 axes; pixel values have three"),
        (lambda n: "a/cat.png", "column x holds 'a/cat.png' instead of an image or pixel values"),
        (lambda n: [[[0.0, 1.0], [1.0]]], "column x holds a list that is no array: "),
    ],
)
def test_images_that_the_model_cannot_read(tmp_path, train, vit, pixels, message):
    values = [pixels(n) for n in range(20)]
    rows = [{"x": one.tolist() if isinstance(one, torch.Tensor) else one} for one in values]
    text = train(with_rows(vit, tmp_path, rows, image="x"), fails=True)
    assert message in text
    assert "rows.jsonl" in text


USER = {"role": "user", "content": "w1 w2"}
MESSAGES = [
    ([{"from": "human", "value": "w1"}], "a message with the keys from, value"),
    ([USER, {"role": "assistant", "content": None}], "a message with the keys role"),
    ([USER, {"role": "Assistant", "content": "w3"}], "of the role 'Assistant'; roles are"),
    (["w1", "w2"], "a message with 'w1'"),
    ("w1 w2", "holds 'w1 w2' instead of a list of messages"),
    ([], "holds [] instead of a list of messages"),
    ([USER, USER], "chat template refuses messages of column m: roles must alternate"),
]
TEMPLATE = (
    "{% for m in messages %}{% if loop.index0 and m['role'] == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }} {% endfor %}"
)


def chatting(folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)


@pytest.mark.parametrize(("messages", "message"), MESSAGES)
def test_messages(tmp_path, train, llama, messages, message):
    config = with_rows(llama, tmp_path, [{"m": messages}] * 20, messages="m")
    text = train(with_model(config, tmp_path, chatting, "base"), fails=True)
    assert message in text
    assert "rows.jsonl" in text


def test_a_template_that_only_an_expert_has(tmp_path, train, llama):
    rows = [{"m": [USER, {"role": "assistant", "content": f"w{n} w3"}]} for n in range(20)]
    config = with_rows(llama, tmp_path, rows, messages="m")
    train(with_model(config, tmp_path, chatting))


def test_tokens_without_an_embedding(tmp_path, train, llama):
    words = tokenizer()
    words.add_tokens(["new"])
    config = with_rows(llama, tmp_path, [{"t": "w1 w2 new"}] * 20, text="t")
    for whose in ("base", "expert0", "expert1"):
        path = Path(llama["base_model"]).with_name(whose)
        words.save_pretrained(shutil.copytree(path, tmp_path / "family" / whose))
    family = str(Path(llama["base_model"]).parent)
    config = json.loads(json.dumps(config).replace(family, str(tmp_path / "family")))
    text = train(config, fails=True)
    assert "has the token number 40, but" in text
    assert "only 40 embeddings; use the tokenizer that belongs to the model" in text


SETTINGS = [
    ({"exclude": ["lm_head", "nosuch"]}, "exclude: 'nosuch' is part of no name of a parameter"),
    ({"exclude": ["."]}, "leaves nothing to merge"),
    ({"base_model": "./nowhere"}, "there is no folder ./nowhere"),
    ({"dtype": "float16"}, "float16 is too narrow and slow on a CPU; take bfloat16"),
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
