# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace train`: from statistics to coefficients λ to a merge to its loss, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from mergekit.common import ModelReference
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy

import mergekit_ace
from mergekit_ace.algebra.learner import Learner
from mergekit_ace.files.saving import write_text
from mergekit_ace.files.statistics import Expert, MergedTensor
from mergekit_ace.methods.architecture import lacks_embeddings
from mergekit_ace.methods.coefficients import CoefficientFile, Contents
from mergekit_ace.methods.lookup import METHODS_OF_BASES
from mergekit_ace.naming import short_names
from mergekit_ace.report.card import markdown_table, markdown_text
from mergekit_ace.training.config import Labels, LanguageTask, TrainConfig
from mergekit_ace.training.data import Example, step_indices
from mergekit_ace.training.family import Family, MergedModel, Teacher, load_family
from mergekit_ace.training.models import claim_models, write_statistics_of_batches
from mergekit_ace.training.state import ModuleTraining, TrainingRun
from mergekit_ace.training.tasks import attach_head


@dataclass(frozen=True)
class Score:
    """Loss and accuracy of a merge on one split.

    Attributes:
        loss: mean over teachers of the mean loss per position, weighted as in training.
        accuracy: share of right answers per expert, 0 to 1: against the truth where the data has
            it, else against the expert's own answers; `rehearsal` likewise for the base's.
    """

    loss: float | None
    accuracy: tuple[float, ...]
    rehearsal: float | None = None


def run_training(
    config: TrainConfig, out: str | os.PathLike, *, overwrite: bool = False, quiet: bool = False
) -> CoefficientFile:
    """Learn coefficients, or go on with that; the files go to `out`."""
    with TrainingRun.start(out, config.mixed_precision, quiet=quiet) as run:
        family = load_family(claim_models(config, run, overwrite=overwrite))
        objective = Objective(family)
        statistics, depths = family.learner_inputs()
        learner, log = train_learner(objective, statistics, depths)
        scores = score_merges(objective, learner(statistics, depths))
        file = coefficient_file(family, learner, statistics, depths, scores)
        if run.is_main:
            write_results(file, family, log)
        run.accelerator.wait_for_everyone()
        return file


def train_learner(
    objective: Objective, statistics: Tensor, depths: Tensor
) -> tuple[Learner, list[dict[str, Any]]]:
    """Train a learner, or go on with one; return it as it was at its best evaluation, and a log.

    In each step the learner predicts λ, `Objective` writes the merge for it and returns ∂L/∂λ, and
    Adam carries that back through the learner.
    """
    config, settings = objective.config, objective.config.training
    torch.manual_seed(settings.seed)
    learner = Learner(config.learner, *statistics.shape[:2])
    learner.standardizer.fit(statistics)
    optimizer = torch.optim.Adam(learner.parameters(), lr=settings.learning_rate, foreach=False)
    per_epoch = objective.steps_per_epoch
    training = ModuleTraining("learner", objective.run, learner, optimizer, settings, per_epoch)

    def evaluate() -> None:
        with torch.no_grad():
            score = objective.score(learner(statistics, depths), "validation")
        scores = {"validation_accuracy": fmean(score.accuracy)}
        if score.rehearsal is not None:
            scores["validation_rehearsal"] = score.rehearsal
        assert score.loss is not None
        training.keep_best(score.loss, scores)

    def rate(step: int) -> float:
        schedule = settings.scheduler
        return settings.learning_rate * schedule.gamma ** (step // per_epoch // schedule.step)

    if training.progress.step == 0:
        evaluate()  # the start counts: training never ends below it
    for step in training.steps(rate, settings.patience):
        coefficients = learner(statistics, depths)  # (K, G)
        gradient, losses = objective.gradient(coefficients, step)
        for teacher, loss in zip(objective.teachers, losses.tolist(), strict=True):
            training.check_finite(f"the loss on the data of {teacher.name}", loss)
        training.check_finite("the gradient", float(gradient.abs().sum()))
        away = coefficients.detach().double() - config.learner.start(len(coefficients))
        gradient += 2 * config.penalty / away.numel() * away  # of penalty times the mean square
        optimizer.zero_grad()
        coefficients.backward(gradient.to(coefficients.dtype))
        optimizer.step()
        if training.end_step(float(losses @ objective.weights)):
            evaluate()
    training.load_best()
    return learner.eval().requires_grad_(False), training.progress.log


def score_merges(objective: Objective, coefficients: Tensor) -> dict[str, Score]:
    """Score the learned coefficients beside merges that need no training, on the test split."""
    config, scores, own = objective.config, {}, []
    for samples in (teacher.splits["test"] for teacher in objective.teachers):
        if all("true" in sample for sample in samples):
            right = _gather(samples, "hard") == _gather(samples, "true")
            own.append(float(right.double().mean()))
    if len(own) == len(objective.teachers):  # all true labels are known
        rehearsal = None if config.rehearsal is None else own.pop()
        scores["each expert on its own"] = Score(None, tuple(own), rehearsal)
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

    `weights`, (T,), are those of the teachers' mean losses; their sum is 1.
    """

    def __init__(self, family: Family):
        models, self.teachers = family.models, family.teachers
        self.config, self.run = models.config, models.run
        self._groups, self._kind, self._module = family.groups, models.kind, family.module
        versions, components = family.components or family.experts, bool(family.components)
        names = list(family.stored)
        self._merged = MergedModel(
            family.module, family.base, versions, names, components=components
        )
        self._batch = self.run.samples_per_step(self.config.training)
        weights = torch.ones(len(self.teachers), dtype=torch.float64)
        if self.config.rehearsal is not None:
            weights[-1] = self.config.training.rehearsal_weight * (len(weights) - 1)
        self.weights = weights / weights.sum()

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which the largest data set has been seen once."""
        return -(-max(len(teacher.splits["train"]) for teacher in self.teachers) // self._batch)

    def gradient(self, coefficients: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return ∂L/∂λ, (K, G), and the teachers' losses, (T,), of one step.

        A teacher's loss is the mean over supervised positions; L is their weighted mean.
        """
        self._merged.write(coefficients[:, self._groups])
        self._merged.products.zero_()
        settings = self.config.training
        losses = torch.zeros(len(self.teachers), dtype=torch.float64)
        for row, (weight, teacher) in enumerate(zip(self.weights, self.teachers, strict=True)):
            examples = teacher.splits["train"]
            indices = step_indices(settings.seed, row, step, self._batch, len(examples))
            positions = sum(len(examples[index]["hard"]) for index in indices)
            for part in self.run.share(indices, settings.batch_size):
                loss, _ = self._loss(teacher, [examples[index] for index in part])
                loss = loss / positions
                (float(weight) * loss).backward()
                losses[row] += loss.detach().double().cpu()
        gradient = torch.zeros(coefficients.shape, dtype=torch.float64)
        gradient.index_add_(1, self._groups, self.run.sum(self._merged.products))
        return gradient, self.run.sum(losses)

    @torch.no_grad()
    def score(self, coefficients: Tensor, split: str) -> Score:
        """Return the score of the merge for λ per group, (K, G), on a split of all data."""
        self._merged.write(coefficients[:, self._groups])
        sums = torch.zeros(len(self.teachers), 3, dtype=torch.float64)  # loss, right, positions
        for row, teacher in enumerate(self.teachers):
            examples = teacher.splits[split]
            for part in self.run.share(range(len(examples)), self.config.training.batch_size):
                samples = [examples[index] for index in part]
                loss, answers = self._loss(teacher, samples)
                wanted = torch.cat([sample.get("true", sample["hard"]) for sample in samples])
                right = int((answers.cpu() == wanted).sum())
                sums[row] += torch.tensor([float(loss), right, len(wanted)])
        losses, right, positions = self.run.sum(sums).unbind(1)
        shares = (right / positions).tolist()
        rehearsal = None if self.config.rehearsal is None else shares.pop()
        return Score(float(losses / positions @ self.weights), tuple(shares), rehearsal)

    def _loss(self, teacher: Teacher, samples: list[Example]) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the merge on some samples, and its answers, (P,)."""
        attach_head(self._module, teacher.head)
        with self.run.accelerator.autocast():
            logits = self._kind.answer(self._module, samples)
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
    family: Family, learner: Learner, statistics: Tensor, depths: Tensor,
    scores: Mapping[str, Score],
) -> CoefficientFile:  # fmt: skip
    """Return the result, expanded from groups to tensors."""
    config, groups, models = family.models.config, family.groups, family.models
    stored, frozen = _names_on_disk(family)
    experts = []
    for one, folder in zip(config.models, map(Path, models.experts), strict=True):
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
        scores={name: asdict(score) for name, score in scores.items()},
        package=mergekit_ace.__version__,
    )
    return CoefficientFile(
        contents, learner(statistics, depths)[:, groups], statistics[:, groups], depths[groups],
        learner.state_dict(), groups,
    )  # fmt: skip


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
    table = scores_table(file, [len(teacher.splits["test"]) for teacher in family.teachers])
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


def scores_table(file: CoefficientFile, samples: Sequence[int]) -> str:
    """Return a Markdown table: mean accuracy of the experts' tasks, each one's, the loss.

    `samples` are how many each task is scored on; one number more for a rehearsal.
    """
    names = [*map(markdown_text, short_names([one.task for one in file.contents.experts]))]
    own = samples[: len(names)]
    rehearsal = len(samples) > len(own)
    names += ["rehearsal"] * rehearsal
    rows = [
        ["accuracy on the test split", "mean", *names, "loss"],
        ["samples", str(sum(own)), *map(str, samples), ""],
    ]
    for name, score in file.contents.scores.items():
        shares = [fmean(score["accuracy"]), *score["accuracy"]]
        shares += [score["rehearsal"]] * rehearsal
        loss = "–" if score["loss"] is None else f"{score['loss']:.4f}"
        rows.append([name, *(f"{share:.3f}" for share in shares), loss])
    return markdown_table(rows)


def merge_config(family: Family, file: CoefficientFile, path: Path) -> dict[str, Any]:
    """Return a config that merges with the coefficients at `path`, run in whatever folder."""
    contents, basis = file.contents, file.contents.basis
    base, *experts = _models_to_merge(family)
    config: dict[str, Any] = {
        "merge_method": METHODS_OF_BASES.get(basis, basis),
        "base_model": base,
        "dtype": "float32",
    }
    stored = str(next(iter(family.base.values())).dtype).removeprefix("torch.")
    if stored != "float32":
        config["out_dtype"] = stored
    if family.models.config.task in LanguageTask:
        config["tokenizer"] = {"source": "base"}
    config["models"] = [
        {"model": model, "parameters": {"task": one.task}}
        for model, one in zip(experts, contents.experts, strict=True)
    ]
    known = {name: value for name, value in contents.parameters.items() if value is not None}
    config["parameters"] = {**known, "coefficients": str(path.resolve())}
    return config


def _models_to_merge(family: Family) -> list[Any]:
    """Return base and experts; of classifiers backbones, of which mergekit takes what it finds."""
    config = family.models.config
    if not family.models.kind.has_heads:
        named = (config.base_model, *(expert.model for expert in config.models))
        parts = (one.split("+") for one in named)
        return ["+".join(os.path.abspath(p) if os.path.isdir(p) else p for p in one)
                for one in parts]  # fmt: skip
    base, *experts = (str(folder.resolve()) for folder in family.models.backbones)
    inferred = [
        ModelReference.model_validate(folder)
        .model_copy(update={"override_architecture": "Inferred"})
        .model_dump(exclude_none=True)
        for folder in (base, *experts)
    ]
    return [inferred[0] if lacks_embeddings(family.module) else base, *inferred[1:]]
