# SPDX-License-Identifier: Apache-2.0
"""The program for a machine with a GPU: its stages, and what is kept of them."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import zipfile
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType

import psutil
import pytest


@pytest.fixture
def gpu_program(example) -> ModuleType:
    return example("benchmark", "gpu")


@pytest.fixture
def run(gpu_program, tmp_path) -> Callable[..., dict]:
    """Run made-up stages, each a program and its limit; return how all stages ended."""

    def run(stages: dict, left: tuple[float, ...] = (), only: str = "") -> dict:
        remaining = chain(left, repeat(1000))
        listed = [
            gpu_program.Stage(name, limit, (sys.executable, "-c", program, "FIGURES", "FOLDER"))
            for name, (program, limit) in stages.items()
        ]
        folders = tmp_path / "out", tmp_path / "work"
        gpu_program.run_stages(listed, *folders, lambda: next(remaining), only.split())
        known = json.loads((tmp_path / "out" / "gpu.json").read_text())
        return {name: stage["state"] for name, stage in known.items()}

    return run


GOOD = "import sys; print('figures'); open(sys.argv[1], 'w').write('{\"rows\": []}')"
BAD = "import sys; open(sys.argv[2] + '/large', 'w'); print('why'); sys.exit(3)"
HANGING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open(sys.argv[1], "w").write('{"first": 1}')
print(child.pid, flush=True)
time.sleep(100)
"""


def test_a_failure_ends_no_other_stage(run, tmp_path):
    assert run({"bad": (BAD, 60), "good": (GOOD, 60)}) == {"bad": "failed", "good": "done"}
    assert (tmp_path / "out" / "bad.log").read_text() == "why\n"
    assert (tmp_path / "out" / "good.json").read_text() == '{"rows": []}'
    assert not list((tmp_path / "work").iterdir()), "what stages write is removed"


def test_a_stage_beyond_its_limit_is_killed_with_its_children(run, tmp_path):
    known = run({"hanging": (HANGING, 2), "good": (GOOD, 60)})
    assert known == {"hanging": "beyond its limit", "good": "done"}
    assert json.loads((tmp_path / "out" / "hanging.json").read_text()) == {"first": 1}
    pid = int((tmp_path / "out" / "hanging.log").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_only_what_has_no_result_is_run_again(run, gpu_program, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_program, "LEAST", 0.5)
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    stages = {"once": (count, 60), "bad": (BAD, 60), "long": (HANGING, 60)}
    cut = run(stages, left=(60, 60, 5.6))  # five are left for what comes after
    assert cut["long"] == "cut short"
    run({**stages, "long": (GOOD, 60)})
    assert (tmp_path / "count").read_text() == "x"
    known = run({**stages, "long": (BAD, 60), "bad": (GOOD, 60)}, only="once bad")
    assert (tmp_path / "count").read_text() == "xx"
    assert known["long"] == known["bad"] == "done"
    assert "late" not in run({"late": (GOOD, 60)}, left=(5.2,)), "there is no time for it"


def test_missing_packages_come_from_wheels(gpu_program, tmp_path):
    """What is installed is left as it is."""
    wheels, target = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    for name in ("brought_along", "torch", "scipy"):
        with zipfile.ZipFile(wheels / f"{name}-0.1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "ANSWER = 42")
    gpu_program.unpack(wheels, target)
    assert [path.name for path in target.iterdir()] == ["brought_along.py"]


class Parsed(Exception):
    """A program has read its command line."""


@pytest.mark.parametrize(("cuda", "disk"), [(False, 1e12), (True, 5e10)])
@pytest.mark.parametrize("small", [False, True])
def test_every_command_is_understood(gpu_program, monkeypatch, small, cuda, disk):
    parse = argparse.ArgumentParser.parse_args

    def stop(*arguments):
        raise Parsed(parse(*arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    for stage in gpu_program.all_stages(small, cuda, disk):
        _, program, *arguments = stage.command
        if stage.name == "tests":
            assert all(Path(a).exists() for a in arguments if a.endswith(".py"))
            continue
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(Parsed) as parsed:
            runpy.run_path(program, run_name="__main__")
        read = parsed.value.args[0]
        assert str(read.json) == "FIGURES"
        on_gpu = getattr(read, "device", None) == "cuda" or "--cuda" in getattr(read, "flags", [])
        assert on_gpu == cuda


def test_a_small_stage(run_example, tmp_path):
    """Stages of several processes are tested each in test_benchmark.py."""
    run_example("benchmark", "gpu", "--out", tmp_path, "--small", "--only", "kernels-1B")
    assert json.loads((tmp_path / "gpu.json").read_text())["kernels-1B"]["state"] == "done"
    assert "\nLlama-3.2-1B     lean-refined " in (tmp_path / "kernels-1B.log").read_text()
    figures = json.loads((tmp_path / "kernels-1B.json").read_text())
    assert next(total["ratio"] for total in figures["totals"]) == 1.0
    names = ["gpu.json", "kernels-1B.json", "kernels-1B.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
