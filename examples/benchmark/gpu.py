# SPDX-License-Identifier: Apache-2.0
"""Test and measure everything that a GPU changes, in stages, on a machine with little time.

    python examples/benchmark/gpu.py --out gpu --minutes 9

Every stage is a process with a time limit, and a failure of one ends no other. What is known of a
stage is in `gpu.json` and `gpu.md` as soon as it ends. Called again, the program goes on with the
stages that have no result yet. It starts without torch: what is missing on the machine is told by
its first stage, and taken from the folder `--wheels`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from environment import installed, is_met, needed

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
TAIL = 6000  # characters of a stage's output that are kept
STOPPING = 5  # seconds that are left for what comes after a stage
FIGURES, FOLDER = "FIGURES", "FOLDER"
MACHINE = "machine"  # the stage that every call begins with
WHOLE_8B = 110e9  # bytes of disk for four models of 8B, and the merged one
TESTS = ("test_cuda.py", "test_devices.py", "adapters/test_adapter_devices.py")


@dataclass(frozen=True)
class Stage:
    """One thing that is tested or measured, by a process in the folder of the checkout."""

    name: str  # on the command line, and in the files
    limit: float  # seconds that it may take
    least: float  # seconds below which it is not worth starting
    command: tuple[str, ...]  # with `FIGURES` for its JSON file, and `FOLDER` for its own folder


def all_stages(small: bool, cuda: bool, free_disk: float) -> list[Stage]:
    """Return the stages, the most valuable ones first; `small` ones only show that they run."""
    device = "cuda" if cuda else "cpu"
    flags = ["--", "--cuda"] if cuda else []

    def stage(name: str, limit: float, least: float, program: str, *more: object) -> Stage:
        arguments = ["--json", FIGURES, *map(str, more)]
        return Stage(name, limit, least, (sys.executable, str(HERE / program), *arguments))

    def kernels(name: str, model: str, experts: int, *more: object) -> Stage:
        size = ["--divide", 64, "--rounds", 1] if small else ["--rounds", 3]
        given = ["--model", model, "--experts", experts, "--device", device, *more]
        return stage(f"kernels-{name}", 150, 30, "kernels.py", *given, *size)

    def checkpoint(name: str, limit: float, size: Sequence[object], *more: object) -> Stage:
        given = [*size, "--folder", FOLDER, *more]
        if small:
            given = ["--folder", FOLDER, *more, "--size", "tiny", "--methods", "ace"]
        return stage(f"checkpoint-{name}", limit, 60, "checkpoint.py", *given, *flags)

    quarter = [] if free_disk > WHOLE_8B else ["--layers", 8]
    refined = ["--heterogeneous", "--methods", "task_arithmetic", "ace"]
    model = ["--size", "tiny", "--batch", 1, "--tokens", 4, "--experts", 2]
    if not small:
        model = ["--size", "1B", "--layers", 4, "--tokens", 512, "--timed", 2, 4, 8]
    adapters = ["--size", "tiny", "--adapters", 2, "--rank", 3] if small else ["--size", "8B"]
    pytest = ["-vv", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    pytest += [str(CHECKOUT / "tests" / name) for name in TESTS]
    pytest += ["-k", "homogeneous_square or libraries"] if small else []
    return [
        stage(MACHINE, 90, 10, "environment.py", "--folder", FOLDER),
        Stage("tests", 300, 30, (sys.executable, "-m", "pytest", *pytest)),
        kernels("1B", "Llama-3.2-1B", 3),
        checkpoint("1B", 240, ["--size", "1B"]),
        kernels("ViT-L-14", "ViT-L/14", 8),
        kernels("GPT-2", "GPT-2", 7),
        kernels("8B", "Llama-3.1-8B", 3, "--branch", "homogeneous"),
        kernels("8B-refined", "Llama-3.1-8B", 3, "--branch", "heterogeneous", "--no-plain"),
        checkpoint("1B-refined", 240, ["--size", "1B"], *refined),
        stage(
            "trainer", 300, 60, "trainer.py", "--device", device, "--dtype", "bfloat16",
            "--folder", FOLDER, "--rounds", 1, *model,
        ),
        stage(
            "adapters", 150, 30, "adapters.py", "--folder", FOLDER, "--rows", "ace", "peft-linear",
            *adapters, *flags,
        ),
        checkpoint("8B", 480, ["--size", "8B", *quarter]),
        checkpoint("8B-refined", 480, ["--size", "8B", *quarter], *refined),
    ]  # fmt: skip


class Results:
    """What is known of the stages by name, in `gpu.json` and `gpu.md` of a folder."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, known = folder, folder / "gpu.json"
        self.stages: dict[str, dict] = json.loads(known.read_text()) if known.exists() else {}

    def keep(self, name: str, result: dict) -> None:
        """Add the result of a stage, and write both files anew."""
        self.stages[name] = result
        files = {"gpu.json": json.dumps(self.stages, indent=1), "gpu.md": markdown(self.stages)}
        for file, text in files.items():
            partial = self.folder / f"{file}.partial"
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self.folder / file)

    def is_known(self, name: str) -> bool:
        """Tell whether a stage has a result: one that the budget has cut short has none."""
        return self.stages.get(name, {}).get("state") in ("done", "failed", "beyond its limit")


def markdown(stages: dict[str, dict]) -> str:
    """Return what became of every stage as a table, and its command and the end of its output."""
    lines = ["| stage | result | seconds |", "|---|---|---|"]
    for name, result in stages.items():
        lines.append(f"| {name} | {result['state']} | {result.get('seconds', '')} |")
    for name, result in stages.items():
        told = [f"$ {result['command']}", *result.get("tail", "").splitlines()]
        lines += ["", f"**{name}**", "", *(f"    {line}" for line in told)]
    return "\n".join(lines) + "\n"


def run(stage: Stage, seconds: float, folder: Path, environment: dict[str, str]) -> dict:
    """Run a stage for so many seconds at most; return what is known of it, and remove the rest."""
    own = folder / stage.name
    shutil.rmtree(own, ignore_errors=True)
    (own / "work").mkdir(parents=True)
    figures, log = own / "figures", own / "log"
    places = {FIGURES: str(figures), FOLDER: str(own / "work")}
    command = [re.sub(f"{FIGURES}|{FOLDER}", lambda m: places[m[0]], c) for c in stage.command]
    start = time.monotonic()
    try:
        status = _status(command, log, seconds, environment)
        state = "failed" if status else "done"
        if status is None:
            state = "cut short" if seconds < stage.limit else "beyond its limit"
        result = {
            "state": state,
            "status": status,
            "seconds": round(time.monotonic() - start, 1),
            "command": _shown(stage),
            "tail": log.read_text(encoding="utf-8", errors="replace")[-TAIL:],
        }
        if figures.exists():
            result["figures"] = json.loads(figures.read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return result


def _status(command: list[str], log: Path, seconds: float, environment: dict) -> int | None:
    """Run a command; return its exit status, or None if it was killed with all that it started."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=environment, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # whatever it has left running, also where this program is ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _shown(stage: Stage) -> str:
    """Return the command of a stage as one would type it."""
    line = " ".join(("python", *stage.command[1:])).replace(f" --json {FIGURES}", "")
    return line.replace(f"{CHECKOUT}/", "").replace(FOLDER, "folder")


def unpack(wheels: Path, target: Path) -> None:
    """Unpack the wheels of packages that are missing here, or too old."""
    wanted = {_normal(requirement.name): requirement for requirement in needed()}
    for wheel in sorted(wheels.glob("*.whl")):
        name = _normal(wheel.name.partition("-")[0])
        if is_met(wanted[name]) if name in wanted else installed(name) is not None:
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


def describe_checkout(target: Path) -> None:
    """Write the metadata that an installed package would have."""
    text = (CHECKOUT / "mergekit_ace" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)
    folder = target / f"mergekit_ace-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: mergekit-ace\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def environment_of(packages: Path) -> dict[str, str]:
    """Return the environment of a stage, in which the checkout stands for an installed package."""
    paths = [str(packages), str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def run_stages(
    stages: Sequence[Stage],
    results: Results,
    again: Sequence[str],
    left: Callable[[], float],
    folder: Path,
    environment: dict[str, str],
) -> None:
    """Run the stages that have no result yet, or are named in `again`, while seconds are left."""
    for stage in stages:
        if results.is_known(stage.name) and stage.name not in again:
            print(f"{stage.name}: known already", flush=True)
            continue
        seconds = min(stage.limit, left() - STOPPING)
        if seconds < min(stage.least, stage.limit):
            print(f"{stage.name}: {max(0, left()):.0f} s are too few", flush=True)
            continue
        print(f"{stage.name}: at most {seconds:.0f} s", flush=True)
        try:
            result = run(stage, seconds, folder, environment)
        except (OSError, ValueError) as error:  # a full disk, or figures that cannot be read
            result = {"state": "failed", "command": _shown(stage), "tail": repr(error)}
        results.keep(stage.name, result)
        print(f"{stage.name}: {result['state']}, {result.get('seconds', 0)} s", flush=True)
        if result["state"] == "failed":
            print(result["tail"][-1000:], flush=True)


def run_all(arguments: argparse.Namespace, folder: Path, left: Callable[[], float]) -> None:
    """Run what is asked for; nothing but the first stage on a machine where that has failed."""
    results, packages = Results(arguments.out), folder / "packages"
    describe_checkout(packages)
    if arguments.wheels:
        unpack(arguments.wheels, packages)
    environment = environment_of(packages)
    if MACHINE not in arguments.skip:
        machine, *_ = all_stages(arguments.small, cuda=False, free_disk=0)
        run_stages([machine], results, [MACHINE], left, folder, environment)
        if results.stages.get(MACHINE, {}).get("state") != "done":
            sys.exit("the machine lacks something; --skip machine goes on nevertheless")
    cuda = bool(results.stages.get(MACHINE, {}).get("figures", {}).get("gpu"))
    if not cuda and not arguments.small:
        sys.exit("torch sees no GPU here, without which only --small runs")
    wanted = set(arguments.only) - {MACHINE, *arguments.skip}
    stages = all_stages(arguments.small, cuda, shutil.disk_usage(folder).free)
    stages = [stage for stage in stages if stage.name in wanted]
    run_stages(stages, results, arguments.again, left, folder, environment)


def main() -> None:
    began = time.monotonic()
    names = [stage.name for stage in all_stages(small=True, cuda=False, free_disk=0)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="for gpu.json and gpu.md")
    parser.add_argument("--minutes", type=float, default=60, help="after which it ends")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE")
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="STAGE")
    parser.add_argument("--again", nargs="+", choices=names, default=[], metavar="STAGE")
    parser.add_argument("--wheels", type=Path, help="folder of packages that may be missing here")
    parser.add_argument("--folder", type=Path, help="for models, by default in --out; 20 to 120 GB")
    parser.add_argument("--small", action="store_true", help="only to see that all stages run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # stages end, too
    folder = (arguments.folder or arguments.out).resolve() / "gpu-stages"
    try:
        run_all(arguments, folder, lambda: began + 60 * arguments.minutes - time.monotonic())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{arguments.out / 'gpu.md'} has the results")


if __name__ == "__main__":
    main()
