# SPDX-License-Identifier: Apache-2.0
"""A catalogue of checkpoints that do not fit a merge: `check` tells each before it starts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from catalogue import NAMES, family_config, findings, save_tokenizer
from checkpoints import add, configure, fine_tuned, rewrite, tiny_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

UP, NORM, HEAD = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
CACHE = ("--lora-merge-cache", "cache")
# Makes the mistake in a copy of a family, and returns flags; `paths` are of base and experts.
Make = Callable[[list[str], dict], Sequence[str] | None]


def weights(which: int, change: Callable[[dict[str, Tensor]], object]) -> Make:
    return lambda paths, config: rewrite(paths[which], change)


def settings(which: int, **changes: object) -> Make:
    return lambda paths, config: configure(paths[which], **changes)


def retyped(which: int, name: str, dtype: torch.dtype, scale: float = 1000) -> Make:
    """Of one tensor, or of all whose name contains `name`."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors |= {key: (scale * t).to(dtype) for key, t in tensors.items() if name in key}

    return weights(which, change)


def added(*whiches: int, **tensors: Tensor) -> Make:
    return lambda paths, config: [add(paths[which], **tensors) for which in whiches][:0]


def removed(which: int, name: str) -> Make:
    return weights(which, lambda tensors: tensors.pop(name))


def packed(method: str, parts: Callable[[str, Tensor], dict[str, Tensor]]) -> Make:
    """The projections of an expert as a quantiser stores them."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_proj.weight" in name]:
            tensors |= parts(name.removesuffix(".weight"), tensors.pop(name))

    def make(paths, config):
        rewrite(paths[1], change)
        configure(paths[1], quantization_config={"quant_method": method})

    return make


def of_gptq(module: str, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    return {
        f"{module}.qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        f"{module}.qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
        f"{module}.scales": torch.ones(1, rows, dtype=torch.float16),
    }


def of_fp8(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes = weight.to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": torch.ones(1, 1)}


def saved(which: int, **given) -> Make:
    """Another model in the place of one."""

    def make(paths, config):
        shutil.rmtree(paths[which])
        fine_tuned(tiny_llama(**given), seed=which).save_pretrained(paths[which])

    return make


def gpt2(paths, config) -> None:
    shutil.rmtree(paths[1])
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(paths[1])


def forgotten(key: str) -> Make:
    """A key of an expert's `config.json`."""

    def make(paths, config):
        file = Path(paths[1]) / "config.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in content.items() if k != key}))

    return make


def all_of(*makes: Make) -> Make:
    return lambda paths, config: [make(paths, config) for make in makes][:0]


def other_shape(paths, config) -> None:
    """Of a method that does not end the plan."""
    tiny_llama(intermediate_size=64).save_pretrained(paths[1])
    config |= {"merge_method": "task_arithmetic", "parameters": {"weight": 1}}


def words(*of_models: Sequence[str] | None) -> Make:
    """Tokenizers with these letters, or words, as tokens, in this order."""

    def make(paths, config):
        for path, letters in zip(paths, of_models, strict=True):
            if letters:
                save_tokenizer(path, list(letters))

    return make


def files(name: str, *texts: str) -> Make:
    """Files of the models, but for those that have none."""
    return lambda paths, config: [
        Path(path, name).write_text(text) for path, text in zip(paths, texts, strict=True) if text
    ][:0]


def damaged_tokens(**content) -> Make:
    def make(paths, config):
        words("abcd", "abcd", "abcd")(paths, config)
        file = Path(paths[1]) / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | content))
        config["tokenizer"] = {"source": "union"}

    return make


def index(edit: Callable[[dict], object]) -> Make:
    """An index beside the weights of an expert."""

    def make(paths, config):
        folder = Path(paths[1])
        weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        edit(weight_map)
        content = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return make


def adapter(made_for: str = "", *, damaged: bool = False, **given) -> Make:
    def make(paths, config):
        targets = ["q_proj", "down_proj"]
        model = get_peft_model(tiny_llama(**given), LoraConfig(r=2, target_modules=targets))
        model.peft_config["default"].base_model_name_or_path = made_for or paths[0]
        folder = Path(paths[0]).parent / "adapter"
        model.save_pretrained(folder)
        config["models"][0]["model"] = f"{paths[0]}+{folder}"
        if damaged:
            file = folder / "adapter_model.safetensors"
            file.write_bytes(file.read_bytes()[:-8])
        return CACHE

    return make


def linked(paths, config) -> None:
    os.symlink(paths[1], f"{paths[1]}-link")
    config["models"].append({"model": f"{paths[1]}-link"})


def empty(paths, config) -> None:
    os.mkdir(f"{paths[1]}-empty")
    config["models"].append({"model": f"{paths[1]}-empty"})


def of_any_dtype(paths, config) -> None:
    del config["dtype"]


def in_bfloat16(paths, config) -> None:
    config["dtype"] = "bfloat16"


HALVED = weights(1, lambda t: t.update({n: (1.01 * x.float()).half() for n, x in t.items()}))
BIAS = {"model__layers__0__self_attn__q_proj__bias": torch.ones(32)}
DAMAGED = "the tokenizer of expert0 is damaged: tokenizer.json cannot be read"


def wide_router(paths, config) -> None:
    """Models in bfloat16 but for one tensor in float32."""
    for path in paths:
        rewrite(path, lambda t: t.update({n: x.bfloat16() for n, x in t.items() if n != NORM}))
    config["out_dtype"] = "bfloat16"


ERRORS: list[tuple[Make, str]] = [
    # Codes in the place of weights.
    (packed("gptq", of_gptq), "I32, F16 (quantised: gptq)"),
    (
        settings(1, quantization_config={"quant_method": "gptq", "bits": 4}),
        "If these are its weights, remove quantization_config",
    ),
    (retyped(1, "", torch.int8), "expert0 is stored as I8, which cannot be"),
    (retyped(1, UP, torch.float8_e4m3fn), "1 tensors in F8_E4M3"),
    (all_of(retyped(1, UP, torch.uint8), of_any_dtype), "expert0 has 1 tensors in U8"),
    # Tensors that not all models have.
    (removed(1, NORM), "expert0 lacks 1 of 21"),
    (added(0, 1, 2, vision__weight=torch.ones(9, 32)), "vision.weight"),
    (added(0, **BIAS), "self_attn.q_proj.bias"),
    (saved(1, num_hidden_layers=3), "expert0 has 3"),
    (saved(1, hidden_size=64), "(40, 64) in expert0, but (40, 32) in the base"),
    (other_shape, "expert0 has 6 tensors of another shape"),
    (gpt2, "base, whose config the result gets, is a LlamaForCausalLM with tensors such as"),
    # Heads.
    (saved(0, tie_word_embeddings=True), "base ties its head to the embedding, and expert0 has"),
    (saved(1, tie_word_embeddings=True), "expert0 ties its head to the"),
    (removed(1, HEAD), "expert0 has no lm_head.weight"),
    (removed(0, HEAD), "base has no lm_head.weight, and its"),
    (all_of(removed(1, HEAD), forgotten("tie_word_embeddings")), "expert0 has no lm_head.weight"),
    # Tokens.
    (words("abcd", "acbd", "abcd"), "numbers 2 tokens differently from the ba"),
    (words(None, "acbd", "abcd"), "differently from expert0: 'b'"),
    (
        all_of(
            files("vocab.txt", *map("\n".join, ("abcd", "acbd", "abcd"))),
            files("tokenizer_config.json", *['{"tokenizer_class": "BertTokenizer"}'] * 3),
        ),
        "tokens differently from the base model",
    ),
    (saved(1, vocab_size=44), "expert0 has another vocabulary: model.embed_tokens.weight"),
    (damaged_tokens(model={"type": "WordLevel", "vocab": {"a": "x"}}), DAMAGED),
    (
        weights(1, lambda t: t.update({NORM: torch.tensor(1.0)})),
        "tensor model.norm.weight has shape () in expert0, but (32,)",
    ),
    # Files and adapters.
    (
        index(lambda names: names.update(x="model.safetensors")),
        "model.safetensors lacks the tensor x that the index expects there",
    ),
    (
        forgotten("architectures"),
        "expert0/config.json has `architectures`: None instead of a list of one name",
    ),
    (empty, "expert0-empty holds no weights"),
    (linked, "expert0 is listed 2 times: expert0, expert0-link"),
    (adapter(damaged=True), "adapter_model.safetensors is damaged"),
    (adapter(hidden_size=64), "config and base ask for"),
    (adapter(num_hidden_layers=3), "onto the base, which has no such module"),
]

WARNINGS: list[tuple[Make, str]] = [
    (
        in_bfloat16,
        "`dtype: bfloat16` rounds expert0, stored as F32, too early",
    ),
    (all_of(in_bfloat16, HALVED), "rounds expert0, stored as F16"),
    (in_bfloat16, "write `dtype: float32` and `out_dtype: bfloat16`"),
    (
        all_of(
            forgotten("rope_parameters"),
            settings(1, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}),
        ),
        "rope_type: linear instead of default",
    ),
    (added(1, rotary=torch.zeros(1)), "so the result lacks 1 tensor of expert0 (rotary)"),
    (words("abcd", "abcde", "abcd"), "expert0 has 1 tokens that the base"),
    (wide_router, "mergekit-yaml rounds 1 tensors that all models keep in a wider dtype"),
    (packed("fp8", of_fp8), "is quantised (fp8): its tensors are dequantised to bfloat16"),
    (adapter("other/model"), "was trained on other/model, not on base"),
    (
        all_of(words(*["abcd"] * 3), files("chat_template.jinja", "", "{{ 1 }}", "{{ 1 }}")),
        "base, whose tokenizer the result has, has no chat template",
    ),
    (all_of(retyped(1, "", torch.bfloat16, 1), of_any_dtype), "different dtypes"),
    (
        all_of(*(settings(n, num_local_experts=n) for n in range(3))),
        "num_local_experts: 1 instead of 0",
    ),
    (settings(1, hidden_act="gelu"), "hidden_act: gelu instead of silu"),
]


@pytest.mark.parametrize(
    ("make", "level", "message"),
    [(make, "error", text) for make, text in ERRORS]
    + [(make, "warning", text) for make, text in WARNINGS],
)
def test_mistakes_in_checkpoints(family, tmp_path, make, level, message):
    shutil.copytree(family, tmp_path, dirs_exist_ok=True)
    config = family_config(tmp_path)
    flags = make([str(tmp_path / name) for name in NAMES], config) or ()
    told = findings(tmp_path, config, *flags)
    assert message in told[level]
    assert level == "error" or not told["error"]
