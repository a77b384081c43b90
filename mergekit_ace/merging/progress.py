# SPDX-License-Identifier: Apache-2.0
"""How far a merge is: throughput, time left, the slowest tensors."""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
from tqdm import tqdm

from mergekit_ace.merging.job import Shard
from mergekit_ace.naming import in_time

_SLOWEST = 5


class MergeProgress:
    """Shows how far a merge is: by a bar, by JSON lines, or not at all.

    Args:
        shards: that are computed in this run.
        kept: number of shards that an earlier run has finished.
        as_json: a JSON line for every shard instead of text.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        kept: int,
        quiet: bool,
        as_json: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._sizes = {name: size for shard in shards for name, size in shard.sizes.items()}
        self._work = {name: part for shard in shards for name, part in shard.work.items()}
        self._clock, self._start = clock, clock()
        self._seconds: dict[str, float] = {}
        self._kept = self._done = kept
        self._count = kept + len(shards)
        self._json, self._quiet = as_json, quiet
        self._out = sys.stdout  # for programs; the driver sends elsewhere what libraries print
        self._bar = tqdm(
            total=sum(self._sizes.values()),
            unit="B",
            unit_scale=True,
            disable=quiet or as_json or not shards,
            leave=False,
            bar_format="merging {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {rate_fmt}{postfix}",
        )

    def merged(self, name: str, seconds: float) -> None:
        """Show that a tensor was computed."""
        self._seconds[name] = seconds
        self._refresh()

    def finished(self, shard: Shard) -> None:
        """Show that a shard is under its name."""
        self._done += 1
        self._refresh()
        self.event("shard", file=shard.file, done=self._done, of=self._count, **self.figures())

    def failed(self, shard: Shard, message: str) -> None:
        """Show that a shard failed, and is tried again: its tensors no longer count."""
        for name in shard.tensors:
            self._seconds.pop(name, None)
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

    def start(self, *, resumed: bool, changed: Sequence[str]) -> None:
        """Show what is kept of an earlier run, and which of its files are made again."""
        for file in changed:
            self.say(f"{file} is not what it was when it was finished: it is made again")
        if resumed:
            self.say(f"{self._kept} of {self._count} shards are finished and kept")
        self.event("start", kept=self._kept, shards=self._count, changed=changed)

    def end(self, out: str) -> None:
        """Show that all is complete."""
        self._bar.close()
        computed, figures = self._count - self._kept, self.figures()
        self.event("complete", out=out, kept=self._kept, shards=self._count, **figures)
        if not computed:
            self.say(f"{out} is complete: all its shards are as the manifest says")
        else:
            self.say(
                f"{computed} shard{'s' * (computed > 1)} in {in_time(figures['seconds'])}, "
                f"{figures['bytes_per_second'] / 1e6:.3g} MB/s; {out} is complete. Slowest tensors:"
            )
            for name, seconds in figures["slowest"]:
                self.say(f"  {seconds:8.2f} s  {name}")

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def figures(self) -> dict[str, Any]:
        """Return the pace: seconds, bytes of the result, and the slowest tensors.

        `seconds_left` follows from the estimated work of all tensors; None at the start.
        """
        elapsed = self._clock() - self._start
        written = sum(self._sizes[name] for name in self._seconds)
        done = sum(self._work[name] for name in self._seconds)
        left = elapsed * (sum(self._work.values()) - done) / done if done else None
        slowest = heapq.nlargest(_SLOWEST, self._seconds.items(), key=lambda item: item[1])
        return {
            "seconds": round(elapsed, 3),
            "bytes": written,
            "bytes_per_second": round(written / max(elapsed, 1e-9)),
            "seconds_left": None if left is None else round(left, 1),
            "slowest": [[name, round(seconds, 3)] for name, seconds in slowest],
        }

    def _refresh(self) -> None:
        figures = self.figures()
        left = figures["seconds_left"]
        text = f"{self._done}/{self._count} shards"
        text += f", about {in_time(left)} left" if left else ""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(figures["bytes"] - self._bar.n)
