# SPDX-License-Identifier: Apache-2.0
"""What the choices of StatsMerging are worth, on two small families that are trained here.

python examples/statsmerging/statsmerging.py images       # pip install scikit-learn
python examples/statsmerging/statsmerging.py languages
python examples/statsmerging/statsmerging.py images --only "rank 1" "rank 5"

Every row is a training of its own, kept in `results-FAMILY.jsonl`: rows that are there are not
repeated, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import yaml
from datasets import disable_progress_bars

from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.distill import run_distillation
from mergekit_ace.training.distill_config import DistillConfig
from mergekit_ace.training.run import run_training

HERE = Path(__file__).resolve().parent
STATISTICS = ("mean", "variance", "magnitude", "singular_values")
Settings = dict[str, Any]

# What every row starts from. Shared and concatenated learners want different learning rates.
COMMON: dict[str, Settings] = {
    "images": {"epochs": 10, "batch_size": 16, "learning_rate": 1e-3},
    "languages": {"epochs": 15, "batch_size": 32, "learning_rate": 1e-3},
}
DEFAULT: Settings = {"input": "concatenated", "activation": "identity"}


def rows(family: str) -> dict[str, Settings]:
    """The table: a row's name and what it changes; `learner` changes `DEFAULT`."""
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
    if family == "languages":
        return table
    table |= {
        f"without {name.replace('_', ' ')}": {
            "learner": {"statistics": [other for other in STATISTICS if other != name]}
        }
        for name in STATISTICS
    }
    table |= {f"rank {rank}": {"learner": {"rank": rank}} for rank in (1, 2, 4, 5)}
    table |= {
        "true labels": {"labels": "true"},
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


def settings(family: str, change: Settings) -> Settings:
    """A `train.yml`."""
    folder = HERE / f"family-{family}"
    if family == "images":
        import images

        images.train_family(folder)
        base, task = str(folder / "base"), "image-classification"
        names = images.TASKS
        if change.get("heterogeneous"):
            distil_wines(folder)
            names = (*names, "wines-student")
        experts = images.expert_configs(folder, names)
        counts = [len(images.splits(name)["train"][0]) for name in names]
    else:
        import languages

        base, task = languages.prepare(folder), "causal-lm"
        experts = languages.expert_configs(folder)
        counts = [languages.LINES["train"]] * len(experts)
    common = COMMON[family]
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
    return {
        "base_model": base,
        "models": experts,
        "task": task,
        "granularity": change.get("granularity", "tensor"),
        "labels": change.get("labels", "hard"),
        "learner": DEFAULT | change.get("learner", {}),
        "training": common | ({"learning_rate": change["rate"]} if "rate" in change else {}),
        "compare": {"direct": False},
    }


def distil_wines(folder: Path) -> None:
    """A convolutional network's knowledge into the base's architecture."""
    config = {
        "teacher": str(folder / "wines-cnn"),
        "student": str(folder / "base"),
        "task": "image-classification",
        "data": {"path": str(folder / "data" / "wines"), "image": "pixels"},
        "training": {"epochs": 60, "batch_size": 16, "learning_rate": 5e-4},
    }
    run_distillation(DistillConfig.model_validate(config), folder / "wines-student", quiet=True)


def run_row(family: str, change: Settings) -> dict[str, Any]:
    """Train; the scores of all merges of the final comparison."""
    out = HERE / f"run-{family}"
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    config = TrainConfig.model_validate(settings(family, change))
    file = run_training(config, out, quiet=True)
    return {"scores": file.contents.scores, "seconds": time.perf_counter() - start}


def run_ace(family: str) -> dict[str, Any]:
    """Data-free ACE of the same models, scored on the same test data."""
    from mergekit_ace.training.family import Family, Models
    from mergekit_ace.training.processes import new_accelerator
    from mergekit_ace.training.state import RunFolder

    out = HERE / f"run-{family}"
    config = TrainConfig.model_validate(settings(family, {}))
    merge = yaml.safe_load((out / "merge.yml").read_text())
    merge["merge_method"] = "ace"
    merge.pop("parameters")
    for model in merge["models"]:
        model.pop("parameters")
    (out / "ace.yml").write_text(yaml.safe_dump(merge))
    command = str(Path(sys.executable).parent / "mergekit-yaml")
    subprocess.run([command, out / "ace.yml", out / "ace", "--quiet"], check=True)
    accelerator, folder = new_accelerator(config.mixed_precision), RunFolder(out)
    models = Models.find(config, folder, accelerator)
    family_ = Family.prepare(config, models, folder, accelerator, quiet=True)
    session = family_.session(accelerator)
    merged = (
        type(session.merged.module).from_pretrained(
            out / "ace", num_labels=2, ignore_mismatched_sizes=True
        )
        if models.kind.has_heads
        else type(session.merged.module).from_pretrained(out / "ace")
    )
    with torch.no_grad():
        for name in family_.names:
            session.merged.module.get_parameter(name).copy_(merged.get_parameter(name))
    score = session.evaluate("test")
    return {"scores": {"ACE": {"loss": score.loss, "accuracy": score.accuracy}}, "seconds": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=("images", "languages"))
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to run, by their names")
    parser.add_argument("--fresh", action="store_true", help="forget known results")
    arguments = parser.parse_args()
    disable_progress_bars()
    path = HERE / f"results-{arguments.family}.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    known = {}
    if path.exists():
        known = {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}
    for name, change in rows(arguments.family).items():
        if name in known or (arguments.only and name not in arguments.only):
            continue
        results = {name: run_row(arguments.family, change)}
        if name == "layer-wise, concatenated":
            results["ACE (no data)"] = run_ace(arguments.family)
        for title, result in results.items():
            known[title] = {"name": title, **result}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[title]) + "\n")
            print(f"{title}: {mean(known[title]):.3f} in {result['seconds']:.0f} s", flush=True)
    print_table(known)


def mean(row: dict[str, Any]) -> float:
    """Mean accuracy of a row's own merge."""
    accuracy = list(row["scores"].values())[-1]["accuracy"]
    return sum(accuracy) / len(accuracy)


def print_table(known: dict[str, dict[str, Any]]) -> None:
    """Markdown: the simple merges first."""
    first = next(iter(known.values()))
    lines = {name: score for name, score in first["scores"].items() if name != "StatsMerging"}
    lines |= {name: list(row["scores"].values())[-1] for name, row in known.items()}
    for name, score in lines.items():
        shares = " | ".join(f"{share:.3f}" for share in score["accuracy"])
        total = sum(score["accuracy"]) / len(score["accuracy"])
        print(f"| {name} | {total:.3f} | {shares} |")


if __name__ == "__main__":
    main()
