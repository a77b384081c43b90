# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets, samples on disk, the order of samples."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from datasets import Dataset, DatasetDict
from families import write_rows

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import (
    load_rows,
    pack_examples,
    step_indices,
    unpack_examples,
)
from mergekit_ace.training.state import TrainingError, load_checkpoint, save_checkpoint

ROWS = [{"text": f"line {n}", "other": n} for n in range(50)]


def texts(rows) -> list[set[str]]:
    return [set(part["text"]) for part in (rows["train"], rows["validation"], rows["test"])]


def config(path, **settings) -> DataConfig:
    return DataConfig(path=str(path), text="text", **settings)


def test_eight_to_one_to_one(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    parts = texts(load_rows(config(path), 0))
    assert [len(part) for part in parts] == [40, 5, 5]
    assert set.union(*parts) == {row["text"] for row in ROWS}
    assert [len(part) for part in texts(load_rows(config(path, samples=20), 0))] == [16, 2, 2]


def test_what_is_held_out_asks_nothing_that_the_rest_asks(tmp_path):
    rows = [{"text": f"line {n % 20}", "other": n} for n in range(200)]
    parts = load_rows(config(write_rows(tmp_path / "d.jsonl", rows)), 0)
    train, validation, test = texts(parts)
    assert not train & validation
    assert not (train | validation) & test
    assert [len(part) for part in parts.values()] == [160, 20, 20]
    assert train | validation | test == {row["text"] for row in rows}
    pairs = [{"text": "one question", "pair": f"text {n}"} for n in range(20)]  # all differ
    parts = load_rows(config(write_rows(tmp_path / "p.jsonl", pairs), text_pair="pair"), 0)
    assert [len(part) for part in parts.values()] == [16, 2, 2]
    same = [{"text": "the same"}] * 20  # nothing else could be held out
    parts = load_rows(config(write_rows(tmp_path / "s.jsonl", same)), 0)
    assert [len(part) for part in parts.values()] == [16, 2, 2]
    # one content is most of the data: it is not what is held out
    path = write_rows(tmp_path / "m.jsonl", ROWS[:4] + [{"text": "again"}] * 40)
    assert "again" in texts(load_rows(config(path), 0))[0]


def test_the_seed_decides_and_nothing_is_written_beside_the_data(tmp_path):
    path = tmp_path / "saved"
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(path)
    before = sorted(path.rglob("*"))
    assert texts(load_rows(config(path), 1)) == texts(load_rows(config(path), 1))
    assert texts(load_rows(config(path), 1)) != texts(load_rows(config(path), 2))
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "txt", "folder"])
def test_files_of_every_kind(tmp_path, kind):
    path = tmp_path / f"d.{kind}"
    data = Dataset.from_list(ROWS)
    if kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "other"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "parquet":
        data.to_parquet(path)
    elif kind == "txt":
        path.write_text("\n".join(row["text"] for row in ROWS))
    else:
        data.save_to_disk(path)
    assert sum(len(part) for part in texts(load_rows(config(path), 0))) == 50


def test_a_path_is_no_pattern(tmp_path):
    write_rows(tmp_path / "d1 x.jsonl", ROWS[:20])
    path = write_rows(tmp_path / "d[12] x.jsonl", ROWS)
    assert sum(len(part) for part in texts(load_rows(config(path), 0))) == 50


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, r"d\.jsonl is empty"),
        (ROWS[:2], {}, "too few rows"),
        ([{"body": "x"}] * 5, {}, "no column text; it has body"),
        (ROWS, {"test_split": "test"}, "is one split, so it has no other called test"),
    ],
)
def test_data_that_cannot_be_used(tmp_path, rows, settings, message):
    path = write_rows(tmp_path / "d.jsonl", rows)
    with pytest.raises(TrainingError, match=message):
        load_rows(config(path, **settings), 0)


def test_named_splits_are_limited_by_held_out(tmp_path):
    parts = {"train": ROWS[:40], "dev": ROWS[40:42], "test": ROWS}
    saved = {name: Dataset.from_list(rows) for name, rows in parts.items()}
    DatasetDict(saved).save_to_disk(tmp_path / "d")
    settings = {"validation_split": "dev", "test_split": "test", "samples": 20, "held_out": 30}
    train, validation, test = texts(load_rows(config(tmp_path / "d", **settings), 0))
    assert (len(train), len(test)) == (20, 30)
    assert train <= {row["text"] for row in parts["train"]}
    assert validation == {row["text"] for row in parts["dev"]}


def test_files_that_are_missing_or_broken(tmp_path):
    with pytest.raises(TrainingError, match="there is no data file"):
        load_rows(config(tmp_path / "d.jsonl"), 0)
    (tmp_path / "b.jsonl").write_text('{"text": ')
    with pytest.raises(TrainingError, match=r"b\.jsonl .* cannot be read: .*JSON"):
        load_rows(config(tmp_path / "b.jsonl"), 0)
    (tmp_path / "b.pkl").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"b\.pkl is of no kind that can be read: \.jsonl"):
        load_rows(config(tmp_path / "b.pkl"), 0)


@pytest.mark.parametrize(("batch", "count"), [(4, 10), (3, 9), (8, 5), (1, 1)])
def test_every_round_sees_every_sample_once(batch, count):
    seen = [n for step in range(3 * count) for n in step_indices(5, 1, step, batch, count)]
    for start in range(0, 3 * count, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_samples_of_any_length_survive_the_disk(tmp_path):
    samples = [
        {"a": torch.arange(3), "b": torch.ones(1, 2, 2)},
        {"a": torch.arange(0), "b": torch.zeros(1, 2, 2)},
        {"a": torch.arange(5), "b": torch.ones(1, 2, 2), "c": torch.ones(1)},
    ]
    save_checkpoint(tmp_path / "e.safetensors", pack_examples({"train": samples}), {"x": "y"})
    tensors, facts = load_checkpoint(tmp_path / "e.safetensors")
    splits = unpack_examples(tensors)
    assert facts["x"] == "y"
    assert len(splits["train"]) == 3
    for got, sample in zip(splits["train"], samples, strict=True):
        assert set(got) == {"a", "b"}, "what not all samples have is dropped"
        assert torch.equal(got["a"], sample["a"])
        assert torch.equal(got["b"], sample["b"])
