# SPDX-License-Identifier: Apache-2.0
"""Which shard is computed next, and how often one may fail."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from mergekit_ace.merging.errors import MergeError
from mergekit_ace.merging.events import ShardFailed
from mergekit_ace.merging.shards import Shard

ATTEMPTS = 3


class ShardQueue:
    """Shards that are yet to be computed.

    Args:
        shards: all of them.
        largest_first: by estimated work, so that none is left alone at the end; or in their order.
    """

    def __init__(self, shards: Sequence[Shard], *, largest_first: bool):
        if largest_first:
            shards = sorted(shards, key=lambda shard: -sum(shard.work))
        self._waiting = deque(shards)
        self._given: dict[int, Shard] = {}
        self._failures: Counter[int] = Counter()

    def __bool__(self) -> bool:
        """Whether anything is left to do, or being done."""
        return bool(self._waiting or self._given)

    def waiting(self) -> bool:
        """Whether a shard could be given to a worker."""
        return bool(self._waiting)

    def take(self) -> Shard:
        """The next shard; it counts as being computed."""
        shard = self._waiting.popleft()
        self._given[shard.index] = shard
        return shard

    def done(self, index: int) -> Shard:
        """A shard is finished."""
        return self._given.pop(index)

    def failed(self, event: ShardFailed) -> Shard:
        """A shard has failed: it waits again, before all others.

        Raises:
            MergeError: it need not be tried again.
        """
        shard = self._given.pop(event.shard)
        self._failures[event.shard] += 1
        count = self._failures[event.shard]
        if event.final or count >= ATTEMPTS:
            times = "" if event.final else f" failed {count} times, the last time with"
            raise MergeError(
                f"{shard.file}{times}: {event.message}\nWhat is finished is kept: give the same "
                "command with --resume once the cause is gone"
            )
        self._waiting.appendleft(shard)
        return shard
