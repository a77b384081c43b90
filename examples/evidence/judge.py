# SPDX-License-Identifier: Apache-2.0
"""Judge merge methods: what do they keep of the experts, and what do they forget?

    python examples/evidence/judge.py --families llama smollm --methods ace tsv_m
    python examples/evidence/judge.py --prepare  # fetch all that needs a network
    python examples/evidence/judge.py --families all --cache FOLDER

`pip install '.[evidence]'` first. Texts, models and exams stay in ~/.cache/mergekit-ace/judge, so
that a stopped command goes on. From its results.json tables.py makes all tables and the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")  # or every model that is read draws a bar

import numpy as np
import torch
from dictionaries import DICTIONARIES, Dictionaries
from family import DEVICE, Family, Losses
from language import RATES, SHORT, LanguageFamily, prepare_packages
from methods import ROWS, Row, merge_family, put_merge, read_state
from scores import LARGER, SCALES, judge_merges
from tables import RESULTS, read_results

from mergekit_ace.files.saving import write_text

CACHE = Path.home() / ".cache" / "mergekit-ace" / "judge"
FAMILIES = (*RATES, *DICTIONARIES, "images")
GPU = DEVICE.type == "cuda"


def make_families(settings: argparse.Namespace) -> Iterator[Family]:
    """Yield every family that the command line asks for, at every seed and number of steps."""
    few = 2 if settings.small else None
    for name in settings.families:
        for seed in settings.seeds or range(3 if name not in RATES else 1 + GPU):
            if name in DICTIONARIES:
                yield Dictionaries(name, seed, settings.cache, few)
            elif name == "images":
                from images import Images  # needs more packages than the others

                yield Images(seed, settings.cache, few)
            else:
                given = settings.cache, settings.base
                yield from (LanguageFamily(name, seed, n, *given) for n in settings.steps)


class Judge:
    """A family with its base and experts in memory, and the exams that were taken already."""

    def __init__(self, family: Family, cache: Path):
        self.family, self.exams = family, cache / "exams"
        self.exams.mkdir(parents=True, exist_ok=True)
        self.model = family.load(family.base)
        self.base = read_state(self.model)
        self.experts = {}
        for name, folder in family.experts.items():
            state = read_state(family.load(folder))
            self.experts[name] = {tensor: state[tensor] for tensor in self.base}
        self.base_losses = self.examine("base", self.base, 1.0)
        self.expert_losses = {
            name: self.examine(f"expert {folder.name}", self.experts[name], 1.0)
            for name, folder in family.experts.items()
        }

    def examine(self, title: str, state: dict, scale: float) -> Losses:
        """Return the losses of W0 + λ (state − W0); take the exam unless it was taken."""
        name = f"{self.family.key} {self.family.exam} {title} {scale:g}.json"
        file = self.exams / name.replace("/", "-")
        if not file.exists():
            put_merge(self.model, self.base, state, scale)
            write_text(file, json.dumps(self.family.examine(self.model)))
        return json.loads(file.read_text())

    def judge(self, row: Row) -> dict[str, Any]:
        """Return the result of a row."""
        start = time.perf_counter()
        merged = merge_family(row, self.family, self.base, self.experts)
        seconds = time.perf_counter() - start
        title = f"{row.name} {row.code}"
        losses: dict[float, Losses] = {}
        scores: dict[str, Any] = {}
        for scale in (*SCALES, *LARGER):
            if scale in LARGER and scores["best_scale"] < max(losses):
                break
            losses[scale] = self.examine(title, merged, scale)
            scores = judge_merges(self.base_losses, self.expert_losses, losses)
        return {"merge_seconds": round(seconds, 1), **scores}

    def describe(self) -> dict[str, Any]:
        """Return the loss per token of base and experts on all texts."""

        def per_token(losses: Losses) -> dict[str, float]:
            sums = {text: np.sum(numbers, 0) for text, numbers in losses.items()}
            return {text: round(float(loss / count), 3) for text, (loss, count) in sums.items()}

        experts = {name: per_token(losses) for name, losses in self.expert_losses.items()}
        return {**self.family.facts, "base": per_token(self.base_losses), "experts": experts}


def machine() -> str:
    """Return the processor or GPU that the results come from."""
    if GPU:
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{torch.get_num_threads()} threads of {(names or [platform.processor()])[0]}"


def commit() -> str:
    """Return the commit of the checkout, with a + where a program differs from it."""
    git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True)
    head = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() or "unknown"
    return head + "+" * git(["git", "diff", "--quiet", "HEAD", "--", ":/*.py"]).returncode


def keep(result: dict[str, Any], path: Path) -> None:
    """Put a result into the file, in the place of an older one of the same family and method."""
    place = {identity(one): one for one in read_results(path)}
    place[identity(result)] = result
    rows = [json.dumps(place[key]) for key in sorted(place)]
    write_text(path, "[\n" + ",\n".join(rows) + "\n]\n")


def identity(result: dict[str, Any]) -> tuple[str, ...]:
    """Return what no two results have in common."""
    return tuple(str(result.get(name)) for name in ("family", "variant", "seed", "method"))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add, names = parser.add_argument, [row.name for row in ROWS]
    add("--families", nargs="+", choices=(*FAMILIES, "all"), default=["llama", "smollm"])
    add("--methods", nargs="+", choices=names, default=names, help="all by default")
    add("--seeds", nargs="+", type=int, help="3 of small families, 1 of SmolLM2, 2 on a GPU")
    add("--steps", nargs="+", type=int, default=[SHORT, 160] if GPU else [SHORT],
        help="that an expert of SmolLM2 is trained for")  # fmt: skip
    add("--base", help="folder or Hub name of another base model, which is not repaired; `raw` for "
        "SmolLM2 as its wheel has it")  # fmt: skip
    add("--cache", type=Path, default=CACHE, help="folder of all that is made once")
    add("--prepare", action="store_true", help="only fetch what needs a network")
    add("--results", type=Path, default=RESULTS, help="file of the results")
    add("--small", type=Path, help="folder of a trial with two steps a training, results included")
    settings = parser.parse_args()
    if settings.small:
        settings.results = settings.small / "results.json"
    settings.cache = (settings.small or settings.cache).resolve()
    settings.families = FAMILIES if "all" in settings.families else settings.families
    return settings


def main() -> None:
    settings = parse()
    if settings.prepare:
        prepare_packages(settings.cache, settings.base)
        return
    for family in make_families(settings):
        family.prepare()
        judge = Judge(family, settings.cache)
        head = {"family": family.name, "variant": family.variant, "seed": family.seed}
        tail = {"commit": commit(), "machine": machine(), "torch": torch.__version__}
        keep({**head, "facts": judge.describe(), **tail}, settings.results)
        known = {(*identity(one), one.get("code")) for one in read_results(settings.results)}
        for row in (row for row in ROWS if row.name in settings.methods):
            line = {**head, "method": row.name, "code": row.code}
            learns = row.samples and family.training_config(row.samples)
            mute = row.own_texts and not isinstance(family, LanguageFamily)
            if mute or (row.samples and not learns) or (*identity(line), row.code) in known:
                continue
            line |= judge.judge(row)
            keep(line | tail, settings.results)
            kept = "keeps {:.3f} ± {:.3f}".format(*line["at_budget"])
            print(f"{family.key}: {row.name} {kept} at λ = {line['best_scale']:g}", flush=True)


if __name__ == "__main__":
    main()
