# SPDX-License-Identifier: Apache-2.0
"""What all methods share: a new one needs nothing else, and a full device stops none.

The device that runs out of memory is imitated, since a test machine may have none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, save_family, tiny_llama
from click.testing import CliRunner
from matrices import family
from measured_files import write_statistics
from mergekit.merge_methods import MergeMethod, merge_state_dicts, merge_tensors, registry
from mergekit.merge_methods.base import TensorGroup
from safetensors.torch import load_file
from torch import Tensor

from mergekit_ace.algebra.linear import record_of_entries
from mergekit_ace.algebra.records import Fraction
from mergekit_ace.cli import main
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.base import Citation, TaskVectorMethod, method_spec
from mergekit_ace.methods.parameters import shared
from mergekit_ace.plugin import METHODS, our_methods, register


class MeanOfTwo(TaskVectorMethod):
    """A throw-away method: one class, and an entry in the list that is registered."""

    spec = method_spec(
        "mean_of_two",
        "Mean of two",
        "https://example.org/mean",
        (shared("share", Fraction, 0.5, "How much of the second expert is taken."),),
    )
    summary = "Goes from one expert towards the other."
    citations = (Citation("doe2026mean", "Doe, Jane", "The Mean of Two", 2026, "2601.00001"),)
    own_rule = "between two experts"

    def merge(self, tensors, settings):
        _, first, second = tensors
        merged = first.lerp(second, settings.parameters["share"])
        return merged, record_of_entries(self.spec.name, tensors[0], tensors[1:])


class FullDevice(AceMerge):
    """`ace` on a device where the first attempts run out of memory."""

    def __init__(self, failures: int):
        self.failures = failures
        self.seen: list[bool] = []

    def merge(self, tensors, settings):
        self.seen.append(settings.least_memory)
        if len(self.seen) <= self.failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().merge(tensors, settings)


def merge_with(method: MergeMethod, tensors: list[Tensor], name: str | None = None) -> Tensor:
    group = TensorGroup.from_tensors(tensors, base_index=0, name=name)
    return method([group])[0]


@pytest.fixture
def mean_of_two(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))  # forgotten afterwards
    register((*METHODS, f"{__name__}:MeanOfTwo"))


def command(*arguments: str | Path) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


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
    assert "share: 0.5; a number from 0 to 1" in command("methods", "mean_of_two")
    assert "@article{doe2026mean," in command("methods")
    checked = command("check", config)
    assert about in checked
    assert '"mean_of_two"' in command("check", config, "--json")
    assert "time  about" in checked
    inspected = command("inspect", config, tmp_path / "inspected", "--quiet")
    assert about in inspected
    assert "21 tensors of 2 experts: 21 between two experts." in inspected
    command("report", lines, "-o", tmp_path / "page.html")
    for page in (tmp_path / "page.html", tmp_path / "inspected" / "report.html"):
        text = page.read_text()
        assert "<title>Mean of two: expert0, expert1</title>" in text
        assert about in text
        assert "21 between two experts" in text
        assert "@article{doe2026mean," in text
        assert "xu2026ace" not in text
    command("card", out, "--report", lines, "--quiet")
    card = (out / "README.md").read_text()
    assert "By [Mean of two](https://example.org/mean)" in card
    assert "goes from one expert towards the other." in card
    assert "| seed | none needed: the method draws no random numbers |" in card
    assert "@article{doe2026mean," in card


@pytest.mark.parametrize(("failures", "where"), [(1, "least"), (2, "CPU")])
def test_goes_on_with_one_warning(rng, caplog, failures, where):
    base, experts = family(rng, 30, 20, 3)
    expected = merge_tensors([base, *experts], "ace", base_index=0)
    assert not caplog.records
    method = FullDevice(failures)
    torch.testing.assert_close(merge_with(method, [base, *experts]), expected)
    assert method.seen == [False, True, True][: failures + 1]
    (record,) = caplog.records
    assert where in record.getMessage()
    assert "a tensor does not fit" in record.getMessage()


def test_names_the_tensor(rng, caplog):
    base, experts = family(rng, 6, 5, 2)
    merge_with(FullDevice(1), [base, *experts], "model.norm.weight")
    assert "tensor model.norm.weight does not fit" in caplog.text


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_method_goes_on(rng, caplog, monkeypatch, tmp_path, method):
    base, experts = family(rng, 30, 20, 3)
    name = method.spec.name
    parameters = {"weight": [0.2, 0.3, 0.4]} if name == "statsmerging" else {}
    if "statistics" in [parameter.name for parameter in method.spec.parameters]:
        made_up = {
            "covariance": {"w": [torch.eye(20)] * 3},
            "fisher": {"w": [e.abs() for e in experts]},
        }
        parameters["statistics"] = write_statistics(tmp_path, made_up, ["1", "2", "3"])
    arguments = {"base_index": 0, "parameters": parameters, "name": "w"}
    expected = merge_tensors([base, *experts], name, **arguments)
    original, failures = type(method).merge, [1, 2]

    def merge(*arguments, **keywords):
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*arguments, **keywords)

    monkeypatch.setattr(type(method), "merge", merge)
    torch.testing.assert_close(merge_tensors([base, *experts], name, **arguments), expected)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name}: tensor w does not fit")
    assert "CPU" in record.getMessage()


def test_no_memory_anywhere(rng):
    base, experts = family(rng, 6, 5, 2)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        merge_with(FullDevice(3), [base, *experts])


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("statsmerging", {"weight": 0.9}),
        ("ace", {"lambda": 3.0}),
        ("ace_relative", {"lambda": 3.0}),
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
