# SPDX-License-Identifier: Apache-2.0
"""Measure what the choices of StatsMerging are worth, on two small families.

python examples/training/statsmerging.py images       # pip install ".[examples]"
python examples/training/statsmerging.py languages
python examples/training/statsmerging.py images --only "rank 1" "rank 5" --seeds 0 1 2
python examples/training/statsmerging.py images --only "rank 1" --small try    # that it runs

Every row is a training of its own, kept in `results-FAMILY.jsonl`: rows that are there are not
repeated, so a run that was stopped goes on. A seed changes the learner's first weights and the
order of the samples; the family stays the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import yaml
from datasets import disable_progress_bars

from mergekit_ace.training.config import DistillConfig, TrainConfig
from mergekit_ace.training.distill import run_distillation
from mergekit_ace.training.run import run_training

HERE = Path(__file__).resolve().parent
STATISTICS = ("mean", "variance", "magnitude", "singular_values")
Settings = dict[str, Any]
Row = dict[str, Any]

# What every row starts from. Shared and concatenated learners want different learning rates.
COMMON: dict[str, Settings] = {
    "images": {"epochs": 10, "batch_size": 16, "learning_rate": 1e-3},
    "languages": {"epochs": 15, "batch_size": 32, "learning_rate": 1e-3},
}
DEFAULT: Settings = {"input": "concatenated", "activation": "identity"}


@dataclass(frozen=True)
class Study:
    """A family, and where its models, trainings and results are kept.

    Attributes:
        family: ``images`` or ``languages``.
        folder: of all that is written.
        steps: at most so many per training, to see that everything runs; None for all.
    """

    family: str
    folder: Path = HERE
    steps: int | None = None

    @property
    def models(self) -> Path:
        """The folder of the family's models and data."""
        return self.folder / f"family-{self.family}"

    @property
    def out(self) -> Path:
        """The folder of the latest training."""
        return self.folder / f"run-{self.family}"


def rows(family: str) -> dict[str, Settings]:
    """Return the table: a row's name and what it changes; `learner` changes `DEFAULT`."""
    table: dict[str, Settings] = {
        "layer-wise, concatenated": {},
        "layer-wise, shared": {"learner": {"input": "shared"}, "rate": 1e-2},
        "layer-wise, no learner": {"learner": {"input": "direct"}, "rate": 1e-2},
        "block-wise, concatenated": {"granularity": "block"},
        "task-wise, concatenated": {"granularity": "task", "rate": 1e-2},
        "layer-wise, concatenated, softmax": {"learner": {"activation": "softmax"}},
        "statistics of the weights": {"learner": {"statistics_of": "weights"}},
        "soft labels": {"labels": "soft"},
    }
    table |= {
        f"without {name.replace('_', ' ')}": {
            "learner": {"statistics": [other for other in STATISTICS if other != name]}
        }
        for name in STATISTICS
    }
    table |= {f"rank {rank}": {"learner": {"rank": rank}} for rank in (1, 2, 4, 5)}
    if family == "images":  # the languages' experts are always right: true labels are the hard ones
        table["true labels"] = {"labels": "true"}
    table |= {
        "transformer, shared": {
            "learner": {"input": "shared", "network": "transformer", "hidden": 64}
        },
        "transformer, concatenated": {"learner": {"network": "transformer", "hidden": 64}},
        "4 layers": {"learner": {"layers": 4}},
        "relu": {"learner": {"activation": "relu"}},
    }
    table |= {f"{share:.0%} of the data": {"share": share} for share in (0.5, 0.1, 0.01)}
    table["one heterogeneous expert"] = {"heterogeneous": True}
    return table


def settings(study: Study, change: Settings, seed: int = 0) -> Settings:
    """Return a `train.yml`, with the family that it names trained."""
    folder = study.models
    if study.family == "images":
        import images

        images.train_family(folder, steps=study.steps)
        base, task = str(folder / "base"), "image-classification"
        names = images.TASKS
        if change.get("heterogeneous"):
            distil_wines(study)
            names = (*names, "wines-student")
        experts = images.expert_configs(folder, names)
        counts = [len(images.splits(name)["train"][0]) for name in names]
    else:
        import languages

        own = languages.FAMILY if study.steps is None else study.folder / "quickstart"
        base, task = languages.prepare(folder, own, study.steps), "causal-lm"
        experts = languages.expert_configs(folder, own)
        if change.get("heterogeneous"):
            experts[0]["model"] = distil_gpt2(study, base)
        counts = [languages.LINES["train"]] * len(experts)
    common = COMMON[study.family]
    if "share" in change:
        samples = [max(round(change["share"] * count), 1) for count in counts]
        for expert, most in zip(experts, samples, strict=True):
            expert["data"]["samples"] = most
        # As many steps, and as many evaluations, as with all the data.
        every = -(-max(counts) // common["batch_size"])
        steps = common["epochs"] * every
        epochs = steps // -(-max(samples) // common["batch_size"]) + 1
        common = {**common, "epochs": epochs, "max_steps": steps, "evaluate_every": every}
        common["scheduler"] = {"step": epochs}
    compare: Settings = {"direct": False}
    if study.steps is not None:
        common = {**common, "max_steps": study.steps}
        compare["task_arithmetic"] = [0.3]
    rate = change.get("rate", common["learning_rate"])
    return {
        "base_model": base,
        "models": experts,
        "task": task,
        "granularity": change.get("granularity", "tensor"),
        "labels": change.get("labels", "hard"),
        "learner": DEFAULT | change.get("learner", {}),
        "training": common | {"learning_rate": rate, "seed": seed},
        "compare": compare,
    }


def distil_wines(study: Study) -> None:
    """Distil a convolutional network's knowledge into the base's architecture."""
    folder, epochs = study.models, 60 if study.steps is None else 1
    config = {
        "teacher": str(folder / "wines-cnn"),
        "student": str(folder / "base"),
        "task": "image-classification",
        "data": {"path": str(folder / "data" / "wines"), "image": "pixels"},
        "training": {
            "epochs": epochs,
            "batch_size": 16,
            "learning_rate": 5e-4,
        },
    }
    run_distillation(DistillConfig.model_validate(config), folder / "wines-student", quiet=True)


def distil_gpt2(study: Study, base: str) -> str:
    """Distil the first language of a GPT-2 into the Llama's architecture; the student's folder."""
    import languages

    folder, epochs = study.models, 10 if study.steps is None else 1
    count = languages.DISTILLED_LINES if study.steps is None else 64
    config = {
        "teacher": languages.train_gpt2(folder, study.steps),
        "student": base,
        "task": "causal-lm",
        "data": {"path": languages.write_lines(folder, count), "text": "line"},
        "training": {
            "epochs": epochs,
            "batch_size": 32,
            "learning_rate": 5e-4,
        },
    }
    student = folder / "gpt2-student"
    run_distillation(DistillConfig.model_validate(config), student, quiet=True)
    return str(student)


def run_row(study: Study, change: Settings, seed: int) -> dict[str, Any]:
    """Train, and return the scores of all merges of the final comparison."""
    shutil.rmtree(study.out, ignore_errors=True)
    start = time.perf_counter()
    config = TrainConfig.model_validate(settings(study, change, seed))
    file = run_training(config, study.out, quiet=True)
    return {"scores": file.contents.scores, "seconds": time.perf_counter() - start}


def run_ace(study: Study) -> dict[str, Any]:
    """Merge the same models by `ace`, without data, and score that on the same test data."""
    config = TrainConfig.model_validate(settings(study, {}))
    return {"scores": {"ACE": score_merge(study.out, config, "ace", {})}, "seconds": 0.0}


def score_merge(
    out: Path, config: TrainConfig, method: str, parameters: Settings
) -> dict[str, Any]:
    """Merge the models of the training in `out` by stock mergekit, and score the result."""
    from mergekit_ace.training.family import Family, ModelFolders
    from mergekit_ace.training.objective import Objective
    from mergekit_ace.training.state import TrainingRun

    merge = yaml.safe_load((out / "merge.yml").read_text())
    merge["merge_method"], merge["parameters"] = method, parameters
    for model in merge["models"]:
        model.pop("parameters")
    (out / "other.yml").write_text(yaml.safe_dump(merge))
    command = str(Path(sys.executable).parent / "mergekit-yaml")
    subprocess.run([command, out / "other.yml", out / "other", "--quiet"], check=True)
    run = TrainingRun(out, config.mixed_precision, quiet=True)
    models = ModelFolders.find(config, run)
    family_ = Family(config, models, run)
    objective = Objective(family_)
    heads = {"num_labels": 2, "ignore_mismatched_sizes": True} if models.kind.has_heads else {}
    merged = type(objective.merged.module).from_pretrained(out / "other", **heads)
    with torch.no_grad():
        for name in family_.names:
            objective.merged.module.get_parameter(name).copy_(merged.get_parameter(name))
    score = objective.evaluate("test")
    return {"loss": score.loss, "accuracy": score.accuracy}


def run_transfer(study: Study, seed: int) -> list[Row]:
    """Try a `shared` learner of two experts on two others that it never saw (A.5.2)."""
    shared: Settings = {"learner": {"input": "shared"}, "rate": 1e-2}
    first = settings(study, shared, seed)
    others = {**first, "models": first["models"][2:]}
    first["models"] = first["models"][:2]
    learner = study.folder / f"run-{study.family}-learner.safetensors"
    out = study.out
    shutil.rmtree(out, ignore_errors=True)
    run_training(TrainConfig.model_validate(first), out, quiet=True)
    shutil.copy(out / "coefficients.safetensors", learner)
    shutil.rmtree(out)
    config = TrainConfig.model_validate(others)
    scores = run_training(config, out, quiet=True).contents.scores
    scores["a learner of their own"] = scores.pop("StatsMerging")
    scores["the learner of the first two"] = score_merge(
        out, config, "statsmerging", {"learner": str(learner)}
    )
    return [{"name": name, "seed": seed, "scores": {name: score}} for name, score in scores.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=("images", "languages"))
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to run, by their names")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    parser.add_argument("--transfer", action="store_true", help="only: a learner on new experts")
    parser.add_argument("--fresh", action="store_true", help="forget known results")
    parser.add_argument(
        "--small", type=Path, metavar="FOLDER",
        help="see that it runs: two steps per training, everything in this folder",
    )  # fmt: skip
    arguments = parser.parse_args()
    names = rows(arguments.family)
    if unknown := set(arguments.only or ()) - set(names):
        parser.error(f"no row is called {'; '.join(sorted(unknown))}; there are {'; '.join(names)}")
    disable_progress_bars()
    study = Study(arguments.family)
    if arguments.small:
        study = Study(arguments.family, arguments.small.resolve(), steps=2)
    if arguments.transfer:
        found = [row for seed in arguments.seeds for row in run_transfer(study, seed)]
        print_table({(row["name"], row["seed"]): row for row in found}, simple=False)
        return
    path = study.folder / f"results-{study.family}.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    known = read_results(path)
    for seed in arguments.seeds:
        run_rows(study, seed, arguments.only, known, path)
    print_table(known)


def run_rows(
    study: Study, seed: int, only: list[str] | None, known: dict[tuple[str, int], Row], path: Path
) -> None:
    """Run the rows that are not known yet, and add them there and to the file."""
    for name, change in rows(study.family).items():
        if (name, seed) in known or (only and name not in only):
            continue
        results = {name: run_row(study, change, seed)}
        if name == "layer-wise, concatenated" and seed == 0:
            results["ACE (no data)"] = run_ace(study)
        for title, result in results.items():
            row = {"name": title, "seed": seed, **result}
            known[title, seed] = row
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{title} ({seed}): {mean(own_accuracy(row)):.3f}", flush=True)


def read_results(path: Path) -> dict[tuple[str, int], Row]:
    """Return what earlier runs found, by name and seed."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["name"], row["seed"]): row for row in map(json.loads, lines)}


def own_accuracy(row: Row) -> list[float]:
    """Return the accuracy of a row's own merge, per task."""
    return list(row["scores"].values())[-1]["accuracy"]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def print_table(known: dict[tuple[str, int], Row], *, simple: bool = True) -> None:
    """Print Markdown: mean over tasks and seeds, the seeds' range, the tasks."""
    first = next(iter(known.values()))
    runs = {
        name: [score["accuracy"]]
        for name, score in first["scores"].items()
        if simple and name != "StatsMerging"
    }
    for (name, _), row in known.items():
        runs.setdefault(name, []).append(own_accuracy(row))
    for name, accuracies in runs.items():
        totals = [mean(accuracy) for accuracy in accuracies]
        spread = f"{min(totals):.3f}–{max(totals):.3f}" if len(totals) > 1 else ""
        tasks = [f"{mean(list(task)):.3f}" for task in zip(*accuracies, strict=True)]
        print(f"| {name} | {mean(totals):.3f} | {spread} | {' | '.join(tasks)} |")


if __name__ == "__main__":
    main()
