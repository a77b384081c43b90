# SPDX-License-Identifier: Apache-2.0
"""`mergekit-yaml`, timed by stages: a process of its own that `checkpoint.py` starts.

    python examples/benchmark/stages.py FIGURES.json CONFIG.yml OUT [flags of mergekit-yaml]

Reading and writing are the tasks of mergekit that do just that; a checkpoint that is memory-mapped
is read when it is first touched, which may be later. The rest of the wall time is planning and
computation.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from mergekit.graph import Task
from mergekit.io.tasks import FinalizeModel, LoadTensor, SaveTensor
from mergekit.scripts.run_yaml import main

from mergekit_ace.plugin import register

SECONDS = {"read": 0.0, "write": 0.0}


def time_task(task: type[Task], stage: str) -> None:
    """Count the time that tasks of this kind take."""
    execute = task.execute

    def timed(self, *args, **kwargs):
        start = time.perf_counter()
        try:
            return execute(self, *args, **kwargs)
        finally:
            SECONDS[stage] += time.perf_counter() - start

    task.execute = timed


if __name__ == "__main__":
    figures, *arguments = sys.argv[1:]
    for task, stage in ((LoadTensor, "read"), (SaveTensor, "write"), (FinalizeModel, "write")):
        time_task(task, stage)
    register()  # where the package is not installed, but on the path
    begin = time.perf_counter()
    main(arguments, standalone_mode=False)
    SECONDS["merge"] = time.perf_counter() - begin
    SECONDS["compute"] = SECONDS["merge"] - SECONDS["read"] - SECONDS["write"]
    if torch.cuda.is_available():
        SECONDS["device_bytes"] = torch.cuda.max_memory_allocated()
    Path(figures).write_text(json.dumps(SECONDS), encoding="utf-8")
