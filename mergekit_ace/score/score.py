# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace score`: every model on every text and task, and what that says of the merges."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from mergekit_ace.files.saving import file_states, locked, package_versions, write_text
from mergekit_ace.naming import ConfigError, short_names
from mergekit_ace.score.config import ScoreConfig
from mergekit_ace.score.measure import (
    KIND,
    answer_matches,
    load_scored,
    read_samples,
    sequence_losses,
    task_results,
)
from mergekit_ace.score.results import Scores, show_scores
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.models import load_processor, local_folder
from mergekit_ace.training.tasks import Example, fit_to_model, write_own_texts

SCORES = "scores.json"
OWN_TEXTS = 64  # that a model writes where it has no data


@dataclass
class Exam:
    """Texts of an expert, or of `keep`.

    Attributes:
        data: None until its writer has written them.
        own: whether a model writes them.
    """

    name: str
    data: DataConfig | None
    own: bool
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
        store = Store(out / SCORES, fresh=overwrite)
        _Scoring(config, out, store, overwrite, quiet).measure()
        scores = Scores(config, store.measured)
        store.finish(scores.summary())
        show_scores(scores, out / "scores.html")
    return scores


class Store:
    """What was measured, by exam and model, in a file that is whole at every moment."""

    def __init__(self, path: Path, *, fresh: bool):
        self._path = path
        self._identities: dict[str, str] = {}
        self.measured: dict[str, Any] = {}
        if path.exists() and not fresh:
            try:
                content = json.loads(path.read_text("utf-8"))
                self.measured, self._identities = content["measured"], content["identities"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} is damaged; give --overwrite") from error

    def has(self, key: str, identity: str) -> bool:
        """Tell whether a measurement is here, of the same files and settings."""
        return self._identities.get(key) == identity

    def keep(self, key: str, identity: str, value: Any) -> None:
        """Add a measurement."""
        self.measured[key], self._identities[key] = value, identity
        self._write({})

    def drop_others(self, keys: Iterable[str]) -> None:
        """Drop the measurements of models and texts that the config no longer has."""
        for key in self._identities.keys() - set(keys):
            del self.measured[key], self._identities[key]

    def finish(self, summary: dict[str, Any]) -> None:
        """Put the summary before the measurements."""
        self._write(summary)

    def _write(self, summary: dict[str, Any]) -> None:
        content = summary | {"measured": self.measured, "identities": self._identities}
        write_text(self._path, json.dumps(content, indent=1) + "\n")


class _Scoring:
    def __init__(self, config: ScoreConfig, out: Path, store: Store, overwrite: bool, quiet: bool):
        self.config, self.out, self.store, self.quiet = config, out, store, quiet
        self.overwrite = overwrite
        self.names = short_names([expert.model for expert in config.models])
        self.exams = [
            Exam(name, expert.data, expert.data is None)
            for name, expert in zip(self.names, config.models, strict=True)
            if expert.has_texts
        ]
        self.keep = Exam("keep", config.keep, config.keep is None)
        self.wanted: list[str] = []

    def measure(self) -> None:
        """Measure whatever is missing; experts first, since they may write the texts."""
        self.merges = [self._merged(merge) for merge in self.config.merges]
        experts = [ModelReference.model_validate(expert.model) for expert in self.config.models]
        base = ModelReference.model_validate(self.config.base_model)
        merges = [ModelReference.model_validate(merge) for merge in self.merges]
        every = [base, *experts, *merges]
        bare, trust = (ModelReference(model=m.model) for m in every), self.config.trust_remote_code
        folders = [local_folder(str(one), Path(), trust) for one in bare]
        self.tokenizer = load_processor(folders, KIND, self.config)
        exams = {exam.name: exam for exam in self.exams}
        for name, expert, reference in zip(self.names, self.config.models, experts, strict=True):
            own = [exams[name]] if name in exams else []
            self._measure_model(name, reference, own, [expert])
        self._measure_model("base", base, [*self.exams, self.keep], self.config.models)
        for label, reference in zip(self.config.merges, merges, strict=True):
            self._measure_model(label, reference, [*self.exams, self.keep], self.config.models)
        self.store.drop_others(self.wanted)

    def _merged(self, merge: str) -> str:
        """Return the folder of a merge; one that is given as a config is merged first."""
        path = Path(merge)
        if path.suffix.lower() not in (".yml", ".yaml"):
            return merge
        from mergekit_ace.merging.run import MergeSettings, run_shards

        folder = self.out / "merges" / path.stem
        options = MergeOptions(cuda=torch.cuda.is_available(), quiet=self.quiet)
        options.apply_global_options()
        run_shards(path, str(folder), options, MergeSettings(overwrite=self.overwrite))
        return str(folder)

    def _measure_model(
        self, label: str, reference: ModelReference, exams: Sequence[Exam], experts: Sequence[Any]
    ) -> None:
        """Load a model if something of it is missing, and measure that."""
        missing = []
        for exam in exams:
            if exam.data is None:
                exam.data = self._written(exam, reference)
            key = f"{exam.name} / {label}"
            identity = self._identity(reference, exam.data.model_dump(), [exam.data.path])
            self.wanted.append(key)
            if not self.store.has(key, identity):
                missing.append((key, identity, exam))
        tasks = []
        for expert in experts:
            for task in expert.tasks:
                key = f"task {task} / {label}"
                identity = self._identity(reference, expert.limit, [self.config.task_folder or ""])
                self.wanted.append(key)
                if not self.store.has(key, identity):
                    tasks.append((key, identity, task, expert.limit))
        if not missing and not tasks:
            return
        model = self._load(reference)
        for key, identity, exam in missing:
            self.store.keep(key, identity, self._measure_exam(model, exam, key))
        for key, identity, task, limit in tasks:
            found = task_results(model, self.tokenizer, [task], limit, self.config.task_folder)
            self.store.keep(key, identity, found[task])

    def _written(self, exam: Exam, writer: ModelReference) -> DataConfig:
        """Let a model write the texts of an exam, unless they are there."""
        state = hashlib.sha256(self._identity(writer, None, []).encode()).hexdigest()[:12]
        path = self.out / "texts" / f"{exam.name}-{state}.jsonl"
        model: Any = None if path.exists() else self._load(writer)
        return write_own_texts(model, self.tokenizer, OWN_TEXTS, path, quiet=self.quiet)

    def _load(self, reference: ModelReference) -> Any:
        """Load a model, and drop the one before."""
        if getattr(self, "loaded", (None,))[0] != reference:
            self.loaded: tuple = (None, None)
            self.loaded = (reference, load_scored(reference, self.config))
        return self.loaded[1]

    def _measure_exam(self, model: Any, exam: Exam, title: str) -> dict[str, Any]:
        assert exam.data is not None
        if exam.samples is None:
            exam.samples = read_samples(fit_to_model(exam.data, model), self.tokenizer)
        found: dict[str, Any] = {
            "losses": sequence_losses(model, exam.samples, title=title, quiet=self.quiet)
        }
        if exam.data.completion is not None:
            found["matches"] = answer_matches(model, exam.samples, exam.data, self.tokenizer)
        return found

    def _identity(self, reference: ModelReference, settings: Any, paths: Sequence[str]) -> str:
        models = [one.path for one in (reference.model, reference.lora) if one is not None]
        files = file_states([*models, *filter(None, paths)])
        versions = package_versions("transformers", "torch")
        return json.dumps([str(reference), self.config.dtype, settings, files, versions])
