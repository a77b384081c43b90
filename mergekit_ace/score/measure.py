# SPDX-License-Identifier: Apache-2.0
"""One model in memory: its losses on texts, its answers, its results on tasks."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mergekit.common import ModelReference
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from mergekit_ace.adapters.read import base_of
from mergekit_ace.naming import ConfigError
from mergekit_ace.score.config import ScoreConfig
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import SampleReader, read_rows
from mergekit_ace.training.models import load_model, local_folder
from mergekit_ace.training.tasks import CausalLanguageModel, Example, batches_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = CausalLanguageModel()
BATCH = 8  # questions of a task, or of a chat without an answer
ROWS = 1024  # logits whose losses are computed at once
MORE = 8  # tokens that an answer may be longer than the right one


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
    folder = local_folder(str(base_of(reference)), Path(), config.trust_remote_code)
    model: Any = load_model(folder, KIND, config, config.dtype)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if lora := reference.lora:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, lora.path, revision=lora.revision).eval()
    return model


def read_samples(data: DataConfig, model: PreTrainedModel, tokenizer: Any) -> list[Example]:
    """Read the held-out rows of data as samples, as far as a model can read them."""
    held_out = data.model_copy(update={"split": data.test_split or data.split})
    reader = SampleReader(model, KIND, tokenizer, data)
    samples = reader.read(read_rows(held_out, seed=0), "held-out", BATCH, quiet=True)
    return [sample for sample in samples if "true" in sample]


def sequence_losses(
    model: PreTrainedModel, samples: Sequence[Example], *, title: str, quiet: bool
) -> list[tuple[float, int]]:
    """Return the summed loss in nats of every sample, and the number of its predicted tokens.

    Raises:
        ConfigError: the model answers NaN or Inf.
    """
    losses: list[tuple[float, int]] = [(0.0, 0)] * len(samples)
    lengths = [len(one["input_ids"]) for one in samples]
    with tqdm(desc=title, total=len(samples), unit="text", disable=quiet) as bar:
        for places in batches_by_length(lengths, model.device):
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
        raise ConfigError(f"{title}: the model answers NaN or Inf; its merge has failed")
    return losses


def answer_matches(
    model: PreTrainedModel, samples: Sequence[Example], data: DataConfig, tokenizer: Any
) -> list[bool]:
    """Return of every prompt whether the model writes the completion, see `same_answer`."""
    matches = [False] * len(samples)
    lengths = [len(one["input_ids"]) for one in samples]
    for places in batches_by_length(lengths, model.device):
        chosen = [samples[place] for place in places]
        prompts = [{"input_ids": one["input_ids"][~one["supervised"]]} for one in chosen]
        longest = max(len(one["true"]) for one in chosen) + MORE
        limited = data.model_copy(update={"max_new_tokens": longest})
        written = KIND.complete(model, prompts, limited, tokenizer)
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
            if not self._manager.match_tasks([task]):
                said = f"lm-evaluation-harness has no task {task}; `lm_eval ls tasks` lists them"
                raise ConfigError(said)

    def _load(self, task: str) -> Any:
        """Return a task with its questions, read once; a group of tasks by its name."""
        if task not in self._loaded:
            self._loaded[task] = self._manager.load_task_or_group([task]).get(task, task)
        return self._loaded[task]

    def numbers(self, task: str) -> list[int]:
        """Return the numbers of the questions of a task of which more is better."""
        loaded = self._load(task)
        if not hasattr(loaded, "eval_docs"):
            raise ConfigError(f"{task} is a group of tasks; name one of them")
        if next(iter(loaded.higher_is_better().values())) is False:
            raise ConfigError(f"of {task} less is better, so that it cannot be an `aim`")
        return [*range(len(list(loaded.eval_docs)))]

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
            tasks=[self._load(task)],
            limit=limit,
            samples=None if questions is None else {task: list(questions)},
            task_manager=self._manager,
            log_samples=False,
        )["results"][task]
        metric = next(key for key in results if "," in key and "_stderr" not in key)
        name, kind = metric.split(",", 1)
        error = results.get(f"{name}_stderr,{kind}")
        known = float(error) if isinstance(error, int | float) else None
        return {"metric": name, "value": float(results[metric]), "error": known}
