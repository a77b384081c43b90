# SPDX-License-Identifier: Apache-2.0
"""What a merge says once at its end of many tensors."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from mergekit.merge_methods import merge_tensors

from mergekit_ace.methods.base import flush_notices, notice


@pytest.fixture
def said(caplog):
    """Flush; what was said."""
    flush_notices()
    caplog.set_level(logging.WARNING)

    def flush() -> list[str]:
        caplog.clear()
        flush_notices()
        return caplog.messages

    return flush


def test_threads_count_together(said):
    with ThreadPoolExecutor(4) as pool:
        for n in range(200):
            pool.submit(notice, f"ace: {{tensors}} of {n % 2}")
    assert sorted(said()) == ["ace: 100 tensors of 0", "ace: 100 tensors of 1"]
    assert said() == []


def test_the_end_of_a_process_flushes():
    """`mergekit-yaml` has no hook for the end of a merge."""
    code = "from mergekit_ace.methods.base import notice; notice('ace: {tensors}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ace: 1 tensor" in done.stderr


def test_refinements_that_are_left_out(said):
    rng = torch.Generator().manual_seed(3)
    shared = torch.randn(8, 1, generator=rng) @ torch.randn(1, 24, generator=rng)
    experts = [s * (shared + 0.03 * torch.randn(8, 24, generator=rng)) for s in (0.1, 0.001)]
    parameters = {"adaptive_normalization": "always", "spectral_refinement": "always"}
    for weight, told in (([1.0, 1.0], 0), ([0.03, 1.0], 1)):
        given = {**parameters, "weight": weight}
        merge_tensors([torch.zeros(8, 24), *experts], "ace", base_index=0, parameters=given)
        messages = said()
        assert len(messages) == told
    assert "in 1 tensor the refinement would have turned the merge against the" in messages[0]


def test_a_result_that_float16_could_not_hold(said):
    """mergekit does not tell a method in which dtype its result is written."""
    base = torch.zeros(4, 3)
    merge_tensors([base, base + 7e4], "ace", base_index=0)
    (text,) = said()
    assert "1 tensor came out with entries above 65504" in text
    assert "write out_dtype: bfloat16" in text
    merge_tensors([base, base + 6e4], "ace", base_index=0)
    assert said() == []
