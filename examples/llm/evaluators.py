# SPDX-License-Identifier: Apache-2.0
"""Scores of one checkpoint on the tasks of a suite, by lm_eval, or by datasets and transformers.

Each function loads a checkpoint and returns another one, which scores it on one task by the task's
name. A score lies between 0 and 1 (correlations between -1 and 1), and comes with the number of
samples.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from suite import ClipSuite, GlueSuite, HarnessSuite, Suite
from torch import Tensor

from mergekit_ace.training.models import local_folder
from mergekit_ace.training.tasks import zero_shot_head

Score: TypeAlias = tuple[float, int]
Scorer: TypeAlias = Callable[[str], Score]
BATCH = 32


def device() -> str:
    """Return where models are evaluated: on the GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def harness_scorer(suite: HarnessSuite, checkpoint: str, limit: int | None) -> Scorer:
    """Score a language model by lm-evaluation-harness."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    on_gpu = device() == "cuda"
    model = HFLM(
        pretrained=checkpoint,
        tokenizer=suite.base.model,
        device=device(),
        dtype=suite.out_dtype or suite.dtype,
        batch_size="auto" if on_gpu else BATCH,
    )
    own = {"include_path": suite.include_path, "include_defaults": False}
    tasks = TaskManager(**own if suite.include_path else {})

    def score(name: str) -> Score:
        task = suite.tasks[name]
        if task.runs_code:  # main() has asked for leave; the metric asks again by this name
            os.environ["HF_ALLOW_CODE_EVAL"] = "1"
        found = simple_evaluate(
            model=model,
            tasks=[name],
            task_manager=tasks,
            limit=limit,
            apply_chat_template=suite.chat_template,
            confirm_run_unsafe_code=task.runs_code,
            log_samples=False,
            bootstrap_iters=0,
        )
        values = found["results"][name]
        if task.metric not in values:
            there = ", ".join(key for key in values if "," in key)
            raise KeyError(f"task {name!r} has no metric {task.metric!r}, but {there}")
        return float(values[task.metric]), found["n-samples"][name]["effective"]

    return score


def load_encoder(kind: str, checkpoint: str, **where: str) -> transformers.PreTrainedModel:
    """Load a checkpoint as the class of transformers with the name `kind`, in float32."""
    model_class = getattr(transformers, kind)
    return model_class.from_pretrained(checkpoint, dtype=torch.float32, **where)


def batches(data: Any, limit: int | None, together: Callable[[list], Any]) -> Iterator[Any]:
    """Go through the first samples of a data set; on a GPU they are made ready beside it."""
    workers = min(8, os.cpu_count() or 1) if device() == "cuda" else 0
    data = data.select(range(min(limit or len(data), len(data))))
    yield from torch.utils.data.DataLoader(data, BATCH, num_workers=workers, collate_fn=together)


def glue_scorer(suite: GlueSuite, checkpoint: str, limit: int | None) -> Scorer:
    """Score a merged encoder under the head of each task's expert."""
    from datasets import load_dataset

    merged = load_encoder(suite.encoder, checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(suite.base.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # GPT-2 has none

    @torch.inference_mode()
    def score(name: str) -> Score:
        task = suite.tasks[name]
        expert = suite.experts[task.expert]
        model = load_encoder(
            "AutoModelForSequenceClassification", expert.model, subfolder=expert.subfolder
        )
        model.base_model.load_state_dict(merged.base_model.state_dict())
        model.config.pad_token_id = tokenizer.pad_token_id
        model.eval().to(device())

        def together(samples: list[dict]) -> tuple[dict[str, Tensor], list]:
            texts = [[sample[column] for sample in samples] for column in task.columns]
            cut = {"truncation": True, "max_length": suite.max_length}
            inputs = tokenizer(*texts, padding=True, return_tensors="pt", **cut)
            return dict(inputs), [sample["label"] for sample in samples]

        logits, labels = [], []
        few = min(filter(None, (limit, task.first)), default=None)
        for inputs, given in batches(load_dataset(**task.data), few, together):
            inputs = {key: value.to(device()) for key, value in inputs.items()}
            logits.append(model(**inputs).logits.float().cpu())
            labels += given
        return agreement(task.metric, torch.cat(logits), labels), len(labels)

    return score


def agreement(metric: str, logits: Tensor, labels: list) -> float:
    """Compare logits, (samples, classes) or (samples, 1), with labels by a metric of GLUE."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if metric == "correlations":
        predicted = logits[:, 0].numpy()
        return float(pearsonr(predicted, labels)[0] + spearmanr(predicted, labels)[0]) / 2
    predicted = logits.argmax(-1).numpy()
    if metric == "matthews":
        return float(matthews_corrcoef(labels, predicted))
    accuracy = float(accuracy_score(labels, predicted))
    if metric == "accuracy_f1":
        return (accuracy + float(f1_score(labels, predicted))) / 2
    return accuracy


def clip_scorer(suite: ClipSuite, checkpoint: str, limit: int | None) -> Scorer:
    """Score a merged vision tower with zero-shot heads from the base's text tower."""
    from datasets import load_dataset

    tower = load_encoder(suite.encoder, checkpoint).eval().to(device())
    base = local_folder(suite.base.model, Path(), trust_remote_code=False)
    processor = transformers.CLIPImageProcessor.from_pretrained(base)

    def together(samples: list[dict]) -> tuple[Tensor, Tensor]:
        images = [sample["image"].convert("RGB") for sample in samples]
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        return pixels, torch.tensor([sample["label"] for sample in samples])

    @torch.inference_mode()
    def score(name: str) -> Score:
        task = suite.tasks[name]
        data = load_dataset(**task.data)
        classes = tuple(task.classes or data.features["label"].names)
        head = head_of(base, classes, tuple(task.templates)).to(device())
        right = seen = 0
        for pixels, labels in batches(data, limit, together):
            logits = head(tower(pixel_values=pixels.to(device())).pooler_output)
            right += int((logits.argmax(-1).cpu() == labels).sum())
            seen += len(labels)
        return right / seen, seen

    return score


@cache
def head_of(base: str, classes: tuple[str, ...], templates: tuple[str, ...]) -> torch.nn.Module:
    """Return the head that the text tower of a CLIP makes of the prompts of classes."""
    names = [name.replace("_", " ") for name in classes]
    return zero_shot_head(base, [[text.replace("{}", n) for text in templates] for n in names])


def scorer(suite: Suite, checkpoint: str, limit: int | None) -> Scorer:
    """Load a checkpoint; return the function that scores it on a task, by `limit` samples."""
    gc.collect()  # of the model before, which refers to itself
    torch.cuda.empty_cache()
    by = {"harness": harness_scorer, "glue": glue_scorer, "clip": clip_scorer}
    return by[suite.evaluator](suite, checkpoint, limit)
