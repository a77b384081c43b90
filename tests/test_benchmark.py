# SPDX-License-Identifier: Apache-2.0
"""The programs that measure speed, memory and cost, each at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from matrices import HETEROGENEOUS, family
from reference import naive_ace


def test_a_process_of_its_own(example, tmp_path):
    measure = example("benchmark", "checkpoint").measure
    figures = measure([sys.executable, "-c", "print(len(b'x' * 2**25))"], tmp_path)
    assert figures["wall"] > 0
    assert figures["resident_bytes"] > 2**25
    with pytest.raises(SystemExit, match="why"):
        measure([sys.executable, "-c", "import sys; sys.exit('why')"], tmp_path)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("program", "flags", "rows"),
    [
        ("checkpoint", ["--methods"], ["task_arithmetic", "ace"]),
        # every kind of row: a merge method, PEFT's way, and a full merge
        ("adapters", ["--adapters=2", "--rank=3", "--rows"], ["tsv_m", "peft-cat", "full-ace"]),
    ],
)
def test_merges(example, run_example, monkeypatch, tmp_path, program, flags, rows):
    def measure_here(command, folder):
        subprocess.run(command, cwd=folder, check=True)
        return {"wall": 1.0, "resident_bytes": 2**20}

    monkeypatch.setattr(example("benchmark", "checkpoint"), "measure", measure_here)
    small = ["--size", "tiny", "--folder", tmp_path, "--json", tmp_path / "figures.json"]
    shown = run_example("benchmark", program, *small, *flags, *rows)
    assert list(json.loads((tmp_path / "figures.json").read_text())["rows"]) == rows
    assert all(f"\n{row} " in shown for row in rows)
    assert not list(tmp_path.glob("*/merged")), "results are removed"


@pytest.mark.parametrize("heterogeneous", [False, True])
@pytest.mark.parametrize("shape", [(14, 9), (9, 14)])
def test_the_lean_transcription(example, rng, shape, heterogeneous):
    base, experts = family(rng, *shape, 3, scales=HETEROGENEOUS, noise=0.5)
    lean_ace = example("benchmark", "lean").lean_ace
    merged = lean_ace(base.double(), [e.double() for e in experts], heterogeneous=heterogeneous)
    switch = "always" if heterogeneous else "never"
    paper = {"epsilon_scale": "absolute", "refinement_mean": "ridged"}
    paper |= dict.fromkeys(("adaptive_normalization", "spectral_refinement"), switch)
    torch.testing.assert_close(merged, naive_ace(base, experts, **paper))


@pytest.mark.parametrize("spectrum", ["low-rank", "slow"])
def test_kernels(run_example, tmp_path, spectrum):
    """Ours, its transcription, a peer, and one of mergekit's own."""
    ways = ["ace", "lean-refined", "iso_c", "ties"]
    small = ["--divide", 64, "--rounds", 1, "--json", tmp_path / "kernels.json", "--heterogeneous"]
    shown = run_example("benchmark", "kernels", *small, "--spectrum", spectrum, "--ways", *ways)
    figures = json.loads((tmp_path / "kernels.json").read_text())
    shapes = [row["shape"] for row in figures["rows"] if row["way"] == "ties"]
    assert shapes == [[32, 32], [8, 32], [128, 32], [32, 128]]
    for total in figures["totals"]:
        own = [row for row in figures["rows"] if row["way"] == total["way"]]
        seconds = sum(row["count"] * row["seconds"] for row in own)
        assert total["seconds"] == pytest.approx(seconds)
        assert f"\nLlama-3.2-1B     {total['way']} " in shown
    assert [total["way"] for total in figures["totals"]] == ways
