# SPDX-License-Identifier: Apache-2.0
"""What is supervised, losses of answers, and what models write: answers, and texts of their own."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import tiny, tiny_llama
from families import SMALL, tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import LlamaForSequenceClassification

from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.tasks import MODEL_KINDS, first_token, write_own_texts
from mergekit_ace.training.train import summed_loss

CHAT = (
    "{% for m in messages %}{{ m.role[0] and '<s> ' }}{{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> {% endif %}"
)
THINKING = CHAT.replace("%}<s> {% endif", "%}<s> w9 {% endif")  # what no written answer has
NUMBERED = "{% for m in messages %}w{{ messages|length }} {{ m.content }} {% endfor %}"
SAID = (("user", "w1"), ("assistant", "w2 w3"), ("user", "w4"), ("assistant", "w5"))
TALK = [{"role": role, "content": content} for role, content in SAID]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
ROW = {"t": "w1 w2 w3 w4", "q": "w1 w2 w3", "a": "w4 w5", "m": TALK, "c": [TALK[0], CALL],
       "one": "w1", "i": [{"role": "ipython", "content": "w9"}, *TALK], "u": TALK[:-1],
       "nothing": None, "empty": ""}  # fmt: skip
ANSWERED, UNANSWERED = {"prompt": "q", "completion": "a"}, ""  # then the expert writes it


def encode(row, task="causal-lm", template=None, **columns):
    words = tokenizer()
    words.chat_template = template
    return MODEL_KINDS[task].encode(row, DataConfig(path="d", **columns), words)


@pytest.mark.parametrize(
    ("template", "columns", "expected"),
    [
        (None, {"text": "t", "max_length": 3}, "w2 w3"),
        (None, {"text": "one"}, None),
        (None, ANSWERED, "w4 w5 </s>"),
        (None, {**ANSWERED, "max_length": 4}, "w4"),
        (None, {**ANSWERED, "max_length": 3}, None),
        (None, {"prompt": "q"}, UNANSWERED),
        (None, {"prompt": "empty"}, None),
        (CHAT, {"messages": "m"}, "w5 </s>"),
        (CHAT, {"messages": "i"}, "w5 </s>"),
        (CHAT, {"messages": "c"}, "</s>"),
        (CHAT, {"messages": "u"}, UNANSWERED),
        (THINKING, {"messages": "m"}, "<s> w5 </s>"),
    ],
)
def test_what_is_supervised(template, columns, expected):
    """All of a text but its first token, an answer with its end, and a chat's last answer."""
    example = encode(ROW, template=template, **columns)
    if expected is None:
        assert example is None
        return
    chosen = example["input_ids"][example["supervised"]]
    assert " ".join(tokenizer().convert_ids_to_tokens(chosen.tolist())) == expected
    assert ("true" in example) == (expected != UNANSWERED)
    assert torch.equal(example.get("true", chosen), chosen)


@pytest.mark.parametrize(
    ("template", "columns", "message"),
    [
        (None, {"text": "nothing"}, r"column nothing holds None instead of text"),
        (None, {"messages": "m"}, "template refuses its messages: .*template"),
        (NUMBERED, {"messages": "m"}, "question otherwise once it is answered; give `prompt`"),
    ],
)
def test_rows_that_cannot_be_read(template, columns, message):
    with pytest.raises(ConfigError, match=message):
        encode(ROW, template=template, **columns)


def test_an_expert_writes_what_it_would_write_alone():
    """Up to an end of its configs or of its tokenizer, whatever else its generation config says."""
    model, kind, words = tiny_llama(), MODEL_KINDS["causal-lm"], tokenizer()
    ended = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    words.backend_tokenizer.post_processor = ended  # a prompt gets no such end
    data = DataConfig(path="d", prompt="q", max_new_tokens=6)
    samples = [kind.encode({"q": q}, data, words) for q in ("w1 w2 w3 w4", "w5")]
    assert [sample["input_ids"].tolist() for sample in samples] == [[2, 5, 6, 7, 8], [2, 9]]
    usual = model.generation_config
    usual.repetition_penalty, usual.stop_strings, usual.eos_token_id = 5.0, ["w"], [30, 31]
    for sample, done in zip(samples, kind.complete(model, samples, data, words), strict=True):
        ids = sample["input_ids"].tolist()
        for _ in range(6):  # greedily, by hand
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in (words.eos_token_id, model.config.eos_token_id, 30, 31):
                break
        assert done["input_ids"].tolist() == ids
        assert int(done["supervised"].sum()) == len(ids) - len(sample["input_ids"])
    assert model.generation_config is usual


@torch.no_grad()
@pytest.mark.parametrize("pad", [5, None])
def test_a_padded_batch_is_classified_like_each_alone(pad):
    """By a decoder, at the last token; `test_train.py` has those that write, and encoders."""
    kind = MODEL_KINDS["sequence-classification"]
    model = tiny(LlamaForSequenceClassification, num_labels=3, pad_token_id=pad, **SMALL)
    texts = ("w1 w2 w3 w4 w5 w6", "w7 w8", "w9 w10 w11")
    samples = [encode({"t": text}, "sequence-classification", text="t") for text in texts]
    states = [model.model(input_ids=s["input_ids"][None]).last_hidden_state for s in samples]
    naive = torch.cat([model.score(state[:, -1]) for state in states])
    together = kind.logits(model, kind.collate(samples))
    torch.testing.assert_close(together, naive, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("known", [7, 3])
def test_losses_of_labels(rng, known):
    """Cross-entropy, and the divergence from a teacher, whose other classes count as one."""
    logits, teacher = (torch.randn(5, 7, generator=rng) for _ in range(2))
    classes = torch.tensor([1, 0, 6, 3, 3])
    best = teacher.log_softmax(-1).topk(known)
    whole = {"hard": classes, "soft_values": best.values, "soft_indices": best.indices}
    samples = [{name: part[a:b] for name, part in whole.items()} for a, b in ((0, 2), (2, 5))]
    expected = cross_entropy(logits, classes, reduction="sum")
    assert float(summed_loss(logits, samples, "hard")) == pytest.approx(float(expected))
    p = best.values.double().exp()
    q = logits.double().softmax(-1).gather(-1, best.indices)
    if known < 7:
        p, q = (torch.cat((part, 1 - part.sum(-1, keepdim=True)), -1) for part in (p, q))
    divergence = float((p * (p / q).log()).sum())
    assert float(summed_loss(logits, samples, "soft")) == pytest.approx(divergence, rel=1e-4)
    assert float(summed_loss(teacher, samples, "soft")) == pytest.approx(0, abs=1e-5)


@torch.no_grad()
def test_own_texts_are_drawn_from_the_models_own_distribution(tmp_path):
    """Whatever the generation config says, once, and without a trace."""
    model, words, path = tiny_llama(max_position_embeddings=30), tokenizer(), tmp_path / "t.jsonl"
    model.lm_head.weight.normal_(std=0.5)  # far from uniform
    usual, state = model.generation_config, torch.get_rng_state()
    usual.temperature, usual.top_k, usual.do_sample = 0.1, 1, True
    usual.repetition_penalty, usual.eos_token_id = 5.0, list(range(20))
    data = write_own_texts(model, words, 100, path, quiet=True)
    assert model.generation_config is usual
    assert torch.equal(torch.get_rng_state(), state)
    written = path.read_text(encoding="utf-8")
    write_own_texts(model, words, 100, tmp_path / "again.jsonl", quiet=True)
    assert (tmp_path / "again.jsonl").read_text(encoding="utf-8") == written
    lines = [json.loads(line)["text"] for line in written.splitlines()]
    texts = torch.tensor(words(lines)["input_ids"])
    assert texts.shape == (100, 29), "as many tokens as the model has positions"
    first = torch.full((100, 1), words.bos_token_id)
    logits = model.double()(torch.cat([first, texts[:, :-1]], dim=1)).logits
    expected = logits.softmax(dim=-1).sum(dim=(0, 1))
    found = texts.flatten().bincount(minlength=len(expected))
    assert expected.max() > 3 * expected.min(), "else a uniform draw would pass"
    assert ((found - expected).abs() <= 5 * expected.sqrt() + 1).all()
    assert len({*lines}) > 95
    assert write_own_texts(None, None, 100, path) == data, "what is there is not written again"


def test_how_a_text_begins():
    words = tokenizer()
    assert first_token(words) == words.bos_token_id
    words.bos_token = None
    assert first_token(words) == words.eos_token_id
    words.chat_template = "{% for one in messages %}w7 {{ one['content'] }}{% endfor %}"
    assert first_token(words) == words.convert_tokens_to_ids("w7")
    words.chat_template = words.eos_token = None
    with pytest.raises(ConfigError, match="how a text begins: add `data` to every model"):
        first_token(words)
