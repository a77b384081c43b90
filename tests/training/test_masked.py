# SPDX-License-Identifier: Apache-2.0
"""Encoders that fill masks: what is asked, and whole trainings up to the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from families import masked_family, parsed, tokenizer
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    DistilBertForMaskedLM,
    RobertaForMaskedLM,
)

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import load_examples
from mergekit_ace.training.run import run_training
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import kind_of

KIND = kind_of("masked-lm")
LONG = " ".join(f"w{n}" for n in range(20))


@pytest.fixture
def words():
    return tokenizer(mask_token="<mask>")


def encode(text: str, words, **settings):
    return KIND.encode({"t": text}, DataConfig(path="d", text="t", **settings), words)


def test_masks_in_the_text_are_what_is_asked(words):
    example = encode("w1 <mask> w3 <mask>", words)
    assert example["supervised"].tolist() == [False, True, False, True]
    assert example["input_ids"].tolist() == words("w1 <mask> w3 <mask>")["input_ids"]
    assert "true" not in example, "nobody knows what stood there"


def test_of_a_text_without_masks_some_tokens_are_masked(words):
    plain = torch.tensor(words(LONG)["input_ids"])
    example = encode(LONG, words)
    asked = example["supervised"]
    assert int(asked.sum()) == 3, "15 % of 20"
    assert torch.equal(example["true"], plain[asked])
    assert (example["input_ids"][asked] == words.mask_token_id).all()
    assert torch.equal(example["input_ids"][~asked], plain[~asked])
    assert torch.equal(encode(LONG, words)["supervised"], asked), "always the same ones"
    others = [encode(f"{LONG} w{n}", words)["supervised"][:20] for n in range(20, 30)]
    assert any(not torch.equal(other, asked) for other in others)
    counts = torch.stack(others).sum(0)
    assert (counts > 0).sum() > 8, "anywhere in the text"


def test_how_many_are_masked(words):
    assert int(encode(LONG, words, masking_rate=0.5)["supervised"].sum()) == 10
    assert encode(LONG, words, masking_rate=1)["supervised"].all()
    assert int(encode("w1", words)["supervised"].sum()) == 1
    for rate in (0, 1.5):
        with pytest.raises(ValueError, match="masking_rate"):
            DataConfig(path="d", text="t", masking_rate=rate)


def test_special_tokens_are_never_masked(words):
    example = encode(f"<s> {LONG} </s>", words, masking_rate=1)
    assert example["supervised"].tolist() == [False] + [True] * 20 + [False]
    assert encode("<s> </s>", words) is None, "nothing is left to mask"
    assert encode("", words) is None


def test_long_texts_are_cut(words):
    assert encode(LONG, words, max_length=5)["input_ids"].shape == (5,)
    words.model_max_length = 4
    assert encode(LONG, words)["input_ids"].shape == (4,)


def test_a_tokenizer_without_a_mask():
    with pytest.raises(TrainingError, match="a tokenizer that has a mask token"):
        encode("w1 w2", tokenizer())


def test_logits_of_a_padded_batch_are_those_of_each_alone(words):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=24, **shape)
    model = BertForMaskedLM(config).eval()
    examples = [encode(text, words) for text in ("w1 <mask> w3 w4 <mask>", "<mask> w2", LONG)]
    with torch.no_grad():
        together = KIND.logits(model, KIND.collate(examples))
        naive = torch.cat(
            [model(input_ids=e["input_ids"][None]).logits[0][e["supervised"]] for e in examples]
        )
    assert len(together) == 2 + 1 + 3
    torch.testing.assert_close(together, naive, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("basis", ["task_vector", "ace_relative"])
@pytest.mark.parametrize("model", [RobertaForMaskedLM, BertForMaskedLM, DistilBertForMaskedLM])
def test_from_masks_to_a_merged_model(tmp_path, mergekit_yaml, model, basis):
    config = masked_family(tmp_path / "family", model, basis=basis)
    out = tmp_path / "out"
    config["training"] |= {"epochs": 10, "patience": 0, "penalty": 0}
    file = run_training(parsed(config), out, quiet=True)
    log = map(json.loads, (out / "training.jsonl").read_text().splitlines())
    seen = [line["loss"] for line in log if "loss" in line]
    assert sum(seen[-4:]) < sum(seen[:4]), "an epoch has four steps"
    merged = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()), out="merged")
    result = AutoModelForMaskedLM.from_pretrained(merged, dtype=torch.float64).eval()
    words = tokenizer(mask_token="<mask>")
    shares, losses = [], []
    for row, (expert, own) in enumerate(zip(config["models"], file.contents.experts, strict=True)):
        assert own.task == expert["task"]
        lines = Path(expert["data"]["path"]).read_text().splitlines()
        known = {tuple(words(json.loads(line)["t"])["input_ids"]) for line in lines}
        teacher = AutoModelForMaskedLM.from_pretrained(expert["model"], dtype=torch.float64).eval()
        splits, _ = load_examples(out / "state" / f"labels-{row}.safetensors")
        right, logs = [], []
        for sample in splits["test"]:
            ids = sample["input_ids"]
            assert tuple(ids.tolist()) in known
            place = ids.tolist().index(words.mask_token_id)
            with torch.no_grad():
                said = teacher(input_ids=ids[None]).logits[0, place].argmax()
                mine = result(input_ids=ids[None]).logits[0, place].log_softmax(-1)
            assert sample["hard"].tolist() == [int(said)]
            right.append(int(mine.argmax() == said))
            logs.append(-float(mine[said]))
        shares.append(sum(right) / len(right))
        losses.append(sum(logs) / len(logs))
    row = "StatsMerging" if basis == "task_vector" else f"{basis}, coefficients"
    score = file.contents.scores[row]
    assert score["accuracy"] == pytest.approx(shares)
    assert score["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_the_base_rehearses_masks(tmp_path):
    config = masked_family(tmp_path / "family", RobertaForMaskedLM)
    rehearsal = {"path": str(tmp_path / "family" / "data0.jsonl"), "text": "t"}
    assert parsed({**config, "basis": "ace_relative"}).penalty == 3
    out = tmp_path / "out"
    file = run_training(parsed(config | {"rehearsal": rehearsal}), out, quiet=True)
    assert len(file.coefficients) == 2
    assert file.contents.scores["base model"]["rehearsal"] == 1


def test_true_labels_of_given_masks(tmp_path):
    config = masked_family(tmp_path / "family", RobertaForMaskedLM, labels="true")
    with pytest.raises(TrainingError, match=r"not all train samples of data .* have the truth"):
        run_training(parsed(config), tmp_path / "out", quiet=True)
    for expert in config["models"]:
        path = Path(expert["data"]["path"])
        path.write_text(path.read_text().replace("<mask> ", ""))
    file = run_training(parsed(config), tmp_path / "true", quiet=True)
    assert file.coefficients.isfinite().all()
