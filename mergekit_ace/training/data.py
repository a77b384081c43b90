# SPDX-License-Identifier: Apache-2.0
"""Data of teachers: their rows, the answers to them (Sec. 3.3), and the order of samples."""

from __future__ import annotations

import glob
import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.methods.base import is_finite
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import DataConfig, TrainConfig
from mergekit_ace.training.tasks import CausalLanguageModel, Example, ModelKind, fit_to_model

if TYPE_CHECKING:
    from datasets import Dataset

LOG = logging.getLogger(__name__)
READERS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text",
}  # fmt: skip


def load_rows(config: DataConfig, seed: int) -> dict[str, Dataset]:
    """Return rows by split, train, validation and test: 8 : 1 : 1 where the data has no splits.

    What is held out asks nothing that the rest asks: rows with the same texts stay together.
    """
    data, columns = read_rows(config, seed), config.columns
    purposes = [n for n in ("text", "text_pair", "prompt", "messages") if n in columns]
    asked = [data[columns[purpose]] for purpose in purposes] or [range(len(data))]
    contents = [str(row) for row in zip(*asked, strict=True)]
    left = [*dict(Counter(contents).most_common())]  # held out from the end; the commonest never

    def rows_of(chosen: Set[str], most: int | None = None) -> Dataset:
        return data.select([number for number, own in enumerate(contents) if own in chosen][:most])

    def held_out(split: str | None, parts: int) -> Dataset:
        if split is not None:
            return _draw(_read(config, split), config.held_out, seed)
        count = min(max(len(left) // parts, 1), config.held_out)
        chosen, left[-count:] = {*left[-count:]}, []
        return rows_of(chosen, config.held_out)

    test, validation = held_out(config.test_split, 10), held_out(config.validation_split, 9)
    splits = {"train": rows_of({*left}), "validation": validation, "test": test}
    if not all(map(len, splits.values())):
        said = "has too few different rows; give more, or name its validation_split and test_split"
        raise ConfigError(f"data {config.path} {said}")
    return splits


def read_rows(config: DataConfig, seed: int) -> Dataset:
    """Read the data and draw `samples` rows of it."""
    return _draw(_read(config, config.split), config.samples, seed)


def _draw(data: Dataset, most: int | None, seed: int) -> Dataset:
    # Not `data.shuffle`: it writes a cache beside the data.
    order = torch.randperm(len(data), generator=torch.Generator("cpu").manual_seed(seed))
    return data.select(order[:most].tolist())


def _read(config: DataConfig, split: str) -> Dataset:
    from datasets import DatasetDict, load_dataset, load_from_disk

    whose, path = f"data {config.path} (split {split})", Path(config.path).expanduser()
    reader = READERS.get(path.suffix.lower())
    if reader is None and path.is_file():
        raise ConfigError(f"{whose} is of no kind that can be read: {', '.join(READERS)}")
    saved = [(path / name).is_file() for name in ("state.json", "dataset_dict.json")]
    if (reader or saved[0]) and (config.validation_split or config.test_split):
        raise ConfigError(f"{whose} is one split; leave out validation_split and test_split")
    try:
        if reader is not None:
            data = load_dataset(reader, data_files=glob.escape(str(path)), split="train")
        elif any(saved):
            data = load_from_disk(path)
            data = data[split] if isinstance(data, DatasetDict) else data
        else:
            where = str(path) if path.exists() else config.path
            data = load_dataset(where, config.name, split=split)
    except Exception as error:  # of many kinds, from readers, the file system and the Hub
        cause = error.__cause__ or error  # `datasets` often says no more than that it failed
        if isinstance(cause, StopIteration):
            raise ConfigError(f"{whose} has no rows") from error
        raise ConfigError(f"{whose} cannot be read: {type(cause).__name__}: {cause}") from error
    missing = sorted(set(config.columns.values()) - set(data.column_names))
    if missing or len(data) == 0:
        what = f"no column {', '.join(missing)}; it has {', '.join(data.column_names)}"
        raise ConfigError(f"{whose} has {what if missing else 'no rows'}")
    return data


class SampleReader:
    """A model on its device, with the data that it reads and answers, cut to its positions."""

    def __init__(self, model: Any, kind: ModelKind, processor: Any, data: DataConfig):
        self.model, self.kind, self.processor = model, kind, processor
        self.data = fit_to_model(data, model)

    def read(self, rows: Dataset, split: str, size: int, *, quiet: bool = True) -> list[Example]:
        """Return rows as complete samples; warn of what is cut off.

        Where rows lack answers, `size` of them are written at once; these samples come last. With
        0 they are left out.
        """
        data, kind, limit = self.data, self.kind, self.data.max_length
        longer = data.model_copy(update={"max_length": limit + 1})
        encoded = [(row, kind.encode(dict(row), data, self.processor)) for row in rows]
        samples = [sample for _, sample in encoded if sample is not None]
        if not samples:
            what = f"no {split} sample has anything to predict within max_length: {limit}"
            raise ConfigError(f"data {data.path}: {what}")
        full = [row for row, sample in encoded if _length(sample) == limit]
        cut = sum(_length(kind.encode(dict(row), longer, self.processor)) > limit for row in full)
        lost = len(rows) - len(samples)
        if cut or lost:
            LOG.warning(
                "data %s: %d of %d %s samples exceed max_length: %d, where they are cut; %d have "
                "nothing to predict within it", data.path, cut, len(rows), split, limit, lost,
            )  # fmt: skip
        if "input_ids" in samples[0]:
            known = len(self.model.get_input_embeddings().weight)
            check_tokens(samples, data, self.model.name_or_path, known)
        if not isinstance(kind, CausalLanguageModel):
            return samples
        lacking = [sample for sample in samples if "true" not in sample]
        complete = [sample for sample in samples if "true" in sample]
        starts = range(0, len(lacking), size) if size else ()
        for start in tqdm(starts, "answers", unit="batch", disable=quiet or not lacking):
            part = lacking[start : start + size]
            complete += kind.complete(self.model, part, data, self.processor)
        return complete

    def logits(self, samples: Sequence[Example]) -> Tensor:
        """Return the logits of complete samples, (P, C), once they are finite."""
        logits = self.kind.answer(self.model, samples)
        if not is_finite(logits.detach()):
            said = f"expert {self.model.name_or_path} answers NaN or Inf"
            raise ConfigError(f"{said} to a sample of data {self.data.path}; leave it out")
        return logits


def _length(sample: Example | None) -> int:
    return len((sample or {}).get("input_ids", ()))


def check_tokens(samples: Sequence[Example], data: DataConfig, model: str, known: int) -> None:
    """Raise a `ConfigError` for tokens beyond the `known` embeddings of a model."""
    largest = int(torch.cat([sample["input_ids"] for sample in samples]).max())
    if largest >= known:
        said = f"the tokenizer has the token number {largest}, but {model} only {known} embeddings"
        raise ConfigError(f"data {data.path}: {said}; use the tokenizer of the model")


@torch.no_grad()
def answer_data(
    teacher: SampleReader, rows: Mapping[str, Dataset], name: str, config: TrainConfig, *,
    quiet: bool,
) -> dict[str, list[Example]]:  # fmt: skip
    """Let a teacher answer its data; return the samples by split, with its labels.

    At the P supervised positions of a sample these are `hard`, (P,), the arg max. With soft labels
    they are `soft_values` and `soft_indices`, (P, k), too: the `top_k` highest log-probabilities
    and their classes, in descending order.
    """
    size, path, splits = config.training.batch_size, teacher.data.path, {}
    for split, unlabelled in rows.items():
        samples = splits[split] = teacher.read(unlabelled, split, size, quiet=quiet)
        starts = range(0, len(samples), size)
        for start in tqdm(starts, f"labels of {name}, {split}", unit="batch", disable=quiet):
            part = samples[start : start + size]
            logits = teacher.logits(part).float()
            classes, answers = logits.shape[-1], {"hard": logits.argmax(-1)}
            if config.labels_of(teacher.data) == "soft":
                best = logits.log_softmax(-1).topk(min(config.top_k, classes), dim=-1)
                answers |= {"soft_values": best.values, "soft_indices": best.indices}
            counts = [int(one["supervised"].sum()) if "supervised" in one else 1 for one in part]
            for key, answer in answers.items():
                for sample, own in zip(part, answer.cpu().split(counts), strict=True):
                    sample[key] = own.clone()
            true = [sample["true"] for sample in part if "true" in sample]
            if config.labels == "true" and len(true) < len(part):
                raise ConfigError(f"labels: true, but data {path} lacks some answers")
            for outside in (one for one in true if one.min() < 0 or one.max() >= classes):
                said = f"its expert knows only the classes 0 to {classes - 1}"
                raise ConfigError(f"data {path} has the label {int(outside.max())}, but {said}")
    return splits


def step_indices(seed: int, teacher: int, step: int, batch: int, count: int) -> list[int]:
    """Return which samples of a teacher a step sees, all processes together.

    They come in a new random order each time around, as a function of the arguments alone.
    """
    places = range(step * batch, (step + 1) * batch)
    return [_order(seed, teacher, place // count, count)[place % count] for place in places]


@lru_cache(maxsize=64)
def _order(seed: int, teacher: int, turn: int, count: int) -> list[int]:
    # Four numbers to one seed: mixed, so that no two of them meet in the same order.
    mixed = (seed * 1_000_003 + teacher) * 1_000_003 + turn
    generator = torch.Generator("cpu").manual_seed(mixed % 2**63)
    return torch.randperm(count, generator=generator).tolist()
