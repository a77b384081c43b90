# SPDX-License-Identifier: Apache-2.0
"""Families of small language models that know dictionaries.

A language is a random one-to-one map from 48 keys to 48 values with a prefix of its own; a line is

    <s> language key = value ; key = value ; …

with six pairs, and only values are scored. The base knows four languages, each expert one more.
Languages 10 and 11 are dialects: half of their words are those of language 0, as two fine-tunes of
one subject share what their base knows. A Llama, a GPT-2 (weights stored the other way round) or a
RoBERTa, which sees masks in the place of all values of a line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from evidence.families import FOLDER, Family, Split, saving
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
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
BATCH = 48
CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {% generation %}"
    "{{ m.content }}{% endgeneration %} ;{% elif m.role == 'user' %} {{ m.content }} ={% else %} "
    "{{ m.content }}{% endif %}{% endfor %}"
)
ROUNDS = {"validation": 2, "test": 8}  # every word is asked once a round


@dataclass(frozen=True)
class Recipe:
    """How one model is trained.

    Attributes:
        steps: optimiser steps.
        peak: of the one-cycle learning rate.
        rank: of the adapters that are trained in the place of the weights; 0: the weights.
    """

    steps: int
    peak: float
    rank: int = 0


BASE = Recipe(700, 1e-3)
EVEN = Recipe(250, 5e-4)
# As fine-tunes of different hands: their ‖Δ‖² come out fortyfold apart.
STRENGTHS = (Recipe(500, 1.5e-4), Recipe(200, 2e-3), Recipe(250, 5e-4), Recipe(350, 2.5e-4))
# Half as far apart on a logarithmic scale.
SPREAD = (Recipe(350, 2.5e-4), Recipe(200, 1e-3), Recipe(280, 4e-4), Recipe(250, 6.3e-4))
ADAPTERS = Recipe(400, 5e-3, rank=8)
GENTLE_ADAPTERS = Recipe(400, 1e-3, rank=16)

# Per family: architecture, experts' languages, their recipes in turn.
FAMILIES: dict[str, tuple[str, range | tuple[int, ...], tuple[Recipe, ...]]] = {
    "llama": ("llama", range(4, 8), (EVEN,)),
    "llama-strengths": ("llama", range(4, 8), STRENGTHS),
    "llama-spread": ("llama", range(4, 8), SPREAD),
    "llama-lora": ("llama", range(4, 8), (ADAPTERS,)),
    "llama-lora-gentle": ("llama", range(4, 8), (GENTLE_ADAPTERS,)),
    "llama-tied": ("llama-tied", range(4, 8), (EVEN,)),
    "llama-8": ("llama", range(4, 12), (EVEN,)),
    "gpt2": ("gpt2", range(4, 8), (EVEN,)),
    "roberta": ("roberta", range(4, 8), (EVEN,)),
}


def make_languages(seed: int) -> list[Tensor]:
    """The value of every key, (48,), for each language."""
    generator = torch.Generator().manual_seed(1000 + seed)
    maps = [torch.randperm(WORDS, generator=generator) for _ in range(LANGUAGES)]
    for number in DIALECTS:  # half of the words are old ones, the others change places
        moved = torch.randperm(WORDS, generator=generator)[: WORDS // 2]
        maps[number] = maps[0].clone()
        maps[number][moved] = maps[0][moved.roll(1)]
    return maps


def lines(numbers: list[int], maps: list[Tensor], rng: random.Random) -> tuple[Tensor, Tensor]:
    """A line per language number: tokens and, where a value stands, labels; else −100."""
    keys = torch.tensor([rng.sample(range(WORDS), PAIRS) for _ in numbers])
    return write(torch.tensor(numbers), keys, maps)


def write(numbers: Tensor, keys: Tensor, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and labels, both (n, 2 + 4·pairs), of lines that ask `keys`, (n, pairs)."""
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


def exam(number: int, maps: list[Tensor], split: Split) -> tuple[Tensor, Tensor]:
    """Lines that ask every word of a language once a round, in orders of the split's own."""
    rng = random.Random(f"{split} {number}")
    rounds = [rng.sample(range(WORDS), WORDS) for _ in range(ROUNDS[split])]
    keys = torch.tensor(rounds).view(-1, PAIRS)
    return write(torch.full((len(keys),), number), keys, maps)


def new_model(architecture: str) -> PreTrainedModel:
    """About 1.4 million parameters, with a head of its own."""
    special = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD}
    size = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    }
    if architecture in ("llama", "llama-tied"):
        config = LlamaConfig(
            **size,
            num_key_value_heads=HEADS,
            max_position_embeddings=64,
            tie_word_embeddings=architecture == "llama-tied",
            **special,
        )
        return LlamaForCausalLM(config)
    if architecture == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=HIDDEN,
            n_inner=INNER,
            n_layer=LAYERS,
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
        max_position_embeddings=66,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=1,
        **special,
    )
    return RobertaForMaskedLM(config)


def answer(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Logits of all answers, (answers, vocabulary), in the order of the labels that count."""
    asked = labels != -100
    if isinstance(model, RobertaForMaskedLM):
        logits = model(input_ids=torch.where(asked, MASK, tokens)).logits
        return logits[asked]
    return model(input_ids=tokens).logits[:, :-1][asked[:, 1:]]


class Dictionaries(Family):
    """One of `FAMILIES`, with one seed."""

    def __init__(self, name: str, seed: int, count: int | None = None):
        """With `count`, of the family's first experts only."""
        self.name, self.seed = name, seed
        self.architecture, numbers, recipes = FAMILIES[name]
        self.masked = self.architecture == "roberta"
        folder = FOLDER / f"{self.architecture}-{seed}"
        self.base = folder / "base"
        self.maps = make_languages(seed)
        self.old = tuple(str(number) for number in OLD)
        self.recipes, self.experts = {}, {}
        for place, number in enumerate(list(numbers)[:count]):
            recipe = recipes[place % len(recipes)]
            kind = f"{recipe.steps}-{recipe.peak:g}" + (f"-rank{recipe.rank}" * bool(recipe.rank))
            self.recipes[str(number)] = recipe
            self.experts[str(number)] = folder / f"language{number}-{kind}"

    def train(self) -> None:
        if not self.base.exists():
            torch.manual_seed(self.seed)
            model = new_model(self.architecture)
            self._train(model, BASE, None)
            self._save(model, self.base)
        for task, folder in self.experts.items():
            if not folder.exists():
                torch.manual_seed(100 * self.seed + int(task))
                model = self._train(self.load(self.base), self.recipes[task], int(task))
                self._save(model, folder)

    def _train(self, model: PreTrainedModel, recipe: Recipe, new: int | None) -> PreTrainedModel:
        """A third of an expert's batch is its new language, the rest rehearses the old ones."""
        rng = random.Random(f"{self.seed} {new} {recipe}")
        learner = model if recipe.rank == 0 else add_adapters(model, recipe.rank)
        parameters = [p for p in learner.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=recipe.peak, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.peak, recipe.steps)
        learner.train()
        what = f"{self.architecture} {self.seed}, {'base' if new is None else f'language {new}'}"
        for _ in tqdm(range(recipe.steps), desc=what, unit="step", mininterval=5):
            fresh = [] if new is None else [new] * (BATCH // 3)
            numbers = [rng.choice(OLD) for _ in range(BATCH - len(fresh))] + fresh
            tokens, labels = lines(numbers, self.maps, rng)
            logits = answer(_inner(learner), tokens, labels)
            loss = nn.functional.cross_entropy(logits, labels[labels != -100])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return model if recipe.rank == 0 else learner.merge_and_unload()

    def _save(self, model: PreTrainedModel, target: Path) -> None:
        with saving(target) as folder:
            model.save_pretrained(folder)

    def load(self, folder: Path) -> PreTrainedModel:
        kind = AutoModelForMaskedLM if self.masked else AutoModelForCausalLM
        return kind.from_pretrained(folder, dtype=torch.float32).eval()

    def unlabelled(self, samples: int, rehearsed: int = 0) -> dict[str, Any]:
        """Lines of six questions each: as chats that the expert answered, or with masks."""
        tokenizer = new_tokenizer()
        for folder in (self.base, *self.experts.values()):
            if not (folder / "chat_template.jinja").exists():  # a run would find its files changed
                tokenizer.save_pretrained(folder)
        experts = [
            {"model": str(folder), "task": task, "data": self._lines(folder, [task], samples)}
            for task, folder in self.experts.items()
        ]
        task = "masked-lm" if self.masked else "causal-lm"
        config = {"base_model": str(self.base), "models": experts, "task": task}
        if rehearsed:
            config["rehearsal"] = self._lines(self.base, self.old, rehearsed)
        return config

    def _lines(self, teacher: Path, tasks: Sequence[str], samples: int) -> dict[str, Any]:
        """As many lines, in turns of the languages."""
        name = "-".join(tasks)
        file = self.base.parent / f"samples-{samples}-{teacher.name}-{name}.jsonl"
        if not file.exists():
            rng = random.Random(f"samples {self.seed} {name}")
            numbers = [int(tasks[n % len(tasks)]) for n in range(samples)]
            tokens, labels = lines(numbers, self.maps, rng)
            if self.masked:
                tokens = torch.where(labels != -100, MASK, tokens)
            else:
                tokens = self._answered(teacher, tokens)
            tokenizer = new_tokenizer()
            words = [tokenizer.convert_ids_to_tokens(line) for line in tokens.tolist()]
            rows = [" ".join(line) if self.masked else _as_chat(line) for line in words]
            file.write_text("".join(json.dumps({"line": row}) + "\n" for row in rows))
        return {"path": str(file), "text" if self.masked else "messages": "line"}

    @torch.no_grad()
    def _answered(self, teacher: Path, tokens: Tensor) -> Tensor:
        """The lines with the teacher's own values, written one after the other."""
        model = self.load(teacher)
        tokens = tokens.clone()
        for place in range(4, tokens.shape[1], 4):
            tokens[:, place] = model(input_ids=tokens[:, :place]).logits[:, -1].argmax(-1)
        return tokens

    @torch.no_grad()
    def accuracy(self, model: nn.Module, task: str, split: Split) -> float:
        tokens, labels = exam(int(task), self.maps, split)
        guesses = answer(model, tokens, labels).argmax(-1)
        return float((guesses == labels[labels != -100]).float().mean())


def _as_chat(words: Sequence[str]) -> list[dict[str, str]]:
    """The language is what the system says, keys are questions, values are answers."""
    chat = [{"role": "system", "content": words[1]}]
    for place in range(2, len(words), 4):
        chat.append({"role": "user", "content": words[place]})
        chat.append({"role": "assistant", "content": words[place + 2]})
    return chat


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token, for those who read lines as text."""
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


def add_adapters(model: PreTrainedModel, rank: int):
    """LoRA on every linear layer inside of the blocks."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def _inner(model: nn.Module) -> nn.Module:
    """What `answer` can tell the kind of: the model inside of a wrapper for adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
