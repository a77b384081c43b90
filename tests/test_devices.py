# SPDX-License-Identifier: Apache-2.0
"""All that computes, on a GPU: the one that is there, or else an imitated one.

An imitated GPU shows where tensors of two devices meet, and where memory runs out; what only a real
one can show comes last.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import ace_config, save_family, tiny_llama
from coefficient_files import make_file
from commands import command
from covering import covered
from imitated_gpu import GPU, imitated_gpu
from matrices import HETEROGENEOUS, REFINED, family, merge_matrix
from measured_files import Kind, needs_statistics, random_covariance, write_statistics
from mergekit.merge_methods import merge_tensors
from reference import naive_ace, task_vector_error
from safetensors.torch import load_file
from torch import Tensor

from mergekit_ace import AceOptions
from mergekit_ace.algebra.ace import PlusOptions
from mergekit_ace.algebra.ridge import TOLERANCE
from mergekit_ace.methods.base import TaskVectorMethod, first_that_fits
from mergekit_ace.plugin import our_methods

PARAMETERS = {"statsmerging": {"weight": [0.2, 0.3, 0.4]}, "wudi": {"steps": 5}}


def parameters_of(method: TaskVectorMethod, tensors: list[Tensor], folder: Path) -> dict[str, Any]:
    """Return what a method needs beside its defaults: made-up statistics of the tensor `w`."""
    if not needs_statistics(method):
        return dict(PARAMETERS.get(method.spec.name, {}))
    rng, experts, shape = torch.Generator().manual_seed(1), (1, 2, 3), tensors[0].shape
    fisher = [torch.rand(shape, generator=rng) for _ in experts]
    measured: dict[Kind, dict[str, list[Tensor]]] = {"fisher": {"w": fisher}, "covariance": {}}
    if len(shape) == 2 and 0 not in shape:
        measured["covariance"] = {"w": [random_covariance(rng, shape[1]) for _ in experts]}
    return {"statistics": write_statistics(folder / "statistics", measured, [*map(str, experts)])}


def families(shape: tuple[int, ...], stored: torch.dtype = torch.float32) -> list[Tensor]:
    """A base and three experts, of different strength where they are matrices."""
    rng = torch.Generator().manual_seed(2)
    if len(shape) == 2:
        base, experts = family(rng, *shape, 3, scales=HETEROGENEOUS)
    else:
        base, *deltas = torch.randn(4, *shape, generator=rng)
        experts = [base + 0.01 * delta for delta in deltas]
    return [tensor.to(stored) for tensor in (base, *experts)]


def is_near(merged: Tensor, expected: Tensor, base: Tensor) -> bool:
    """Up to what rounding exchanges of neighbouring singular directions at a cut between them."""
    return bool((merged.cpu() - expected).norm() <= 5e-3 * (expected - base).norm())


@covered(
    shape=[(48, 200), (90, 80), (200, 60), (60, 150)],
    dtype=["float32", "float64"],
    switch=["never", "always"],
    scale=["spectrum", "absolute"],
    stored=[torch.float32, torch.bfloat16],
)
def test_every_form_agrees_with_the_cpu(gpu, shape, dtype, switch, scale, stored):
    tensors = families(shape, stored)
    options = AceOptions(
        adaptive_normalization=switch,
        spectral_refinement=switch,
        epsilon_scale=scale,
        compute_dtype=dtype,
    )
    expected, _ = merge_matrix(tensors[0], tensors[1:], options=options)
    base, *experts = (tensor.to(gpu) for tensor in tensors)
    merged, _ = merge_matrix(base, experts, options=options)
    assert merged.device == gpu
    bar = 5e-4 if dtype == "float32" else 1e-8
    assert task_vector_error(merged.cpu(), expected, tensors[0]) <= bar


@pytest.mark.parametrize("shape", [(60, 50), (7,), (3, 8, 9), (0, 4)])
@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_method(gpu, tmp_path, method, shape):
    """Also inside of `with torch.device(…)`, as `--multi-gpu` merges."""
    name, tensors = method.spec.name, families(shape)
    parameters = parameters_of(method, tensors, tmp_path)
    expected = merge_tensors(tensors, name, base_index=0, parameters=parameters, name="w")
    given = [tensor.to(gpu) for tensor in tensors]
    parameters["report"] = str(tmp_path / "lines.jsonl")
    for context in (nullcontext(), torch.device(gpu)):
        with context:
            merged = merge_tensors(given, name, base_index=0, parameters=parameters, name="w")
        assert merged.device == gpu
        assert is_near(merged, expected, tensors[0])
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines] == [name] * 2


@pytest.mark.parametrize("key", [None, "coefficients", "learner"])
def test_checkpoints(gpu, tmp_path, mergekit_yaml, key):
    """And coefficients that are learned, or predicted from statistics of the tensors."""
    paths = save_family(tiny_llama(num_hidden_layers=1), tmp_path)
    config = ace_config(paths)
    if key:
        names = sorted(load_file(Path(paths[0]) / "model.safetensors"))
        make_file(names, paths[1:], granularity="tensor").save(tmp_path / "c.safetensors")
        parameters = {key: str(tmp_path / "c.safetensors")}
        config = ace_config(paths, merge_method="statsmerging", parameters=parameters)
    expected = load_file(mergekit_yaml(config, out="cpu") / "model.safetensors")
    merged = mergekit_yaml(config, "--device", str(gpu), out="gpu")
    for name, tensor in load_file(merged / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)


def test_inspections_of_checkpoints(monkeypatch, tmp_path):
    config, norms = tmp_path / "inspected.yml", []
    paths = save_family(tiny_llama(num_hidden_layers=1), tmp_path)
    config.write_text(yaml.safe_dump(ace_config(paths)))
    for device in ("cpu", GPU):
        with imitated_gpu(monkeypatch):
            command("inspect", config, tmp_path / str(device), "--quiet", "--device", device)
        text = (tmp_path / str(device) / "report.jsonl").read_text()
        norms.append([json.loads(line)["norm"] for line in text.splitlines()])
    torch.testing.assert_close(*map(torch.tensor, norms))


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
@pytest.mark.parametrize(
    ("on_cpu", "error"), [("illegal memory access", "illegal"), (None, "no memory left for")]
)
def test_devices_without_memory(message, on_cpu, error):
    """Libraries raise errors of other kinds; no other error may be taken for one of memory."""

    def work(device: torch.device) -> str:
        raise RuntimeError(message if device == GPU else on_cpu or message)

    with pytest.raises(RuntimeError, match=error):
        first_that_fits(GPU, work, "ace", "a.weight")


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_full_devices(monkeypatch, caplog, tmp_path, method):
    """Beside the inputs there is room for so many matrices in float32.

    Where there is enough, the GPU is seldom waited for: numbers that the CPU asks for do not
    multiply with rows, steps or experts' entries.
    """
    name, tensors = method.spec.name, families((300, 290))
    parameters = parameters_of(method, tensors, tmp_path)
    expected = merge_tensors(tensors, name, base_index=0, parameters=parameters, name="w")
    with imitated_gpu(monkeypatch) as device:
        given = [tensor.to(GPU) for tensor in tensors]
        inputs, device.waits = device.used, 0
        for room in (math.inf, 2.5, 1.0, 0.0):
            device.memory = inputs + room * 4 * tensors[0].numel() + 2048
            caplog.clear()
            merged = merge_tensors(given, name, base_index=0, parameters=parameters, name="w")
            if room == math.inf:
                assert 0 < device.waits <= 100
                assert not caplog.messages
                parameters["report"] = str(tmp_path / "lines.jsonl")
            assert is_near(merged, expected, tensors[0])
            del merged  # nor may it take room
    assert [text.startswith(f"{name}: tensor w does not fit") for text in caplog.messages] == [True]
    assert "on the CPU" in caplog.text


REAL = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FLAGS = [["--cuda"], ["--cuda", "--read-to-gpu"], ["--cuda", "--low-cpu-memory"], ["--multi-gpu"]]
LARGE = pytest.mark.parametrize("shape", [(400, 3000), (1600, 1500), (3000, 800)])


@REAL
@pytest.mark.usefixtures("settings_put_back")
@pytest.mark.parametrize("switches", [dict.fromkeys(REFINED, "never"), REFINED])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@LARGE
def test_float32_is_enough_also_where_the_caller_allows_tf32(shape, stored, switches):
    base, *experts = (tensor.cuda() for tensor in families(shape, stored))
    exact, _ = merge_matrix(base, experts, options=AceOptions(**switches))
    torch.set_float32_matmul_precision("high")
    left = torch.randn(512, 512, device="cuda")
    rounded = left @ left
    merged, _ = merge_matrix(base, experts, options=AceOptions(**switches))
    assert torch.get_float32_matmul_precision() == "high"
    assert not torch.allclose(rounded.double(), left.double() @ left.double(), atol=1e-4), "no TF32"
    assert merged.dtype == torch.float32
    assert task_vector_error(merged, exact, base) <= TOLERANCE / 4
    with torch.device("cuda"):
        expected = naive_ace(base, experts, **switches)
    bar = 5e-3 if switches is REFINED else 2 * TOLERANCE  # directions at the cut are exchanged
    assert task_vector_error(merged, expected, base) <= bar


@REAL
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
@pytest.mark.parametrize("method", ["ace", "ace_plus", "tsv_m"])
def test_flags_of_mergekit(tmp_path, mergekit_yaml, method, flags):
    config = ace_config(save_family(tiny_llama(), tmp_path), merge_method=method)
    expected = load_file(mergekit_yaml(config, out="cpu") / "model.safetensors")
    merged = load_file(mergekit_yaml(config, *flags, out="gpu") / "model.safetensors")
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "more"), [(AceOptions(), 0), (AceOptions(**REFINED), 48), (PlusOptions(), 25)]
)
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("shape", [(48, 380), (90, 80), (200, 60), (60, 150)])
def test_commands_that_a_merge_takes(monkeypatch, shape, count, options, more):
    """Twelve an expert, forty beside, and more to refine or flatten; the CPU waits twice."""
    base, experts = family(torch.Generator().manual_seed(2), *shape, count, scales=[1.0] * count)
    with imitated_gpu(monkeypatch) as device:
        given = [tensor.to(GPU) for tensor in (base, *experts)]
        device.commands = device.waits = 0
        merge_matrix(given[0], given[1:], options=options)
        assert device.commands <= 12 * count + 40 + more
        assert device.waits <= 2
