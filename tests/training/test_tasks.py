# SPDX-License-Identifier: Apache-2.0
"""What is supervised, and that padding and batching change nothing."""

from __future__ import annotations

import pytest
import torch
from checkpoints import tiny_llama
from families import SMALL, logits_by_hand, tokenizer
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForSequenceClassification

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import model_kind

CHAT = (
    "{% for m in messages %}{{ m.role[0] and '<s> ' }}{{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> {% endif %}"
)


@pytest.fixture
def words():
    return tokenizer()


def supervised(example, words) -> str:
    chosen = example["input_ids"][example["supervised"]]
    return " ".join(words.convert_ids_to_tokens(chosen.tolist()))


def encode(row, words, task="causal-lm", **columns):
    return model_kind(task).encode(row, DataConfig(path="d", **columns), words)


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<s> {% generation %}{{ m.content }} "
    "</s>{% endgeneration %} {% else %}<s> {{ m.content }} </s> {% endif %}{% endfor %}"
)
SAID = (("user", "w1"), ("assistant", "w2 w3"), ("user", "w4"), ("assistant", "w5"))
TALK = [{"role": role, "content": content} for role, content in SAID]
ROW = {"t": "w1 w2 w3 w4", "q": "w1 w2 w3", "a": "w4 w5", "m": TALK, "one": "w1"}
ANSWERED = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("template", "columns", "expected"),
    [
        (None, {"text": "t"}, "w2 w3 w4"),
        (None, {"text": "t", "max_length": 3}, "w2 w3"),
        (None, {"text": "one"}, None),
        (None, ANSWERED, "w4 w5 </s>"),
        (None, {**ANSWERED, "max_length": 4}, "w4"),
        (None, {**ANSWERED, "max_length": 3}, None),
        (CHAT, {"messages": "m"}, "w5 </s>"),
        (MARKED, {"messages": "m"}, "w2 w3 </s> w5 </s>"),
        (MARKED, {"messages": "m", "max_length": 7}, "w2 w3 </s>"),
    ],
)
def test_what_is_supervised(words, template, columns, expected):
    """All of a text but its first token, an answer with its end, and what a template marks."""
    words.chat_template = template
    example = encode(ROW, words, **columns)
    assert (example and supervised(example, words)) == expected
    if example:
        assert example["true"].tolist() == example["input_ids"][example["supervised"]].tolist()


@pytest.mark.parametrize(
    ("template", "columns"),
    [(None, {"prompt": "q"}), (CHAT, {"messages": "m"}), (MARKED, {"messages": "m"})],
)
def test_a_question_is_for_the_expert_to_answer(words, template, columns):
    words.chat_template = template
    example = encode({"q": "w1 w2", "m": TALK[:-1]}, words, **columns)
    assert not example["supervised"].any()
    assert "true" not in example


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"t": None}, {"text": "t"}, r"column t holds None instead of text"),
        ({"m": TALK}, {"messages": "m"}, "no chat template"),
    ],
)
def test_rows_that_cannot_be_read(words, row, columns, message):
    with pytest.raises(TrainingError, match=message):
        encode(row, words, **columns)


def test_a_role_that_the_template_knows(words):
    words.chat_template = (
        "{% for m in messages if m['role'] != 'ipython' %}{{ m['content'] }} {% endfor %}"
    )
    talk = [{"role": "ipython", "content": "w9"}, {"role": "user", "content": "w1"}]
    assert (
        encode({"m": talk}, words, messages="m")["input_ids"].tolist() == words("w1")["input_ids"]
    )
    talk[0]["role"] = "gpt"
    with pytest.raises(TrainingError, match="a message of the role 'gpt'; roles are system"):
        encode({"m": talk}, words, messages="m")


def test_an_answer_without_text(words):
    """A template that writes it behind the question is enough; else the answer is written plain."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    chat = {"m": [TALK[0], called]}
    words.chat_template = CHAT
    assert supervised(encode(chat, words, messages="m"), words)
    words.chat_template = "{% for m in messages %}w{{ loop.length }} {{ m.content }} {% endfor %}"
    with pytest.raises(TrainingError, match="column m has an answer without text, which"):
        encode(chat, words, messages="m")


def test_an_expert_writes_what_it_would_write_alone(words):
    model, kind = tiny_llama(), model_kind("causal-lm")
    data = DataConfig(path="d", prompt="q", max_new_tokens=6)
    samples = [kind.encode({"q": q}, data, words) for q in ("w1 w2 w3 w4", "w5")]
    for sample, done in zip(samples, kind.complete(model, samples, data, words), strict=True):
        ids = sample["input_ids"].tolist()
        for _ in range(6):  # greedily, by hand
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == model.generation_config.eos_token_id:
                break
        assert done["input_ids"].tolist() == ids
        assert int(done["supervised"].sum()) == len(ids) - len(sample["input_ids"])


MASKED = model_kind("masked-lm")


LONG = " ".join(f"w{n}" for n in range(20))


@pytest.fixture
def masker():
    return tokenizer(mask_token="<mask>")


def encode_masked(text: str, masker, **settings):
    return MASKED.encode({"t": text}, DataConfig(path="d", text="t", **settings), masker)


def test_masks_in_the_text_are_what_is_asked(masker):
    example = encode_masked("w1 <mask> w3 <mask>", masker)
    assert example["supervised"].tolist() == [False, True, False, True]
    assert example["input_ids"].tolist() == masker("w1 <mask> w3 <mask>")["input_ids"]
    assert "true" not in example, "nobody knows what stood there"


def test_of_a_text_without_masks_some_tokens_are_masked(masker):
    plain = torch.tensor(masker(LONG)["input_ids"])
    example = encode_masked(LONG, masker)
    asked = example["supervised"]
    assert int(asked.sum()) == 3, "15 % of 20"
    assert torch.equal(example["true"], plain[asked])
    assert (example["input_ids"][asked] == masker.mask_token_id).all()
    assert torch.equal(example["input_ids"][~asked], plain[~asked])
    assert torch.equal(encode_masked(LONG, masker)["supervised"], asked), "always the same ones"
    others = [encode_masked(f"{LONG} w{n}", masker)["supervised"][:20] for n in range(20, 30)]
    assert any(not torch.equal(other, asked) for other in others)
    counts = torch.stack(others).sum(0)
    assert (counts > 0).sum() > 8, "anywhere in the text"


@pytest.mark.parametrize(
    ("text", "rate", "count"), [(LONG, 0.5, 10), (LONG, 1, 20), ("w1", 0.15, 1)]
)
def test_how_many_are_masked(masker, text, rate, count):
    assert int(encode_masked(text, masker, masking_rate=rate)["supervised"].sum()) == count


def test_long_texts_are_cut(masker):
    assert encode_masked(LONG, masker, max_length=5)["input_ids"].shape == (5,)
    masker.model_max_length = 4
    assert encode_masked(LONG, masker)["input_ids"].shape == (4,)


def test_special_tokens_are_never_masked(masker):
    example = encode_masked(f"<s> {LONG} </s>", masker, masking_rate=1)
    assert example["supervised"].tolist() == [False] + [True] * 20 + [False]
    assert encode_masked("<s> </s>", masker) is None, "nothing is left to mask"
    assert encode_masked("", masker) is None


def test_a_tokenizer_without_a_mask():
    with pytest.raises(TrainingError, match="a tokenizer that has a mask token"):
        encode_masked("w1 w2", tokenizer())


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_logits_of_a_padded_batch_are_those_of_each_alone(masker, task):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(masker), **SMALL)
    model = BertForMaskedLM(config).eval() if task == "masked-lm" else tiny_llama()
    texts = ["w1 w2 w3 w4 w5", "w6 w7", "w8 w9 w10"]
    if task == "masked-lm":
        texts = ["w1 <mask> w3 w4 <mask>", "<mask> w2", LONG]
    kind, samples = model_kind(task), [encode({"t": t}, masker, task, text="t") for t in texts]
    with torch.no_grad():
        together = kind.logits(model, kind.collate(samples))
    naive = torch.cat([logits_by_hand(model, sample) for sample in samples])
    assert len(together) == (2 + 1 + 3 if task == "masked-lm" else 4 + 1 + 2)
    torch.testing.assert_close(together, naive, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pad", [None, 0, 5])
def test_a_padded_batch_is_answered_like_each_alone(pad):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=3,
        pad_token_id=pad,
    )
    model = LlamaForSequenceClassification(config).eval()
    kind, data = model_kind("sequence-classification"), DataConfig(path="d", text="t")
    texts = ["w1 w2 w3 w4 w5 w6", "w7 w8", "w9 w10 w11 <pad>"]  # the last ends in token 0
    samples = [kind.encode({"t": text}, data, tokenizer()) for text in texts]
    if pad == 0:
        samples = samples[:2]
    with torch.no_grad():
        together = kind.logits(model, kind.collate(samples))
        alone = torch.cat([kind.logits(model, kind.collate([sample])) for sample in samples])
        states = [model.model(input_ids=s["input_ids"][None]).last_hidden_state for s in samples]
        naive = torch.cat([model.score(state[:, -1]) for state in states])
    torch.testing.assert_close(together, naive, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, naive, rtol=1e-4, atol=1e-5)
    assert model.config.pad_token_id == pad
