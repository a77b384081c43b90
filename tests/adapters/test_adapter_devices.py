# SPDX-License-Identifier: Apache-2.0
"""Adapters merged on a GPU, or on one that is imitated, and on one that is full."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import tiny_llama
from commands import command
from imitated_gpu import GPU, imitated_gpu
from peft_models import config_of, save_adapters
from safetensors.torch import load_file
from torch import Tensor

from mergekit_ace.adapters import command as adapter_command
from mergekit_ace.adapters import merge as adapter_merge
from mergekit_ace.adapters.read import read_adapter
from mergekit_ace.algebra.low_rank import LowRank


@pytest.fixture
def family(tmp_path) -> list[str]:
    targets = {"target_modules": ["q_proj", "up_proj", "embed_tokens"]}
    return save_adapters(tmp_path, tiny_llama, {**targets, "r": 3}, {**targets, "r": 2})


def merge(config: dict, out: Path, kind: str, *flags: object) -> dict[str, Tensor]:
    path = out.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config))
    command(kind, path, out, "--quiet", *flags)
    if kind == "merge":
        return load_file(out / "model.safetensors")
    # signs of singular vectors are open: compare the products
    changes = read_adapter(str(out), tiny_llama().to("meta")).changes
    return {name: change.factors().dense().float() for name, change in changes.items()}


@pytest.mark.parametrize(("method", "weight"), [("ace", {}), ("linear", {"weight": 0.5})])
@pytest.mark.parametrize("kind", ["adapter", "merge"])
def test_adapters(gpu, tmp_path, family, kind, method, weight):
    config = config_of(family, method, **weight)
    expected = merge(config, tmp_path / "cpu", kind)
    found = merge(config, tmp_path / "gpu", kind, "--device", gpu)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["adapter", "merge"])
def test_full_devices(monkeypatch, tmp_path, caplog, family, kind):
    """There is room for what is on the GPU already, and nothing more."""
    config, merge_changes = config_of(family, "ace"), adapter_merge.merge_changes
    expected = merge(config, tmp_path / "cpu", kind)
    with imitated_gpu(monkeypatch) as device:

        def beside_others(*arguments: Any, **named: Any) -> tuple[LowRank | None, float]:
            device.memory = device.used
            try:
                return merge_changes(*arguments, **named)
            finally:
                device.memory = math.inf

        for module in (adapter_merge, adapter_command):
            monkeypatch.setattr(module, "merge_changes", beside_others)
        found = merge(config, tmp_path / "gpu", kind, "--device", GPU)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert "does not fit into the free memory of meta; merged on the CPU" in caplog.text
