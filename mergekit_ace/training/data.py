# SPDX-License-Identifier: Apache-2.0
"""Data of teachers: their rows, the answers to them (Sec. 3.3), and the order of samples."""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.methods.base import is_finite
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import DataConfig, TrainConfig
from mergekit_ace.training.tasks import Example, ModelKind, fit_to_model

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)
_READERS = dict.fromkeys((".jsonl", ".json"), "json")
_READERS |= {".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def load_rows(config: DataConfig, seed: int) -> dict[str, Dataset]:
    """Return rows by split, train, validation and test: 8 : 1 : 1 where the data has no splits.

    What is held out asks nothing that the rest asks: rows with the same texts stay together.
    """
    data = read_rows(config, seed)
    purposes = [n for n in ("text", "text_pair", "prompt", "messages") if n in config.columns]
    columns = [data[config.columns[purpose]] for purpose in purposes]
    contents: list[Hashable] = [tuple(map(str, row)) for row in zip(*columns, strict=True)]
    contents, splits = contents or list(range(len(data))), {}  # images by their numbers
    named = ("test", config.test_split, 10), ("validation", config.validation_split, 9)
    for split, name, parts in named:
        if name is not None:
            splits[split] = _draw(_read(config, name), config.held_out, seed)
            continue
        chosen = _hold_out(contents, parts)
        if len(chosen) == len(set(contents)):
            raise ConfigError(
                f"data {config.path} has too few different rows to hold some out for validation "
                "and test; give more, or name its validation_split and test_split"
            )
        splits[split] = data.select([n for n, own in enumerate(contents) if own in chosen])
        data = data.select([n for n, own in enumerate(contents) if own not in chosen])
        contents = [content for content in contents if content not in chosen]
    return {"train": data, "validation": splits["validation"], "test": splits["test"]}


def _hold_out(contents: Sequence[Hashable], parts: int) -> set[Hashable]:
    """Choose contents from the end, at least one: one of so many parts, of them and of the rows."""
    rows = Counter(contents)
    most, room = max(len(rows) // parts, 1), max(len(contents) // parts, 1)
    chosen: set[Hashable] = set()
    for content in reversed(rows):
        if len(chosen) < most and rows[content] <= room:
            chosen.add(content)
            room -= rows[content]
    return chosen or {min(rows, key=rows.__getitem__)}


def read_rows(config: DataConfig, seed: int) -> Dataset:
    """Read the data and draw `samples` rows of it."""
    return _draw(_read(config, config.split), config.samples, seed)


def _draw(data: Dataset, most: int | None, seed: int) -> Dataset:
    # Not `data.shuffle`: it writes a cache beside the data.
    order = torch.randperm(len(data), generator=torch.Generator("cpu").manual_seed(seed))
    return data.select(order[:most].tolist())


def _read(config: DataConfig, split: str) -> Dataset:
    from datasets import DatasetDict, load_dataset, load_from_disk

    whose, path = f"data {config.path}", os.path.expanduser(config.path)
    reader = _READERS.get(os.path.splitext(path)[1].lower())
    saved = [os.path.join(path, name) for name in ("state.json", "dataset_dict.json")]
    if os.path.isfile(path) and reader is None:
        raise ConfigError(f"{whose} is of no kind that can be read: {', '.join(_READERS)}")
    if reader is not None and not os.path.isfile(path):
        raise ConfigError(f"there is no data file {config.path}")
    if split != config.split and (reader is not None or os.path.isfile(saved[0])):
        raise ConfigError(
            f"{whose} is one split, so it has no other called {split}; leave out validation_split "
            "and test_split, and a tenth each is held out"
        )
    try:
        if reader is not None:
            data = load_dataset(reader, data_files=glob.escape(path), split="train")
        elif any(map(os.path.isfile, saved)):
            data = load_from_disk(path)
            data = data[split] if isinstance(data, DatasetDict) else data
        else:
            where = path if os.path.exists(path) else config.path
            data = load_dataset(where, config.name, split=split)
    except Exception as error:  # of many kinds, from readers, the file system and the Hub
        cause = error.__cause__ or error  # `datasets` often says no more than that it failed
        raise ConfigError(
            f"{whose} (split {split}) cannot be read: {type(cause).__name__}: {cause}"
        ) from error
    missing = sorted(set(config.columns.values()) - set(data.column_names))
    if missing or len(data) == 0:
        what = f"no column {', '.join(missing)}; it has {', '.join(data.column_names)}"
        raise ConfigError(f"{whose} (split {split}) has {what if missing else 'no rows'}")
    return data


@contextmanager
def explained_failures(model: str, data: DataConfig) -> Iterator[None]:
    """Raise what is said of inputs, by whatever reads them, as a `ConfigError` with the data."""
    try:
        yield
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError) as error:
        raise ConfigError(f"data {data.path}: {model} cannot read its samples: {error}") from error


class SampleReader:
    """A model on its device, with the data that it reads and answers, cut to its positions."""

    def __init__(self, model: PreTrainedModel, kind: ModelKind, processor: Any, data: DataConfig):
        self.model, self.kind, self.processor = model, kind, processor
        self.data = fit_to_model(data, model)

    def read(self, rows: Dataset, split: str, size: int, *, quiet: bool) -> list[Example]:
        """Return rows as complete samples; warn of what is cut off.

        Where rows lack answers, so many are written at once; these samples come last.
        """
        data, kind, limit = self.data, self.kind, self.data.max_length
        one_more = data.model_copy(update={"max_length": limit + 1})
        with self._explained():
            encoded = [kind.encode(row, data, self.processor) for row in rows]
            full = (row for row, one in zip(rows, encoded, strict=True) if _length(one) == limit)
            cut = sum(_length(kind.encode(row, one_more, self.processor)) > limit for row in full)
        samples = [sample for sample in encoded if sample is not None]
        if not samples:
            raise ConfigError(
                f"data {data.path}: no {split} sample has anything to predict within max_length: "
                f"{limit}"
            )
        lost = len(rows) - len(samples)
        if cut or lost:
            LOG.warning(
                "data %s: %d of %d %s samples exceed max_length: %d, where they are cut; %d have "
                "nothing to predict within it", data.path, cut, len(rows), split, limit, lost,
            )  # fmt: skip
        if "input_ids" in samples[0]:
            known = len(self.model.get_input_embeddings().weight)
            check_tokens(samples, data, self.model.name_or_path, known)
        lacking = [sample for sample in samples if kind.writes and "true" not in sample]
        complete = [sample for sample in samples if not kind.writes or "true" in sample]
        starts = range(0, len(lacking), size)
        for start in tqdm(starts, "answers", unit="batch", disable=quiet or not lacking):
            with self._explained():
                part = lacking[start : start + size]
                complete += kind.complete(self.model, part, data, self.processor)
        return complete

    def logits(self, samples: Sequence[Example]) -> Tensor:
        """Return the logits of complete samples, (P, C), once they are finite."""
        with self._explained():
            batch = send_to_device(self.kind.collate(samples), self.model.device)
            logits = self.kind.logits(self.model, batch)
        if not is_finite(logits.detach()):
            raise ConfigError(
                f"expert {self.model.name_or_path} answers NaN or Inf to a sample of data "
                f"{self.data.path}; its checkpoint is damaged, or overflows in its dtype: leave it "
                "out"
            )
        return logits

    def _explained(self) -> Any:
        return explained_failures(self.model.name_or_path, self.data)


def _length(sample: Example | None) -> int:
    """Return the tokens of a sample, of the longer side where it has two."""
    return max(len((sample or {}).get(name, ())) for name in ("input_ids", "target_ids"))


def check_tokens(samples: Sequence[Example], data: DataConfig, model: str, known: int) -> None:
    """Raise a `ConfigError` for tokens beyond the `known` embeddings of a model."""
    texts = [s[name] for name in ("input_ids", "target_ids") for s in samples if name in s]
    largest = max((int(ids.max()) for ids in texts if len(ids)), default=-1)
    if largest >= known:
        raise ConfigError(
            f"data {data.path}: the tokenizer has the token number {largest}, but {model} has only "
            f"{known} embeddings; use the tokenizer that belongs to the model"
        )


@torch.no_grad()
def answer_data(
    teacher: SampleReader, rows: Mapping[str, Dataset], name: str, config: TrainConfig, *,
    quiet: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Let a teacher answer its data; return the samples with its labels, packed.

    At the P supervised positions of a sample these are `hard`, (P,), the arg max. With soft labels
    they are `soft_values` and `soft_indices`, (P, k), too: the `top_k` highest log-probabilities
    and their classes, in descending order.
    """
    size, splits = config.training.batch_size, {}
    for split, unlabelled in rows.items():
        samples = teacher.read(unlabelled, split, size, quiet=quiet)
        starts = range(0, len(samples), size)
        splits[split] = []
        for start in tqdm(starts, f"labels of {name}, {split}", unit="batch", disable=quiet):
            part = samples[start : start + size]
            logits = teacher.logits(part).float()
            classes = logits.shape[-1]
            answers = {"hard": logits.argmax(-1)}
            if config.labels_of(teacher.data) == "soft":
                best = logits.log_softmax(-1).topk(min(config.top_k, classes), dim=-1)
                answers |= {"soft_values": best.values, "soft_indices": best.indices}
            counts = [int(one["supervised"].sum()) if "supervised" in one else 1 for one in part]
            parts = {key: answer.cpu().split(counts) for key, answer in answers.items()}
            for n, sample in enumerate(part):
                true = sample.get("true", torch.tensor([-1]))
                if "true" in sample and not 0 <= int(true.min()) <= int(true.max()) < classes:
                    raise ConfigError(
                        f"data {teacher.data.path} has the label {int(true.max())}, but its expert "
                        f"knows only the classes 0 to {classes - 1}"
                    )
                splits[split].append(sample | {key: own[n] for key, own in parts.items()})
        if config.labels == "true" and not all("true" in sample for sample in splits[split]):
            raise ConfigError(f"labels: true, but data {teacher.data.path} lacks some answers")
    return pack_examples(splits)


class Examples(Sequence[Example]):
    """Samples whose tensors lie end to end, memory-mapped, with their ends; each is a view."""

    def __init__(self, fields: Mapping[str, tuple[Tensor, Tensor]]):
        self._fields = {name: (all_, [0, *ends.tolist()]) for name, (all_, ends) in fields.items()}

    def __len__(self) -> int:
        return len(next(iter(self._fields.values()))[1]) - 1

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        fields = self._fields.items()
        return {name: all_[ends[index] : ends[index + 1]] for name, (all_, ends) in fields}


def pack_examples(splits: Mapping[str, Sequence[Example]]) -> dict[str, Tensor]:
    """Lay the samples of all splits end to end, but for names that not all of a split have."""
    tensors = {}
    for split, samples in splits.items():
        for name in sorted(set.intersection(*(set(sample) for sample in samples))):
            parts = [sample[name] for sample in samples]
            tensors[f"{split}/{name}"] = torch.cat(parts)
            tensors[f"{split}/{name}/ends"] = torch.tensor([len(part) for part in parts]).cumsum(0)
    return tensors


def unpack_examples(tensors: Mapping[str, Tensor]) -> dict[str, Examples]:
    """Return the splits that `pack_examples` has packed."""
    fields: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for key in tensors:
        if not key.endswith("/ends"):
            split, name = key.split("/")
            fields.setdefault(split, {})[name] = tensors[key], tensors[f"{key}/ends"]
    return {split: Examples(named) for split, named in fields.items()}


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
