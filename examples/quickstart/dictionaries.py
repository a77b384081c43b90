# SPDX-License-Identifier: Apache-2.0
"""The skills of the quickstart family: small dictionaries, each a random one-to-one map.

A language maps 48 English words to the same 48 invented ones, each language in its own way. A line
reads

    <s> topaz apple = fola ; river = tiku ; … ;

and a model masters topaz when it writes the right word behind every `=`. Since all languages share
their words, experts write different answers for the same questions into the same matrices, which
is what makes merging them a task.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

OLD_LANGUAGES = ("amber", "coral", "jade", "pearl")  # the base model speaks these
NEW_LANGUAGES = ("topaz", "ruby", "onyx", "opal")  # each expert learns one of these
KEYS = tuple(
    """apple bird boat book bread bridge candle chair cloud coat door dream earth field fire fish
    flower forest garden glass gold hand hill horse house island key lamp leaf letter milk moon
    mountain night ocean paper rain river road salt ship silver snow star stone tree wind
    winter""".split()
)
# Samples for a merge ask the first half. The other one tells what the merge knows beyond them.
ASKED, UNASKED = KEYS[::2], KEYS[1::2]
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
PAIRS = 6  # questions in a line


def invented_words() -> list[str]:
    """Return 48 words of two syllables, the same in every run."""
    syllables = [c + v for c in "fklmnprstvz" for v in "aeiou"]
    words = [a + b for a in syllables for b in syllables if a != b]
    return random.Random(0).sample(words, len(KEYS))


WORDS = invented_words()
# The answer to every key, by language; the same in every run.
DICTIONARIES: dict[str, dict[str, str]] = {
    language: dict(zip(KEYS, random.Random(language).sample(WORDS, len(WORDS)), strict=True))
    for language in OLD_LANGUAGES + NEW_LANGUAGES
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word, so that a person can type a question."""
    words = [*SPECIAL, "=", ";", *OLD_LANGUAGES, *NEW_LANGUAGES, *KEYS, *WORDS]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )


def encode(lines: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, both (lines, tokens); labels are -100 except at answers."""
    ids = torch.tensor(tokenizer(lines)["input_ids"])
    equals = tokenizer.convert_tokens_to_ids("=")
    labels = torch.full_like(ids, -100)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, 1:] = ids[:, :-1] == equals
    labels[answers] = ids[answers]
    return ids, labels


def write_line(language: str, keys: Sequence[str]) -> str:
    """Return the text of one line that asks `keys`."""
    answers = DICTIONARIES[language]
    return f"{language} " + " ; ".join(f"{key} = {answers[key]}" for key in keys)


def random_lines(languages: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Return `count` lines, each of a random one of the languages, with random keys."""
    return [write_line(rng.choice(languages), rng.sample(KEYS, PAIRS)) for _ in range(count)]


def exam(language: str, rounds: int = 4) -> list[str]:
    """Return lines that ask every key of a language once per round, in fixed random orders."""
    rng = random.Random(1)
    lines = []
    for _ in range(rounds):
        keys = rng.sample(KEYS, len(KEYS))
        lines += [write_line(language, keys[n : n + PAIRS]) for n in range(0, len(keys), PAIRS)]
    return lines
