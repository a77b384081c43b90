# SPDX-License-Identifier: Apache-2.0
"""Train the families of `quality.py` that are not there yet, and print what they know.

python examples/benchmark/train_families.py llama gpt2 --seeds 0 1 2

`quality.py` does the same by itself; this program is for spreading the work over processes.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from evidence.all_families import FAMILIES, make_family


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("families", nargs="+", choices=FAMILIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for name in arguments.families:
            family = make_family(name, seed)
            family.train()
            base = family.load(family.base)
            for task, folder in family.experts.items():
                expert = family.load(folder)
                old = [family.accuracy(expert, other, "test") for other in family.old]
                kept = f", what the base knew {sum(old) / len(old):.3f}" if old else ""
                print(
                    f"{name}, seed {seed}, task {task}: base "
                    f"{family.accuracy(base, task, 'test'):.3f}, expert "
                    f"{family.accuracy(expert, task, 'test'):.3f}{kept}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
