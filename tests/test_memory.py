# SPDX-License-Identifier: Apache-2.0
"""Working memory of a merge, as the operating system counts it.

Beyond the inputs and the result at most T + 4 float32 matrices of max(i², o·i), or in the dual form
of max(N², o·i), and with a refinement what its eigenvectors in float64 take. All cases run in a
process of their own, in which memory that is freed goes back to the system at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json
import sys
from pathlib import Path
import torch
from mergekit_ace import AceOptions, merge_tensor
from mergekit_ace.algebra import linalg

linalg.BLOCK_ENTRIES = 2**16  # on the scale of these small matrices

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

def measure(rows, columns, experts, refined):
    switch = "always" if refined else "never"
    options = AceOptions(adaptive_normalization=switch, spectral_refinement=switch)
    base = torch.randn(rows, columns)
    members = [base + 1e-3 * torch.randn(rows, columns) for _ in range(experts)]
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    merged, record = merge_tensor(base, members, options=options)
    assert merged.dtype == torch.float32, record
    side = min(rows * experts, columns)
    result = merged.numel() * merged.element_size()
    few = 2**22  # what the BLAS packs matrices into
    used = status("VmHWM") - before - result - few
    allowed = 4 * (experts + 4) * max(side**2, rows * columns)
    if refined:
        allowed += 12 * rows * columns + 24 * min(rows, columns) ** 2
    return used / allowed

cases = json.loads(sys.argv[1])
measure(*cases[1])  # the libraries allocate buffers of their own
print(json.dumps([measure(*case) for case in cases]))
"""
CASES = [((768, 768), 8), ((3000, 600), 3), ((400, 2000), 3)]


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's account of peak memory"
)
def test_working_memory():
    cases = [(*shape, experts, refined) for shape, experts in CASES for refined in (False, True)]
    thresholds = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    environment = {**os.environ, **thresholds, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for case, share in zip(cases, json.loads(output.stdout), strict=True):
        assert share <= 1, case
