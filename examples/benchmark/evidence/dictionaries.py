# SPDX-License-Identifier: Apache-2.0
"""Languages that small models learn: dictionaries, lines, exams, and the models themselves.

A language is a random one-to-one map from 48 keys to 48 values with a prefix of its own; a line is

    <s> language key = value ; key = value ; …

with six pairs, and only values are scored. Languages 10 and 11 are dialects: half of their words
are those of language 0, as two fine-tunes of one subject share what their base knows. A model is a
Llama, a GPT-2 (weights stored the other way round) or a RoBERTa, which sees masks in the place of
all values of a line.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

WORDS, PAIRS = 48, 6
PAD, BOS, EQUALS, END, MASK = range(5)
LANGUAGES = 12
OLD = range(4)
DIALECTS = (10, 11)
FIRST_KEY = MASK + 1 + LANGUAGES
FIRST_VALUE = FIRST_KEY + WORDS
VOCABULARY = FIRST_VALUE + WORDS
HIDDEN, LAYERS, HEADS, INNER = 192, 3, 4, 512
# Query heads, heads of keys and values, size of a head. With T experts the rows of a grouped one's
# keys (and values) are T·o/i = T·heads·size / HIDDEN times as many as the columns: for four experts
# 1 at size 48, 0.92 at 44 and 1.08 at 52; for eight 1 at size 24.
LLAMAS = {
    "llama": (HEADS, HEADS, 48),
    "llama-tied": (HEADS, HEADS, 48),
    "llama-grouped": (HEADS, 1, 48),
    "llama-grouped-0.9": (HEADS, 1, 44),
    "llama-grouped-1.1": (HEADS, 1, 52),
    "llama-tied-grouped": (HEADS, 1, 48),
    "llama-8-grouped": (8, 1, 24),
}
CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {% generation %}"
    "{{ m.content }}{% endgeneration %} ;{% elif m.role == 'user' %} {{ m.content }} ={% else %} "
    "{{ m.content }}{% endif %}{% endfor %}"
)
ROUNDS = {"validation": 2, "test": 8}  # every word is asked once a round


def make_languages(seed: int) -> list[Tensor]:
    """Return the value of every key, (48,), for each language."""
    generator = torch.Generator().manual_seed(1000 + seed)
    maps = [torch.randperm(WORDS, generator=generator) for _ in range(LANGUAGES)]
    for number in DIALECTS:  # half of the words are old ones, the others change places
        moved = torch.randperm(WORDS, generator=generator)[: WORDS // 2]
        maps[number] = maps[0].clone()
        maps[number][moved] = maps[0][moved.roll(1)]
    return maps


def halves() -> tuple[range, range]:
    """Return the words that samples for a merge may ask, and those that they leave to the exam.

    A merge with data is scored on the second half: on the first one it may have learned the
    samples' own answers. Experts are trained on all words.
    """
    return range(0, WORDS, 2), range(1, WORDS, 2)


def lines(
    numbers: list[int], maps: list[Tensor], rng: random.Random, words: Sequence[int] = range(WORDS)
) -> tuple[Tensor, Tensor]:
    """Return tokens of a random line per language number, and labels: −100 but for values.

    Args:
        numbers: of languages.
        maps: of all languages.
        rng: draws the words of each line.
        words: that are asked; all by default.
    """
    keys = torch.tensor([rng.sample(words, PAIRS) for _ in numbers])
    return write(torch.tensor(numbers), keys, maps)


def write(numbers: Tensor, keys: Tensor, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, both (n, 2 + 4·pairs), of lines that ask `keys`, (n, pairs)."""
    count, pairs = keys.shape
    values = torch.stack(maps)[numbers[:, None], keys] + FIRST_VALUE
    tokens = torch.empty(count, pairs, 4, dtype=torch.long)
    tokens[..., 0], tokens[..., 1], tokens[..., 2] = keys + FIRST_KEY, EQUALS, values
    tokens[..., 3] = END
    labels = torch.full_like(tokens, -100)
    labels[..., 2] = values
    prefix = torch.stack([torch.full_like(numbers, BOS), numbers + MASK + 1], dim=1)
    nothing = torch.full_like(prefix, -100)
    return (
        torch.cat([prefix, tokens.flatten(1)], dim=1),
        torch.cat([nothing, labels.flatten(1)], dim=1),
    )


def exam(number: int, maps: list[Tensor], split: str) -> tuple[Tensor, Tensor]:
    """Return lines that ask every word of a language once a round, in orders of the split's own."""
    rng = random.Random(f"{split} {number}")
    rounds = [rng.sample(range(WORDS), WORDS) for _ in range(ROUNDS[split])]
    keys = torch.tensor(rounds).view(-1, PAIRS)
    return write(torch.full((len(keys),), number), keys, maps)


def asked_words(tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the word of every question, (answers,), in the order of the labels."""
    asked = labels != -100  # "key = value": the key stands two tokens before
    return tokens[asked.roll(-2, dims=1)] - FIRST_KEY


def new_model(architecture: str, layers: int = LAYERS) -> PreTrainedModel:
    """Return a model of about 1.4 million parameters, if it has as many layers as usual."""
    special = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD}
    size = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
    }
    if architecture in LLAMAS:
        heads, groups, head_size = LLAMAS[architecture]
        config = LlamaConfig(
            **size,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=head_size,
            max_position_embeddings=64,
            tie_word_embeddings=architecture.startswith("llama-tied"),
            **special,
        )
        return LlamaForCausalLM(config)
    if architecture == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=HIDDEN,
            n_inner=INNER,
            n_layer=layers,
            n_head=HEADS,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
            **special,
        )
        return GPT2LMHeadModel(config)
    config = RobertaConfig(
        **size,
        num_attention_heads=HEADS,
        max_position_embeddings=66,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=1,
        **special,
    )
    return RobertaForMaskedLM(config)


def answer(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the logits of all answers, (answers, vocabulary), in the order of the labels."""
    asked = labels != -100
    if isinstance(model, RobertaForMaskedLM):
        logits = model(input_ids=torch.where(asked, MASK, tokens)).logits
        return logits[asked]
    return model(input_ids=tokens).logits[:, :-1][asked[:, 1:]]


def as_chat(words: Sequence[str]) -> list[dict[str, str]]:
    """Return a line as a chat: the language is the system prompt, keys are questions."""
    chat = [{"role": "system", "content": words[1]}]
    for place in range(2, len(words), 4):
        chat.append({"role": "user", "content": words[place]})
        chat.append({"role": "assistant", "content": words[place + 2]})
    return chat


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for every token, so that lines can be written as text."""
    words = ["<pad>", "<s>", "=", ";", "<mask>"]
    words += [f"language{number}" for number in range(LANGUAGES)]
    words += [f"{kind}{number}" for kind in ("key", "value") for number in range(WORDS)]
    model = models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token=";",
        mask_token="<mask>",
        chat_template=CHAT,
    )
