# SPDX-License-Identifier: Apache-2.0
"""Merge LoRA adapters by `mergekit-ace adapter`, by PEFT, and by a full merge of the base.

    python examples/benchmark/adapters.py --size 8B --folder adapters

writes adapters of random numbers on all seven linear layers of every block, and a base of which
only the config exists; nothing is downloaded. In every round the rows run in turn, each a process
of its own, and wall time and peak resident memory of the whole process are printed. A row is

* a merge method, for `mergekit-ace adapter`;
* `peft-linear`, `peft-ties`, `peft-svd` or `peft-cat`, for PEFT's `add_weighted_adapter`;
* `full-METHOD`, for `mergekit-yaml`, which merges every adapter into the base first.

`peft-svd` and full merges take long: `--layers 1` makes a model of one layer. What follows `--` is
passed on to `mergekit-ace adapter` and `mergekit-yaml`, for example `-- --cuda`.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import yaml
from checkpoint import MERGEKIT_YAML, compare
from kernels import print_machine
from llamas import SIZES, make_config, make_tensor, shapes, write_model
from safetensors.torch import save_file
from transformers import LlamaConfig

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(folder: Path, config: LlamaConfig, rank: int, seed: int) -> None:
    """Write an adapter of random numbers for a base."""
    factors, rng = {}, torch.Generator().manual_seed(seed)
    for name, (rows, *columns) in shapes(config).items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(TARGETS)):
            prefix = f"base_model.model.{module}"
            factors[f"{prefix}.lora_A.weight"] = 0.02 * torch.randn(rank, *columns, generator=rng)
            factors[f"{prefix}.lora_B.weight"] = 0.02 * torch.randn(rows, rank, generator=rng)
    known = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": TARGETS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(known), encoding="utf-8")


def write_family(folder: Path, options: argparse.Namespace) -> list[str]:
    """Write the adapters, and the base's config, or its weights as well where a row reads them.

    Returns the names of the adapters' folders. What is there already is left alone.
    """
    layers = {"num_hidden_layers": options.layers} if options.layers else {}
    config = make_config(options.size, tie_word_embeddings=False, **layers)
    base, names = folder / "base", [f"adapter{n}" for n in range(1, options.adapters + 1)]
    whole = any(row.startswith("full-") for row in options.rows)
    if whole and not list(base.glob("*.safetensors")):
        write_model(base, config, lambda name, shape: make_tensor(name, shape, 0, 1.0, "cpu"))
    config.save_pretrained(base)
    for seed, name in enumerate(names):
        if not (folder / name / "adapter_config.json").exists():
            write_adapter(folder / name, config, options.rank, seed)
    return names


def command_of(row: str, folder: Path, adapters: list[str], flags: list[str]) -> list[str]:
    """Return the command that a row is; write its `merge.yml`."""
    kind, _, method = row.partition("-")
    if kind == "peft":
        program = str(Path(__file__).resolve().with_name("weighted_adapter.py"))
        return [sys.executable, program, method, "merged", "base", *adapters]
    config = {
        "merge_method": method if kind == "full" else row,
        "base_model": "./base",
        "models": [{"model": f"./base+./{name}"} for name in adapters],
    }
    (folder / "merge.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if kind == "full":
        whole = ["--quiet", "--lora-merge-cache", "models", "--lora-merge-dtype", "bfloat16"]
        return [*MERGEKIT_YAML, "merge.yml", "merged", *whole, *flags]
    ours = [sys.executable, "-m", "mergekit_ace.cli", "adapter"]
    return [*ours, "merge.yml", "merged", "--quiet", *flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--adapters", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    usual = ["ace", "peft-linear", "peft-ties"]
    parser.add_argument("--rows", nargs="+", default=usual, metavar="ROW")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="for the adapters; stays")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("flags", nargs="*", help="of mergekit, after --")
    options = parser.parse_args()
    about = f"{options.size}-rank{options.rank}-{options.layers or 'all'}-layers"
    folder = options.folder.resolve() / about
    adapters = write_family(folder, options)
    known = {"machine": print_machine("cuda" if "--cuda" in options.flags else "cpu")}
    known |= {"size": options.size, "layers": options.layers}
    print(f"{about}, {options.adapters} adapters in float32")
    command = partial(command_of, folder=folder, adapters=adapters, flags=options.flags)
    compare(options.rows, command, folder, options.rounds, options.json, **known)


if __name__ == "__main__":
    main()
