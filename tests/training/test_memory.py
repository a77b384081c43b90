# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

from mergekit_ace.training.memory import return_large_blocks

PROGRAM = """
import sys
import torch
from mergekit_ace.training.memory import return_large_blocks

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

if sys.argv[1] == "with":
    assert return_large_blocks()
for size in (8, 16, 24, 31):  # each one freed raises what glibc keeps
    torch.zeros(size * 2**18)
before, large, small = anonymous(), [], []
for _ in range(30):
    large.append(torch.zeros(8 * 2**18))
    small.append(torch.zeros(2**14))  # lives on, between the large ones
del large
print(anonymous() - before)
"""


def kept(how: str) -> float:
    """MiB that a process still holds of 240 that it has freed."""
    command = [sys.executable, "-c", PROGRAM, how]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_freed_gradients_leave_the_process():
    assert kept("with") < 20
    if return_large_blocks():  # glibc, whose default is why this exists
        assert kept("without") > 100
