# SPDX-License-Identifier: Apache-2.0
"""What the driver asks of those who compute shards; and a worker in the driver's own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from mergekit_ace.merging.errors import OutputError
from mergekit_ace.merging.events import Event, ShardFailed
from mergekit_ace.merging.shard import ShardWorker
from mergekit_ace.merging.shards import Shard


class Workers(Protocol):
    """Those who compute shards, wherever they are. One that dies is replaced by them."""

    def free(self) -> int:
        """How many more shards would be computed at once."""

    def give(self, shard: Shard) -> None:
        """Have a shard computed."""

    def events(self) -> Iterator[Event]:
        """Wait until something has happened to a shard that was given, and tell it."""

    def close(self) -> None:
        """Stop everything at once."""


class OwnProcess:
    """Computes one shard after the other in this process.

    Args:
        worker: that does it.
    """

    def __init__(self, worker: ShardWorker):
        self._worker = worker
        self._shard: Shard | None = None

    def free(self) -> int:
        return int(self._shard is None)

    def give(self, shard: Shard) -> None:
        self._shard = shard

    def events(self) -> Iterator[Event]:
        assert self._shard is not None  # the driver waits for nobody
        yield from run_shard(self._worker, self._shard.index, self._shard.tensors)
        self._shard = None

    def close(self) -> None:
        pass


def run_shard(worker: ShardWorker, index: int, tensors: Sequence[str]) -> Iterator[Event]:
    """Compute a shard; an error is the last event."""
    try:
        yield from worker.merge(index, tensors)
    except Exception as error:
        yield failure(index, error)


def failure(index: int, error: Exception) -> ShardFailed:
    """What an error means for a shard."""
    final = isinstance(error, OutputError)
    message = str(error) if final else f"{type(error).__name__}: {error}"
    return ShardFailed(index, message, final)
