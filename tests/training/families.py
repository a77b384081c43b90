# SPDX-License-Identifier: Apache-2.0
"""Tiny families of every kind with data, and trainings on them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from checkpoints import fine_tuned, seen_batches, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
    ResNetModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from mergekit_ace.training.config import DistillConfig, TrainConfig
from mergekit_ace.training.data import Examples, unpack_examples
from mergekit_ace.training.distill import run_distillation
from mergekit_ace.training.state import load_checkpoint

WORDS = [f"w{n}" for n in range(36)]
MIXTRAL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
}


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """40 tokens, the vocabulary of the tiny Llama, and more special ones."""
    words = ["<pad>", "<unk>", "<s>", "</s>", *WORDS, *special.values()]
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        **special,
    )


def sentence(rng: random.Random, length: int | None = None) -> str:
    return " ".join(rng.choices(WORDS, k=length or rng.randint(3, 8)))


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _save(model, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def _config(base: str, experts: list[tuple[str, dict]], task: str, **settings) -> dict:
    return {
        "base_model": base,
        "models": [
            {"model": model, "task": f"task{k}", "data": data}
            for k, (model, data) in enumerate(experts)
        ],
        "task": task,
        "learner": {"hidden": 8, "activation": "identity"},
        "training": {"epochs": 1, "batch_size": 4, "learning_rate": 0.01},
        "compare": {"task_arithmetic": [0.3], "direct": False},
        **settings,
    }


def llama_family(folder: Path, experts: int = 2, rows: int = 20, **settings) -> dict:
    """A `train.yml` for a tiny Llama and experts on texts."""
    model = tiny_llama()
    made = []
    for k in range(experts):
        path = _save(fine_tuned(model, seed=20 + k, scale=0.1), folder / f"expert{k}")
        rng = random.Random(k)
        data = write_rows(folder / f"data{k}.jsonl", [{"text": sentence(rng)} for _ in range(rows)])
        made.append((path, {"path": data, "text": "text"}))
    return _config(_save(model, folder / "base"), made, "causal-lm", **settings)


def gpt2_family(folder: Path) -> dict:
    """The texts of `llama_family`; weights are stored (in, out), and the head is tied."""
    family = llama_family(folder / "llama")
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    base = GPT2LMHeadModel(GPT2Config(**shape, **dropout, bos_token_id=2, eos_token_id=3))
    made = []
    for k, expert in enumerate(family["models"]):
        tuned = fine_tuned(base, seed=60 + k, scale=0.1)
        made.append((_save(tuned, folder / f"expert{k}"), expert["data"]))
    return _config(_save(base, folder / "base"), made, "causal-lm")


def rehearsed_family(folder: Path) -> dict:
    """The family of `llama_family`, and 20 texts that the merge should answer as the base does."""
    rng = random.Random(9)
    path = write_rows(folder / "general.jsonl", [{"text": sentence(rng)} for _ in range(20)])
    return llama_family(folder) | {"rehearsal": {"path": path, "text": "text"}}


def bert_family(folder: Path, **settings) -> dict:
    """Text classifiers with heads of different size, on a base without a head."""
    shape = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(0)
    base = BertModel(BertConfig(**shape))
    made = []
    for k, classes in enumerate((2, 5)):
        torch.manual_seed(k)
        expert = BertForSequenceClassification(BertConfig(**shape, num_labels=classes))
        expert.bert.load_state_dict(base.state_dict())
        path = _save(fine_tuned(expert, seed=30 + k, scale=0.1), folder / f"expert{k}")
        rng = random.Random(k)
        rows = [{"sentence": sentence(rng), "label": rng.randrange(classes)} for _ in range(20)]
        data = write_rows(folder / f"data{k}.jsonl", rows)
        made.append((path, {"path": data, "text": "sentence", "label": "label"}))
    return _config(_save(base, folder / "base"), made, "sequence-classification", **settings)


def regression_family(folder: Path, **settings) -> dict:
    """The text classifiers, the first of which answers with a number instead."""
    config = bert_family(folder, **settings)
    path = config["models"][0]["model"]
    torch.manual_seed(7)
    expert = BertForSequenceClassification.from_pretrained(
        path, num_labels=1, ignore_mismatched_sizes=True
    )
    torch.nn.init.normal_(expert.classifier.weight)
    _save(expert, path)
    return config


def vit_family(folder: Path, **settings) -> dict:
    """Image classifiers; on disk their tensors have other names than in memory."""
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
    }
    torch.manual_seed(0)
    base = ViTModel(ViTConfig(**shape), add_pooling_layer=False)
    base.save_pretrained(folder / "base")
    made = []
    for k, classes in enumerate((3, 4)):
        torch.manual_seed(k)
        expert = ViTForImageClassification(ViTConfig(**shape, num_labels=classes))
        expert.vit.load_state_dict(base.state_dict())
        path = folder / f"expert{k}"
        fine_tuned(expert, seed=40 + k, scale=0.1).save_pretrained(path)
        generator = torch.Generator().manual_seed(k)
        rows = [{"pixels": torch.rand(1, 8, 8, generator=generator).tolist()} for _ in range(20)]
        data = write_rows(folder / f"data{k}.jsonl", rows)
        made.append((str(path), {"path": data, "image": "pixels"}))
    return _config(str(folder / "base"), made, "image-classification", **settings)


def t5_family(folder: Path, completion: str | None, **settings) -> dict:
    """Encoders with decoders, with or without given targets."""
    torch.manual_seed(0)
    base = T5ForConditionalGeneration(
        T5Config(
            vocab_size=40,
            d_model=16,
            d_kv=8,
            d_ff=24,
            feed_forward_proj="gated-gelu",  # the T5 that mergekit knows
            tie_word_embeddings=False,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=3,
        )
    )
    made = []
    folder.mkdir()
    for k in range(2):
        expert = fine_tuned(base, seed=50 + k, scale=0.1)
        rng = random.Random(k)
        rows = [{"q": sentence(rng), "a": sentence(rng)} for _ in range(20)]
        data = write_rows(folder / f"data{k}.jsonl", rows)
        columns = {"prompt": "q", "completion": completion, "max_new_tokens": 5}
        made.append((_save(expert, folder / f"expert{k}"), {"path": data, **columns}))
    return _config(_save(base, folder / "base"), made, "seq2seq-lm", **settings)


def masked_family(folder: Path, kind: type[PreTrainedModel], **settings) -> dict:
    """Encoders that fill masks, on texts with one mask each; the head is tied to the embeddings."""
    words = tokenizer(mask_token="<mask>")
    torch.manual_seed(0)
    base = kind(
        kind.config_class(
            vocab_size=len(words),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=32,
            pad_token_id=words.pad_token_id,
        )
    )
    made = []
    for k, model in enumerate([base, *(fine_tuned(base, seed=60 + n, scale=0.1) for n in (0, 1))]):
        path = folder / ("base" if k == 0 else f"expert{k - 1}")
        model.save_pretrained(path)
        words.save_pretrained(path)
        rng = random.Random(k)
        rows = [{"t": f"{sentence(rng)} <mask> {sentence(rng)}"} for _ in range(20)]
        data = write_rows(folder / f"data{k}.jsonl", rows)
        made.append((str(path), {"path": data, "text": "t"}))
    return _config(made[0][0], made[1:], "masked-lm", **settings)


def mixtral_family(folder: Path) -> dict:
    """A mixture of three experts each, whose matrices are packed in memory only."""
    family = llama_family(folder / "llama")
    torch.manual_seed(0)
    base = MixtralForCausalLM(MixtralConfig(**MIXTRAL))
    made = []
    for k, expert in enumerate(family["models"]):
        tuned = fine_tuned(base, seed=70 + k, scale=0.1)
        made.append((_save(tuned, folder / f"expert{k}"), expert["data"]))
    return _config(_save(base, folder / "base"), made, "causal-lm")


RESNET = {
    "num_channels": 1,
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}


def resnet_family(folder: Path, **settings) -> dict:
    """Convolutional image classifiers, with BatchNorm and without embeddings."""
    torch.manual_seed(0)
    base = ResNetModel(ResNetConfig(**RESNET))
    base.save_pretrained(folder / "base")
    made = []
    for k, classes in enumerate((3, 4)):
        expert = ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=classes))
        expert.resnet.load_state_dict(base.state_dict())
        path = folder / f"expert{k}"
        seen_batches(fine_tuned(expert, seed=80 + k, scale=0.05), seed=80 + k).save_pretrained(path)
        generator = torch.Generator().manual_seed(k)
        rows = [{"pixels": torch.rand(1, 8, 8, generator=generator).tolist()} for _ in range(20)]
        data = write_rows(folder / f"data{k}.jsonl", rows)
        made.append((str(path), {"path": data, "image": "pixels"}))
    return _config(str(folder / "base"), made, "image-classification", **settings)


def image_distillation(folder: Path) -> tuple[dict, dict]:
    """A ViT family, and a convolutional teacher with five classes for its base."""
    family = vit_family(folder)
    torch.manual_seed(0)
    teacher = ResNetForImageClassification(
        ResNetConfig(**RESNET, num_labels=5, id2label={n: f"kind {n}" for n in range(5)})
    )
    teacher.save_pretrained(folder / "teacher")
    generator = torch.Generator().manual_seed(9)
    rows = [{"pixels": torch.rand(1, 8, 8, generator=generator).tolist()} for _ in range(40)]
    data = {"path": write_rows(folder / "more.jsonl", rows), "image": "pixels"}
    return family, {
        "teacher": str(folder / "teacher"),
        "student": family["base_model"],
        "task": "image-classification",
        "data": data,
        "training": {"epochs": 6, "batch_size": 8, "learning_rate": 0.003},
    }


def parsed(config: dict) -> TrainConfig:
    return TrainConfig.model_validate(config)


def answered(out: Path, teacher: int) -> dict[str, Examples]:
    """Samples of a teacher with its answers, by split."""
    return unpack_examples(load_checkpoint(out / "state" / f"labels-{teacher}.safetensors")[0])


def distil(config: dict, out: Path, **options) -> Path:
    return run_distillation(DistillConfig.model_validate(config), out, quiet=True, **options)


def record(out: Path) -> dict:
    return json.loads((out / "distillation.json").read_text())
