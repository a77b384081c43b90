# SPDX-License-Identifier: Apache-2.0
"""Train three small LoRA adapters, merge them both ways by one config, compare the results.

    python examples/adapters/run.py            # train once, merge, compare
    python examples/adapters/run.py --fresh    # forget what was trained first

`mergekit-ace adapter` makes an adapter. `mergekit-yaml` merges each adapter into the base first and
makes a full model, whose weights are those of the base with the merged adapter.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

import torch
from dictionaries import NEW_LANGUAGES, OLD_LANGUAGES
from family import Recipe, answers, start_model, train_family
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

HERE = Path(__file__).resolve().parent
# All paths are relative to this folder, as those of ace.yml and of the adapters' configs are.
FAMILY, OUTPUT = Path("family"), Path("output")
LANGUAGES = NEW_LANGUAGES[:3]
RANK = 16
ADAPTERS = {
    language: Recipe(language, steps=400, peak=1e-3, seed=1 + n)
    for n, language in enumerate(LANGUAGES)
}
# The commands, by what they make.
FULL = "mergekit.scripts.run_yaml --lora-merge-cache output/models --lora-merge-dtype float32"
MERGES = {
    "full": FULL.split(),
    "adapter": ["mergekit_ace.cli", "adapter"],
    f"adapter-{RANK}": ["mergekit_ace.cli", "adapter", "--rank", str(RANK)],
}


def start_adapter(base: Path, recipe: Recipe) -> PreTrainedModel | PeftModel:
    """Return the base before its training, or with a new adapter."""
    if not recipe.new:
        return start_model(base, recipe)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, lora)


def merge_all() -> None:
    """Merge by every command, and print its seconds, the start of Python included."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    for name, (module, *arguments) in MERGES.items():
        command = [sys.executable, "-m", module, *arguments, "ace.yml", str(OUTPUT / name)]
        start = time.perf_counter()
        result = subprocess.run([*command, "--quiet"], capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
        print(f"{OUTPUT / name} took {time.perf_counter() - start:.0f} s", flush=True)


def weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, or of the base with an adapter merged into it."""
    adapter = (folder / "adapter_config.json").exists()
    base = FAMILY / "base" if adapter else folder
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return model.state_dict()


def distance(folder: Path, other: Path) -> float:
    """Return ‖W - W'‖ / ‖W' - W0‖ over all weights of two results."""
    ours, theirs, base = weights(folder), weights(other), weights(FAMILY / "base")
    away = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in base)
    change = sum(float((theirs[name] - base[name]).double().square().sum()) for name in base)
    return (away / change) ** 0.5


def report(rows: dict[str, Path]) -> None:
    """Print right answers by row, and how far the merged adapters are from the full merge."""
    given = {}
    print("\n" + f"{'accuracy':<24}" + "".join(f"{t:>10}" for t in (*LANGUAGES, "old", "MB")))
    for row, folder in rows.items():
        given[row] = answers(folder)
        scores = {
            language: (guessed == right).float().mean().item()
            for language, (guessed, right) in given[row].items()
        }
        values = [scores[language] for language in LANGUAGES]
        values.append(sum(scores[language] for language in OLD_LANGUAGES) / len(OLD_LANGUAGES))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
        print(f"{row:<24}" + "".join(f"{value:>10.3f}" for value in values) + f"{size:>10.1f}")
    print()
    for row in ("merged adapter", f"merged, rank {RANK}"):
        pairs = [(given[row][name][0], given["full merge"][name][0]) for name in given[row]]
        same = sum(int((ours == theirs).sum()) for ours, theirs in pairs)
        count = sum(len(ours) for ours, _ in pairs)
        print(
            f"{row}: {distance(rows[row], rows['full merge']):.1e} from the full merge (of its "
            f"change), {same} of {count} answers the same"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="train the family anew")
    arguments = parser.parse_args()
    os.chdir(HERE)
    start = time.perf_counter()
    if arguments.fresh:
        shutil.rmtree(FAMILY, ignore_errors=True)
    train_family(FAMILY, ADAPTERS, start_adapter)
    merge_all()
    rows = {"base": FAMILY / "base"}
    rows |= {f"adapter {language}": FAMILY / language for language in LANGUAGES}
    rows |= {"full merge": OUTPUT / "full", "merged adapter": OUTPUT / "adapter"}
    report({**rows, f"merged, rank {RANK}": OUTPUT / f"adapter-{RANK}"})
    print(f"\n{time.perf_counter() - start:.0f} s in all; the results are in {HERE / OUTPUT}")


if __name__ == "__main__":
    main()
