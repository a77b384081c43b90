# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets, their splits, and the order of samples."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict
from families import write_rows

from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import load_rows, step_indices

ROWS = [{"text": f"line {n}", "other": n} for n in range(50)]
SPLITS = ("train", "validation", "test")


def load(path, seed: int = 0, **settings) -> list[list[str]]:
    """Texts of the rows of training, validation and test."""
    rows = load_rows(DataConfig(path=str(path), text="text", **settings), seed)
    return [rows[split]["text"][:] for split in SPLITS]


def sizes(parts: list[list[str]]) -> list[int]:
    return [*map(len, parts)]


def test_what_is_held_out_asks_nothing_that_the_rest_asks(tmp_path):
    path = write_rows(tmp_path / "d[1] x.jsonl", ROWS)  # a path is no pattern
    assert sizes(load(path, samples=20)) == [16, 2, 2]
    parts = load(write_rows(tmp_path / "d.jsonl", ROWS[:20] * 10))
    assert sizes(parts) == [160, 20, 20]
    assert sum(len({*part}) for part in parts) == 20
    assert sizes(load(tmp_path / "d.jsonl", held_out=5)) == [160, 5, 5]
    assert sizes(load(path, held_out=3)) == [44, 3, 3]
    pairs = [{"text": "one question", "pair": f"text {n}"} for n in range(20)]  # all differ
    pairs = load(write_rows(tmp_path / "p.jsonl", pairs), text_pair="pair")
    assert sizes(pairs) == [16, 2, 2]
    # one content is most of the data: it is not what is held out
    path = write_rows(tmp_path / "m.jsonl", ROWS[:4] + [{"text": "again"}] * 40)
    assert "again" in load(path)[0]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "txt", "folder"])
def test_the_seed_decides_and_nothing_is_written_beside_the_data(tmp_path, kind):
    path, data = tmp_path / f"d.{kind}", Dataset.from_list(ROWS)
    {
        "json": lambda to: to.write_text(json.dumps(ROWS)),
        "txt": lambda to: to.write_text("\n".join(row["text"] for row in ROWS)),
        "csv": data.to_csv,
        "parquet": data.to_parquet,
        "folder": data.save_to_disk,
    }[kind](path)
    before = sorted(tmp_path.rglob("*"))
    assert load(path, 1) == load(path, 1) != load(path, 2)
    assert sizes(load(path)) == [40, 5, 5]
    assert sorted(tmp_path.rglob("*")) == before


def test_named_splits_are_limited_by_held_out(tmp_path):
    parts = {"train": ROWS[:40], "dev": ROWS[40:42], "test": ROWS}
    saved = {name: Dataset.from_list(rows) for name, rows in parts.items()}
    DatasetDict(saved).save_to_disk(tmp_path / "d")
    settings = {"validation_split": "dev", "test_split": "test", "samples": 20, "held_out": 30}
    rows = load(tmp_path / "d", **settings)
    assert sizes(rows) == [20, 2, 30]
    assert {*rows[0]} <= {row["text"] for row in parts["train"]}
    assert {*rows[1]} == {row["text"] for row in parts["dev"]}


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("d.jsonl", "", {}, r"d\.jsonl .* has no rows"),
        ("d.jsonl", '{"text": "the same"}\n' * 20, {}, "too few different rows"),
        ("d.jsonl", '{"body": "x"}\n' * 5, {}, "no column text; it has body"),
        ("d.jsonl", '{"text": "x"}\n', {"test_split": "a"}, r"is one split; leave out"),
        ("d.jsonl", None, {}, r"cannot be read: FileNotFoundError: Unable to find .*d\.jsonl"),
        ("d.jsonl", '{"text": ', {}, r"d\.jsonl .* cannot be read: .*JSON"),
        ("d.pkl", "", {}, r"d\.pkl .* is of no kind that can be read: \.jsonl"),
    ],
)
def test_data_that_cannot_be_used(tmp_path, name, content, settings, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name, **settings)


@pytest.mark.parametrize(("batch", "count"), [(4, 10), (8, 5), (1, 1)])
def test_every_round_sees_every_sample_once(batch, count):
    seen = [n for step in range(3 * count) for n in step_indices(5, 1, step, batch, count)]
    for start in range(0, 3 * count, count):
        assert sorted(seen[start : start + count]) == list(range(count))
