# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace merge --try`: base and result continue a prompt."""

from __future__ import annotations

import ast
import math
import re

import pytest
import torch
from checkpoints import ace_config, fine_tuned, save_family, tiny_llama
from sharded import command, linear, refusal, save_tokenizer, write_config
from test_architectures import MODELS
from transformers import AutoTokenizer, LlamaForCausalLM

PROMPT = "t1 t2 t3"


def save_talkers(folder, model) -> list[str]:
    paths = save_family(model, folder)
    for path in paths:
        save_tokenizer(path, 40)
    return paths


def trials(text: str) -> list[dict]:
    """What base and result have said, and their losses."""
    lines = re.findall(r"^(.*?): (['\"].*), mean loss (.*)$", text, re.MULTILINE)
    return [
        {"model": model, "continuation": ast.literal_eval(said), "loss": float(loss)}
        for model, said, loss in lines
    ]


def test_it_says_what_transformers_says(tmp_path):
    paths = save_talkers(tmp_path, tiny_llama())
    config, out = write_config(tmp_path / "merge.yml", ace_config(paths)), tmp_path / "merged"
    base, result = trials(command(config, out, "--try", PROMPT))
    assert (base["model"], result["model"]) == (paths[0], str(out))
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    text = PROMPT + base["continuation"]
    for trial, folder in ((base, paths[0]), (result, out)):
        model = LlamaForCausalLM.from_pretrained(folder)
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        said = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        assert trial["continuation"] == tokenizer.decode(said, skip_special_tokens=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double().log_softmax(-1)
        expected = -logits.gather(1, ids[0, 1:, None]).mean()
        assert math.isclose(trial["loss"], float(expected), rel_tol=1e-4)


def test_for_people_and_again(tmp_path):
    paths = save_talkers(tmp_path, tiny_llama())
    config, out = write_config(tmp_path / "merge.yml", linear(paths[:1])), tmp_path / "merged"
    first = command(config, out, "--try", PROMPT)
    # the same model twice
    lines = [line.partition(": ")[2] for line in first.splitlines() if "mean loss" in line]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    again = command(config, out, "--try", PROMPT, "--quiet")
    assert [line for line in again.splitlines() if "mean loss" in line] == [
        line for line in first.splitlines() if "mean loss" in line
    ]


def test_a_model_that_knows_less_has_a_larger_loss(tmp_path):
    base = tiny_llama()
    paths = save_talkers(tmp_path, base)
    with torch.no_grad():
        fine_tuned(base, seed=1, scale=1.0).save_pretrained(paths[1])
    settings = ace_config(paths[:2], merge_method="task_arithmetic", parameters={"weight": 1.0})
    config = write_config(tmp_path / "merge.yml", settings)
    before, after = trials(command(config, tmp_path / "merged", "--no-check", "--try", PROMPT))
    assert after["loss"] > before["loss"] + 0.1


def test_a_prompt_of_nothing(tmp_path):
    config = write_config(tmp_path / "merge.yml", ace_config(save_talkers(tmp_path, tiny_llama())))
    assert "--try needs a text" in refusal(config, tmp_path / "merged", "--try", " ")


def test_a_token_without_an_embedding(tmp_path):
    """As where a tokenizer was extended, and its model was not: the merge is complete."""
    paths = save_talkers(tmp_path, tiny_llama(vocab_size=30))
    config = write_config(tmp_path / "merge.yml", ace_config(paths))
    assert "Error: --try: " in refusal(config, tmp_path / "merged", "--try", "t1 t35")
    assert "is complete" in command(config, tmp_path / "merged", "--try", "t1 t29")


def test_encoders_and_decoders(tmp_path):
    torch.manual_seed(0)
    paths = save_talkers(tmp_path, MODELS["t5"][0]())
    config = write_config(tmp_path / "merge.yml", ace_config(paths))
    found = trials(command(config, tmp_path / "merged", "--try", PROMPT))
    assert [math.isfinite(trial["loss"]) for trial in found] == [True, True]


@pytest.mark.parametrize(
    ("name", "message"),
    [("vit", "--try needs a model"), ("roberta", "--try needs a model"), ("llama", "a tokenizer")],
)
def test_models_that_do_not_speak(tmp_path, name, message):
    """Said before anything is merged."""
    torch.manual_seed(0)
    paths = save_family(MODELS[name][0](), tmp_path)
    if name == "roberta":
        save_tokenizer(paths[0], 40)
    config = write_config(tmp_path / "merge.yml", linear(paths))
    assert message in refusal(config, tmp_path / "merged", "--try", PROMPT)
    assert not (tmp_path / "merged").exists()
