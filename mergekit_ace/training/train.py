# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace train`: from statistics to coefficients λ to a merge to its loss, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy

import mergekit_ace
from mergekit_ace.algebra.learner import Learner
from mergekit_ace.files.saving import write_text
from mergekit_ace.files.statistics import Expert, MergedTensor
from mergekit_ace.methods.coefficients import METHODS_OF_BASES, CoefficientFile, Contents
from mergekit_ace.methods.storage import lacks_embeddings
from mergekit_ace.naming import short_names
from mergekit_ace.report.card import markdown_table, markdown_text
from mergekit_ace.training.config import Labels, TrainConfig
from mergekit_ace.training.data import Example, step_indices
from mergekit_ace.training.family import Family, MergedModel, Teacher, load_family
from mergekit_ace.training.models import claim_models, write_statistics_of_batches
from mergekit_ace.training.state import TrainingRun, check_number, train_module


class Score(NamedTuple):
    """Loss and accuracy of a merge on one split.

    The loss is the mean over teachers of the mean loss per position, weighted as in training.
    Accuracies are shares of right answers, 0 to 1, of every teacher, the rehearsal last: against
    the truth where the data has it, else against the teacher's own answers.
    """

    loss: float | None
    accuracy: Sequence[float]


def run_training(
    config: TrainConfig, out: str | os.PathLike, *, overwrite: bool = False, quiet: bool = False
) -> CoefficientFile:
    """Learn coefficients, or go on with that; the files go to `out`."""
    with TrainingRun.start(out, config.mixed_precision, quiet=quiet) as run:
        family = load_family(claim_models(config, run, overwrite=overwrite))
        objective = Objective(family)
        learner, log = train_learner(objective)
        coefficients = learner(family.statistics, family.depths)
        scores = score_merges(objective, coefficients)
        file = coefficient_file(family, learner, scores)
        if run.is_main:
            write_results(file, family, log)
        run.accelerator.wait_for_everyone()
        return file


def train_learner(objective: Objective) -> tuple[Learner, list[dict[str, Any]]]:
    """Train a learner, or go on with one; return it as it was at its best evaluation, and a log.

    In each step the learner predicts λ, `Objective` writes the merge for it and returns ∂L/∂λ, and
    Adam carries that back through the learner.
    """
    family, config = objective.family, objective.config
    settings, per_epoch = config.training, objective.steps_per_epoch
    torch.manual_seed(settings.seed)
    learner = Learner(config.learner, *family.statistics.shape[:2])
    learner.standardizer.fit(family.statistics)
    optimizer = torch.optim.Adam(learner.parameters(), lr=settings.learning_rate, foreach=False)

    def take_step(step: int) -> float:
        decays = step // per_epoch // settings.scheduler.step
        rate = settings.learning_rate * settings.scheduler.gamma**decays
        optimizer.param_groups[0]["lr"] = rate
        coefficients = learner(family.statistics, family.depths)  # (K, G)
        gradient, losses = objective.gradient(coefficients, step)
        for teacher, loss in zip(family.teachers, losses.tolist(), strict=True):
            check_number(f"the loss on the data of {teacher.name}", loss, step)
        check_number("the gradient", float(gradient.abs().sum()), step)
        away = coefficients.detach().double() - config.learner.start(len(coefficients))
        gradient += 2 * config.penalty / away.numel() * away  # of penalty times the mean square
        optimizer.zero_grad()
        coefficients.backward(gradient.to(coefficients.dtype))
        optimizer.step()
        return float(losses @ objective.weights)

    @torch.no_grad()
    def evaluate() -> tuple[Any, dict[str, float]]:
        loss, shares = objective.score(learner(family.statistics, family.depths), "validation")
        scores = {"validation_accuracy": fmean(shares[: len(config.models)])}
        if config.rehearsal is not None:
            scores["validation_rehearsal"] = shares[-1]
        return loss, scores

    progress = train_module(
        family.models.run, "learner", learner, optimizer, settings, per_epoch, take_step, evaluate
    )
    return learner.eval().requires_grad_(False), progress.log


def score_merges(objective: Objective, coefficients: Tensor) -> dict[str, Score]:
    """Score the learned coefficients beside merges that need no training, on the test split."""
    config, scores = objective.config, {}
    tests = [teacher.splits["test"] for teacher in objective.family.teachers]
    if all("true" in sample for samples in tests for sample in samples):
        right = [_gather(samples, "hard") == _gather(samples, "true") for samples in tests]
        own = [float(answers.double().mean()) for answers in right]
        scores["each expert on its own"] = Score(None, own)
    if config.options is None:
        plain, value = "uniform (mean of the experts)", 1 / len(coefficients)
        learned = "AdaMerging" if config.loss == "entropy" else "StatsMerging"
    else:
        plain, value = f"{config.basis}, without data", 1.0
        learned = f"{config.basis}, coefficients"
    merges = {
        "base model": torch.zeros_like(coefficients),
        plain: torch.full_like(coefficients, value),
        learned: coefficients,
    }
    return scores | {name: objective.score(used, "test") for name, used in merges.items()}


class Objective:
    """Loss of a merge on the data of T teachers, as a function of its coefficients.

    `weights`, (T,), are those of the teachers' mean losses; their sum is 1. After
    `steps_per_epoch` the largest data set has been seen once.
    """

    def __init__(self, family: Family):
        self.family, self.config = family, family.models.config
        self._run, settings = family.models.run, self.config.training
        components = family.components
        self._merged = MergedModel(
            family.module, family.base, components or family.experts, list(family.stored),
            components=bool(components),
        )  # fmt: skip
        self._batch = self._run.samples_per_step(settings)
        largest = max(len(teacher.splits["train"]) for teacher in family.teachers)
        self.steps_per_epoch = -(-largest // self._batch)
        weights = torch.ones(len(family.teachers), dtype=torch.float64)
        if self.config.rehearsal is not None:
            weights[-1] = settings.rehearsal_weight * (len(weights) - 1)
        self.weights = weights / weights.sum()

    def gradient(self, coefficients: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return ∂L/∂λ, (K, G), and the teachers' losses, (T,), of one step.

        A teacher's loss is the mean over supervised positions; L is their weighted mean.
        """
        groups, settings = self.family.groups, self.config.training
        self._merged.write(coefficients[:, groups])
        self._merged.products.zero_()
        losses = torch.zeros_like(self.weights)
        for row, teacher in enumerate(self.family.teachers):
            examples = teacher.splits["train"]
            indices = step_indices(settings.seed, row, step, self._batch, len(examples))
            positions = sum(len(examples[index]["hard"]) for index in indices)
            for part in self._run.share(indices, settings.batch_size):
                loss, _ = self._loss(teacher, [examples[index] for index in part])
                loss = loss / positions
                (float(self.weights[row]) * loss).backward()
                losses[row] += loss.detach().double().cpu()
        gradient = torch.zeros(coefficients.shape, dtype=torch.float64)
        gradient.index_add_(1, groups, self._run.sum(self._merged.products))
        return gradient, self._run.sum(losses)

    @torch.no_grad()
    def score(self, coefficients: Tensor, split: str) -> Score:
        """Return the score of the merge for λ per group, (K, G), on a split of all data."""
        self._merged.write(coefficients[:, self.family.groups])
        sums = torch.zeros(len(self.weights), 3, dtype=torch.float64)  # loss, right, positions
        for row, teacher in enumerate(self.family.teachers):
            examples = teacher.splits[split]
            for part in self._run.share(range(len(examples)), self.config.training.batch_size):
                samples = [examples[index] for index in part]
                loss, answers = self._loss(teacher, samples)
                wanted = torch.cat([sample.get("true", sample["hard"]) for sample in samples])
                right = int((answers.cpu() == wanted).sum())
                sums[row] += torch.tensor([float(loss), right, len(wanted)])
        losses, right, positions = self._run.sum(sums).unbind(1)
        return Score(float(losses / positions @ self.weights), (right / positions).tolist())

    def _loss(self, teacher: Teacher, samples: list[Example]) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the merge on some samples, and its answers, (P,)."""
        with self._run.accelerator.autocast():
            logits = self.family.models.kind.answer(self.family.module, samples, teacher.head)
        if self.config.loss == "entropy":
            entropies = Categorical(logits=logits.float(), validate_args=False).entropy()
            return entropies.sum(), logits.argmax(-1)
        return summed_loss(logits, samples, teacher.labels), logits.argmax(-1)


def _gather(samples: list[Example], name: str) -> Tensor:
    """Lay the labels of some samples end to end, over their P positions."""
    return torch.cat([sample[name] for sample in samples])


def summed_loss(logits: Tensor, samples: list[Example], labels: Labels) -> Tensor:
    """Return cross-entropy to hard labels (Eq. 7), or KL from teacher to merge (Eq. 32), summed.

    Where only the k likeliest classes of the teacher are known, the rest of both distributions
    counts as one class more. Logits are (P, C), and samples as `answer_data` makes them.
    """
    logits = logits.float()
    if labels != "soft":
        return cross_entropy(logits, _gather(samples, labels).to(logits.device), reduction="sum")
    teacher, classes = (
        _gather(samples, name).to(logits.device) for name in ("soft_values", "soft_indices")
    )
    merge = logits.log_softmax(-1).gather(-1, classes)
    loss = (teacher.exp() * (teacher - merge)).sum()
    if classes.shape[-1] < logits.shape[-1]:
        teacher_rest, merge_rest = _log_rest(teacher), _log_rest(merge)
        loss = loss + (teacher_rest.exp() * (teacher_rest - merge_rest)).sum()
    return loss


def _log_rest(log_probabilities: Tensor) -> Tensor:
    """Return the logarithm of the probability that the given classes leave, (P,)."""
    rest = 1 - log_probabilities.exp().sum(-1)
    return rest.clamp(min=torch.finfo(rest.dtype).eps).log()


def coefficient_file(
    family: Family, learner: Learner, scores: Mapping[str, Score]
) -> CoefficientFile:
    """Return the result, expanded from groups to tensors."""
    config = family.models.config
    stored, frozen = _names_on_disk(family)
    experts = []
    for one, folder in zip(config.models, map(Path, family.models.experts), strict=True):
        # The folder of a model in the Hub's cache is called after its commit.
        revision = folder.name if folder.parent.name == "snapshots" else None
        experts.append(Expert(task=one.task, model=one.model, revision=revision))
    contents = Contents(
        base_model=config.base_model,
        granularity=config.granularity,
        basis=config.basis,
        experts=tuple(experts),
        tensors=tuple(MergedTensor(name=name, stored=names) for name, names in stored.items()),
        frozen=frozen,
        parameters={} if config.options is None else config.options.model_dump(exclude={"scale"}),
        learner=config.learner,
        config=config.model_dump(mode="json"),
        scores={name: score._asdict() for name, score in scores.items()},
        package=mergekit_ace.__version__,
    )
    coefficients = learner(family.statistics, family.depths)[:, family.groups]
    return CoefficientFile(contents, coefficients, learner.state_dict())


def _names_on_disk(family: Family) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the names of every merged parameter on disk, and those that keep the base's values."""
    module, stored = family.module, dict(family.stored)
    frozen = set(family.on_disk)
    if family.models.kind.has_heads:  # names in backbones, too
        prefix = f"{module.base_model_prefix}."
        for name, names in stored.items():
            stored[name] = tuple(sorted({*names, name.removeprefix(prefix)}))
        frozen |= set(module.base_model.state_dict())
    else:  # which mergekit may know by their names in memory
        merged = {id(module.get_parameter(name)) for name in stored}
        everything = module.named_parameters(remove_duplicate=False)
        frozen |= {name for name, parameter in everything if id(parameter) not in merged}
    return stored, tuple(sorted(frozen.difference(*stored.values())))


def write_results(file: CoefficientFile, family: Family, log: Sequence[Mapping[str, Any]]) -> None:
    """Write the output folder; the coefficients last, so that they mean it is complete."""
    config, run = family.models.config, family.models.run
    table = scores_table(file.contents, [len(one.splits["test"]) for one in family.teachers])
    write_text(run.path / "scores.md", table + "\n")
    write_text(run.path / "training.jsonl", "".join(json.dumps(line) + "\n" for line in log))
    if family.models.kind.has_heads:
        write_statistics_of_batches(family.module.base_model, family.models.backbones)
    path = run.path / "coefficients.safetensors"
    method = "task vectors" if config.options is None else config.basis
    note = f"# {method} with learned coefficients: mergekit-yaml THIS_FILE OUTPUT_FOLDER"
    merge = yaml.safe_dump(merge_config(family, file, path), sort_keys=False)
    write_text(run.path / "merge.yml", f"{note}\n{merge}")
    file.save(path)
    if not run.quiet:
        print(f"\n{table}\n\nmergekit-yaml {run.path / 'merge.yml'} OUTPUT_FOLDER")


def scores_table(contents: Contents, samples: Sequence[int]) -> str:
    """Return a Markdown table: mean accuracy of the experts' tasks, each one's, the loss.

    `samples` are how many each task is scored on; one number more for a rehearsal.
    """
    tasks, count = [one.task for one in contents.experts], len(contents.experts)
    names = [*map(markdown_text, short_names(tasks)), "rehearsal"][: len(samples)]
    rows = [
        ["accuracy on the test split", "mean", *names, "loss"],
        ["samples", str(sum(samples[:count])), *map(str, samples), ""],
    ]
    for name, score in contents.scores.items():
        shares = [fmean(score["accuracy"][:count]), *score["accuracy"]]
        loss = "–" if score["loss"] is None else f"{score['loss']:.4f}"
        rows.append([name, *(f"{share:.3f}" for share in shares), loss])
    return markdown_table(rows)


def merge_config(family: Family, file: CoefficientFile, path: Path) -> dict[str, Any]:
    """Return a config that merges with the coefficients at `path`, run in whatever folder."""
    contents, basis = file.contents, file.contents.basis
    base, *experts = _models_to_merge(family)
    known = {name: value for name, value in contents.parameters.items() if value is not None}
    config: dict[str, Any] = {
        "merge_method": METHODS_OF_BASES.get(basis, basis),
        "base_model": base,
        "dtype": "float32",
        "out_dtype": str(next(iter(family.base.values())).dtype).removeprefix("torch."),
        "models": [
            {"model": model, "parameters": {"task": one.task}}
            for model, one in zip(experts, contents.experts, strict=True)
        ],
        "parameters": {**known, "coefficients": str(path.resolve())},
    }
    tokenizer = {} if family.models.kind.has_heads else {"tokenizer": {"source": "base"}}
    return config | tokenizer


def _models_to_merge(family: Family) -> list[Any]:
    """Return base and experts; of classifiers backbones, of which mergekit takes what it finds."""
    config = family.models.config
    if not family.models.kind.has_heads:
        named = (config.base_model, *(expert.model for expert in config.models))
        parts = (one.split("+") for one in named)
        return ["+".join(os.path.abspath(p) if os.path.isdir(p) else p for p in one)
                for one in parts]  # fmt: skip
    base, *experts = [
        {"model": {"path": str(folder.resolve())}, "override_architecture": "Inferred"}
        for folder in family.models.backbones
    ]
    return [base if lacks_embeddings(family.module) else base["model"]["path"], *experts]
