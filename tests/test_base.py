# SPDX-License-Identifier: Apache-2.0
"""What all methods share, and what a merge says once at its end of many tensors."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, save_family, tiny_llama
from commands import command
from mergekit.merge_methods import merge_state_dicts, merge_tensors, registry
from safetensors.torch import load_file

from mergekit_ace.methods.base import flush_notices
from mergekit_ace.plugin import METHODS, register

CONTRIBUTING = Path(__file__).parents[1] / ".github" / "CONTRIBUTING.md"


@pytest.fixture
def mean_of_two(tmp_path, monkeypatch):
    """The method of CONTRIBUTING.md: a file, and an entry in the list that is registered."""
    _, _, begun = CONTRIBUTING.read_text("utf-8").partition("```python\n")
    (tmp_path / "mean_of_two.py").write_text(begun.partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))  # forgotten afterwards
    register((*METHODS, "mean_of_two:MeanOfTwoMerge"))


def test_a_new_method_is_one_class_and_one_entry(tmp_path, mergekit_yaml, mean_of_two):
    """It is found by every command without another edit."""
    paths = save_family(tiny_llama(), tmp_path)
    lines, config = tmp_path / "r.jsonl", tmp_path / "merged.yml"
    parameters = {"share": 0.25, "report": str(lines)}
    out = mergekit_yaml(ace_config(paths, merge_method="mean_of_two", parameters=parameters))
    _, one, two = (load_file(Path(path) / "model.safetensors") for path in paths)
    for name, tensor in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(tensor, one[name].lerp(two[name], 0.25))
    about = "Mean of two: Goes from one expert towards the other. https://example.org/mean"
    assert "`share`: 0.5; a number from 0 to 1" in command("methods", "mean_of_two")
    assert "@article{doe2026mean," in command("methods")
    checked = command("check", config)
    assert about in checked
    assert "memory  about" in checked
    inspected = command("inspect", config, tmp_path / "inspected", "--quiet")
    assert about in inspected
    assert "21 tensors of 2 experts: 21 merged by Mean of two." in inspected
    command("report", lines, tmp_path / "page.html")
    for page in (tmp_path / "page.html", tmp_path / "inspected" / "report.html"):
        text = page.read_text()
        for shown in ("<title>Mean of two: ", about, "21 merged by Mean of two", "{doe2026mean,"):
            assert shown in text
        assert "xu2026ace" not in text
    command("card", out, "--report", lines)
    card = (out / "README.md").read_text()
    assert "By [Mean of two](https://example.org/mean)" in card
    assert "goes from one expert towards the other." in card
    assert "@article{doe2026mean," in card


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("statsmerging", {"weight": 0.9}),
        ("ace", {"lambda": 3.0}),
        ("ace_plus", {"lambda": 3.0}),
        ("consensus_ta", {"lambda": 3.0}),
    ],
)
def test_statistics_stay_between_those_of_the_models(rng, method, parameters):
    """The sum of changes would make the variances negative."""
    names = ("norm.running_mean", "norm.running_var", "norm.weight")
    states = {
        model: {name: torch.rand(6, generator=rng) + size for name in names}
        for model, size in (("base", 5.0), ("a", 0.0), ("b", 0.1), ("c", 0.2))
    }
    merged = merge_state_dicts(states, method, base="base", parameters=parameters)
    for name, tensor in merged.items():
        versions = torch.stack([state[name] for state in states.values()])
        inside = (tensor >= versions.amin(0)) & (tensor <= versions.amax(0))
        assert bool(inside.all()) == (name != "norm.weight"), name


@pytest.fixture
def said(caplog):
    """Flush; what was said."""
    flush_notices()
    caplog.set_level(logging.WARNING)

    def flush() -> list[str]:
        caplog.clear()
        flush_notices()
        return caplog.messages

    return flush


def test_a_process_that_imports_ours_first_and_says_a_notice_at_its_end():
    """Registration begins while our module is half there; mergekit has no hook at the end."""
    code = "from mergekit_ace.methods.base import notice; notice('ace: {tensors}');"
    code += "import mergekit.merge_methods as known; print(type(known.get('ace')).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ace: 1 tensor" in done.stderr
    assert done.stdout == "AceMerge\n"
    assert "not registered" not in done.stderr


def test_a_result_that_float16_could_not_hold(said):
    """mergekit does not tell a method in which dtype its result is written."""
    for size, told in ((6e4, 0), (7e4, 1)):
        merge_tensors([torch.zeros(4, 3), torch.full((4, 3), size)], "ace", base_index=0)
        messages = said()
        assert len(messages) == told
    assert "1 tensor came out with entries above 65504" in messages[0]
    assert "write out_dtype: bfloat16" in messages[0]
