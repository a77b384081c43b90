# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import json

import pytest
from datasets import Dataset, DatasetDict
from families import write_rows

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import load_rows
from mergekit_ace.training.state import TrainingError

ROWS = [{"text": f"line {n}", "other": n} for n in range(50)]


def texts(rows) -> list[set[str]]:
    return [set(part["text"]) for part in (rows.train, rows.validation, rows.test)]


def config(path, **settings) -> DataConfig:
    return DataConfig(path=str(path), text="text", **settings)


def test_eight_to_one_to_one(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    train, validation, test = texts(load_rows(config(path), 0))
    assert (len(train), len(validation), len(test)) == (40, 5, 5)
    assert train | validation | test == {row["text"] for row in ROWS}
    assert [len(part) for part in texts(load_rows(config(path, samples=20), 0))] == [16, 2, 2]


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


def test_splits_that_the_data_has(tmp_path):
    parts = {"train": ROWS[:30], "dev": ROWS[30:35], "final": ROWS[35:]}
    saved = {name: Dataset.from_list(rows) for name, rows in parts.items()}
    DatasetDict(saved).save_to_disk(tmp_path / "d")
    settings = {"validation_split": "dev", "test_split": "final"}
    got = texts(load_rows(config(tmp_path / "d", **settings), 0))
    assert got == [{row["text"] for row in rows} for rows in parts.values()]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "is empty|cannot be read"),
        (ROWS[:2], {}, "too few rows"),
        ([{"body": "x"}] * 5, {}, "no column text; it has body"),
    ],
)
def test_data_that_cannot_be_used(tmp_path, rows, settings, message):
    path = write_rows(tmp_path / "d.jsonl", rows)
    with pytest.raises(TrainingError, match=message):
        load_rows(config(path, **settings), 0)


def test_one_split_has_no_others(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", ROWS)
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for source in (path, tmp_path / "saved"):
        with pytest.raises(TrainingError, match="is one split, so it has no other called test"):
            load_rows(config(source, test_split="test"), 0)


def test_named_splits_are_limited_by_held_out(tmp_path):
    parts = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)}
    DatasetDict(parts).save_to_disk(tmp_path / "d")
    rows = load_rows(config(tmp_path / "d", test_split="test", samples=20, held_out=30), 0)
    assert (len(rows.train) + len(rows.validation), len(rows.test)) == (20, 30)


def test_files_that_are_missing_or_broken(tmp_path):
    with pytest.raises(TrainingError, match="there is no data file"):
        load_rows(config(tmp_path / "d.jsonl"), 0)
    (tmp_path / "b.jsonl").write_text('{"text": ')
    with pytest.raises(TrainingError, match=r"b\.jsonl .* cannot be read"):
        load_rows(config(tmp_path / "b.jsonl"), 0)
