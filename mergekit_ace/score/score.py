# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace score`: every model on every text and task, and what that says of the merges."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from mergekit_ace.adapters.read import base_of
from mergekit_ace.files.saving import file_states, locked, package_versions, write_text
from mergekit_ace.merging.run import run_shards
from mergekit_ace.merging.shards import MERGE_PACKAGES
from mergekit_ace.naming import ConfigError, short_names
from mergekit_ace.planning import read_merge_config
from mergekit_ace.score.config import ScoreConfig, ScoredExpert
from mergekit_ace.score.measure import (
    KIND,
    Harness,
    answer_matches,
    explained_memory,
    load_scored,
    read_samples,
    sequence_losses,
)
from mergekit_ace.score.results import Scores, show_scores
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import READERS
from mergekit_ace.training.models import load_processor, local_folder
from mergekit_ace.training.tasks import Example, write_own_texts

SCORES = "scores.json"
OWN_TEXTS = 64  # that a model writes where it has no data


@dataclass
class Exam:
    """Texts of an expert, or of `keep`; without data its writer writes them."""

    name: str
    data: DataConfig | None
    samples: list[Example] | None = None


def run_scoring(
    config: ScoreConfig, out: Path, *, overwrite: bool = False, quiet: bool = False
) -> Scores:
    """Score merges; `out` gets `scores.json`, from which a run that was stopped goes on.

    Raises:
        ConfigError: something about the config, the models or the data is wrong.
    """
    busy = ConfigError(f"another run writes to {out}; wait for it, or choose another folder")
    with locked(out, "score.lock", busy):
        others = [path.name for path in out.iterdir() if path.name != "score.lock"]
        if others and SCORES not in others:
            raise ConfigError(f"{out} holds other things than scores; give another folder")
        if overwrite:
            (out / SCORES).unlink(missing_ok=True)
            shutil.rmtree(out / "merges", ignore_errors=True)
        scoring = Scoring(config, out, quiet=quiet)
        scoring.measure(config.merges)
        return scoring.write_results()


def merge_once(config: Path, out: Path, *, quiet: bool) -> str:
    """Return the folder of a merge in `out`, made now unless it is there; drop older ones."""
    merge, source = read_merge_config(config)
    versions, threads = package_versions(*MERGE_PACKAGES), torch.get_num_threads()
    state = [source, _files_of(merge.referenced_models()), versions, threads]
    folder = out / f"{config.stem}-{_digest(json.dumps(state))}"
    for old in out.glob(f"{config.stem}-{'?' * 12}"):
        if old != folder:
            shutil.rmtree(old)
    run_merge(config, folder, quiet=quiet)
    return str(folder)


def run_merge(config: Path, folder: Path, *, quiet: bool) -> None:
    """Merge, on the GPU where there is one."""
    options = MergeOptions(cuda=torch.cuda.is_available(), quiet=quiet)
    options.apply_global_options()
    run_shards(config, str(folder), options)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _files_of(models: Iterable[ModelReference]) -> dict[str, list[int]]:
    """Return the states of all files of models, and of their adapters."""
    parts = [part for model in models for part in (model.model, model.lora) if part is not None]
    return file_states(sorted({part.path for part in parts}))


class Scoring:
    """Measures models, and keeps in a file what was measured, which is whole at every moment.

    Attributes:
        exams: texts of the experts, and last those of `keep`.
        measured: losses, matches and results of tasks, by exam, or `task NAME`, and model.
    """

    def __init__(self, config: ScoreConfig, out: Path, *, quiet: bool):
        self.config, self.out, self.quiet = config, out, quiet
        self.harness = Harness(config.tasks, config.task_folder)
        self.names = short_names([expert.model for expert in config.models])
        experts = zip(self.names, config.models, strict=True)
        self.exams = [Exam(name, expert.data) for name, expert in experts if expert.has_texts]
        self.exams.append(Exam("keep", config.keep))
        self.measured: dict[str, dict[str, Any]] = {}
        self._known: dict[str, dict[str, Any]] = {}  # also of other configs
        self._loaded: tuple[ModelReference | None, Any] = (None, None)
        if (out / SCORES).exists():
            self._known = json.loads((out / SCORES).read_text("utf-8"))["measured"]

    def measure(self, merges: Sequence[str]) -> None:
        """Measure whatever is missing; experts first, since they may write the texts."""
        self.out.mkdir(parents=True, exist_ok=True)
        for data in (exam.data for exam in self.exams if exam.data is not None):
            path = Path(data.path).expanduser()
            if path.suffix.lower() in READERS and not path.is_file():
                raise ConfigError(f"there is no data file {data.path}")  # before it merges
        self._write({"measured": self._known})  # the folder is ours from now on
        made = [
            merge_once(Path(merge), self.out / "merges", quiet=self.quiet)
            if merge.lower().endswith((".yml", ".yaml"))
            else merge
            for merge in merges
        ]
        labels, experts = ["base", *self.names, *merges], self.config.models
        names = [self.config.base_model, *(expert.model for expert in experts), *made]
        models = dict(zip(labels, map(ModelReference.model_validate, names), strict=True))
        trust = self.config.trust_remote_code
        folders = [local_folder(str(base_of(one)), Path(), trust) for one in models.values()]
        self.tokenizer = load_processor(folders, KIND, self.config)
        for name, expert in zip(self.names, experts, strict=True):
            own = [exam for exam in self.exams if exam.name == name]
            self._measure_model(name, models[name], own, [expert])
        for label in ("base", *merges):
            self._measure_model(label, models[label], self.exams, experts)
        self._loaded = (None, None)

    def write_results(self) -> Scores:
        """Write the figures and their page, without what the config no longer has."""
        scores = Scores(self.config, self.measured)
        self._write(scores.summary() | {"measured": self.measured})
        show_scores(scores, self.out / "scores.html")
        return scores

    def samples(self, exam: Exam, model: Any) -> list[Example]:
        """Return the texts of an exam, as far as models can read them."""
        assert exam.data is not None
        if exam.samples is None:
            exam.samples = read_samples(exam.data, model, self.tokenizer)
        return exam.samples

    def _write(self, content: dict[str, Any]) -> None:
        write_text(self.out / SCORES, json.dumps(content, indent=1) + "\n")

    def _measure_model(
        self, label: str, reference: ModelReference, exams: Sequence[Exam],
        experts: Sequence[ScoredExpert],
    ) -> None:  # fmt: skip
        """Load a model if something of it is missing, and measure that."""

        def read(exam: Exam, data: DataConfig) -> dict[str, Any]:
            model, title = self._load(reference), f"{exam.name} / {label}"
            samples = self.samples(exam, model)
            result: dict[str, Any] = {
                "losses": sequence_losses(model, samples, title=title, quiet=self.quiet)
            }
            if data.completion is not None:
                result["matches"] = answer_matches(model, samples, data, self.tokenizer)
            return result

        def answer(task: str, limit: int | None) -> dict[str, Any]:
            return self.harness.measure(self._load(reference), self.tokenizer, task, limit)

        with explained_memory(reference):
            for exam in exams:
                data = exam.data = exam.data or self._written(exam, reference)
                identity = self._identity(reference, data.model_dump(), data.path)
                self._measure_once(exam.name, label, identity, partial(read, exam, data))
            for task, limit in [(task, one.limit) for one in experts for task in one.tasks]:
                identity = self._identity(reference, limit, self.config.task_folder)
                self._measure_once(f"task {task}", label, identity, partial(answer, task, limit))

    def _measure_once(
        self, exam: str, label: str, identity: str, measure: Callable[[], dict[str, Any]]
    ) -> None:
        """Take a measurement from the file, or measure, where that is of other files."""
        known = self._known.setdefault(exam, {})
        if known.get(label, {}).get("identity") != identity:
            known[label] = {"identity": identity, **measure()}
            self._write({"measured": self._known})
        self.measured.setdefault(exam, {})[label] = known[label]

    def _identity(self, reference: ModelReference, settings: Any, path: str | None = None) -> str:
        files = _files_of([reference]) | file_states([path] if path else [])
        versions = package_versions("transformers", "torch")
        return json.dumps([str(reference), self.config.dtype, settings, files, versions])

    def _written(self, exam: Exam, writer: ModelReference) -> DataConfig:
        """Let a model write the texts of an exam, unless they are there."""
        name = f"{exam.name}-{_digest(self._identity(writer, None))}.jsonl"
        path = self.out / "texts" / name
        model: Any = None if path.exists() else self._load(writer)
        return write_own_texts(model, self.tokenizer, OWN_TEXTS, path, quiet=self.quiet)

    def _load(self, reference: ModelReference) -> Any:
        """Load a model, and drop the one before."""
        if self._loaded[0] != reference:
            self._loaded = (None, None)
            self._loaded = (reference, load_scored(reference, self.config))
        return self._loaded[1]
