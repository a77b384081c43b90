# SPDX-License-Identifier: Apache-2.0
"""Throughput and time left, by a clock of the test's own."""

from __future__ import annotations

import re

from mergekit_ace.merging.job import Shard
from mergekit_ace.merging.progress import MergeProgress, Pace


def test_the_pace():
    now = [100.0]
    pace = Pace({"a": 10, "b": 30}, {"a": 1.0, "b": 3.0}, clock=lambda: now[0])
    assert pace.left is None
    now[0] = 102.0
    pace.add("a", 2.0)
    assert (pace.bytes, pace.rate, pace.left) == (10, 5.0, 6.0)
    pace.add("b", 1.0)
    assert pace.slowest() == [("a", 2.0), ("b", 1.0)]
    assert pace.left == 0
    pace.take_back(["b", "c"])
    assert pace.left == 6.0


def test_the_end_names_the_folder(capsys):
    shard = Shard(0, "model.safetensors", {"w": 8}, {"w": 1.0})
    progress = MergeProgress([shard], kept=1, quiet=False, as_json=False)
    progress.merged("w", 1.0)
    progress.end("out/")
    assert re.search("1 shard in .* out/ is complete", capsys.readouterr().out)
