# SPDX-License-Identifier: Apache-2.0
"""The command `calibrate`, from a config to a checkpoint that transformers loads."""

from __future__ import annotations

import copy
import json
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA, ace_config, fine_tuned, state, tiny, tiny_llama
from commands import command, run_config
from families import sentence, tokenizer, write_rows
from filelock import FileLock
from peft_models import train_by_chance
from transformers import Gemma2ForCausalLM, LlamaForCausalLM, MistralForCausalLM

from mergekit_ace.calibration import calibrate as calibrate_module
from mergekit_ace.calibration.calibrate import SampleTeacher, calibrated_layers
from mergekit_ace.files.saving import LOCK_FILE
from mergekit_ace.training.tasks import write_own_texts


def save(model, folder: Path) -> str:
    """Save a model with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
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


def test_a_checkpoint_comes_out(config, folder, tmp_path):
    """Half of the way to the mathematics, where what should stay weighs as all experts do."""
    out, words = tmp_path / "out", tokenizer()
    config["models"][1]["task"] = "medicine"
    found, card = calibrated(config, out)
    model, start = state(LlamaForCausalLM, config["merged_model"])

    def teacher(folder: str, data: dict, weight: float) -> SampleTeacher:
        lines = Path(data["path"]).read_text().splitlines()
        texts = [torch.tensor(words(json.loads(line)["text"])["input_ids"]) for line in lines]
        return SampleTeacher(state(LlamaForCausalLM, folder)[1], texts, weight)

    teachers = [teacher(one["model"], one["data"], 0.5) for one in config["models"]]
    teachers.append(teacher(config["merged_model"], config["keep"], 1.0))
    expected = {**start}
    for tensors in calibrated_layers(model, start, teachers, torch.device("cpu")):
        expected |= {name: (start[name] + tensor) / 2 for name, tensor in tensors.items()}
    for name, tensor in expected.items():
        assert torch.equal(start[name], found[name]) == ("_proj.weight" not in name), name
        assert torch.allclose(found[name], tensor.bfloat16().float(), rtol=0.01, atol=1e-5)

    section = card[card.index("## Calibration") :]
    for said in ("The ridge was 1, ", "went 0.5 of the way", "| `expert1` | 20 |",
                 "| `medicine` | 20 |", "| what should stay | 20 |"):  # fmt: skip
        assert said in section
    assert str(folder) not in section
    command("card", out, "--report", folder / "ace.jsonl")
    again = (out / "README.md").read_text()
    assert section.rstrip() in again
    assert again.count("## How this merge was made") == 1

    files = {path.name for path in Path(config["merged_model"]).iterdir()}
    assert {path.name for path in out.iterdir()} == files - {"merge_manifest.json"}
    assert len(list(out.glob("*.safetensors"))) > 1
    assert not out.with_name("out.partial").exists()
    refused(config, out, "holds a model. Choose another folder, or --overwrite")
    run(config, out, "--overwrite")
    (out / "config.json").rename(out / "notes.txt")
    refused(config, out, "holds something else than a model", flags=("--overwrite",))
    assert (out / "notes.txt").exists()


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
        # without an answer, it counts as a whole
        one["data"] = {"path": one["data"]["path"], "prompt": "text"}
    config["base_model"] = save(base, tmp_path / "base")
    config["merged_model"] = save(far, tmp_path / "far")
    out, card = calibrated(config, tmp_path / "out")
    name = "model.norm.weight"
    went = (out[name] - before[name]) / (far.state_dict()[name] - before[name])
    scale = float(went.mean())
    assert any(scale == pytest.approx(one, abs=1e-3) for one in (0.1, 0.15, 0.2, 0.3))
    assert f"with its change of the base multiplied by {scale:.2g}, as it was first. " in card
    refused({**config, "base_model": str(tmp_path / "none")}, tmp_path / "out2", "none")


@pytest.mark.parametrize("based", [False, True])
def test_models_without_data_write_texts_of_their_own(config, folder, tmp_path, monkeypatch, based):
    """The result is that of the same texts given as data; what stays, base or merge write."""
    monkeypatch.setattr(calibrate_module, "SAMPLES", 16)
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
    assert card.count("a model, which wrote them itself |") == 3
    assert "| what should stay | 16 |" in card


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
    for one in (larger["models"][0], larger["models"][1]):
        one["model"] = str(shutil.copytree(one["model"], tmp_path / Path(one["model"]).name))
        words.save_pretrained(one["model"])
    larger["merged_model"] = str(shutil.copytree(folder / "merged", tmp_path / "merged"))
    words.save_pretrained(tmp_path / "merged")
    new = write_rows(tmp_path / "new.jsonl", [{"text": "w1 w2 new"}] * 3)
    monkeypatch.setattr(calibrate_module, "write_own_texts", None)
    wide = save(tiny_llama(intermediate_size=40), tmp_path / "wide")
    gemma = save(tiny(Gemma2ForCausalLM, **LLAMA, head_dim=8), tmp_path / "gemma")
    first, lone = config["models"][0], tmp_path / "adapter"
    train_by_chance(tiny_llama, lone, target_modules=["q_proj"], r=2)
    for changes, message in (
        ({"keep": {"path": str(tmp_path / "none.jsonl"), "text": "text"}}, "none.jsonl"),
        ({"keep": {**config["keep"], "text": None, "image": "text"}}, "keep needs the col"),
        (larger | {"keep": {"path": new, "text": "text"}}, "has the token number 40, but "),
        ({"models": [{**first, "model": wide}]}, "give the experts that were merged"),
        ({"models": [{"model": str(lone)}]}, f"write BASE+{lone}"),
        ({"merged_model": gemma, "models": [{"model": gemma}]}, "Gemma2ForCausalLM cannot be cal"),
    ):
        refused(config | changes, tmp_path / "wrong", message)
        assert not list(tmp_path.glob("wrong*/"))


def test_texts_are_cut_to_a_sliding_window(config, tmp_path):
    """A step sees all earlier tokens, which the attention of such a model does not."""
    window = tiny(MistralForCausalLM, **LLAMA, sliding_window=4)
    config["merged_model"] = save(window.bfloat16(), tmp_path / "window")
    run(config, tmp_path / "out")
    assert "| what should stay | 20 | 80 |" in (tmp_path / "out" / "README.md").read_text()


def test_what_is_read_is_neither_replaced_nor_dropped(config, folder, tmp_path):
    first, kept = config["models"][0], shutil.copytree(folder / "base", tmp_path / "kept")
    keep = {**config["keep"], "path": str(shutil.copy(folder / "keep.jsonl", kept))}
    partial = str(shutil.copytree(first["model"], tmp_path / "out.partial"))
    inside = tmp_path / "merged" / "calibrated"  # the copy of the merge would hold itself
    config["merged_model"] = str(shutil.copytree(folder / "merged", inside.parent))

    def files() -> list[Path]:
        return sorted(path for path in tmp_path.rglob("*") if path.suffix != ".yml")

    before = files()
    for out, changes in (
        (inside, {}),
        (inside.parent, {}),
        (kept, {"keep": keep}),
        (tmp_path / "out", {"models": [{**first, "model": partial}]}),
    ):
        told = "which is read, or lies in it; choose another folder"
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
