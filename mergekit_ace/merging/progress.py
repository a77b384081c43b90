# SPDX-License-Identifier: Apache-2.0
"""How far a merge is: throughput, time left, the slowest tensors."""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
from tqdm import tqdm

from mergekit_ace.merging.job import Shard
from mergekit_ace.preflight.estimate import in_time

_SLOWEST = 5


class Pace:
    """Measures the pace of a merge, without showing anything.

    Args:
        sizes: bytes by tensor, of those that are computed in this run.
        work: estimated seconds by tensor, likewise; only ratios count.
        clock: returns seconds.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        work: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.sizes, self.work = sizes, work
        self._clock, self._start = clock, clock()
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Count a tensor that was computed."""
        self._seconds[name] = seconds

    def take_back(self, names: Iterable[str]) -> None:
        """Count tensors no longer, as their shard has failed."""
        for name in names:
            self._seconds.pop(name, None)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def bytes(self) -> int:
        """Bytes of all tensors computed."""
        return sum(self.sizes[name] for name in self._seconds)

    @property
    def rate(self) -> float:
        """Bytes of the result per second."""
        return self.bytes / max(self.elapsed, 1e-9)

    @property
    def left(self) -> float | None:
        """Seconds until all is computed, if the work goes on at this pace; None at the start."""
        whole, done = sum(self.work.values()), sum(self.work[name] for name in self._seconds)
        return self.elapsed * (whole - done) / done if done else None

    def slowest(self) -> list[tuple[str, float]]:
        """Return names and seconds of the tensors that took longest."""
        return heapq.nlargest(_SLOWEST, self._seconds.items(), key=lambda item: item[1])


class MergeProgress:
    """Shows the pace: a bar, JSON lines, or nothing.

    Args:
        shards: that are computed in this run.
        kept: number of shards that an earlier run has finished.
        quiet: no bar.
        as_json: a JSON line for every shard instead of text.

    Attributes:
        pace: of this run.
        kept: as above.
        count: number of all shards.
    """

    def __init__(self, shards: Sequence[Shard], *, kept: int, quiet: bool, as_json: bool):
        sizes = {name: size for shard in shards for name, size in shard.sizes.items()}
        work = {name: seconds for shard in shards for name, seconds in shard.work.items()}
        self.pace = Pace(sizes, work)
        self.kept = self._done = kept
        self.count = kept + len(shards)
        self._json, self._quiet = as_json, quiet
        self._out = sys.stdout  # for programs; the driver sends elsewhere what libraries print
        self._bar = tqdm(
            total=sum(sizes.values()),
            unit="B",
            unit_scale=True,
            disable=quiet or as_json or not shards,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {rate_fmt}{postfix}",
        )

    def merged(self, name: str, seconds: float) -> None:
        """Show that a tensor was computed."""
        self.pace.add(name, seconds)
        self._refresh()

    def finished(self, shard: Shard) -> None:
        """Show that a shard is under its name."""
        self._done += 1
        self._refresh()
        self.event("shard", file=shard.file, done=self._done, of=self.count, **self._figures())

    def failed(self, shard: Shard, message: str) -> None:
        """Show that a shard failed, and is tried again."""
        self.pace.take_back(shard.tensors)
        self._refresh()
        self.event("retry", file=shard.file, error=message)
        self.say(f"{shard.file} is tried again: {message}", err=True)

    def say(self, text: str, *, err: bool = False, asked_for: bool = False) -> None:
        """Print a line for people; not if they want quiet, unless it is an error or asked for."""
        if not (self._json or (self._quiet and not (err or asked_for))):
            self._bar.clear()
            click.echo(text, err=err)

    def event(self, name: str, **fields: Any) -> None:
        """Print a line for programs."""
        if self._json:
            click.echo(json.dumps({"event": name, **fields}), file=self._out)

    def end(self, out: str) -> None:
        """Show that all is complete."""
        self._bar.close()
        computed = self.count - self.kept
        self.event("complete", out=out, kept=self.kept, shards=self.count, **self._figures())
        if computed:
            self.say(
                f"{computed} shard{'s' * (computed > 1)} in {in_time(self.pace.elapsed)}, "
                f"{self.pace.rate / 1e6:.3g} MB/s; {out} is complete. Slowest tensors:"
            )
            for name, seconds in self.pace.slowest():
                self.say(f"  {seconds:8.2f} s  {name}")

    def close(self) -> None:
        """Take the bar away."""
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
        text = f"{self._done}/{self.count} shards"
        text += f", about {in_time(left)} left" if left else ""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(self.pace.bytes - self._bar.n)
