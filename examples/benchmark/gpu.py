# SPDX-License-Identifier: Apache-2.0
"""Test and measure everything that a GPU changes, in stages, on a machine with little time.

    python examples/benchmark/gpu.py --out gpu --minutes 9

Every stage is a process with a time limit, and a failure of one ends no other. How a stage ended is
in `gpu.json` as soon as it does; its output and figures are in `STAGE.log` and `STAGE.json`. Called
again, the program goes on with the stages that have no result yet. It starts without torch and the
packages of the folder `--wheels`, which it unpacks where they are missing.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
STOPPING = 5  # seconds that are left for what comes after a stage
LEAST = 30  # seconds below which no stage is begun that may take longer
FIGURES, FOLDER = "FIGURES", "FOLDER"
WHOLE_8B = 110e9  # bytes of disk for four models of 8B, and the merged one
TESTS = ("test_cuda.py", "test_devices.py", "adapters/test_adapter_devices.py")


@dataclass(frozen=True)
class Stage:
    """One thing that is tested or measured, by a process in the folder of the checkout."""

    name: str  # on the command line, and of its files
    limit: float  # seconds that it may take
    command: tuple[str, ...]  # with `FIGURES` for its JSON file, and `FOLDER` for its own folder


def all_stages(small: bool, cuda: bool, free_disk: float) -> list[Stage]:
    """Return the stages, the most valuable ones first; `small` ones only show that they run."""
    device = "cuda" if cuda else "cpu"
    flags = ["--", "--cuda"] if cuda else []

    def stage(name: str, limit: float, program: str, *more: object) -> Stage:
        arguments = ["--json", FIGURES, *map(str, more)]
        return Stage(name, limit, (sys.executable, str(HERE / program), *arguments))

    def kernels(name: str, model: str, experts: int, *more: object) -> Stage:
        size = ["--divide", 64, "--rounds", 1] if small else ["--rounds", 3]
        given = ["--model", model, "--experts", experts, "--device", device, *more]
        return stage(f"kernels-{name}", 150, "kernels.py", *given, *size)

    def checkpoint(name: str, limit: float, size: Sequence[object], *more: object) -> Stage:
        given = [*size, "--folder", FOLDER, *more]
        if small:
            given = ["--folder", FOLDER, *more, "--size", "tiny", "--methods", "ace"]
        return stage(f"checkpoint-{name}", limit, "checkpoint.py", *given, *flags)

    quarter = [] if free_disk > WHOLE_8B else ["--layers", 8]
    refined = ["--heterogeneous", "--methods", "task_arithmetic", "ace"]
    model = ["--size", "tiny", "--batch", 1, "--tokens", 4, "--experts", 2]
    if not small:
        model = ["--size", "1B", "--layers", 4, "--tokens", 512]
    trainer = ["--device", device, "--dtype", "bfloat16", "--folder", FOLDER, "--rounds", 1, *model]
    adapters = ["--size", "tiny", "--adapters", 2, "--rank", 3] if small else ["--size", "8B"]
    adapters = ["--folder", FOLDER, "--rows", "ace", "peft-linear", *adapters, *flags]
    pytest = ["-vv", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    pytest += [str(CHECKOUT / "tests" / name) for name in TESTS]
    pytest += ["-k", "homogeneous_square or libraries"] if small else []
    return [
        Stage("tests", 300, (sys.executable, "-m", "pytest", *pytest)),
        kernels("1B", "Llama-3.2-1B", 3),
        checkpoint("1B", 240, ["--size", "1B"]),
        kernels("ViT-L-14", "ViT-L/14", 8),
        kernels("GPT-2", "GPT-2", 7),
        kernels("8B", "Llama-3.1-8B", 3),
        checkpoint("1B-refined", 240, ["--size", "1B"], *refined),
        stage("trainer", 300, "trainer.py", *trainer),
        stage("adapters", 150, "adapters.py", *adapters),
        checkpoint("8B", 480, ["--size", "8B", *quarter]),
        checkpoint("8B-refined", 480, ["--size", "8B", *quarter], *refined),
    ]


def run(stage: Stage, seconds: float, out: Path, folder: Path, environment: dict) -> dict:
    """Run a stage for so many seconds at most; remove what it leaves but its log and figures."""
    own = folder / stage.name
    own.mkdir(parents=True, exist_ok=True)
    places = {FIGURES: str(out / f"{stage.name}.json"), FOLDER: str(own)}
    command = [re.sub(f"{FIGURES}|{FOLDER}", lambda m: places[m[0]], c) for c in stage.command]
    start = time.monotonic()
    with open(out / f"{stage.name}.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            state = "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            state = "cut short" if seconds < stage.limit else "beyond its limit"
        finally:  # whatever it has left running, also where this program is ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(own, ignore_errors=True)
    took = round(time.monotonic() - start, 1)
    return {"state": state, "seconds": took, "command": " ".join(command)}


def run_stages(
    stages: Sequence[Stage], out: Path, folder: Path, left: Callable[[], float],
    only: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run the stages named in `only`, else all that have no result, while seconds are left.

    A stage that the budget has cut short has none.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, environment = out / "gpu.json", environment_of(folder / "packages")
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for stage in stages:
        state = known.get(stage.name, {}).get("state", "cut short")
        if stage.name not in only and (only or state != "cut short"):
            continue
        seconds = min(stage.limit, left() - STOPPING)
        if seconds < min(LEAST, stage.limit):
            print(f"{stage.name}: {max(0, left()):.0f} s are too few", flush=True)
            continue
        print(f"{stage.name}: at most {seconds:.0f} s", flush=True)
        known[stage.name] = run(stage, seconds, out, folder, environment)
        partial = out / "gpu.json.partial"
        partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
        os.replace(partial, file)
        print(f"{stage.name}: {known[stage.name]['state']}", flush=True)


def unpack(wheels: Path, target: Path) -> None:
    """Unpack the wheels of packages that are missing here."""
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            version(wheel.name.partition("-")[0])
        except PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)


def environment_of(packages: Path) -> dict[str, str]:
    """Return the environment of a stage, in which the checkout stands for an installed package."""
    paths = [str(packages), str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def sees_gpu(environment: dict[str, str]) -> bool:
    """Tell whether torch works with a GPU here; what it says if not is shown."""
    program = "import torch; a = torch.ones(2, 2, device='cuda'); print((a @ a).sum())"
    return subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0


def main() -> None:
    began = time.monotonic()
    names = [stage.name for stage in all_stages(small=True, cuda=False, free_disk=0)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="for the results")
    parser.add_argument("--minutes", type=float, default=60, help="after which it ends")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=[], metavar="STAGE",
        help="these stages alone, with a result or without",
    )  # fmt: skip
    parser.add_argument("--wheels", type=Path, help="folder of packages that may be missing here")
    parser.add_argument("--folder", type=Path, help="for models, by default in --out; 20 to 120 GB")
    parser.add_argument("--small", action="store_true", help="only to see that all stages run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # stages end, too
    folder = (arguments.folder or arguments.out).resolve() / "gpu-stages"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.wheels:
            unpack(arguments.wheels, folder / "packages")
        cuda = sees_gpu(environment_of(folder / "packages"))
        if not cuda and not arguments.small:
            sys.exit("torch sees no GPU here, without which only --small runs")
        stages = all_stages(arguments.small, cuda, shutil.disk_usage(folder).free)
        end = began + 60 * arguments.minutes
        out = arguments.out.resolve()
        run_stages(stages, out, folder, lambda: end - time.monotonic(), arguments.only)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{arguments.out} has the results")


if __name__ == "__main__":
    main()
