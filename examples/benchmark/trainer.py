# SPDX-License-Identifier: Apache-2.0
"""Measure time and memory of a training step beside those of a plain one of one model.

python examples/benchmark/trainer.py
python examples/benchmark/trainer.py --basis components
python examples/benchmark/trainer.py --device cuda

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
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mergekit_ace.training.mapped_weights import map_tensors, stored_tensors
from mergekit_ace.training.merged import MergedModel

EXPERTS = (2, 4, 8)
LAYERS = 12


def new_model(layers: int = LAYERS, device: str = "cpu") -> LlamaForCausalLM:
    """Return a Llama in float32; with twelve layers it has 53 million parameters."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to(device)


def write_family(folder: Path, experts: int, basis: str, layers: int) -> None:
    """Write the base and its experts, or their components, a file each."""
    model = new_model(layers)
    for k in range(experts + 1):
        (folder / str(k)).mkdir()
        state = {n: p.detach() + 0.001 * k for n, p in model.named_parameters()}
        if k > 0 and basis == "components":
            state = {n: torch.full_like(p, 0.001 * k) for n, p in state.items()}
        save_file(state, folder / str(k) / "model.safetensors")


def weights(folder: Path, k: int) -> dict[str, torch.Tensor]:
    return map_tensors(stored_tensors(folder / str(k)))


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


def batch(device: str, size: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 8192, (size, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


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
    model = new_model(options.layers, options.device)
    inputs = batch(options.device, options.batch, options.tokens)
    with PeakMemory(options.device) as memory:
        for _ in range(3):
            model(**inputs).loss.item()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"model_bytes": size, "peak_bytes": memory.peak}


def measure(folder: Path, experts: int, storage: str, options: argparse.Namespace) -> dict:
    """Return the memory of training steps, or their time beside that of plain ones."""
    device = options.device
    inputs = batch(device, options.batch, options.tokens)
    family = [weights(folder, k) for k in range(experts + 1)]
    names = list(family[0])
    components = options.basis == "components"
    merged = MergedModel(
        new_model(options.layers, device),
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
    twin = new_model(options.layers, device)

    def plain_step() -> None:
        for _ in range(experts):
            twin(**inputs).loss.backward()
        twin.zero_grad()

    rounds = [(timed(step, device), timed(plain_step, device)) for _ in range(options.rounds)]
    pairs = rounds[1:]  # the first one warms up
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
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--experts", nargs="+", type=int, default=EXPERTS)
    parser.add_argument("--layers", type=int, default=LAYERS)
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
    with tempfile.TemporaryDirectory() as folder:
        write_family(Path(folder), max(options.experts), options.basis, options.layers)
        plain = child([folder, 0, ""])
        for experts in options.experts:
            ours = child([folder, experts, "disk"])
            above = (ours["peak_bytes"] - plain["peak_bytes"]) / plain["model_bytes"]
            print(
                f"K = {experts}, disk: {above:.2f} models above one model and its activations, "
                f"{ours['peak_bytes'] / 1e6:.0f} MB in all",
                flush=True,
            )
        middle = options.experts[len(options.experts) // 2]
        for storage in ("device", "disk"):
            result = child([folder, middle, storage], "--time")
            print(
                f"K = {middle}, {storage}: a step takes {result['ratio']:.2f} times as long as a "
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
