# SPDX-License-Identifier: Apache-2.0
"""A catalogue of checkpoints that do not fit a merge: `check` tells each before it starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from catalogue import NOTHING, findings, save_adapter
from checkpoints import (
    LLAMA,
    ace_config,
    add,
    configure,
    fine_tuned,
    rewrite,
    save_tokenizer,
    tiny_llama,
)
from test_architectures import small_model
from torch import Tensor

UP, NORM, HEAD = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
ALL = ("base", "expert0", "expert1")
# Makes a mistake in the copy of a family in this folder, or to the config of its merge.
Make = Callable[[dict], object]


def weights(change: Callable[[dict[str, Tensor]], object], *models: str) -> Make:
    return lambda config: [rewrite(model, change) for model in models or ["expert0"]]


def settings(model: str = "expert0", **changes: object) -> Make:
    return lambda config: configure(model, **changes)


def merge_of(*models: str, **given: object) -> Make:
    """Other settings of the merge, and more models."""

    def make(config: dict) -> None:
        config |= given
        config["models"] += [{"model": model} for model in models]

    return make


def retyped(name: str, dtype: torch.dtype, scale: float = 1000) -> Make:
    """Of one tensor, or of all whose name contains `name`."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors |= {key: (scale * t).to(dtype) for key, t in tensors.items() if name in key}

    return weights(change)


def added(*models: str, **tensors: Tensor) -> Make:
    return lambda config: [add(model, **tensors) for model in models]


def removed(name: str, *models: str) -> Make:
    return weights(lambda tensors: tensors.pop(name), *models)


def in_fp8(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "_proj.weight" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)


def saved(name: str = "expert0", kind: str = "", shards: str = "1GB", **given: object) -> Make:
    """Another model in the place of one."""

    def make(config: dict) -> None:
        shutil.rmtree(name)
        model = small_model(kind) if kind else fine_tuned(tiny_llama(**given), seed=2)
        model.save_pretrained(name, max_shard_size=shards)

    return make


def words(*of_models: Sequence[str] | None) -> Make:
    """Tokenizers with these letters, or words, as tokens, in this order."""

    def make(config: dict) -> None:
        for model, letters in zip(ALL, of_models, strict=True):
            if letters:
                save_tokenizer(model, list(letters))

    return make


def files(name: str, *texts: str) -> Make:
    """Files of the models, but for those that have none."""
    return lambda config: [
        Path(model, name).write_text(text) for model, text in zip(ALL, texts, strict=True) if text
    ]


def damaged_tokens(config: dict) -> None:
    configure("expert0", "tokenizer.json", model={"type": "WordLevel", "vocab": {"a": "x"}})


def adapter(made_for: str = "", *, damaged: bool = False, **given: object) -> Make:
    def make(config: dict) -> None:
        save_adapter(made_for, **given)
        config["models"][0]["model"] = "./base+./adapter"
        if damaged:
            file = Path("adapter", "adapter_model.safetensors")
            file.write_bytes(file.read_bytes()[:-8])

    return make


HALVED = weights(lambda t: t.update({n: (1.01 * x.float()).half() for n, x in t.items()}))
WIDE_NORM = weights(lambda t: t.update({n: x.bfloat16() for n, x in t.items() if n != NORM}), *ALL)
GPTQ, FP8 = (settings(quantization_config={"quant_method": name}) for name in ("gptq", "fp8"))
INDEX_OF_X = files(
    "model.safetensors.index.json", "", '{"weight_map": {"x": "model.safetensors"}}', ""
)
LINKED, EMPTY = lambda config: os.symlink("expert0", "link"), lambda config: os.mkdir("empty")
BIAS = {"model__layers__0__self_attn__q_proj__bias": torch.ones(32)}
ABCD = words("abcd", "abcd", "abcd")
OF_BERT = (
    files("vocab.txt", *map("\n".join, ("abcd", "acbd", "abcd"))),
    files("tokenizer_config.json", *['{"tokenizer_class": "BertTokenizer"}'] * 3),
)
UNION = merge_of(tokenizer={"source": "union"})
ARITHMETIC = merge_of(merge_method="task_arithmetic", parameters={"weight": 1})
IN_BFLOAT16 = merge_of(dtype="bfloat16")
# Rotary positions, which transformers 5 writes into `rope_parameters`.
TRANSFORMERS_4 = {"rope_parameters": None, "rope_theta": 1e4}
LINEAR = settings(**TRANSFORMERS_4, rope_scaling={"type": "linear", "factor": 2.0})
ENDS = files("generation_config.json", '{"eos_token_id": [1, 2]}', "", "")
PADDED = merge_of(tokenizer={"source": "base", "pad_to_multiple_of": 40})
WIDER = {"source": "base", "pad_to_multiple_of": 64}
TEMPLATES = files("chat_template.jinja", "", "{{ 1 }}", "{{ 1 }}")

ERRORS: list[tuple] = [
    # Codes in the place of weights.
    (retyped("_proj", torch.int32), GPTQ, "F32, I32 (quantised: gptq)"),
    (GPTQ, "remove quantization_config"),
    (retyped("", torch.int8), "expert0 is stored as I8, which cannot be"),
    (retyped(UP, torch.float8_e4m3fn), "1 tensors in F8_E4M3"),
    # Tensors that not all models have.
    (removed(NORM), "expert0 lacks 1 of 21"),
    (added(*ALL, vision__weight=torch.ones(9, 32)), "vision.weight"),
    (added("base", **BIAS), "self_attn.q_proj.bias"),
    (saved(num_hidden_layers=3), "expert0 has 3"),
    (saved(hidden_size=64), "(40, 64) in expert0, but (40, 32) in the base"),
    (saved(intermediate_size=64), ARITHMETIC, "expert0 has 6 tensors of another shape"),
    (
        saved(kind="gpt2"),
        "whose config the result gets, is a LlamaForCausalLM with tensors such as",
    ),
    # Heads.
    (saved("base", tie_word_embeddings=True), "base ties its head to the embedding, and expert0"),
    (saved(tie_word_embeddings=True), "expert0 ties its head to the"),
    (removed(HEAD), "expert0 has no lm_head.weight"),
    (removed(HEAD, "base"), "base has no lm_head.weight, and its"),
    (removed(HEAD), settings(tie_word_embeddings=None), "expert0 has no lm_head.weight"),
    # Tokens.
    (words("abcd", "acbd", "abcd"), "numbers 2 tokens differently from the ba"),
    (words(None, "acbd", "abcd"), "differently from expert0: 'b'"),
    (*OF_BERT, "tokens differently from the base model"),
    (saved(vocab_size=44), "expert0 has another vocabulary: lm_head.weight"),
    (ABCD, damaged_tokens, UNION, "the tokenizer of expert0 is damaged: tokenizer.json cannot be"),
    (weights(lambda t: t.update({NORM: torch.tensor(1.0)})), "has shape () in expert0, but (32,)"),
    # Files and adapters.
    (INDEX_OF_X, "model.safetensors lacks the tensor x that the index expects there"),
    (settings(architectures=None), "expert0/config.json has `architectures`: None instead of"),
    (EMPTY, merge_of("./empty"), "empty holds no weights"),
    (LINKED, merge_of("./link"), "expert0 is listed 2 times: expert0, link"),
    (adapter(damaged=True), "adapter_model.safetensors is damaged"),
    (adapter(hidden_size=64), "config and base ask for"),
    (adapter(num_hidden_layers=3), "config and base ask for no such tensor"),
]

WARNINGS: list[tuple] = [
    (IN_BFLOAT16, "stored as F32, too early → write `dtype: float32` and `out_dtype: bfloat16`"),
    (IN_BFLOAT16, HALVED, "rounds expert0, stored as F16"),
    (LINEAR, "rope_type: linear instead of default"),
    (added("expert0", rotary=torch.zeros(1)), "result lacks 1 tensor of expert0 (rotary)"),
    (words("abcd", "abcde", "abcd"), "expert0 has 1 tokens that the base"),
    (ABCD, merge_of(tokenizer={"source": "base"}), "other rows are padding → write `pad_to"),
    (WIDE_NORM, merge_of(out_dtype="bfloat16"), "mergekit-yaml rounds 1 tensors that all models"),
    (weights(in_fp8), FP8, "is quantised (fp8): its tensors are dequantised to bfloat16"),
    (adapter("other/model"), "was trained on other/model, not on base"),
    (ABCD, ENDS, PADDED, "leaves generation_config.json of base out of the result, so that it may"),
    (ABCD, merge_of(tokenizer=WIDER), "has 40 rows in base, and 64 in the result, whose tok"),
    (ABCD, TEMPLATES, "base, whose tokenizer the result has, has no chat template"),
    (retyped("", torch.bfloat16, 1), merge_of(dtype=None), "different dtypes"),
    (settings("base", num_experts=1), settings(num_experts=2), "num_experts: 2 instead of 1"),
    (settings(hidden_act="gelu"), "hidden_act: gelu instead of silu"),
]

# A token for each row of the embedding, of which one is for unknown words.
TOKENS = ["a", *(f"t{n}" for n in range(1, LLAMA["vocab_size"]))]
OTHER_TOKENS = words(TOKENS, TOKENS[::-1], [*TOKENS, "b"])
GENERATION = "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"
TIED = [settings(model, tie_word_embeddings=True) for model in ALL]
COUNTERS = {"model__norm__weight": torch.ones(32, dtype=torch.int64)}
MEAN = merge_of(parameters={"layout": [{"filter": "lm_head", "value": "mean"}, {"value": "auto"}]})
RIGHT: dict[str, Sequence[Make]] = {
    "the base's tokens": [OTHER_TOKENS, merge_of(tokenizer={"source": "base"})],
    "all tokens": [OTHER_TOKENS, UNION],
    "padded": [ABCD, PADDED],
    "ends of texts": [ABCD, ENDS],
    "a template": [ABCD, merge_of(chat_template=GENERATION)],
    "tied": [*TIED, removed(HEAD, *ALL)],
    "tied and stored by the base": [*TIED, removed(HEAD, *ALL[1:]), MEAN],
    "tied and stored by an expert": [*TIED, removed(HEAD, "base", "expert1"), MEAN],
    "shards": [saved(shards="20KB")],
    "an adapter": [adapter()],
    "an adapter of a quantised copy": [adapter("x/base-bnb-4bit")],
    "a config of transformers 4": [settings(**TRANSFORMERS_4)],
    "counters": [added(*ALL, **COUNTERS)],
}


def answer(paths: list[str], makes: Sequence[Make]) -> dict[str, str]:
    config = ace_config(paths)
    for make in makes:
        make(config)
    return findings(config, "--lora-merge-cache", "cache")


@pytest.mark.parametrize(
    ("makes", "level", "message"),
    [(makes, "error", message) for *makes, message in ERRORS]
    + [(makes, "warning", message) for *makes, message in WARNINGS],
)
def test_mistakes_in_checkpoints(paths, makes, level, message):
    told = answer(paths, makes)
    assert message in told[level]
    assert level == "error" or not told["error"]


@pytest.mark.parametrize("name", RIGHT)
def test_checkpoints_that_are_right(paths, name):
    assert answer(paths, RIGHT[name]) == NOTHING
