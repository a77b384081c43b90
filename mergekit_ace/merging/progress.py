# SPDX-License-Identifier: Apache-2.0
"""How far a merge is: throughput, time left, the slowest tensors."""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from tqdm import tqdm

from mergekit_ace.merging.shards import Shard
from mergekit_ace.preflight.estimate import in_time

SLOWEST = 5


@dataclass
class Pace:
    """Counts, without showing anything.

    Args:
        sizes: bytes by tensor, of those that are computed in this run.
        work: estimated seconds by tensor, likewise; only ratios count.
        clock: seconds.
    """

    sizes: Mapping[str, int]
    work: Mapping[str, float]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._start = self.clock()
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """A tensor was computed."""
        self._seconds[name] = seconds

    def take_back(self, names: Sequence[str]) -> None:
        """Tensors of a shard that failed are lost."""
        for name in names:
            self._seconds.pop(name, None)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    @property
    def bytes(self) -> int:
        """Of all tensors computed."""
        return sum(self.sizes[name] for name in self._seconds)

    @property
    def rate(self) -> float:
        """Bytes of the result per second."""
        return self.bytes / max(self.elapsed, 1e-9)

    @property
    def left(self) -> float | None:
        """Seconds until all is computed, as the work goes on at its pace; None at the start."""
        whole, done = sum(self.work.values()), sum(self.work[name] for name in self._seconds)
        return self.elapsed * (whole - done) / done if done else None

    def slowest(self) -> list[tuple[str, float]]:
        """Names and seconds of the tensors that took longest."""
        return heapq.nlargest(SLOWEST, self._seconds.items(), key=lambda item: item[1])


class Progress:
    """Shows the pace: a bar, JSON lines, or nothing.

    Args:
        shards: that are computed in this run.
        sizes: bytes by tensor.
        kept: shards that an earlier run has finished.
        quiet: no bar.
        as_json: a JSON line for every shard instead of text.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        sizes: Mapping[str, int],
        *,
        kept: int,
        quiet: bool,
        as_json: bool,
    ):
        work = {n: w for s in shards for n, w in zip(s.tensors, s.work, strict=True)}
        self.pace = Pace({name: sizes[name] for name in work}, work)
        self._done, self._of = kept, kept + len(shards)
        self._json, self._quiet = as_json, quiet
        self._out = (
            sys.stdout
        )  # for programs: what libraries print goes elsewhere, see `run_shards`
        self._bar = tqdm(
            total=sum(self.pace.sizes.values()),
            unit="B",
            unit_scale=True,
            disable=quiet or as_json or not shards,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {rate_fmt}{postfix}",
        )

    def tensor(self, name: str, seconds: float) -> None:
        """A tensor was computed."""
        self.pace.add(name, seconds)
        self._refresh()

    def finished(self, shard: Shard) -> None:
        """A shard is under its name."""
        self._done += 1
        self._refresh()
        self.event("shard", file=shard.file, done=self._done, of=self._of, **self._figures())

    def failed(self, shard: Shard, message: str) -> None:
        """A shard failed, and is tried again."""
        self.pace.take_back(shard.tensors)
        self._refresh()
        self.event("retry", file=shard.file, error=message)
        self.say(f"{shard.file} is tried again: {message}", err=True)

    def say(self, text: str, *, err: bool = False) -> None:
        """A line for people."""
        if not (self._json or (self._quiet and not err)):
            self._bar.clear()
            click.echo(text, err=err)

    def event(self, name: str, **fields: Any) -> None:
        """A line for programs."""
        if self._json:
            click.echo(json.dumps({"event": name, **fields}), file=self._out)

    def end(self, out: str, kept: int) -> None:
        """All is complete."""
        self._bar.close()
        figures = self._figures()
        self.event("complete", out=out, kept=kept, shards=self._of, **figures)
        if self._of > kept:
            rate = self.pace.rate / 1e6
            self.say(
                f"{self._of - kept} shards in {in_time(self.pace.elapsed)}, {rate:.0f} MB/s of "
                "the result. Slowest tensors:"
            )
            for name, seconds in self.pace.slowest():
                self.say(f"  {seconds:8.2f} s  {name}")

    def close(self) -> None:
        """No more bar."""
        self._bar.close()

    def _figures(self) -> dict[str, Any]:
        left = self.pace.left
        return {
            "seconds": round(self.pace.elapsed, 3),
            "bytes": self.pace.bytes,
            "bytes_per_second": round(self.pace.rate),
            "seconds_left": None if left is None else round(left, 1),
            "slowest": [[name, round(seconds, 3)] for name, seconds in self.pace.slowest()],
        }

    def _refresh(self) -> None:
        left = self.pace.left
        text = f"{self._done}/{self._of} shards"
        text += f", about {in_time(left)} left" if left else ""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(self.pace.bytes - self._bar.n)
