# SPDX-License-Identifier: Apache-2.0
"""Tiny families of every kind with data, and trainings on them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import yaml
from accelerate.state import AcceleratorState
from checkpoints import fine_tuned, seen_batches, tiny, tiny_llama
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertForSequenceClassification,
    CLIPModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    GPT2LMHeadModel,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ResNetForImageClassification,
    ViTForImageClassification,
)

from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.training.config import DistillConfig, TrainConfig
from mergekit_ace.training.distill import run_distillation
from mergekit_ace.training.train import run_training

WORDS = [f"w{n}" for n in range(36)]
SMALL = {"vocab_size": 40, "max_position_embeddings": 32, "hidden_size": 16}
SMALL |= {"intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
MIXTRAL = SMALL | {"num_local_experts": 3, "num_experts_per_tok": 2}
VIT = SMALL | {"image_size": 8, "patch_size": 4, "num_channels": 1}
RESNET = {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
RESNET |= {"layer_type": "basic"}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
GPT2 |= {"bos_token_id": 2, "eos_token_id": 3}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
CLASSES = (2, 5)  # that the classifiers of a family know


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """40 tokens, the vocabulary of the tiny Llama, and more special ones."""
    words = ["<pad>", "<unk>", "<s>", "</s>", *WORDS, *special.values()]
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    usual = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **usual, **special)


def sentence(rng: random.Random, length: int | None = None) -> str:
    return " ".join(rng.choices(WORDS, k=length or rng.randint(3, 8)))


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save_trained(
    folder: Path, task: str, base: PreTrainedModel, experts: list[PreTrainedModel],
    row: Callable[[random.Random, int], dict], columns: dict, rows: int = 20, **settings,
) -> dict:  # fmt: skip
    """A `train.yml` for models that are saved for it, each with rows of its own."""
    members = []
    folder.mkdir(parents=True, exist_ok=True)
    for k, expert in enumerate(experts):
        rng = random.Random(k)
        path = write_rows(folder / f"data{k}.jsonl", [row(rng, k) for _ in range(rows)])
        data = {"path": path, **columns}
        members.append({"model": str(folder / f"expert{k}"), "task": f"task{k}", "data": data})
        expert.save_pretrained(folder / f"expert{k}")
    base.save_pretrained(folder / "base")
    if "image" not in columns:
        for saved in ("base", *(f"expert{k}" for k in range(len(experts)))):
            tokenizer().save_pretrained(folder / saved)
    return {
        "base_model": str(folder / "base"),
        "models": members,
        "task": task,
        "learner": {"hidden": 8, "activation": "identity"},
        "training": {"epochs": 1, "batch_size": 4, "learning_rate": 0.01},
        **settings,
    }


def language(folder: Path, base: PreTrainedModel, experts: int = 2, **settings) -> dict:
    tuned = [fine_tuned(base, seed=20 + k, scale=0.1) for k in range(experts)]
    row, columns = lambda rng, _: {"text": sentence(rng)}, {"text": "text"}
    return save_trained(folder, "causal-lm", base, tuned, row, columns, **settings)


def llama(folder: Path, **settings) -> dict:
    return language(folder, tiny_llama(), **settings)


def gpt2(folder: Path) -> dict:
    """Weights are stored (in, out), and the head is tied."""
    return language(folder, tiny(GPT2LMHeadModel, **GPT2))


def mixtral(folder: Path) -> dict:
    """A mixture of three experts each, whose matrices are packed in memory only."""
    return language(folder, tiny(MixtralForCausalLM, **MIXTRAL))


def _classifiers(
    folder: Path, kind: type, config: dict, row: Callable, columns: dict, **settings
) -> dict:
    """Classifiers with heads of different size on the weights of one base, which has none."""
    base, experts = tiny(kind, **config).base_model, []
    for k, count in enumerate(CLASSES):
        expert = tiny(kind, k, num_labels=count, **config)
        expert.base_model.load_state_dict(base.state_dict())
        experts.append(seen_batches(fine_tuned(expert, seed=30 + k, scale=0.05), seed=80 + k))
    task = "image-classification" if "image" in columns else "sequence-classification"
    return save_trained(folder, task, base, experts, row, columns, **settings)


def bert(folder: Path, **settings) -> dict:
    def row(rng: random.Random, k: int) -> dict:
        return {"text": sentence(rng), "label": rng.randrange(CLASSES[k])}

    columns = {"text": "text", "label": "label"}
    return _classifiers(folder, BertForSequenceClassification, SMALL, row, columns, **settings)


def pixels(rng: random.Random, _: int = 0, channels: int = 1) -> dict:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return {"pixels": torch.rand(channels, 8, 8, generator=generator).tolist()}


def vit(folder: Path, **settings) -> dict:
    """On disk tensors have other names than in memory."""
    columns = {"image": "pixels"}
    return _classifiers(folder, ViTForImageClassification, VIT, pixels, columns, **settings)


def resnet(folder: Path, **settings) -> dict:
    """Convolutions, with BatchNorm and without embeddings."""
    columns = {"image": "pixels"}
    return _classifiers(folder, ResNetForImageClassification, RESNET, pixels, columns, **settings)


PROMPTS = (["w1 w2", "w3 w4", ["w5", "w6 w7"]], ["w8", "w9 w1"])


def clip(folder: Path) -> dict:
    """A whole CLIP, and image towers of it, one without a projection."""
    text = SMALL | {"eos_token_id": 3, "projection_dim": 12}
    vision = VIT | {"num_channels": 3, "projection_dim": 12}
    base = tiny(CLIPModel, text_config=text, vision_config=vision, projection_dim=12)
    base.save_pretrained(folder / "base")
    kinds = (CLIPVisionModelWithProjection, CLIPVisionModel)
    towers = [kind.from_pretrained(folder / "base") for kind in kinds]
    towers = [fine_tuned(tower, seed=k, scale=0.1) for k, tower in enumerate(towers)]
    task, row = "zero-shot-image-classification", partial(pixels, channels=3)
    config = save_trained(folder, task, base, towers, row, {"image": "pixels"})
    tokenizer().save_pretrained(folder / "base")
    for expert, prompts in zip(config["models"], PROMPTS, strict=True):
        expert["data"]["prompts"] = prompts
    return config


def image_distillation(folder: Path) -> tuple[dict, dict]:
    """A ViT family, and a convolutional teacher with five classes for its base."""
    family = vit(folder)
    kinds = {n: f"kind {n}" for n in range(5)}
    teacher = tiny(ResNetForImageClassification, **RESNET, num_labels=5, id2label=kinds)
    teacher.save_pretrained(folder / "teacher")
    rng = random.Random(9)
    path = write_rows(folder / "more.jsonl", [pixels(rng) for _ in range(40)])
    return family, {
        "teacher": str(folder / "teacher"),
        "student": family["base_model"],
        "task": family["task"],
        "data": {"path": path, "image": "pixels"},
        "training": {"epochs": 6, "batch_size": 8, "learning_rate": 0.003},
    }


def train(config: dict, out: Path, *, overwrite: bool = False, **training) -> CoefficientFile:
    """Train with other settings under `training:`."""
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process
    settings = TrainConfig.model_validate(changed(config, **training))
    return run_training(settings, out, overwrite=overwrite, quiet=True)


def log_of(out: Path) -> list[dict]:
    """What `training.jsonl` says, a line per step and evaluation."""
    return [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]


def merge_of(out: Path) -> dict:
    return yaml.safe_load((out / "merge.yml").read_text())


def tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a model."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def changed(config: dict, **training) -> dict:
    return {**config, "training": {**config["training"], **training}}


def answered(out: Path, teacher: int) -> dict[str, list[dict]]:
    """Samples of a teacher with its answers, by split."""
    return torch.load(out / "state" / f"labels-{teacher}.pt")


@torch.no_grad()
def logits_by_hand(model, sample: dict) -> torch.Tensor:
    """What a language model answers at the supervised positions of a sample alone."""
    logits = model(input_ids=sample["input_ids"][None]).logits[0]
    return logits[:-1][sample["supervised"][1:]]


def distil(config: dict, out: Path, *, overwrite: bool = False, **training) -> Path:
    settings = DistillConfig.model_validate(changed(config, **training))
    return run_distillation(settings, out, overwrite=overwrite, quiet=True)


def record(out: Path) -> dict:
    return json.loads((out / "distillation.json").read_text())


class Killed(BaseException):
    """Like a signal: nothing in the package catches it."""


def killed_after(monkeypatch, owner: object, name: str, calls: int) -> None:
    """Let a function of `owner` be the last that a process reaches, after some calls."""
    original, left = getattr(owner, name), [calls]

    def dying(*args, **options):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return original(*args, **options)

    monkeypatch.setattr(owner, name, dying)
