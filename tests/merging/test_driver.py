# SPDX-License-Identifier: Apache-2.0
"""Which shard is next, and how often one may fail."""

from __future__ import annotations

import pytest

from mergekit_ace.merging.driver import ATTEMPTS, ShardQueue
from mergekit_ace.merging.job import MergeError, Shard, shard_file
from mergekit_ace.merging.worker import ShardFailed


def shards(*work: float) -> list[Shard]:
    return [
        Shard(n, shard_file(n, len(work), safetensors=True), {f"t{n}": 10}, {f"t{n}": seconds})
        for n, seconds in enumerate(work)
    ]


def test_the_queue():
    in_order = ShardQueue(shards(1, 3, 2), largest_first=False)
    assert [in_order.take().index for _ in range(3)] == [0, 1, 2]
    queue = ShardQueue(shards(1, 3, 2), largest_first=True)
    assert [queue.take().index for _ in range(3)] == [1, 2, 0]
    assert queue
    assert queue.take() is None
    queue.done(2)
    for n in range(1, ATTEMPTS + 1):
        if n == ATTEMPTS:
            with pytest.raises(MergeError, match="failed 3 times, the last time with: no luck"):
                queue.failed(ShardFailed(1, "no luck"))
        else:
            assert queue.failed(ShardFailed(1, "no luck")).index == 1
            assert queue.take().index == 1
    with pytest.raises(MergeError, match=r"00001-of-00003.safetensors: full\n"):
        queue.failed(ShardFailed(0, "full", final=True))
    assert not queue
