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
import math
import shutil
import statistics
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from checkpoint import TIMED, measure
from kernels import print_machine
from llamas import INDEX, SIZES, make_config, make_tensor, shapes, write_model
from transformers import LlamaConfig

from mergekit_ace.files.saving import write_text

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DTYPES = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Family:
    """Adapters of one base, in `base`, `adapter1`, `adapter2`, … and `merge.yml` of a folder."""

    folder: Path
    config: LlamaConfig  # of the base
    count: int  # of adapters
    rank: int
    dtype: str  # of the factors

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters' folders."""
        return [f"adapter{number}" for number in range(1, self.count + 1)]

    def write(self, weights: bool) -> None:
        """Write what is not there yet; of the base its config, or its `weights` as well."""
        base = self.folder / "base"
        if weights and not (base / INDEX).exists():
            made = ((n, make_tensor(n, shape, 0, 1.0, "cpu")) for n, shape in shapes(self.config))
            write_model(base, self.config, made)
        self.config.save_pretrained(base)
        for number, name in enumerate(self.adapters):
            if not (self.folder / name / "adapter_config.json").exists():
                self._write_adapter(self.folder / name, number)

    def _write_adapter(self, folder: Path, number: int) -> None:
        """Write an adapter factor by factor: the memory of this process counts as its child's."""
        folder.mkdir(parents=True, exist_ok=True)
        header, end, dtype = {}, 0, getattr(torch, self.dtype)
        for name, shape in self._factors():
            place = [end, end := end + dtype.itemsize * math.prod(shape)]
            header[name] = {"dtype": DTYPES[self.dtype], "shape": shape, "data_offsets": place}
        text = json.dumps(header).encode()
        rng = torch.Generator().manual_seed(number)
        with open(folder / "adapter_model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, shape in self._factors():
                factor = 0.02 * torch.randn(shape, generator=rng)
                file.write(factor.to(dtype).view(torch.uint8).numpy())
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "base",
            "r": self.rank,
            "lora_alpha": 2 * self.rank,
            "target_modules": TARGETS,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")

    def _factors(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield names and shapes of the factors of an adapter."""
        for name, shape in shapes(self.config):
            module = name.removesuffix(".weight")
            if module.endswith("_proj"):
                yield f"base_model.model.{module}.lora_A.weight", (self.rank, shape[1])
                yield f"base_model.model.{module}.lora_B.weight", (shape[0], self.rank)


def command_of(row: str, family: Family, more: list[str]) -> list[str]:
    """Return the command that a row is, with more flags of mergekit; write its `merge.yml`."""
    kind, _, method = row.partition("-")
    if kind == "peft":
        program = str(Path(__file__).resolve().with_name("weighted_adapter.py"))
        return [sys.executable, program, method, "merged", "base", *family.adapters]
    config = {
        "merge_method": method if kind == "full" else row,
        "base_model": "./base",
        "models": [{"model": f"./base+./{name}"} for name in family.adapters],
    }
    (family.folder / "merge.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if kind == "full":
        flags = ["--quiet", "--lora-merge-cache", "models", "--lora-merge-dtype", "bfloat16"]
        return [*TIMED, "merge.yml", "merged", *flags, *more]
    ours = [sys.executable, "-m", "mergekit_ace.cli", "adapter"]
    return [*ours, "merge.yml", "merged", "--quiet", *more]


def run(row: str, family: Family, flags: list[str]) -> dict[str, float]:
    """Run a row; return seconds, and bytes of memory."""
    results = [family.folder / "merged", family.folder / "models"]
    for old in results:
        shutil.rmtree(old, ignore_errors=True)
    measured = measure(command_of(row, family, flags), family.folder)
    for new in results:
        shutil.rmtree(new, ignore_errors=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--adapters", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the adapters")
    usual = ["ace", "peft-linear", "peft-ties"]
    parser.add_argument("--rows", nargs="+", default=usual, metavar="ROW")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="for the adapters; stays")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("flags", nargs="*", help="of mergekit, after --")
    arguments = parser.parse_args()
    layers = arguments.layers or SIZES[arguments.size]["num_hidden_layers"]
    about = f"{arguments.size}-rank{arguments.rank}-{arguments.dtype}-{layers}-layers"
    config = make_config(arguments.size, tie_word_embeddings=False, num_hidden_layers=layers)
    own = config, arguments.adapters, arguments.rank, arguments.dtype
    family = Family(arguments.folder.resolve() / about, *own)
    family.write(weights=any(row.startswith("full-") for row in arguments.rows))
    machine = print_machine("cuda" if "--cuda" in arguments.flags else "cpu")
    adapters = f"{arguments.adapters} adapters of rank {arguments.rank} in {arguments.dtype}"
    print(f"{arguments.size}, {layers} layers, {adapters}")
    print("row              wall s  x first   RSS GB")
    found: dict[str, list[dict[str, float]]] = {row: [] for row in arguments.rows}
    for _ in range(arguments.rounds):
        for row in arguments.rows:
            found[row].append(run(row, family, arguments.flags))
            print_row(row, found[row][-1:], found[arguments.rows[0]][-1:])
            if arguments.json:
                known = {"machine": machine, "size": arguments.size, "layers": layers}
                write_text(arguments.json, json.dumps({**known, "rows": found}, indent=1))
    if arguments.rounds > 1:
        print("medians")
        for row in arguments.rows:
            print_row(row, found[row], found[arguments.rows[0]])


def print_row(row: str, rounds: list[dict[str, float]], first: list[dict[str, float]]) -> None:
    """Print medians over rounds; the ratio to the first row is that of one round."""
    wall = statistics.median(one["wall"] for one in rounds)
    ratio = statistics.median(a["wall"] / b["wall"] for a, b in zip(rounds, first, strict=True))
    memory = max(one["resident_bytes"] for one in rounds) / 1e9
    print(f"{row:14} {wall:8.1f} {ratio:8.2f} {memory:8.2f}", flush=True)


if __name__ == "__main__":
    main()
