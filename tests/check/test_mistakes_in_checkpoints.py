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
from catalogue import findings
from checkpoints import ace_config, fine_tuned, save_family, tiny_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_check import configure, rewrite, save_tokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

UP = "model.layers.1.mlp.up_proj.weight"
CACHE = ("--lora-merge-cache", "cache")
# Makes the mistake in a copy of a family, and returns flags; `paths` are of base and experts.
Make = Callable[[list[str], dict], Sequence[str] | None]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for name, settings in (("untied", {}), ("tied", {"tie_word_embeddings": True})):
        folders[name] = tmp_path_factory.mktemp(name)
        save_family(tiny_llama(**settings), folders[name])
    return folders


def retyped(which: int, name: str, dtype: torch.dtype, scale: float = 1000) -> Make:
    """Of one tensor, or of all matrices whose name contains `name`."""

    def make(paths, config):
        def change(tensors: dict[str, Tensor]) -> None:
            for key in [key for key in tensors if name in key]:
                tensors[key] = (scale * tensors[key]).to(dtype)

        rewrite(paths[which], change)

    return make


def added(*whiches: int, **tensors: Tensor) -> Make:
    def make(paths, config):
        new = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        for which in whiches:
            rewrite(paths[which], lambda stored: stored.update(new))

    return make


def removed(which: int, name: str) -> Make:
    return lambda paths, config: rewrite(paths[which], lambda tensors: tensors.pop(name))


def quantised(which: int, method: str) -> Make:
    settings = {"quant_method": method, "bits": 4}
    return lambda paths, config: configure(paths[which], quantization_config=settings)


def packed(method: str, parts: Callable[[str, Tensor], dict[str, Tensor]]) -> Make:
    """The projections of an expert as a quantiser stores them."""

    def make(paths, config):
        def change(tensors: dict[str, Tensor]) -> None:
            for name in [name for name in tensors if "_proj.weight" in name]:
                weight = tensors.pop(name)
                tensors.update(parts(name.removesuffix(".weight"), weight))

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


def of_bnb_4(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)
    return {f"{module}.weight": codes, f"{module}.weight.absmax": torch.ones(4)}


def of_fp8(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes = weight.to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": torch.ones(1, 1)}


def saved(which: int, **settings) -> Make:
    """Another model in the place of one."""

    def make(paths, config):
        shutil.rmtree(paths[which])
        tiny_llama(1, **settings).save_pretrained(paths[which])

    return make


def gpt2(paths, config) -> None:
    shutil.rmtree(paths[1])
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(paths[1])


def forgets(path: str, key: str) -> None:
    file = Path(path) / "config.json"
    content = json.loads(file.read_text())
    del content[key]
    file.write_text(json.dumps(content))


def head_without_a_word(paths, config) -> None:
    """The default of the architecture counts where config.json says nothing."""
    rewrite(paths[1], lambda tensors: tensors.pop("lm_head.weight"))
    forgets(paths[1], "tie_word_embeddings")


def head_stored(*whiches: int) -> Make:
    def make(paths, config):
        def change(tensors: dict[str, Tensor]) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        for which in whiches:
            rewrite(paths[which], change)

    return make


def words(*of_models: Sequence[str] | None) -> Make:
    """Tokenizers with these letters, or words, as tokens, in this order."""

    def make(paths, config):
        for path, letters in zip(paths, of_models, strict=True):
            if letters:
                save_tokenizer(path, list(letters))

    return make


def files(name: str, text: Callable[[str], str]) -> Make:
    """Vocabularies in files of their own."""

    def make(paths, config):
        for path, letters in zip(paths, ("abcd", "acbd", "abcd"), strict=True):
            (Path(path) / name).write_text(text(letters))

    return make


def numbers(letters: str) -> str:
    return json.dumps({letter: number for number, letter in enumerate(letters)})


def fast_and_slow(paths, config) -> None:
    words("abcd", None, "abcd")(paths, config)
    (Path(paths[1]) / "vocab.json").write_text(numbers("acbd"))


def without_a_model(paths, config) -> None:
    words("abcd", "acbd", "abcd")(paths, config)
    (Path(paths[2]) / "tokenizer.json").write_text('{"model": null}')


def damaged_tokens(**content) -> Make:
    def make(paths, config):
        words("abcd", "abcd", "abcd")(paths, config)
        file = Path(paths[1]) / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | content))
        config["tokenizer"] = {"source": "union"}

    return make


def classes(*of_experts: Sequence[str]) -> Make:
    def make(paths, config):
        for path, names in zip(paths[1:], of_experts, strict=True):
            configure(path, id2label=dict(enumerate(names)))

    return make


def index(paths: list[str], edit: Callable[[dict], object]) -> None:
    folder = Path(paths[1])
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    edit(weight_map)
    content = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def adapter(made_for: str = "", **settings) -> Make:
    def make(paths, config):
        model = get_peft_model(
            tiny_llama(**settings), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
        )
        model.peft_config["default"].base_model_name_or_path = made_for or paths[0]
        folder = f"{Path(paths[0]).parent}/adapter"
        model.save_pretrained(folder)
        config["models"][0]["model"] = f"{paths[0]}+{folder}"
        return CACHE

    return make


def damaged_adapter(paths, config) -> Sequence[str]:
    adapter()(paths, config)
    file = Path(paths[0]).parent / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return CACHE


def linked(paths, config) -> None:
    os.symlink(paths[1], f"{paths[1]}-link")
    config["models"].append({"model": f"{paths[1]}-link"})


def larger(which: int) -> Make:
    def make(paths, config):
        fine_tuned(tiny_llama(vocab_size=44), seed=1).save_pretrained(paths[which])

    return make


def one_of_many(make: Make) -> Make:
    """Without a `dtype:` in the config."""

    def without_dtype(paths, config):
        make(paths, config)
        del config["dtype"]

    return without_dtype


BIAS = {"model__layers__0__self_attn__q_proj__bias": torch.ones(32)}

ERRORS: list[tuple[str, str, Make, str]] = [
    # Codes in the place of weights.
    ("GPTQ", "untied", packed("gptq", of_gptq), "expert0 is stored as I32 (quantised: gptq)"),
    (
        "4 bits",
        "untied",
        packed("bitsandbytes", of_bnb_4),
        "expert0 is stored as U8 (quantised: bitsandbytes), which cannot be merged → dequantise",
    ),
    ("fp8", "untied", packed("fp8", of_fp8), "is stored as F8_E4M3 (quantised: fp8)"),
    (
        "a GPTQ config",
        "untied",
        quantised(1, "gptq"),
        "expert0 says that it is quantised (gptq), b",
    ),
    ("all int8", "untied", retyped(1, "", torch.int8), "expert0 is stored as I8, which cannot be"),
    (
        "a tensor in int8",
        "untied",
        retyped(1, UP, torch.int8),
        f"1 tensors in I8, which cannot be merged: {UP}",
    ),
    ("a tensor in fp8", "untied", retyped(1, UP, torch.float8_e4m3fn), "1 tensors in F8_E4M3"),
    ("a complex tensor", "untied", retyped(2, UP, torch.complex64), "expert1 has 1 tensors in C64"),
    ("uint8", "untied", one_of_many(retyped(1, UP, torch.uint8)), "expert0 has 1 tensors in U8"),
    # Tensors that not all models have.
    ("an expert lacks a norm", "untied", removed(1, "model.norm.weight"), "expert0 lacks 1 of 21"),
    ("the base lacks a norm", "untied", removed(0, "model.norm.weight"), "base lacks 1 of 21"),
    ("a matrix more", "untied", added(0, 1, 2, vision__weight=torch.ones(9, 32)), "vision.weight"),
    ("a bias of the base", "untied", added(0, **BIAS), "self_attn.q_proj.bias"),
    ("more layers", "untied", saved(1, num_hidden_layers=3), "expert0 has 3"),
    ("wider", "untied", saved(1, hidden_size=64), "(40, 64) in expert0, but (40, 32) in the base"),
    ("another family", "untied", gpt2, "Must specify --allow-crimes"),
    # Heads.
    ("tied base", "tied", saved(1), "base ties its head to the embedding, and expert0 has"),
    ("tied expert", "untied", saved(1, tie_word_embeddings=True), "expert0 ties its head to the"),
    ("headless expert", "untied", removed(1, "lm_head.weight"), "expert0 has no lm_head.weight"),
    (
        "headless base",
        "untied",
        removed(0, "lm_head.weight"),
        "base has no lm_head.weight, and its",
    ),
    ("by default untied", "untied", head_without_a_word, "expert0 has no lm_head.weight"),
    (
        "an index without the head",
        "untied",
        lambda paths, config: index(paths, lambda names: names.pop("lm_head.weight")),
        "expert0 has no lm_head.weight",
    ),
    # Tokens.
    (
        "permuted",
        "untied",
        words("abcd", "acbd", "abcd"),
        "numbers 2 tokens differently from the ba",
    ),
    (
        "permuted beside none",
        "untied",
        words(None, "acbd", "abcd"),
        "differently from expert0: 'b'",
    ),
    ("permuted vocab.json", "untied", files("vocab.json", numbers), "numbers 2 tokens differently"),
    ("permuted vocab.txt", "untied", files("vocab.txt", "\n".join), "numbers 2 tokens differently"),
    (
        "fast and slow",
        "untied",
        fast_and_slow,
        "expert0 numbers 2 tokens differently from the base",
    ),
    ("more rows", "untied", larger(1), "expert0 has another vocabulary: model.embed_tokens.weight"),
    ("fewer rows", "untied", larger(0), "expert1 has another vocabulary"),
    (
        "a token whose number is text",
        "untied",
        damaged_tokens(model={"type": "WordLevel", "vocab": {"a": "x"}}),
        "the tokenizer of expert0 is damaged: tokenizer.json cannot be read",
    ),
    (
        "tokens that are numbers",
        "untied",
        damaged_tokens(added_tokens=[3]),
        "the tokenizer of expert0 is damaged: tokenizer.json cannot be read",
    ),
    ("a tokenizer without a model", "untied", without_a_model, "expert0 numbers 2 tokens differ"),
    (
        "a norm without an axis",
        "untied",
        lambda paths, config: rewrite(
            paths[1], lambda t: t.update({"model.norm.weight": torch.tensor(1.0)})
        ),
        "tensor model.norm.weight has shape () in expert0, but (32,)",
    ),
    # Files and adapters.
    (
        "an index with a tensor more",
        "untied",
        lambda paths, config: index(paths, lambda names: names.update(x="model.safetensors")),
        "model.safetensors lacks the tensor x that the index expects there",
    ),
    (
        "an index of another shard",
        "untied",
        lambda paths, config: index(paths, lambda names: names.update({UP: "m2.safetensors"})),
        "expert0/m2.safetensors is missing",
    ),
    (
        "no architecture",
        "untied",
        lambda paths, config: forgets(paths[1], "architectures"),
        "expert0/config.json has `architectures`: None instead of a list of one name",
    ),
    ("a link", "untied", linked, "expert0 is listed 2 times, as expert0 and expert0-link"),
    (
        "a damaged adapter",
        "untied",
        damaged_adapter,
        "adapter_model.safetensors is damaged",
    ),
    (
        "a wider adapter",
        "untied",
        adapter(hidden_size=64),
        "the shape (2, 64), and config and base ask for",
    ),
    (
        "a deeper adapter",
        "untied",
        adapter(num_hidden_layers=3),
        "onto the base, which has no such module",
    ),
]

WARNINGS: list[tuple[str, str, Make, str]] = [
    ("tokens more", "untied", words("abcd", "abcde", "abcd"), "expert0 has 1 tokens that the base"),
    (
        "another adapter",
        "untied",
        adapter("other/model"),
        "was trained on other/model, not on base",
    ),
    ("mixed dtypes", "untied", one_of_many(retyped(1, "", torch.bfloat16, 1)), "different dtypes"),
    (
        "another number of experts",
        "untied",
        lambda paths, config: [configure(p, num_local_experts=n) for n, p in enumerate(paths)][:0],
        "num_local_experts: 1 instead of 0",
    ),
    (
        "classes of other names",
        "untied",
        classes(("good", "bad"), ("yes", "no")),
        "expert1 calls its classes yes, no, and expert0 calls them good, bad",
    ),
    (
        "another activation",
        "untied",
        lambda paths, config: configure(paths[1], hidden_act="gelu"),
        "hidden_act: gelu instead of silu",
    ),
]


@pytest.mark.parametrize(
    ("family", "make", "level", "message"),
    [pytest.param(*row, "error", text, id=name) for name, *row, text in ERRORS]
    + [pytest.param(*row, "warning", text, id=name) for name, *row, text in WARNINGS],
)
def test_mistakes_in_checkpoints(families, tmp_path, family, make, level, message):
    shutil.copytree(families[family], tmp_path, dirs_exist_ok=True)
    paths = [str(tmp_path / name) for name in ("base", "expert0", "expert1")]
    config = ace_config(paths)
    flags = make(paths, config) or ()
    told = findings(tmp_path, config, *flags)
    assert message in told[level]
    assert level == "error" or not told["error"]
