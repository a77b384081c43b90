# SPDX-License-Identifier: Apache-2.0
"""Say what a machine has: processors, memory, disk, GPU, and which packages are missing.

    python examples/benchmark/environment.py --folder . --json environment.json

ends with 1 where something is missing that `gpu.py` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

# Large, and expected to be there; the others can be brought along.
PRESENT = ("torch>=2.6", "transformers>=5.0,<6", "accelerate>=1.6.0", "safetensors>=0.5.2")
TO_BRING = Path(__file__).with_name("gpu_packages.txt")


def needed() -> list[Requirement]:
    """Return what must be installed."""
    lines = (line.partition("#")[0].strip() for line in TO_BRING.read_text().splitlines())
    return [Requirement(line) for line in (*PRESENT, *filter(None, lines))]


def installed(name: str) -> str | None:
    """Return the version of a package; None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_met(requirement: Requirement) -> bool:
    """Tell whether a package is installed in a version that will do."""
    found = installed(requirement.name)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def describe_machine(folder: Path) -> dict[str, object]:
    """Return processors, memory and disk in bytes, and what torch says of a GPU."""
    about: dict[str, object] = {
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_disk": shutil.disk_usage(folder).free,
        "gpu": None,
    }
    try:
        import torch
    except ImportError as error:
        return {**about, "error": str(error)}
    about["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        known = torch.cuda.get_device_properties(0)
        about |= {"gpu": known.name, "gpu_memory": known.total_memory}
        matrix = torch.ones(64, 64, device="cuda")  # one that is there and does not work says why
        torch.linalg.cholesky(matrix @ matrix + 64 * torch.eye(64, device="cuda"))
        torch.cuda.synchronize()
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that is meant")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    about = describe_machine(arguments.folder)
    about |= {requirement.name: installed(requirement.name) for requirement in needed()}
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(about, indent=1), encoding="utf-8")
    lacking = [str(requirement) for requirement in needed() if not is_met(requirement)]
    if lacking:
        sys.exit(f"missing, or too old: {', '.join(lacking)}; bring the wheels (--wheels)")


if __name__ == "__main__":
    main()
