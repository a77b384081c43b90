# SPDX-License-Identifier: Apache-2.0
"""What only a real GPU can show; test_devices.py runs on it, too, where there is one."""

from __future__ import annotations

import pytest
import torch
from checkpoints import ace_config, save_family, tiny_llama
from matrices import HETEROGENEOUS, family
from reference import naive_ace, task_vector_error
from safetensors.torch import load_file
from torch import Tensor

from mergekit_ace import AceOptions, merge_matrix
from mergekit_ace.algebra.ridge import TOLERANCE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SWITCHES = pytest.mark.parametrize("switch", ["never", "always"])
SHAPES = pytest.mark.parametrize("shape", [(400, 3000), (1600, 1500), (3000, 800)])


def experts_on(device: str, rows: int, columns: int, stored=torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(4)
    base, experts = family(rng, rows, columns, 3, scales=HETEROGENEOUS)
    return [tensor.to(device, stored) for tensor in (base, *experts)]


def branch(switch: str) -> AceOptions:
    return AceOptions(adaptive_normalization=switch, spectral_refinement=switch)


@pytest.fixture
def precision_put_back():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision_put_back")
@SWITCHES
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@SHAPES
def test_matrices_that_are_merged_in_float32(shape, stored, switch):
    """Also where the caller allows TF32."""
    base, *experts = experts_on("cuda", *shape, stored)
    options = branch(switch)
    exact, _ = merge_matrix(base, experts, options=options)
    torch.set_float32_matmul_precision("high")
    left = torch.randn(512, 512, device="cuda")
    rounded = left @ left
    merged, _ = merge_matrix(base, experts, options=options)
    assert torch.get_float32_matmul_precision() == "high"
    assert not torch.allclose(rounded.double(), left.double() @ left.double(), atol=1e-4), "no TF32"
    assert merged.dtype == torch.float32
    assert task_vector_error(merged, exact, base) <= TOLERANCE / 4
    with torch.device("cuda"):
        expected = naive_ace(base, experts, **options.model_dump(exclude_unset=True))
    bar = 5e-3 if switch == "always" else 2 * TOLERANCE  # directions at the cut are exchanged
    assert task_vector_error(merged, expected, base) <= bar


FLAGS = [["--cuda"], ["--cuda", "--read-to-gpu"], ["--cuda", "--low-cpu-memory"], ["--multi-gpu"]]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
@pytest.mark.parametrize("method", ["ace", "ace_relative", "ace_plus", "tsv_m"])
def test_flags_of_mergekit(tmp_path, mergekit_yaml, method, flags):
    config = ace_config(save_family(tiny_llama(), tmp_path), merge_method=method)
    expected = load_file(mergekit_yaml(config, out="cpu") / "model.safetensors")
    merged = load_file(mergekit_yaml(config, *flags, out="gpu") / "model.safetensors")
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)


@SWITCHES
@SHAPES
def test_commands_that_a_merge_takes(shape, switch):
    """Twelve kernels an expert and forty beside, and three waits; a decomposition has its own."""
    base, *experts = experts_on("cuda", *shape)
    merge_matrix(base, experts, options=branch(switch))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        merge_matrix(base, experts, options=branch(switch))
    names = [event.name for event in profile.events()]
    waits = sum(name == "aten::_local_scalar_dense" for name in names)
    waits += sum("Memcpy DtoH" in name for name in names)
    assert waits <= 6
    if switch == "never":
        launched = [name for name in names if name.startswith("cudaLaunchKernel")]
        assert len(launched) <= 12 * len(experts) + 40
