# SPDX-License-Identifier: Apache-2.0
"""Which shard is next, and how often one may fail; workers that a test imitates."""

from __future__ import annotations

import pytest
from sharded import SHARDS, command, finished, linear, refusal, save_llamas, write_config

from mergekit_ace.merging import driver
from mergekit_ace.merging.pool import LocalWorker, WorkerDiedError, WorkerPool


class Crew:
    """Workers of this process, and in which order they were given shards.

    Args:
        deaths: of workers, from the third shard on.
        lost: workers that never start, the first of all.
    """

    def __init__(self, count: int, deaths: int = 0, lost: int = 0):
        self.count, self.deaths, self.lost, self.given = count, deaths, lost, []
        self.started: list[LocalWorker] = []

    def make_pool(self, workers, job, memory, *, logs):
        crew = self

        class Mortal(LocalWorker):
            employed = False

            def submit(self, shard):
                self.employed = True
                crew.given.append((shard.index, sum(shard.work.values())))
                super().submit(shard)

            def receive(self):
                if self.employed and crew.deaths and len(crew.given) > 2:
                    crew.deaths -= 1
                    raise WorkerDiedError("died")
                return super().receive()

        def start():
            self.started.append(Mortal(job))
            return self.started[-1]

        def wait(workers):
            return [worker for worker in workers if worker not in self.started[: self.lost]]

        return WorkerPool(start, wait, self.count)


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "merge.yml", linear(save_llamas(tmp_path)))


@pytest.mark.parametrize("count", [1, 2])
def test_the_order(tmp_path, config, monkeypatch, count):
    """Several workers take the largest shards first; one takes them as they come."""
    crew = Crew(count)
    monkeypatch.setattr(driver, "make_pool", crew.make_pool)
    command(config, tmp_path / "merged", *SHARDS)
    indices, work = [given[0] for given in crew.given], [given[1] for given in crew.given]
    assert len(indices) > 3
    assert sorted(indices) == list(range(len(indices)))
    if count == 1:
        assert indices == sorted(indices)
    else:
        assert work == sorted(work, reverse=True)
        assert work != sorted(work)


def test_deaths(tmp_path, config, monkeypatch):
    """A shard is tried three times, next after the one that is being computed."""
    crew = Crew(1, deaths=2)
    monkeypatch.setattr(driver, "make_pool", crew.make_pool)
    command(config, tmp_path / "merged", *SHARDS)
    assert [index for index, _ in crew.given][:6] == [0, 1, 2, 2, 2, 3]
    crew.given, crew.deaths = [], 3
    text = refusal(config, tmp_path / "again", *SHARDS)
    assert "failed 3 times, the last time with: the worker that computed it died" in text
    assert len(finished(tmp_path / "again")) == 2


def test_workers_for_which_there_is_no_room(tmp_path, config, monkeypatch):
    """As in a cluster that has lost a node: the others compute all shards."""
    crew = Crew(3, deaths=1, lost=1)
    monkeypatch.setattr(driver, "make_pool", crew.make_pool)
    command(config, tmp_path / "merged", *SHARDS)
    assert len(crew.started) == 4
    assert len(finished(tmp_path / "merged")) == len(crew.given) - 1
