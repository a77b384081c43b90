# SPDX-License-Identifier: Apache-2.0
"""Measure time and memory of a training step beside those of a plain one of one model.

    python examples/benchmark/trainer.py
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
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from kernels import machine, process_bytes, timed
from llamas import SIZES
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mergekit_ace.files.saving import write_text
from mergekit_ace.training.mapped_weights import map_folder
from mergekit_ace.training.merged import MergedModel


def new_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return a Llama of random weights, in the dtype and on the device of the options."""
    settings = dict(SIZES[options.size])
    settings["num_hidden_layers"] = options.layers or settings["num_hidden_layers"]
    torch.manual_seed(0)
    with torch.device(options.device):
        return LlamaForCausalLM(LlamaConfig(**settings)).eval().to(getattr(torch, options.dtype))


def write_family(folder: Path, experts: int, options: argparse.Namespace) -> None:
    """Write the base and its experts, or their components, a file each."""
    model = new_model(options).cpu()
    for k in range(experts + 1):
        (folder / str(k)).mkdir()
        share = 0.0 if k > 0 and options.basis == "components" else 1.0
        state = {n: share * p.detach() + 0.001 * k for n, p in model.named_parameters()}
        save_file(state, folder / str(k) / "model.safetensors")


def peak_memory(run: Callable[[], object], device: str) -> int:
    """Return the most bytes that are in use while something runs three times."""
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process_bytes("RssAnon"))

    watcher = threading.Thread(target=watch, daemon=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    watcher.start()
    for _ in range(3):
        run()
    done.set()
    watcher.join()
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak


def batch(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    shape, words = (options.batch, options.tokens), SIZES[options.size]["vocab_size"]
    ids = torch.randint(0, words, shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.to(options.device), "labels": ids.to(options.device)}


def measure_plain(options: argparse.Namespace) -> dict:
    """Return the memory of forward passes that could be followed by backward ones."""
    model, inputs = new_model(options), batch(options)
    peak = peak_memory(lambda: model(**inputs).loss.item(), options.device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"model_bytes": size, "peak_bytes": peak}


def measure(
    folder: Path, experts: int, storage: str, timing: bool, options: argparse.Namespace
) -> dict:
    """Return the memory of training steps, or their time beside that of plain ones."""
    device, inputs = options.device, batch(options)
    base, *family = (map_folder(folder / str(k)) for k in range(experts + 1))
    names, components = list(base), options.basis == "components"
    merged = MergedModel(new_model(options), base, family, names, storage, components=components)
    coefficients = torch.full((experts, len(names)), 0.3)

    def step() -> None:
        merged.write(coefficients)
        merged.clear()
        for _ in range(experts):  # one backward pass per expert, as in training
            merged.module(**inputs).loss.backward()
            merged.collect()

    if not timing:
        return {"peak_bytes": peak_memory(step, device)}
    twin = new_model(options)

    def plain_step() -> None:
        for _ in range(experts):
            twin(**inputs).loss.backward()
        twin.zero_grad()

    pairs = [
        (timed(step, device)[0], timed(plain_step, device)[0]) for _ in range(options.rounds + 1)
    ][1:]  # the first one warms up
    return {
        "seconds": statistics.median(ours for ours, _ in pairs),
        "ratio": statistics.median(ours / plain for ours, plain in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--basis", default="experts", choices=("experts", "components"))
    parser.add_argument("--batch", type=int, default=8, help="sequences in a backward pass")
    parser.add_argument("--tokens", type=int, default=64, help="in a sequence")
    parser.add_argument("--rounds", type=int, default=3, help="that are timed")
    parser.add_argument("--experts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--size", choices=SIZES, default="53M", help="of the model")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--timed", nargs="+", type=int, help="experts; by default the middle one")
    parser.add_argument("--folder", type=Path, help="for the models, while it runs")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, experts, storage, timing = options.child
        own = Path(folder), experts, storage, timing, options
        print(json.dumps(measure(*own) if experts else measure_plain(options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_family(Path(folder), max(options.experts), options)
        measure_all(folder, options)


def measure_all(folder: str, options: argparse.Namespace) -> None:
    """Measure and print memory, then time; the JSON file is written after each figure."""
    known: dict = {"machine": machine(options.device), "size": options.size}
    known |= {"memory": [], "time": []}

    def keep(kind: str, row: dict) -> None:
        known[kind].append(row)
        if options.json:
            write_text(options.json, json.dumps(known, indent=1))

    plain = child(folder, 0, "", False)
    for experts in options.experts:
        ours = child(folder, experts, "disk", False)
        above = (ours["peak_bytes"] - plain["peak_bytes"]) / plain["model_bytes"]
        keep("memory", {"experts": experts, "models": above, **ours})
        print(
            f"K = {experts}, disk: {above:.2f} models above one model and its activations, "
            f"{ours['peak_bytes'] / 1e6:.0f} MB in all",
            flush=True,
        )
    middle = options.experts[len(options.experts) // 2]
    on_disk = [(experts, "disk") for experts in options.timed or [middle]]
    for experts, storage in ((middle, "device"), *on_disk):
        result = child(folder, experts, storage, True)
        keep("time", {"experts": experts, "storage": storage, **result})
        print(
            f"K = {experts}, {storage}: a step takes {result['ratio']:.2f} times as long as a "
            f"plain one ({result['seconds']:.2f} s)",
            flush=True,
        )


def child(*given: object) -> dict:
    """Measure in a process of its own; return the result, its last line."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", json.dumps(given)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    main()
