# SPDX-License-Identifier: Apache-2.0
"""Which shard is next, and how often one may fail; workers that a test imitates."""

from __future__ import annotations

import pytest
from sharded import SHARDS, command, finished, linear, refusal, save_llamas, write_config

from mergekit_ace.merging import driver
from mergekit_ace.merging.pool import LocalWorker, WorkerDiedError, WorkerPool


class Crew:
    """Workers of this process of which some die, and in which order they were given shards."""

    def __init__(self, count: int, deaths: int = 0):
        self.count, self.deaths, self.given = count, deaths, []

    def make_pool(self, workers, job, memory, *, logs):
        crew = self

        class Mortal(LocalWorker):
            def submit(self, shard):
                crew.given.append((shard.index, sum(shard.work.values())))
                super().submit(shard)

            def receive(self):
                if crew.deaths and len(crew.given) > 2:
                    crew.deaths -= 1
                    raise WorkerDiedError("died")
                return super().receive()

        return WorkerPool(lambda: Mortal(job), list, self.count)


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
