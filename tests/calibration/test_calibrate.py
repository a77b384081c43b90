# SPDX-License-Identifier: Apache-2.0
"""The command `calibrate`, and its mathematics against whole models as hooks see them."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import LLAMA, ace_config, fine_tuned, state, tiny, tiny_llama
from commands import command, run_config
from families import logits_by_hand, sentence, tokenizer, write_rows
from filelock import FileLock
from peft_models import train_by_chance
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from mergekit_ace.calibration import calibrate
from mergekit_ace.files.saving import LOCK_FILE
from mergekit_ace.training import tasks
from mergekit_ace.training.tasks import write_own_texts

CPU = torch.device("cpu")


def save(model, folder: Path, **special: str) -> str:
    """Save a model with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer(**special).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base, a merge of two experts, in several files, and a text file for each of them."""
    folder, base, rng = tmp_path_factory.mktemp("family"), tiny_llama(), random.Random(0)
    paths = [save(base, folder / "base")]
    for seed in (1, 2):
        paths.append(save(fine_tuned(base, seed, 0.05).bfloat16(), folder / f"expert{seed}"))
    merge = ace_config(paths, parameters={"report": str(folder / "ace.jsonl")}, dtype="bfloat16")
    run_config("merge", merge, folder / "merged", "--out-shard-size", "6K")
    for name in ("expert1", "expert2", "keep"):
        rows = [{"text": sentence(rng, rng.randint(5, 30))} for _ in range(20)]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture
def config(folder) -> dict:
    def data(name: str) -> dict:
        return {"path": str(folder / f"{name}.jsonl"), "text": "text"}

    names = ("expert1", "expert2")
    experts = [{"model": str(folder / name), "data": data(name)} for name in names]
    return {"merged_model": str(folder / "merged"), "models": experts, "keep": data("keep")}


run = partial(run_config, "calibrate")


def calibrated(settings: dict, out: Path, *flags: str) -> tuple[dict[str, torch.Tensor], str]:
    """The weights that come out, and the model card."""
    run(settings, out, *flags)
    return state(LlamaForCausalLM, out)[1], (out / "README.md").read_text()


def refused(settings: dict, out: Path, *words: str, flags: tuple[str, ...] = ()) -> None:
    said = run(settings, out, *flags, fails=True)
    assert [word for word in words if word not in said] == [], said


def test_a_checkpoint_comes_out(config, folder, tmp_path, monkeypatch):
    """Half of the way to the mathematics, where what should stay weighs as all experts do."""
    out, words = tmp_path / "out", tokenizer()
    config["models"][1]["task"] = "medicine"
    found, card = calibrated(config, out)
    model, start = state(LlamaForCausalLM, config["merged_model"])

    def teacher(folder: str, data: dict, weight: float) -> calibrate.SampleTeacher:
        lines = Path(data["path"]).read_text().splitlines()
        texts = [torch.tensor(words(json.loads(line)["text"])["input_ids"]) for line in lines]
        return calibrate.SampleTeacher(state(LlamaForCausalLM, folder)[1], texts, weight)

    teachers = [teacher(one["model"], one["data"], 0.5) for one in config["models"]]
    teachers.append(teacher(config["merged_model"], config["keep"], 1.0))
    expected = {**start}
    for tensors in calibrate.calibrated_layers(model, start, teachers, CPU):
        expected |= {name: (start[name] + tensor) / 2 for name, tensor in tensors.items()}
    for name, tensor in expected.items():
        assert torch.equal(start[name], found[name]) == ("_proj.weight" not in name), name
        assert torch.allclose(found[name], tensor.bfloat16().float(), rtol=0.01, atol=1e-5)
    section = card[card.index("## Calibration") :]
    whose = ("| `expert1` | 20 |", "| `medicine` | 20 |", "| what should stay | 20 |")
    assert [said for said in ("went 0.5 of the way", *whose) if said not in section] == []
    assert str(folder) not in section
    command("card", out, "--report", folder / "ace.jsonl")
    again = (out / "README.md").read_text()
    assert section.rstrip() in again
    assert again.count("## How this merge was made") == 1
    files = {path.name for path in Path(config["merged_model"]).iterdir()}
    assert {path.name for path in out.iterdir()} == files - {"merge_manifest.json"}
    assert not out.with_name("out.partial").exists()
    refused(config, out, "holds a model. Choose another folder, or --overwrite")
    with monkeypatch.context() as patch:  # an end between two renamings
        move = os.replace
        patch.setattr(os, "replace", lambda a, b: move(a, b if a.name != "result" else "/no/x"))
        run(config, out, "--overwrite", fails=True)
    assert (out / "config.json").exists()
    run(config, out, "--overwrite")
    (out / "config.json").rename(out / "notes.txt")
    refused(config, out, "holds something else than a model", flags=("--overwrite",))


def test_lambda_is_chosen_where_the_base_is_known(config, tmp_path):
    """A merge that goes five times too far comes back; what is not solved shows by how much."""
    base = tiny_llama()
    before = base.state_dict()
    experts = [fine_tuned(base, seed, 0.003) for seed in (1, 2)]
    far = fine_tuned(base, 1, 0.0)
    for name, tensor in far.state_dict().items():
        tensor += 2.5 * sum(expert.state_dict()[name] - before[name] for expert in experts)
    for one, expert in zip(config["models"], experts, strict=True):
        one["model"] = save(expert, tmp_path / Path(one["model"]).name)
        # without an answer, it counts as a text, and is cut like one
        one["data"] = {"path": one["data"]["path"], "prompt": "text", "max_length": 12}
    config["base_model"] = save(base, tmp_path / "base")
    config["merged_model"] = save(far, tmp_path / "far", mask_token="new")
    out, card = calibrated(config, tmp_path / "out")
    name = "model.norm.weight"
    scale = float(((out[name] - before[name]) / (far.state_dict()[name] - before[name])).mean())
    assert any(scale == pytest.approx(one, abs=1e-3) for one in (0.1, 0.15, 0.2, 0.3))
    assert f"with its change of the base multiplied by {scale:.2g}, as it was first. " in card
    assert card.count("` | 20 | ") == 2


@pytest.mark.parametrize("based", [False, True])
def test_models_without_data_write_texts_of_their_own(config, folder, tmp_path, monkeypatch, based):
    """The result is that of the same texts given as data; what stays, base or merge write."""
    monkeypatch.setattr(calibrate, "SAMPLES", 16)
    settings = {"merged_model": config["merged_model"]}
    settings |= {"base_model": str(folder / "base")} if based else {}
    names, data = [one["model"] for one in config["models"]], {}
    for name in (settings["base_model" if based else "merged_model"], *names):
        model = LlamaForCausalLM.from_pretrained(name, dtype="auto").eval()
        path = tmp_path / "texts" / f"{len(data)}.jsonl"
        data[name] = write_own_texts(model, tokenizer(), 16, path, quiet=True).model_dump()
    keep, *_ = data.values()
    own = {"models": [{"model": name} for name in names]}
    given = {"models": [{"model": name, "data": data[name]} for name in names], "keep": keep}
    found, card = calibrated({**settings, **own}, tmp_path / "own")
    expected, _ = calibrated({**settings, **given}, tmp_path / "given")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert card.count("| 16 | 496 | the model itself |") == 3


@pytest.mark.parametrize("alone", [False, True])
def test_an_adapter_is_an_expert(config, tmp_path, alone):
    """It does what the model does that PEFT makes of it, also where it changes the embeddings.

    Where there are only adapters, weights go all of the way, else half of it.
    """
    lora = {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "r": 4, "lora_alpha": 7}
    made = train_by_chance(tiny_llama, tmp_path / "adapter", **lora)
    whole = tiny_llama()
    whole.load_state_dict(made.merged)
    model = save(made.base, tmp_path / "base") + f"+{tmp_path / 'adapter'}"
    first, *others = ({},) if alone else config["models"]  # alone, it writes texts of its own
    found = []
    for expert in (save(whole, tmp_path / "whole"), model):
        models = [{**first, "model": expert}, *others]
        result, card = calibrated({**config, "models": models}, tmp_path / f"out{len(found)}")
        found.append(result)
    start = state(LlamaForCausalLM, config["merged_model"])[1]
    assert f"went {'all' if alone else '0.5'} of the way" in card
    assert f"| `adapter` | {64 if alone else 20} |" in card
    for key, tensor in found[0].items():
        moved = (tensor - start[key]) * (2 if alone else 1)
        assert (found[1][key] - start[key] - moved).norm() <= 0.05 * moved.norm(), key  # bfloat16
    assert any((found[1][key] != first).any() for key, first in start.items())


def test_mistakes_are_told(config, folder, tmp_path, monkeypatch):
    """Before a text is written, and nothing is left behind."""
    words, larger = tokenizer(), copy.deepcopy(config)
    words.add_tokens(["new"])
    for one in larger["models"]:
        one["model"] = str(shutil.copytree(one["model"], tmp_path / Path(one["model"]).name))
        words.save_pretrained(one["model"])
    larger["merged_model"] = str(shutil.copytree(folder / "merged", tmp_path / "merged"))
    words.save_pretrained(tmp_path / "merged")
    new = write_rows(tmp_path / "new.jsonl", [{"text": "w1 w2 new"}] * 3)
    monkeypatch.setattr(tasks, "write_own_texts", None)
    wide = save(tiny_llama(intermediate_size=40), tmp_path / "wide")
    gemma = save(tiny(transformers.Gemma2ForCausalLM, **LLAMA, head_dim=8), tmp_path / "gemma")
    eight = {n: one.to(torch.float8_e4m3fn) for n, one in tiny_llama().state_dict().items()}
    quantised = save(tiny_llama(), tmp_path / "eight")
    save_file(eight, tmp_path / "eight" / "model.safetensors", {"format": "pt"})
    first, lone = config["models"][0], tmp_path / "adapter"
    train_by_chance(tiny_llama, lone, target_modules=["q_proj"], r=2)
    for changes, message in (
        ({"keep": {"path": str(tmp_path / "none.jsonl"), "text": "text"}}, "none.jsonl"),
        ({"keep": {**config["keep"], "text": None, "image": "text"}}, "keep needs the col"),
        (larger | {"keep": {"path": new, "text": "text"}}, "has the token number 40, but "),
        ({"models": [{**first, "model": wide}]}, "give the experts that were merged"),
        ({"models": [{**first, "model": quantised}]}, "eight is quantised"),
        ({"models": [{"model": str(lone)}]}, f"write BASE+{lone}"),
        ({"base_model": str(tmp_path / "none")}, "none"),
        ({"merged_model": gemma, "models": [{"model": gemma}]}, "Gemma2ForCausalLM cannot be cal"),
    ):
        refused(config | changes, tmp_path / "wrong", message)
        assert not [path for path in tmp_path.glob("wrong*") if path.is_dir()]


def test_texts_are_cut_to_a_sliding_window(config, tmp_path):
    """A step sees all earlier tokens, which the attention of such a model does not."""
    window = tiny(transformers.MistralForCausalLM, **LLAMA, sliding_window=4)
    config["merged_model"] = save(window.bfloat16(), tmp_path / "window")
    run(config, tmp_path / "out")
    assert "| what should stay | 20 | 80 |" in (tmp_path / "out" / "README.md").read_text()


def test_what_is_read_is_neither_replaced_nor_dropped(config, folder, tmp_path):
    kept = shutil.copytree(folder / "base", tmp_path / "kept")
    keep = {**config["keep"], "path": str(shutil.copy(folder / "keep.jsonl", kept))}
    partial = str(shutil.copytree(folder / "expert1", tmp_path / "out.partial"))
    inside = tmp_path / "merged" / "calibrated"  # the copy of the merge would hold itself
    config["merged_model"] = str(shutil.copytree(folder / "merged", inside.parent))

    def files() -> list[Path]:
        return sorted(path for path in tmp_path.rglob("*") if path.suffix != ".yml")

    before = files()
    for out, changes in (
        (inside, {}),
        (inside.parent, {}),
        (kept, {"keep": keep}),
        (tmp_path / "out", {"models": [{"model": partial}]}),
    ):
        told = "which is read; choose another folder"
        refused(config | changes, out, told, flags=("--overwrite",))
    assert files() == before
    (tmp_path / "other.partial").mkdir()
    with FileLock(tmp_path / "other.partial" / LOCK_FILE):
        refused(config, tmp_path / "other", "another run is writing to")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    run(config, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "config.json").exists()


def stacked_least_squares(rows: list[tuple[Tensor, Tensor, float]], start: Tensor) -> Tensor:
    """Minimise Σ w ‖W Xᵀ − Yᵀ‖² / n + λ s̄ ‖W − W_m‖² by stacking all rows (X, Y, w)."""
    left = [(w / len(x)) ** 0.5 * x.double() for x, _, w in rows]
    right = [(w / len(x)) ** 0.5 * y.double() for x, y, w in rows]
    mean = sum(x.square().sum() for x in left) / start.shape[1]
    root = (calibrate.RIDGE * mean) ** 0.5
    left.append(root * torch.eye(start.shape[1], dtype=torch.float64))
    right.append(root * start.double().mT)
    return torch.linalg.lstsq(torch.cat(left), torch.cat(right)).solution.mT


@torch.no_grad()
def watch(model: LlamaForCausalLM, ids: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Return what all linears of the decoder layers do, by name, as hooks see it.

    That is inputs, outputs, and the residual stream there, a row for each token.
    """
    model, seen, stream = copy.deepcopy(model), {}, []

    def keep(name, module, given, output):
        seen[name] = (given[0].flatten(0, 1), output.flatten(0, 1), stream[-1])

    for name, module in model.model.layers.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_pre_hook(lambda _, given: stream.append(given[0].flatten(0, 1)))
        if name.endswith("_proj"):
            module.register_forward_hook(partial(keep, name))
    model(ids)
    return seen


@pytest.mark.parametrize(
    ("kind", "biased"), [(LlamaForCausalLM, True), *((k, False) for k in calibrate.KNOWN_MODELS)]
)
def test_every_linear_is_the_least_squares(rng, monkeypatch, kind, biased):
    """What a linear reads in the calibrated model is what it was calibrated on.

    Of three texts the longest is alone, and the others are padded. Where inputs are all zero,
    weights stay.
    """
    monkeypatch.setitem(tasks._TOKENS, "cpu", 40)
    base = tiny(kind, **LLAMA, head_dim=16, attention_bias=biased)
    base.set_attn_implementation("eager")  # which is not causal without a mask
    merge, *experts = (fine_tuned(base, seed, 0.05) for seed in (3, 1, 2))
    merge.model.layers[1].post_attention_layernorm.weight.data.zero_()
    texts = [
        [torch.randint(base.config.vocab_size, (length,), generator=rng) for length in lengths]
        for lengths in ((24, 9, 17), (20, 12))
    ]
    parts = list(zip(experts, texts, (0.4, 0.6), strict=True))
    teachers = [
        calibrate.SampleTeacher(expert.state_dict(), own, weight) for expert, own, weight in parts
    ]
    start = {name: tensor.clone() for name, tensor in merge.state_dict().items()}
    found = {**start}
    for tensors in calibrate.calibrated_layers(base, start, teachers, CPU):
        found |= tensors
    merge.load_state_dict(found)
    seen = [
        (
            expert.state_dict(),
            weight,
            [(watch(merge, i[None]), watch(expert, i[None])) for i in own],
        )
        for expert, own, weight in parts
    ]
    for name in watch(merge, texts[0][0][None]):
        key = f"model.layers.{name}.weight"
        if name.startswith("1.mlp."):
            assert torch.equal(found[key], start[key])
            continue
        rows = []
        for expert, weight, pairs in seen:
            inputs, wanted = [], []
            for merged, own in pairs:
                (read, _, stream), (given, outputs, target) = merged[name], own[name]
                bias = start.get(key.replace(".weight", ".bias"), 0.0)
                writes = name.endswith(calibrate.WRITERS)
                wanted.append(
                    outputs + target - stream - bias if writes else given @ expert[key].mT
                )
                inputs.append(read)
            rows.append((torch.cat(inputs), torch.cat(wanted), weight))
        expected = stacked_least_squares(rows, start[key])
        assert not torch.allclose(found[key], start[key], atol=1e-4), name
        assert torch.allclose(found[key].double(), expected, atol=1e-4), name


def naive_share(models: list, texts: list[list[dict[str, Tensor]]], scale: float) -> float:
    """A base, a merge and experts as whole models in float64, one sequence at a time."""
    base, merged, *experts = (copy.deepcopy(model).double() for model in models)
    between, ends = copy.deepcopy(base), merged.state_dict().items()
    origin = base.state_dict()
    between.load_state_dict({name: torch.lerp(origin[name], end, scale) for name, end in ends})
    shares = []
    for expert, samples in zip(experts, texts, strict=True):
        lost = [0.0, 0.0]
        for sample in samples:
            target, *others = (
                logits_by_hand(model, sample).log_softmax(-1) for model in (expert, base, between)
            )
            for number, other in enumerate(others):
                lost[number] += float((target.exp() * (target - other)).sum())
        shares.append(1 - lost[1] / lost[0])
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    ("tied", "headless"), [(False, ()), (True, (0, 1, 2, 3)), (True, (0, 2, 3))]
)
def test_the_best_scale_is_that_of_whole_models(rng, tied, headless):
    """For texts with a prompt, of which the first one is padded; some store no tied head."""
    base = tiny_llama(tie_word_embeddings=tied)
    experts = [fine_tuned(base, seed, 0.3) for seed in (1, 2)]
    merged = copy.deepcopy(base)
    for name, tensor in merged.named_parameters():  # a tied one once
        moved = [expert.get_parameter(name) - base.get_parameter(name) for expert in experts]
        tensor.data += sum(moved)
    texts = [
        [{"input_ids": torch.randint(40, (length,), generator=rng),
          "supervised": torch.arange(length) >= 4} for length in lengths]
        for lengths in ((9, 12, 12), (9, 12, 12, 12))
    ]  # fmt: skip
    stored = [{**model.state_dict()} for model in (base, merged, *experts)]
    for number in headless:  # as on disk
        del stored[number]["lm_head.weight"]
    config = copy.deepcopy(base.config)
    config.attention_dropout = 0.5  # of training, which this is not
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.model.rotary_emb = copy.deepcopy(base.model.rotary_emb)
    table, more = stored[2]["model.embed_tokens.weight"], torch.ones(3, base.config.hidden_size)
    stored[2]["model.embed_tokens.weight"] = torch.cat((table, more))  # which the merge has not
    pairs = list(zip(stored[2:], map(calibrate.KIND.collate, texts), strict=True))
    scale, share, before = calibrate.choose_scale(model, stored[0], stored[1], pairs, CPU)
    curve = [naive_share([base, merged, *experts], texts, scale) for scale in calibrate.SCALES]
    assert scale == calibrate.SCALES[curve.index(max(curve))]
    assert share == pytest.approx(max(curve), abs=2e-3)
    assert before == pytest.approx(curve[calibrate.SCALES.index(1.0)], abs=2e-3)


def test_what_the_base_lacks_stays_as_merged():
    base, merged = torch.zeros(2, 3), torch.ones(4, 3).bfloat16()
    between = calibrate.scaled_weights({"a": base}, {"a": merged, "b": merged}, 0.25)
    assert between["a"].dtype == torch.float32
    assert between["a"][:, 0].tolist() == [0.25, 0.25, 1.0, 1.0]
    assert torch.equal(between["b"], merged)
    fewer = calibrate.scaled_weights({"a": base}, {"a": torch.ones(1, 3)}, 0.5)
    assert fewer["a"].tolist() == [[0.5] * 3]
