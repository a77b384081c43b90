# SPDX-License-Identifier: Apache-2.0
"""The command `calibrate`, from a config to a checkpoint that transformers loads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import fine_tuned, state, tiny_llama
from click.testing import CliRunner, Result
from families import sentence, tokenizer, write_rows
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from mergekit_ace.calibration.layerwise import Calibration, SampleTeacher
from mergekit_ace.cli import main


@pytest.fixture(params=[False, True], ids=["plain", "biased"])
def config(tmp_path, request) -> dict:
    """A poor merge of two experts, in two files, and a text file for each of them."""
    base = tiny_llama(attention_bias=request.param)
    models = {"merged": fine_tuned(base, 3, 0.02)}
    models |= {f"expert{t}": fine_tuned(base, t, 0.05) for t in (1, 2)}
    for name, model in models.items():
        shard = {"max_shard_size": "6KB"} if name == "merged" else {}
        model.bfloat16().save_pretrained(tmp_path / name, **shard)
        tokenizer().save_pretrained(tmp_path / name)
    rng = random.Random(0)
    for name in ("expert1", "expert2", "keep"):
        rows = [{"text": sentence(rng, rng.randint(5, 30))} for _ in range(20)]
        write_rows(tmp_path / f"{name}.jsonl", rows)

    def data(name: str) -> dict:
        return {"path": str(tmp_path / f"{name}.jsonl"), "text": "text"}

    experts = [{"model": str(tmp_path / n), "data": data(n)} for n in ("expert1", "expert2")]
    return {"merged_model": str(tmp_path / "merged"), "models": experts, "keep": data("keep")}


def calibrate(config: dict, out: Path, *flags: str) -> Result:
    path = out.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config))
    return CliRunner().invoke(main, ["calibrate", str(path), str(out), "--quiet", *flags])


def test_a_checkpoint_comes_out(config, tmp_path):
    out = tmp_path / "out"
    result = calibrate(config, out)
    assert result.exit_code == 0, result.output
    merged = Path(config["merged_model"])
    assert {path.name for path in out.iterdir()} == {path.name for path in merged.iterdir()}
    assert len(list(out.glob("*.safetensors"))) > 1
    before, after = (state(LlamaForCausalLM, folder)[1] for folder in (merged, out))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == ("_proj.weight" not in name), name
    assert not out.with_name("out.partial").exists()
    again = calibrate(config, out)
    assert again.exit_code == 1
    assert "is not empty; give another folder, or --overwrite" in again.output
    assert calibrate(config, out, "--overwrite").exit_code == 0


def test_experts_weigh_as_much_as_what_should_stay(config, tmp_path):
    """The result is half of the way to the mathematics on all texts, in one batch each."""
    assert calibrate(config, tmp_path / "out").exit_code == 0
    words = tokenizer()

    def teacher(folder: str, data: dict, weight: float) -> SampleTeacher:
        lines = Path(data["path"]).read_text().splitlines()
        texts = [torch.tensor(words(json.loads(line)["text"])["input_ids"]) for line in lines]
        used = pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True).bool()
        batch = (pad_sequence(texts, batch_first=True), used)
        return SampleTeacher(state(LlamaForCausalLM, folder)[1], [batch], weight)

    model, start = state(LlamaForCausalLM, config["merged_model"])
    teachers = [teacher(one["model"], one["data"], 0.5) for one in config["models"]]
    teachers.append(teacher(config["merged_model"], config["keep"], 1.0))
    found = state(LlamaForCausalLM, tmp_path / "out")[1]
    for tensors in Calibration(model, start, teachers, torch.device("cpu")).layers():
        for name, tensor in tensors.items():
            halfway = (start[name] + tensor) / 2
            assert torch.allclose(found[name], halfway.bfloat16().float(), rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("config", [False], indirect=True)
def test_mistakes_are_told(config, tmp_path):
    def message(**changes) -> str:
        result = calibrate({**config, **changes}, tmp_path / "wrong")
        assert result.exit_code == 1, result.output
        assert not list(tmp_path.glob("wrong*/")), "nothing is left behind"
        return result.output

    assert "data" in message(keep={"path": str(tmp_path / "none.jsonl"), "text": "text"})
    wide = LlamaForCausalLM(tiny_llama(intermediate_size=40).config)
    wide.save_pretrained(tmp_path / "wide")
    tokenizer().save_pretrained(tmp_path / "wide")
    first = {**config["models"][0], "model": str(tmp_path / "wide")}
    told = message(models=[first])
    assert "give the experts that were merged" in told
    images = {"path": str(tmp_path / "keep.jsonl"), "image": "text"}
    assert "keep needs a column text, prompt or messages" in message(keep=images)
    result = calibrate(config, tmp_path / "expert1", "--overwrite")
    assert "is one of the models that are read" in result.output


@pytest.mark.parametrize("config", [False], indirect=True)
def test_texts_longer_than_a_sliding_window_are_refused(config, tmp_path):
    """A step sees all earlier tokens, which the attention of such a model does not."""
    llama = tiny_llama()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(llama.config, name) for name in names}
    mistral = MistralForCausalLM(MistralConfig(**sizes, sliding_window=2))
    mistral.save_pretrained(tmp_path / "window")
    tokenizer().save_pretrained(tmp_path / "window")
    result = calibrate({**config, "merged_model": str(tmp_path / "window")}, tmp_path / "out")
    assert result.exit_code == 1
    assert "reaches back 2; add max_length: 2 to all data" in result.output
