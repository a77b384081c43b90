# SPDX-License-Identifier: Apache-2.0
"""The rows of the table, and how each is merged: by the commands that a user has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from experts import digest, digest_of_files
from sources import LENGTH, Texts
from transformers import AutoTokenizer

import mergekit_ace

# W0 + λ (merged − W0): the same values for every method; of these the best is looked for.
SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
# Ridges from the paper's heaviest down to none, by `--rows` alone.
EPSILONS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3)
WITHOUT_BASE = ("linear", "karcher")
MERGEKITS_OWN = (*WITHOUT_BASE, "task_arithmetic", "ties", "dare_ties", "sce")
EMBEDDINGS = "embed"  # part of the names of tables of embeddings
# What train.yml says beside models and data: steps are few, since each takes all experts' samples.
TRAINING = {
    "epochs": 100,
    "max_steps": 40,
    "batch_size": 2,
    "scheduler": {"kind": "linear"},
    "evaluate_every": 10,
}
LEARNERS: dict[str, dict[str, Any]] = {
    "statsmerging": {"training": {**TRAINING, "learning_rate": 1e-3}},
    "ace_relative": {
        "training": {**TRAINING, "learning_rate": 0.1},
        "basis": "ace_relative",
        "learner": {"input": "direct"},
    },
}


PACKAGE = Path(mergekit_ace.__file__).parent


@dataclass(frozen=True)
class Row:
    """One method with its parameters.

    Attributes:
        name: in the table.
        method: `merge_method`.
        parameters: of it.
        published: λ of its defaults, or of those that papers take.
        scaled: whether it is measured at its best λ as well.
        learn: settings of a `train.yml`; None for a method that learns nothing.
        samples: per expert, where it learns or reads what was measured on them; 0 where experts
            write them themselves.
        measured: parameter that names what `mergekit-ace statistics` has measured; empty without.
        calibrated: whether `mergekit-ace calibrate` follows, on texts that the models write.
    """

    name: str
    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    published: float = 1.0
    scaled: bool = True
    learn: Mapping[str, Any] | None = None
    samples: int = 0
    measured: str = ""
    calibrated: bool = False

    @property
    def code(self) -> list[str]:
        """What stands for the code that makes the row: that of mergekit, and of this package."""
        folders = [] if self.method in MERGEKITS_OWN else ["algebra", "methods"]
        if self.learn is not None or self.measured or self.calibrated:
            folders += ["coefficients", "training"]
        if self.calibrated:
            folders += ["calibration"]
        return [version("mergekit"), *(digest_of_files(PACKAGE / folder) for folder in folders)]

    @property
    def made_of(self) -> str:
        """What results of the row depend on, beside the models and λ."""
        learn = dict(self.learn or {})
        parameters = dict(self.parameters)
        where_from = (self.samples, learn, self.measured, self.calibrated)
        return digest(self.method, parameters, *where_from, self.code)


def layout(value: str) -> dict[str, Any]:
    """Return the parameter that has embeddings read in another way than by default."""
    return {"layout": [{"filter": EMBEDDINGS, "value": value}, {"value": "auto"}]}


ROWS = [
    Row("mean (linear)", "linear", {"weight": 1.0}, scaled=False),
    Row("task_arithmetic", "task_arithmetic", {"weight": 1.0}, published=0.4),
    Row("ties", "ties", {"weight": 1.0, "density": 0.2}),
    Row("dare_ties", "dare_ties", {"weight": 1.0, "density": 0.3}),
    Row("sce", "sce", {"select_topk": 0.1}),
    Row("karcher", "karcher"),
    Row("tsv_m", "tsv_m"),
    Row("iso_c", "iso_c"),
    # The authors' descent would take 4.5e14 operations: longer than all other merges together.
    Row("wudi (exact)", "wudi", {"solver": "exact"}),
    Row("ace", "ace"),
    Row("ace_relative", "ace_relative"),
]
# By `--rows` alone: how else embeddings may be read, of which side covariances may be (adapters are
# saved as full models here), centring and the prior, and what samples or own texts are worth.
ON_DEMAND = [
    Row("ace, embeddings averaged", "ace", layout("mean")),
    *(
        Row(f"{method}, from {side}", method, {"side": side})
        for method in ("ace", "ace_relative")
        for side in ("inputs", "outputs")
    ),
    Row("ace, paper's γ", "ace", {"heterogeneity": "gamma"}),
    Row("ace, rows not centred", "ace", {"centred": False}, scaled=False),
    Row("ace, without prior", "ace", {"structural_prior": False}, scaled=False),
    Row("ace_relative, rows centred", "ace_relative", {"centred": True}, scaled=False),
    Row("ace_relative, with prior", "ace_relative", {"structural_prior": True}, scaled=False),
    *(
        Row(f"ace_relative, embeddings {reading}", "ace_relative", layout(value))
        for reading, value in (("averaged", "mean"), ("as table", "table"), ("as matrix", "matrix"))
    ),
    *(
        Row(f"{method}, ε = {e:g}", method, {"epsilon": e}, scaled=False)
        for method in ("ace", "ace_relative")
        for e in EPSILONS
    ),
    *(
        Row(f"{method}, {samples} samples", method, scaled=False, learn=learn, samples=samples)
        for samples in (16, 64)
        for method, learn in LEARNERS.items()
    ),
    *(
        Row(
            f"{method}, 16 samples, hard labels",
            method,
            scaled=False,
            learn={**learn, "labels": "hard"},
            samples=16,
        )
        for method, learn in LEARNERS.items()
    ),
    *(
        Row(f"{method}, 16 samples", method, scaled=False, samples=16, measured="statistics")
        for method in ("regmean", "fisher")
    ),
    *(
        Row(
            f"{method}, mix {mix:g}, 16 samples",
            method,
            {"mix": mix},
            scaled=False,
            samples=16,
            measured="covariances",
        )
        for method in ("ace", "ace_relative")
        for mix in (0.25, 0.5, 1.0)
    ),
    *(
        Row(f"{method}, own texts", method, scaled=False, measured="covariances")
        for method in ("ace", "ace_relative")
    ),
    *(
        Row(f"calibrated {method}", method, scaled=False, calibrated=True)
        for method in ("ace", "tsv_m")
    ),
    Row("calibrated ace, from outputs", "ace", {"side": "outputs"}, scaled=False, calibrated=True),
    Row(
        "calibrated ace_relative, own texts",
        "ace_relative",
        scaled=False,
        measured="covariances",
        calibrated=True,
    ),
]


@dataclass(frozen=True)
class Merge:
    """A row at a λ, of certain experts: a checkpoint that is made when it is asked for.

    Attributes:
        row: of the table.
        scale: λ.
        base: folder of the base model.
        experts: their folders by name.
        texts: of the experts, which rows that learn draw samples from.
        folder: for all merges.
    """

    row: Row
    scale: float
    base: Path
    experts: Mapping[str, Path]
    texts: Mapping[str, Texts]
    folder: Path

    @cached_property
    def target(self) -> Path:
        """Folder of the checkpoint; its name says what it depends on."""
        members = [path.name for path in self.experts.values()]
        depends_on = digest(self.row.made_of, self.base.name, members, self.scale)
        kind = "learned-" * (self.row.learn is not None)
        return self.folder / f"{kind}{self.row.method}-{depends_on}"

    @property
    def seconds(self) -> float:
        """What the commands took."""
        return json.loads((self.target / "seconds.json").read_text())

    def make(self) -> Path:
        """Return the folder of the checkpoint; merge unless it is there."""
        if not self.target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            seconds = 0.0
            if self.row.learn is not None:
                config, seconds = self._learn()
            else:
                config = self.target.with_suffix(".yml")
                config.write_text(yaml.safe_dump(self.config(), sort_keys=False))
            partial = self.target.with_name(self.target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            seconds += run_merger(find_mergekit(), config, partial, "--random-seed", 0, "--quiet")
            if self.row.calibrated:
                partial, more = self._calibrate(partial)
                seconds += more
            (partial / "seconds.json").write_text(json.dumps(round(seconds, 1)))
            os.replace(partial, self.target)
            print(f"merged {self.row.name}, λ {self.scale:g}: {seconds:.0f} s", flush=True)
        return self.target

    def config(self) -> dict[str, Any]:
        """Return the config of a row without learned coefficients."""
        config: dict[str, Any] = {"merge_method": self.row.method}
        if self.row.method not in WITHOUT_BASE:
            config["base_model"] = str(self.base)
        config["models"] = [{"model": str(folder)} for folder in self.experts.values()]
        parameters = dict(self.row.parameters)
        if self.row.measured:
            parameters[self.row.measured] = str(self._measure())
        if self.scale != 1.0:
            parameters["lambda"] = self.scale
        if parameters:
            config["parameters"] = parameters
        return config | {"dtype": "float32", "out_dtype": "bfloat16"}

    def _learn(self) -> tuple[Path, float]:
        """Train coefficients; return the config that merges with them, and the seconds it took."""
        learned = self.target.with_name(self.target.name + "-coefficients")
        settings = {**self._data(learned), "compare": {"direct": False, "task_arithmetic": []},
                    **(self.row.learn or {})}  # fmt: skip
        config = learned / "train.yml"
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        command = [sys.executable, "-m", "mergekit_ace.cli", "train"]
        seconds = run_merger(*command, config, learned / "out")
        return learned / "out" / "merge.yml", seconds

    def _calibrate(self, merged: Path) -> tuple[Path, float]:
        """Calibrate a merge on texts that the models write; return the result's folder, seconds."""
        config = self.target.with_name(self.target.name + "-calibrate.yml")
        models = [{"model": str(folder)} for folder in self.experts.values()]
        settings = {"base_model": str(self.base), "merged_model": str(merged), "models": models}
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        result = self.target.with_name(self.target.name + "-calibrated")
        command = [sys.executable, "-m", "mergekit_ace.cli", "calibrate", config, result]
        seconds = run_merger(*command, "--overwrite")
        shutil.rmtree(merged)
        return result, seconds

    def _measure(self) -> Path:
        """Return the statistics of the experts; measure them unless they are there.

        They serve all rows, and stay when a merge is removed.
        """
        members = [path.name for path in self.experts.values()]
        made_of = digest(self.base.name, members, self.row.samples, self.row.code)
        folder = self.folder.with_name("statistics") / made_of
        kind = "fisher" if self.row.method == "fisher" else "covariances"
        config = folder / f"{kind}.yml"
        settings = {**self._data(folder), "measure": [kind]}
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        command = [sys.executable, "-m", "mergekit_ace.cli", "statistics"]
        run_merger(*command, config, folder / "out")  # soon done where it is there
        return folder / "out" / "statistics.json"

    def _data(self, folder: Path) -> dict[str, Any]:
        """Write samples into a folder; return what a `train.yml` says of models and data.

        They come from the validation part: from files that no expert has seen. For none there is no
        data.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        models = []
        for name, path in self.experts.items():
            if not self.row.samples:
                models.append({"model": str(path), "task": name})
                continue
            file = folder / f"{name}.jsonl"
            if not file.exists():  # a run would find its files changed
                ids, _ = self.texts[name].sequences("validation", tokenizer, self.row.samples)
                lines = tokenizer.batch_decode(ids, skip_special_tokens=True)
                file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
            data = {"path": str(file), "text": "text", "max_length": LENGTH}
            models.append({"model": str(path), "task": name, "data": data})
        return {"base_model": str(self.base), "models": models, "task": "causal-lm"}

    def remove(self) -> None:
        """Delete the checkpoint and what its making has left."""
        for path in self.folder.glob(f"{self.target.name}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def find_mergekit() -> str:
    """Return the path of the command mergekit-yaml."""
    beside = Path(sys.executable).parent  # that of this environment, even if not activated
    found = shutil.which("mergekit-yaml", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        sys.exit("mergekit-yaml is not installed: pip install .")
    return found


def run_merger(*command: object) -> float:
    """Run mergekit-yaml or mergekit-ace; return the seconds that it took."""
    start = time.perf_counter()
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        what = " ".join(map(str, command))
        if result.returncode < 0:  # by a signal
            sys.exit(f"{what} was killed, probably for want of memory.\n{result.stderr}")
        sys.exit(f"{what} failed:\n{result.stderr}")
    return time.perf_counter() - start
