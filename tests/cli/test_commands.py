# SPDX-License-Identifier: Apache-2.0
"""What all commands have in common: help, kinds of configs, devices, old spellings."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch
from commands import command
from mergekit.merge_methods import merge_tensors

from mergekit_ace.cli import main, read_config
from mergekit_ace.training.config import TrainConfig

CONFIGS = {
    "multi": "name: a\nmerge_method: ace\n---\nmerge_method: ties\n",
    "merge": "merge_method: ace\nmodels: []\n",
    "train": "task: causal-lm\nbase_model: base\nmodels: []\n",
    "statistics": "task: causal-lm\nmeasure: [fisher]\nmodels: []\n",
    "distill": "task: causal-lm\nteacher: a\nstudent: b\n",
    "calibrate": "merged_model: a\nmodels: []\n",
    "score": "merges: [a]\nmodels: []\n",
    "search": "merge: ace.yml\nsearch: {}\n",
}
# The kind that a command takes is called as the command, but for these.
OTHER_KINDS = {"check": "merge", "inspect": "merge", "adapter": "merge"}


def test_the_overview_cuts_no_command_short():
    text = command("-h")
    _, commands = text.split("Commands:\n")
    listed = commands.split("\n\n")[0].splitlines()
    assert {line.split()[0] for line in listed} == set(main.commands)
    assert "..." not in commands
    assert "Example:" in text


@pytest.mark.parametrize("name", main.commands)
def test_help_has_an_example_that_works(here, name):
    text = command(name, "-h")
    assert text == command(name, "--help")
    assert ("Dangerous Options:\n" in text) == ("--trust-remote-code" in text)
    program, given_name, *arguments = shlex.split(text.split("Example:\n")[1])
    assert (program, given_name) == ("mergekit-ace", name)
    for given in arguments:
        Path(given).touch() if "." in given else Path(given).mkdir()
    main.commands[name].make_context(name, arguments)  # raises for what is not taken


@pytest.mark.parametrize("name", [*list(CONFIGS)[1:], *OTHER_KINDS])
def test_a_config_of_another_kind_is_told_as_such(here, name):
    taken = {OTHER_KINDS.get(name, name)} | ({"train"} if name == "statistics" else set())
    for kind, text in CONFIGS.items():
        Path("config.yml").write_text(text)
        said = command(name, "config.yml", "out", fails=True)
        told = f"config.yml is a config for `mergekit-ace {kind}`"
        if kind == "multi":
            told = "config.yml is a file of several merge configs"
        elif (name, kind) == ("distill", "train"):  # which has some of its settings
            told = "there is no `teacher:`"
        assert (told in said) == (kind not in taken), said
        assert told not in said or "there is no setting" not in said
    assert not list(Path("out").glob("*"))


@pytest.mark.parametrize("flags", [("--device", "nowhere"), ("--device", "cuda:99"), ("--cuda",)])
@pytest.mark.parametrize("name", ["train", "merge"])
def test_a_device_that_is_not_there(here, monkeypatch, name, flags):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("config.yml").write_text(CONFIGS[name])
    said = command(name, "config.yml", "out", *flags, fails=True)
    assert "torch cannot compute on" in said
    if name == "merge":
        said = command(name, "config.yml", "out", "--lora-merge-dtype", "f32", fails=True)
        assert "'f32' is not one of 'bfloat16', 'float16', 'float32', 'float64'" in said
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [("cpu", "0,1", ""), ("cuda:1", "4,5", "5"), ("cuda:1", None, "1"), ("cuda:2", "4,5", "")],
)
def test_only_the_device_is_visible(here, monkeypatch, device, before, after):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    Path("config.yml").write_text(CONFIGS["train"])
    command("train", "config.yml", "out", "--device", device, fails=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after


def test_remote_code_is_trusted_on_the_command_line_alone(here):
    data = "{path: a.jsonl, text: text}"
    text = f"task: causal-lm\nbase_model: base\nmodels: [{{model: a, data: {data}}}]\n"
    Path("train.yml").write_text(text)
    for given in (True, False):
        settings = read_config(Path("train.yml"), TrainConfig, {"trust_remote_code": given})
        assert settings.trust_remote_code == given
    Path("train.yml").write_text(text + "trust_remote_code: true\n")
    said = command("train", "train.yml", "out", fails=True)
    assert "trust_remote_code is no setting; give --trust-remote-code" in said


def test_places_of_results_are_arguments(here):
    tensors = list(torch.randn(3, 6, 4))
    merge_tensors(tensors, "ace", base_index=0, name="w", parameters={"report": "lines.jsonl"})
    for given in ((), ("page.html",)):
        command("report", "lines.jsonl", *given)
    assert Path("report.html").read_bytes() == Path("page.html").read_bytes()
