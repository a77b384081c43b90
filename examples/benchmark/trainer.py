# SPDX-License-Identifier: Apache-2.0
"""Measure time and memory of a training step beside those of a plain one of one model.

python examples/benchmark/trainer.py
python examples/benchmark/trainer.py --basis components
python examples/benchmark/trainer.py --device cuda --dtype bfloat16 --size 1B

A Llama of random weights and its experts are written to a temporary folder first. Each number of
experts is measured in a process of its own: memory as what is not mapped from files (RssAnon) on a
CPU, as allocated on a GPU, in units of one model's weights above one model and its activations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from kernels import machine
from llamas import SIZES
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mergekit_ace.files import write_text
from mergekit_ace.training.mapped_weights import map_folder
from mergekit_ace.training.merged import MergedModel

EXPERTS = (2, 4, 8)


def new_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return a Llama of random weights, in the dtype and on the device of the options."""
    settings = dict(SIZES[options.size])
    if options.layers is not None:
        settings["num_hidden_layers"] = options.layers
    torch.manual_seed(0)
    with torch.device(options.device):
        return LlamaForCausalLM(LlamaConfig(**settings)).eval().to(getattr(torch, options.dtype))


def write_family(folder: Path, experts: int, options: argparse.Namespace) -> None:
    """Write the base and its experts, or their components, a file each."""
    model, basis = new_model(options).cpu(), options.basis
    for k in range(experts + 1):
        (folder / str(k)).mkdir()
        state = {n: p.detach() + 0.001 * k for n, p in model.named_parameters()}
        if k > 0 and basis == "components":
            state = {n: torch.full_like(p, 0.001 * k) for n, p in state.items()}
        save_file(state, folder / str(k) / "model.safetensors")


def weights(folder: Path, k: int) -> dict[str, torch.Tensor]:
    return map_folder(folder / str(k))


class PeakMemory:
    """The most memory that was in use while this context was entered, in bytes."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.peak = 0

    def __enter__(self) -> PeakMemory:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        if self.cuda:
            self.peak = torch.cuda.max_memory_allocated()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, anonymous())


def anonymous() -> int:
    """Return the resident memory of this process that no file backs, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell RssAnon")


def batch(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    shape, words = (options.batch, options.tokens), SIZES[options.size]["vocab_size"]
    ids = torch.randint(0, words, shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.to(options.device), "labels": ids.to(options.device)}


def timed(run: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_plain(options: argparse.Namespace) -> dict:
    """Memory of one model and its activations: forward passes that could be followed by backward
    ones.
    """
    model, inputs = new_model(options), batch(options)
    with PeakMemory(options.device) as memory:
        for _ in range(3):
            model(**inputs).loss.item()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"model_bytes": size, "peak_bytes": memory.peak}


def measure(folder: Path, experts: int, storage: str, options: argparse.Namespace) -> dict:
    """Return the memory of training steps, or their time beside that of plain ones."""
    device, inputs = options.device, batch(options)
    family = [weights(folder, k) for k in range(experts + 1)]
    names = list(family[0])
    components = options.basis == "components"
    merged = MergedModel(
        new_model(options),
        family[0],
        family[1:],
        names,
        storage,
        components=components,
    )
    coefficients = torch.full((experts, len(names)), 0.3)

    def step() -> None:
        merged.write(coefficients)
        merged.clear()
        for _ in range(experts):  # one backward pass per expert, as in training
            merged.module(**inputs).loss.backward()
            merged.collect()

    if not options.time:
        with PeakMemory(device) as memory:
            for _ in range(3):
                step()
        return {"peak_bytes": memory.peak}
    twin = new_model(options)

    def plain_step() -> None:
        for _ in range(experts):
            twin(**inputs).loss.backward()
        twin.zero_grad()

    timed(step, device), timed(plain_step, device)  # warms up
    pairs = [(timed(step, device), timed(plain_step, device)) for _ in range(options.rounds)]
    return {
        "seconds": statistics.median(ours for ours, _ in pairs),
        "ratio": statistics.median(ours / plain for ours, plain in pairs),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--basis", default="experts", choices=("experts", "components"))
    parser.add_argument("--batch", type=int, default=8, help="sequences in a backward pass")
    parser.add_argument("--tokens", type=int, default=64, help="in a sequence")
    parser.add_argument("--rounds", type=int, default=3, help="that are timed")
    parser.add_argument("--experts", nargs="+", type=int, default=EXPERTS)
    parser.add_argument("--size", choices=SIZES, default="53M", help="of the model")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--timed", nargs="+", type=int, help="experts; by default the middle one")
    parser.add_argument("--folder", type=Path, help="for the models, while it runs")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--time", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.child:
        folder, experts, storage = json.loads(options.child)
        plain = experts == 0
        result = (
            measure_plain(options) if plain else measure(Path(folder), experts, storage, options)
        )
        print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_family(Path(folder), max(options.experts), options)
        measure_all(folder, options)


def measure_all(folder: str, options: argparse.Namespace) -> None:
    """Measure and print memory, then time; the JSON file is written after each figure."""
    about = machine(options.device)
    known: dict = {"machine": about, "size": options.size, "memory": [], "time": []}

    def keep(kind: str, row: dict) -> None:
        known[kind].append(row)
        if options.json:
            write_text(options.json, json.dumps(known, indent=1))

    plain = child([folder, 0, ""])
    for experts in options.experts:
        ours = child([folder, experts, "disk"])
        above = (ours["peak_bytes"] - plain["peak_bytes"]) / plain["model_bytes"]
        keep("memory", {"experts": experts, "models": above, **ours})
        print(
            f"K = {experts}, disk: {above:.2f} models above one model and its activations, "
            f"{ours['peak_bytes'] / 1e6:.0f} MB in all",
            flush=True,
        )
    middle = options.experts[len(options.experts) // 2]
    timed = [(experts, "disk") for experts in options.timed or [middle]]
    for experts, storage in ((middle, "device"), *timed):
        result = child([folder, experts, storage], "--time")
        keep("time", {"experts": experts, "storage": storage, **result})
        print(
            f"K = {experts}, {storage}: a step takes {result['ratio']:.2f} times as long as a "
            f"plain one ({result['seconds']:.2f} s)",
            flush=True,
        )


def child(what: list, *flags: str) -> dict:
    """Measure in a process of its own; return the result, its last line."""
    command = [sys.executable, __file__, *sys.argv[1:], *flags, "--child", json.dumps(what)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    main()
