# SPDX-License-Identifier: Apache-2.0
"""The program for a machine with a GPU: its stages, and what is kept and told of them."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import distributions
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from mergekit_ace import __version__


@pytest.fixture
def gpu_program(example) -> ModuleType:
    return example("benchmark", "gpu")


@pytest.fixture
def run(gpu_program, tmp_path) -> Callable[..., dict]:
    """Run made-up stages, each a program and its limit; what is known of all stages."""

    def run(
        stages: dict[str, tuple[str, float]], left: tuple[float, ...] = (), again: str = ""
    ) -> dict:
        remaining = chain(left, repeat(1000))
        listed = [
            gpu_program.Stage(
                name, limit, 0.5, (sys.executable, "-c", program, "FIGURES", "FOLDER")
            )
            for name, (program, limit) in stages.items()
        ]
        results = gpu_program.Results(tmp_path / "out")
        environment = gpu_program.environment_of(tmp_path / "packages")
        gpu_program.run_stages(
            listed, results, again.split(), lambda: next(remaining), tmp_path / "work", environment
        )
        return json.loads((tmp_path / "out" / "gpu.json").read_text())

    return run


GOOD = "import sys; print('figures'); open(sys.argv[1], 'w').write('{\"rows\": []}')"
BAD = "import sys; open(sys.argv[2] + '/large', 'w'); print('why'); sys.exit(3)"
HANGING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open(sys.argv[1], "w").write('{"first": 1}')
print("child", child.pid, flush=True)
time.sleep(100)
"""


def test_a_failure_ends_no_other_stage(run, tmp_path):
    known = run({"bad": (BAD, 60), "good": (GOOD, 60)})
    assert (known["bad"]["state"], known["bad"]["status"]) == ("failed", 3)
    assert known["bad"]["tail"] == "why\n"
    assert known["good"]["state"] == "done"
    assert known["good"]["figures"] == {"rows": []}
    assert not list((tmp_path / "work").iterdir()), "what stages write is removed"
    told = (tmp_path / "out" / "gpu.md").read_text()
    assert "| bad | failed |" in told
    assert "    why\n" in told


def test_a_stage_beyond_its_limit_is_killed_with_its_children(run):
    known = run({"hanging": (HANGING, 2), "good": (GOOD, 60)})
    assert known["hanging"]["state"] == "beyond its limit"
    assert known["hanging"]["figures"] == {"first": 1}
    pid = int(known["hanging"]["tail"].split()[1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert known["good"]["state"] == "done"


def test_only_what_has_no_result_is_run_again(run, tmp_path):
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    stages = {"once": (count, 60), "bad": (BAD, 60), "long": (HANGING, 60)}
    cut = run(stages, left=(60, 60, 5.6))  # five are left for what comes after
    assert cut["long"]["state"] == "cut short"
    run({**stages, "long": (GOOD, 60)})
    assert (tmp_path / "count").read_text() == "x"
    known = run({**stages, "long": (BAD, 60), "bad": (GOOD, 60)}, again="once bad")
    assert (tmp_path / "count").read_text() == "xx"
    assert known["long"]["state"] == known["bad"]["state"] == "done"


def test_no_stage_is_begun_without_time(run, tmp_path):
    run({"good": (GOOD, 60)})
    assert "late" not in run({"late": (GOOD, 60)}, left=(5.2,))


def test_missing_packages_come_from_wheels(gpu_program, tmp_path):
    """And what is installed is left as it is."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("brought_along", "torch", "scipy"):
        with zipfile.ZipFile(wheels / f"{name}-0.1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "ANSWER = 42")
    gpu_program.unpack(wheels, tmp_path / "packages")
    assert [path.name for path in (tmp_path / "packages").iterdir()] == ["brought_along.py"]


def test_the_checkout_stands_for_an_installed_package(gpu_program, tmp_path):
    gpu_program.describe_checkout(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("mergekit-ace", __version__)


class Parsed(Exception):
    """A program has read its command line."""


@pytest.mark.parametrize(("cuda", "disk"), [(False, 1e12), (True, 5e10)])
@pytest.mark.parametrize("small", [False, True])
def test_every_command_is_understood(gpu_program, monkeypatch, small, cuda, disk):
    parse = argparse.ArgumentParser.parse_args

    def stop(*arguments):
        raise Parsed(parse(*arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    read = []
    for stage in gpu_program.all_stages(small, cuda, disk):
        _, program, *arguments = stage.command
        if stage.name == "tests":
            assert all(Path(a).exists() for a in arguments if a.endswith(".py"))
            continue
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(Parsed) as parsed:
            runpy.run_path(program, run_name="__main__")
        read.append(parsed.value.args[0])
        assert str(read[-1].json) == "FIGURES"
    on_gpu = [
        getattr(a, "device", None) == "cuda" or "--cuda" in getattr(a, "flags", []) for a in read
    ]
    assert on_gpu == [cuda and n > 0 for n in range(len(read))], "all but the first"


def test_small_stages(run_example, tmp_path):
    """A stage of one process; those of several are tested each in test_benchmark.py."""
    only = ["--only", "machine", "kernels-1B"]
    run_example("benchmark", "gpu", "--out", tmp_path, "--small", *only)
    known = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: stage["state"] for name, stage in known.items()} == {
        "machine": "done",
        "kernels-1B": "done",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]
    table = (tmp_path / "gpu.md").read_text()
    assert "    processors: " in table
    assert "    Llama-3.2-1B, 3 experts, homogeneous" in table
    assert "  all together: ours " in table
    assert "python examples/benchmark/kernels.py --model Llama-3.2-1B" in table
    figures = known["kernels-1B"]["figures"]
    assert [total["heterogeneous"] for total in figures["totals"]] == [False, True]
    assert known["machine"]["figures"]["processors"] >= 1


def test_what_is_told_of_stages(gpu_program):
    text = gpu_program.markdown({
        "adapters": {
            "state": "done", "seconds": 1.5, "command": "python adapters.py", "tail": "a 1\n\nb 2\n"
        },
        "kernels-1B": {"state": "failed", "command": "python kernels.py"},
    })  # fmt: skip
    assert text.splitlines() == [
        "| stage | result | seconds |",
        "|---|---|---|",
        "| adapters | done | 1.5 |",
        "| kernels-1B | failed |  |",
        "",
        "**adapters**",
        "",
        "    $ python adapters.py",
        "    a 1",
        "    ",
        "    b 2",
        "",
        "**kernels-1B**",
        "",
        "    $ python kernels.py",
    ]
