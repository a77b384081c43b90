# SPDX-License-Identifier: Apache-2.0
"""Time `mergekit-ace check` on families of full size, of which only headers exist.

    python examples/benchmark/preflight.py --size 8B

prints the seconds of the check itself, those of importing mergekit, and those of the whole command.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from llamas import SIZES, write_headers

PROGRAM = """
import sys, time
start = time.perf_counter()
import mergekit.plan
imported = time.perf_counter()
from mergekit_ace.cli import main
try:
    main(["check", *sys.argv[1:]])
except SystemExit as end:
    code = end.code
checked = time.perf_counter()
print(f"import {imported - start:.2f} check {checked - imported:.2f}", file=sys.stderr)
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, *experts = write_headers(folder, arguments.size, arguments.experts)
        config = {
            "merge_method": "ace",
            "base_model": str(base),
            "models": [{"model": str(expert)} for expert in experts],
            "dtype": "bfloat16",
        }
        (folder / "ace.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        for n in range(arguments.rounds):
            start = time.perf_counter()
            command = [sys.executable, "-c", PROGRAM, str(folder / "ace.yml")]
            done = subprocess.run(command, capture_output=True, text=True)
            whole = time.perf_counter() - start
            if n == 0:
                print(done.stdout)
            print(f"{done.stderr.splitlines()[-1]} whole command {whole:.2f} s", flush=True)


if __name__ == "__main__":
    main()
