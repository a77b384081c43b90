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
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from kernels import print_machine, process_bytes, timed
from llamas import SIZES, make_config
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from mergekit_ace.files.saving import write_text
from mergekit_ace.training.mapped_weights import map_folder
from mergekit_ace.training.merged import MergedModel


def new_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return a Llama of random weights, in the dtype and on the device of the options."""
    changes = {"num_hidden_layers": options.layers} if options.layers else {}
    torch.manual_seed(0)
    with torch.device(options.device):
        model = LlamaForCausalLM(make_config(options.size, **changes))
    return model.eval().to(getattr(torch, options.dtype))


def write_family(folder: Path, experts: int, options: argparse.Namespace) -> None:
    """Write the base and its experts, a file each."""
    model = new_model(options).cpu()
    for k in range(experts + 1):
        (folder / str(k)).mkdir()
        state = {n: p.detach() + 0.001 * k for n, p in model.named_parameters()}
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


def measure(folder: str, experts: int, options: argparse.Namespace) -> dict:
    """Return memory and time of training steps, or of a plain model's where there is no expert.

    A plain model only reads: its memory is that of forward passes that backward ones could follow.
    """
    device, model = options.device, new_model(options)
    shape, words = (options.batch, options.tokens), SIZES[options.size]["vocab_size"]
    ids = torch.randint(words, shape, generator=torch.Generator().manual_seed(0)).to(device)

    def loss(module: LlamaForCausalLM) -> torch.Tensor:
        return module(input_ids=ids, labels=ids).loss

    if not experts:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        return {"model": size, "peak": peak_memory(lambda: loss(model).item(), device)}
    base, *family = (map_folder(Path(folder, str(k))) for k in range(experts + 1))
    merged = MergedModel(model, base, family, list(base))
    coefficients = torch.full((experts, len(base)), 0.3)

    def step() -> None:
        merged.write(coefficients)
        merged.clear()
        for _ in range(experts):  # one backward pass per expert, as in training
            loss(merged.module).backward()
            merged.collect()

    def plain_step() -> None:
        for _ in range(experts):
            loss(twin).backward()
        twin.zero_grad()

    peak = peak_memory(step, device)
    twin = new_model(options)
    pairs = [
        (timed(step, device)[0], timed(plain_step, device)[0]) for _ in range(options.rounds + 1)
    ][1:]  # the first one warms up
    seconds, ratio = median(a for a, _ in pairs), median(a / b for a, b in pairs)
    return {"peak": peak, "seconds": seconds, "ratio": ratio}


def measure_apart(*given: object) -> dict:
    """Measure in a process of its own; return the result, its last line."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", json.dumps(given)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=8, help="sequences in a backward pass")
    parser.add_argument("--tokens", type=int, default=64, help="in a sequence")
    parser.add_argument("--rounds", type=int, default=3, help="that are timed")
    parser.add_argument("--experts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--size", choices=SIZES, default="53M", help="of the model")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--folder", type=Path, help="for the models, while it runs")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, options)))
        return
    rows: list[dict] = []
    machine = print_machine(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_family(Path(folder), max(options.experts), options)
        plain = measure_apart(folder, 0)
        for experts in options.experts:
            row = measure_apart(folder, experts)
            above = (row["peak"] - plain["peak"]) / plain["model"]
            rows.append({"experts": experts, "models": above, **row})
            print(
                f"K = {experts}: {above:.2f} models above one model and its activations, "
                f"{row['peak'] / 1e6:.0f} MB in all; a step takes {row['ratio']:.2f} times as long "
                f"as a plain one ({row['seconds']:.2f} s)",
                flush=True,
            )
            if options.json:
                about = {"machine": machine, "size": options.size, "rows": rows}
                write_text(options.json, json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
