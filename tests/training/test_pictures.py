# SPDX-License-Identifier: Apache-2.0
"""Pictures of a training."""

from __future__ import annotations

import sys

from coefficient_files import make_file

from mergekit_ace.training.run import draw_training


def test_pictures(tmp_path):
    log = [{"step": 0, "validation_loss": 2.0}, {"step": 1, "loss": 1.0}]
    file = make_file(["embed.weight", "layers.0.up.weight"], ["./a/math/", "code"])
    assert "coefficients.png" in draw_training(file, log, tmp_path)
    for name in ("coefficients.png", "training.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_says_how_to_get_pictures(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = make_file(["embed.weight"], ["a"])
    assert "pip install matplotlib" in draw_training(file, [], tmp_path)
    assert not list(tmp_path.iterdir())
