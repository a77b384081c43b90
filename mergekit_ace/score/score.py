# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace score`: every model on every text and task, and what that says of the merges."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from mergekit.common import ModelReference
from mergekit.options import MergeOptions
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from mergekit_ace.adapters.read import base_of
from mergekit_ace.check.loading import merged_model
from mergekit_ace.files.saving import LOCK_FILE, file_states, locked, package_versions, write_text
from mergekit_ace.merging.run import run_shards
from mergekit_ace.naming import ConfigError, short_names
from mergekit_ace.score.config import ScoreConfig, ScoredExpert
from mergekit_ace.score.results import Scores, show_scores
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import SampleReader, read_rows
from mergekit_ace.training.models import load_model, load_processor, local_folder, model_paths
from mergekit_ace.training.tasks import (
    CausalLanguageModel,
    Example,
    batches_by_length,
    fit_to_model,
    write_own_texts,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

SCORES = "scores.json"
OWN_TEXTS = 64  # that a model writes where it has no data
KIND = CausalLanguageModel()
BATCH = 8  # questions of a task that are asked at once
ROWS = 1024  # logits whose losses are computed at once
MORE = 8  # tokens that an answer may be longer than the right one


def run_scoring(
    config: ScoreConfig, out: Path, *, overwrite: bool = False, quiet: bool = False
) -> Scores:
    """Score merges into `out`, or go on with what is there; a `ConfigError` names mistakes."""
    with locked(out):
        others = [path.name for path in out.iterdir() if path.name != LOCK_FILE]
        if others and SCORES not in others:
            raise ConfigError(f"{out} holds other things than scores; give another folder")
        if overwrite:
            (out / SCORES).unlink(missing_ok=True)
            shutil.rmtree(out / "merges", ignore_errors=True)
        scoring = Scoring(config, out, quiet=quiet)
        scoring.measure(config.merges)
        return scoring.write_results()


def merge_once(config: Path, folder: Path, *, trust: bool = False, quiet: bool) -> str:
    """Merge on the GPU where there is one, unless it is done; an older merge is replaced."""
    cuda = torch.cuda.is_available()
    options = MergeOptions(cuda=cuda, quiet=quiet, trust_remote_code=trust)
    options.apply_global_options()
    run_shards(config, folder, options, overwrite="changed")
    return str(folder)


class Scoring:
    """Measures models, and keeps in a file what was measured, which is whole at every moment.

    Attributes:
        exams: texts of the experts, and last of `keep`; None until a model has written them.
        measured: losses, matches and results of tasks, by exam, or `task NAME`, and model.
    """

    def __init__(self, config: ScoreConfig, out: Path, *, quiet: bool):
        self.config, self.out, self.quiet = config, out, quiet
        self.harness = Harness(config.tasks, config.task_folder)
        self.names = short_names([expert.model for expert in config.models])
        experts = zip(self.names, config.models, strict=True)
        self.exams = {name: expert.data for name, expert in experts if expert.has_texts}
        self.exams["keep"] = config.keep
        self._samples: dict[str, list[Example]] = {}
        self.measured: dict[str, dict[str, Any]] = {}
        self._known: dict[str, dict[str, Any]] = {}  # also of other configs
        self._loaded: tuple[ModelReference | None, Any] = (None, None)
        if (out / SCORES).exists():
            self._known = json.loads((out / SCORES).read_text("utf-8"))["measured"]

    def measure(self, merges: Sequence[str]) -> None:
        """Measure whatever is missing; experts first, since they may write the texts."""
        self.out.mkdir(parents=True, exist_ok=True)
        # files and columns that are missing are told before it merges
        self._rows = {exam: _held_out(data) for exam, data in self.exams.items() if data}
        self._write({"measured": self._known})  # the folder is ours from now on
        made, trust = list[str | ModelReference](merges), self.config.trust_remote_code
        for n, merge in enumerate(map(Path, merges)):
            if merge.suffix.lower() in (".yml", ".yaml"):
                folder = self.out / "merges" / merge.stem
                made[n] = merged_model(folder)
                merge_once(merge, folder, trust=trust, quiet=self.quiet)
        labels, experts = ["base", *self.names, *merges], self.config.models
        known = [self.config.base_model, *(expert.model for expert in experts), *made]
        models = dict(zip(labels, map(ModelReference.model_validate, known), strict=True))
        folders = [local_folder(base_of(one), Path(), trust) for one in models.values()]
        self.tokenizer = load_processor(folders, KIND, self.config, grown=True)
        readers = [models[label].config(trust) for label in ("base", *self.names)]
        self._readers: list[Any] = [SimpleNamespace(config=config) for config in readers]
        for name, expert in zip(self.names, experts, strict=True):
            self._measure_model(name, models[name], self.exams.keys() & {name}, [expert])
        for label in ("base", *merges):
            self._measure_model(label, models[label], self.exams, experts)
        self._loaded = (None, None)

    def write_results(self) -> Scores:
        """Write the figures and their page, without what the config no longer has."""
        scores = Scores(self.config, self.measured)
        self._write(scores.summary() | {"measured": self.measured})
        show_scores(scores, self.out / "scores.html")
        return scores

    def samples(self, exam: str, model: Any) -> list[Example]:
        """Return the held-out texts of an exam, as far as models can read them."""
        if exam not in self._samples:
            data: Any = self.exams[exam]
            reader = SampleReader(model, KIND, self.tokenizer, data)
            rows = self._rows.pop(exam, None) or _held_out(data)  # else written meanwhile
            samples = reader.read(rows, "held-out", 0)
            if not samples:
                raise ConfigError(f"data {data.path}: no chat ends with an answer to be scored")
            texts = {tuple(one["input_ids"].tolist()): one for one in samples}
            self._samples[exam] = [*texts.values()]  # each once, or a search would see its test
        return self._samples[exam]

    def _write(self, content: dict[str, Any]) -> None:
        write_text(self.out / SCORES, json.dumps(content, indent=1) + "\n")

    def _measure_model(
        self, label: str, reference: ModelReference, exams: Iterable[str],
        experts: Sequence[ScoredExpert],
    ) -> None:  # fmt: skip
        """Load a model if something of it is missing, and measure that."""

        def read(exam: str, data: DataConfig) -> dict[str, Any]:
            model, title = self._load(reference), f"{exam} / {label}"
            samples, result = self.samples(exam, model), dict[str, Any]()
            result["losses"] = sequence_losses(model, samples, title=title, quiet=self.quiet)
            if data.completion is not None:
                result["matches"] = answer_matches(model, samples, data, self.tokenizer)
            return result

        def answer(task: str, limit: int | None) -> dict[str, Any]:
            return self.harness.measure(self._load(reference), self.tokenizer, task, limit)

        def once(exam: str, identity: str, measure: Callable[..., Any], *given: Any) -> None:
            """Take a measurement from the file, or measure, where that is of other files."""
            known = self._known.setdefault(exam, {})
            if known.get(label, {}).get("identity") != identity:
                known[label] = {"identity": identity, **measure(*given)}
                self._write({"measured": self._known})
            self.measured.setdefault(exam, {})[label] = known[label]

        with explained_memory(reference):
            for exam in exams:
                data = self.exams[exam] or self._written(exam, reference)
                # All read the same tokens: as many as base and experts have positions for.
                data = self.exams[exam] = reduce(fit_to_model, self._readers, data)
                identity = self._identity(reference, data.model_dump(), data.path)
                once(exam, identity, read, exam, data)
            for task, limit in [(task, one.limit) for one in experts for task in one.tasks]:
                identity = self._identity(reference, limit, self.config.task_folder)
                once(f"task {task}", identity, answer, task, limit)

    def _identity(self, reference: ModelReference, settings: Any, path: str | None = None) -> str:
        models = model_paths({self.config.base_model, reference})  # the base's tokenizer reads
        files = file_states([*models, *([path] if path else ())])
        versions = package_versions("transformers", "torch", "mergekit-ace")
        return json.dumps([str(reference), self.config.dtype, settings, files, versions])

    def _written(self, exam: str, writer: ModelReference) -> DataConfig:
        """Let a model write the texts of an exam, unless they are there."""
        identity = hashlib.sha256(self._identity(writer, None).encode()).hexdigest()
        path = self.out / "texts" / f"{exam}-{identity[:12]}.jsonl"
        model: Any = None if path.exists() else self._load(writer)
        return write_own_texts(model, self.tokenizer, OWN_TEXTS, path, quiet=self.quiet)

    def _load(self, reference: ModelReference) -> Any:
        """Load a model, and drop the one before."""
        if self._loaded[0] != reference:
            self._loaded = (None, None)
            self._loaded = (reference, load_scored(reference, self.config))
        return self._loaded[1]


def _held_out(data: DataConfig) -> Dataset:
    """Return the rows of data that are scored: of its test split, if it has one."""
    test = {"split": data.test_split, "samples": data.held_out} if data.test_split else {}
    return read_rows(data.model_copy(update=test), 0)


@contextmanager
def explained_memory(model: object) -> Iterator[None]:
    """Raise a `ConfigError` with a remedy where a GPU is full."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = f"{model} does not fit on the GPU with what it reads"
        raise ConfigError(f"{said}; give `dtype: bfloat16`, or --device cpu") from error


def load_scored(reference: ModelReference, config: ScoreConfig) -> Any:
    """Load a model, with its adapter if it has one, on the GPU where there is one."""
    folder = local_folder(base_of(reference), Path(), config.trust_remote_code)
    model: Any = load_model(folder, KIND, config, config.dtype)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if lora := reference.lora:
        from peft import PeftModel

        adapted: Any = PeftModel.from_pretrained(model, lora.path, revision=lora.revision)
        model = adapted.eval().get_base_model()  # which holds the adapter's layers
    return model


def sequence_losses(
    model: PreTrainedModel, samples: Sequence[Example], *, title: str, quiet: bool
) -> list[tuple[float, int]]:
    """Return the summed loss in nats of every sample, and the number of its predicted tokens.

    Raises:
        ConfigError: the model answers NaN or Inf.
    """
    losses: list[tuple[float, int]] = [(0.0, 0)] * len(samples)
    texts = [one["input_ids"] for one in samples]
    with tqdm(desc=title, total=len(samples), unit="text", disable=quiet) as bar:
        for places in batches_by_length(texts, model.device):
            chosen = [samples[place] for place in places]
            truth = torch.cat([one["true"] for one in chosen]).to(model.device)
            with torch.inference_mode():
                parts = zip(KIND.answer(model, chosen).split(ROWS), truth.split(ROWS), strict=True)
                each = [cross_entropy(part.float(), true, reduction="none") for part, true in parts]
            sums = torch.cat(each).split([len(one["true"]) for one in chosen])
            for place, own in zip(places, sums, strict=True):
                losses[place] = float(own.double().sum()), len(own)
            bar.update(len(places))
    if not all(math.isfinite(loss) for loss, _ in losses):
        raise ConfigError(
            f"{title}: the model answers NaN or Inf; it is damaged, or its merge failed"
        )
    return losses


def answer_matches(
    model: PreTrainedModel, samples: Sequence[Example], data: DataConfig, tokenizer: Any
) -> list[bool]:
    """Return of every prompt whether the model writes the completion, see `same_answer`."""
    # Of the tokenizer, which all share: configs of equal models may name other end tokens.
    ends = [number for number, one in tokenizer.added_tokens_decoder.items() if one.special]
    matches = [False] * len(samples)
    for places in batches_by_length([one["input_ids"] for one in samples], model.device):
        chosen = [samples[place] for place in places]
        prompts = [{"input_ids": one["input_ids"][~one["supervised"]]} for one in chosen]
        longest = max(len(one["true"]) for one in chosen) + MORE
        limited = data.model_copy(update={"max_new_tokens": longest})
        written = KIND.complete(model, prompts, limited, tokenizer, ends)
        for place, right, answer in zip(places, chosen, written, strict=True):
            ids = (right["true"], answer["input_ids"][answer["supervised"]])
            texts = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
            matches[place] = same_answer(*texts, ended=len(ids[1]) < longest)
    return matches


def same_answer(right: str, written: str, *, ended: bool) -> bool:
    """Tell whether a written answer is the right one, but for spaces around it.

    It ends where the model ends it, or its line. Where it does neither, it has to begin as the
    right one does.
    """
    right, written = right.strip(), written.strip()
    if "\n" not in right and "\n" in written:
        written, ended = written.split("\n")[0].strip(), True
    if ended:
        return written == right
    return re.match(rf"{re.escape(right)}(?!\w)", written) is not None


class Harness:
    """lm-evaluation-harness with some tasks, and a folder of one's own tasks."""

    def __init__(self, tasks: Sequence[str], folder: str | None):
        """Raise a `ConfigError` where it is not installed, or has no such task."""
        self._loaded: dict[str, Any] = {}
        if not tasks:
            return
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            said = "`tasks` need lm-evaluation-harness: pip install 'mergekit-ace[score]'"
            raise ConfigError(said) from error
        self._manager = TaskManager(include_path=folder and os.path.expanduser(folder))
        for task in tasks:
            if task not in {*self._manager.all_subtasks, *self._manager.all_groups}:  # or a tag
                said = f"lm-evaluation-harness has no task {task}; `lm_eval ls tasks` lists them"
                raise ConfigError(said)

    def _load(self, task: str) -> Any:
        """Return a task with its questions, read once; a group of tasks by its name."""
        if task not in self._loaded:
            found = self._manager.load_task_or_group([task])
            for group in found.keys() - {task}:
                if not group.config.get("aggregate_metric_list"):
                    said = f"{task} is a group of tasks without a result of its own"
                    raise ConfigError(f"{said}; name its tasks")
            self._loaded[task] = found.get(task, task)
        return self._loaded[task]

    def count(self, task: str) -> int:
        """Return how many questions a task has of which more is better."""
        loaded = self._load(task)
        if not hasattr(loaded, "eval_docs"):
            raise ConfigError(f"{task} is a group of tasks; name one of them")
        if next(iter(loaded.higher_is_better().values())) is False:
            raise ConfigError(f"of {task} less is better, so that it cannot be an `aim`")
        return len(list(loaded.eval_docs))

    def measure(
        self, model: PreTrainedModel, tokenizer: Any, task: str, limit: int | None = None,
        questions: Sequence[int] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return name, value and standard error, if known, of a task's first metric.

        It asks the first `limit` questions, or those with the numbers `questions`.
        """
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        evaluate: Any = lm_eval.simple_evaluate  # its types are lost in a decorator
        harness: Any = HFLM
        results = evaluate(
            model=harness(pretrained=model, tokenizer=tokenizer, batch_size=BATCH),
            tasks=[self._load(task)], limit=limit, task_manager=self._manager, log_samples=False,
            samples=None if questions is None else {task: list(questions)},
        )["results"][task]  # fmt: skip
        name, kind = next(k for k in results if "," in k and "_stderr" not in k).split(",", 1)
        error = results.get(f"{name}_stderr,{kind}")
        known = float(error) if isinstance(error, int | float) else None
        return {"metric": name, "value": float(results[f"{name},{kind}"]), "error": known}
