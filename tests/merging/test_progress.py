# SPDX-License-Identifier: Apache-2.0
"""Throughput and time left, by a clock of the test's own."""

from __future__ import annotations

import re

from mergekit_ace.merging.job import Shard
from mergekit_ace.merging.progress import MergeProgress


def test_the_pace():
    now = [100.0]
    first, second = (
        Shard(n, f"model-{n}.safetensors", {name: size}, {name: work})
        for n, (name, size, work) in enumerate((("a", 10, 1.0), ("b", 30, 3.0)))
    )
    progress = MergeProgress(
        [first, second], kept=0, quiet=True, as_json=False, clock=lambda: now[0]
    )
    assert progress.figures()["seconds_left"] is None
    now[0] = 102.0
    progress.merged("a", 2.0)
    figures = progress.figures()
    assert (figures["bytes"], figures["bytes_per_second"], figures["seconds_left"]) == (10, 5, 6)
    progress.merged("b", 1.0)
    assert progress.figures()["slowest"] == [["a", 2.0], ["b", 1.0]]
    assert progress.figures()["seconds_left"] == 0
    progress.failed(second, "no memory")
    assert progress.figures()["seconds_left"] == 6


def test_the_end_names_the_folder(capsys):
    shard = Shard(0, "model.safetensors", {"w": 8}, {"w": 1.0})
    progress = MergeProgress([shard], kept=1, quiet=False, as_json=False)
    progress.merged("w", 1.0)
    progress.end("out/")
    assert re.search("1 shard in .* out/ is complete", capsys.readouterr().out)
