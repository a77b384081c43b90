# SPDX-License-Identifier: Apache-2.0
"""What happens to a shard, as workers tell the driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WrittenShard:
    """A shard that is on the disk, but not yet under its name.

    Attributes:
        folder: temporary, with what belongs to the shard.
        path: of the file; None where every tensor of it turned out to be absent.
        size: bytes of the file.
        sha256: of the file; empty without one.
        tensors: names and bytes of what is in it, in the order of computation.
        reports: lines to append, by path.
    """

    folder: str
    path: str | None
    size: int
    sha256: str
    tensors: dict[str, int]
    reports: dict[str, str]


@dataclass(frozen=True)
class TensorMerged:
    """A tensor of a shard was computed.

    Attributes:
        shard: index of the shard.
        name: of the tensor.
        seconds: that it took.
    """

    shard: int
    name: str
    seconds: float


@dataclass(frozen=True)
class ShardDone:
    """A shard was computed.

    Attributes:
        shard: index of the shard.
        written: where it is, and what is in it.
    """

    shard: int
    written: WrittenShard


@dataclass(frozen=True)
class ShardFailed:
    """A shard was not computed.

    Attributes:
        shard: index of the shard.
        message: what happened.
        final: to try again would be of no use.
    """

    shard: int
    message: str
    final: bool = False


Event = TensorMerged | ShardDone | ShardFailed
