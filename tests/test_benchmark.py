# SPDX-License-Identifier: Apache-2.0
"""The programs that measure speed, memory and cost, each at its smallest."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matrices import HETEROGENEOUS, family
from mergekit.io.tasks import FinalizeModel, LoadTensor, SaveTensor
from reference import naive_ace


@pytest.fixture
def measured_here(example, in_process, monkeypatch):
    """Run in this process what `checkpoint.measure` starts in one of its own."""

    def measure(command: list[str], folder: Path) -> dict[str, float]:
        for task in (LoadTensor, SaveTensor, FinalizeModel):  # `merge_timed` puts clocks there
            monkeypatch.setattr(task, "execute", task.execute)
        subprocess.run(command, cwd=folder, check=True)
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"wall": 1.0, "resident_bytes": resident}

    for program in ("checkpoint", "adapters"):
        monkeypatch.setattr(example("benchmark", program), "measure", measure)


def test_a_process_of_its_own(example, tmp_path):
    measure = example("benchmark", "checkpoint").measure
    figures = measure([sys.executable, "-c", "print(len(b'x' * 2**25))"], tmp_path)
    assert figures["wall"] > 0
    assert figures["resident_bytes"] > 2**25
    assert (tmp_path / "merge.log").read_text() == f"{2**25}\n"
    with pytest.raises(SystemExit, match="why"):
        measure([sys.executable, "-c", "import sys; sys.exit('why')"], tmp_path)


def test_checkpoints(run_example, measured_here, tmp_path):
    methods = ["task_arithmetic", "ace"]
    flags = ["--size", "tiny", "--json", tmp_path / "figures.json", "--folder", tmp_path]
    shown = run_example("benchmark", "checkpoint", *flags, "--methods", *methods)
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["method"] for row in rows] == methods
    assert all(f"\n{row['method']} " in shown for row in rows)
    assert all(row["compute"] > 0 and row["write"] > 0 for row in rows)


def test_adapters(run_example, measured_here, tmp_path):
    """Every kind of row: a merge method, PEFT's way, and a full merge."""
    rows = ["tsv_m", "peft-cat", "full-ace"]
    small = ["--size", "tiny", "--adapters", 2, "--rank", 3, "--folder", tmp_path]
    small += ["--json", tmp_path / "a.json"]
    shown = run_example("benchmark", "adapters", *small, "--rows", *rows)
    figures = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert list(figures) == rows
    for row in rows:
        assert f"\n{row} " in shown
        assert all(one["resident_bytes"] > 2**20 for one in figures[row])
    assert not list(tmp_path.glob("*/merged")), "results are removed"


@pytest.mark.parametrize("heterogeneous", [False, True])
@pytest.mark.parametrize("shape", [(14, 9), (9, 14), (5, 20)])
def test_the_lean_transcription(example, rng, shape, heterogeneous):
    base, experts = family(rng, *shape, 3, scales=HETEROGENEOUS, noise=0.5)
    lean_ace = example("benchmark", "lean").lean_ace
    merged = lean_ace(base.double(), [e.double() for e in experts], heterogeneous=heterogeneous)
    switch = "always" if heterogeneous else "never"
    paper = {"epsilon_scale": "absolute", "refinement_mean": "ridged"}
    paper |= dict.fromkeys(("adaptive_normalization", "spectral_refinement"), switch)
    expected = naive_ace(base, experts, **paper)
    torch.testing.assert_close(merged, expected)


@pytest.mark.parametrize("spectrum", ["low-rank", "slow"])
def test_kernels(run_example, tmp_path, spectrum):
    """Ours, its transcription, a peer, and one of mergekit's own."""
    ways = ["ace", "ace-refined", "lean-refined", "iso_c", "ties"]
    small = ["--divide", 64, "--rounds", 1, "--json", tmp_path / "kernels.json", "--heterogeneous"]
    shown = run_example("benchmark", "kernels", *small, "--spectrum", spectrum, "--ways", *ways)
    figures = json.loads((tmp_path / "kernels.json").read_text())
    shapes = [row["shape"] for row in figures["rows"] if row["way"] == "ties"]
    assert shapes == [[32, 32], [8, 32], [128, 32], [32, 128]]
    assert [total["way"] for total in figures["totals"]] == ways
    for way in ways:
        own = [row for row in figures["rows"] if row["way"] == way]
        (total,) = [one["seconds"] for one in figures["totals"] if one["way"] == way]
        assert total == pytest.approx(sum(row["count"] * row["seconds"] for row in own))
        assert f"\nLlama-3.2-1B     {way} " in shown


def test_a_merge_of_one_expert_is_refused(run_example, capsys):
    with pytest.raises(SystemExit):
        run_example("benchmark", "kernels", "--experts", 1)
    assert "at least two experts" in capsys.readouterr().err
