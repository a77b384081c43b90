# SPDX-License-Identifier: Apache-2.0
"""Measure what `dtype: bfloat16` costs, on the quickstart family.

    python examples/quickstart/quickstart.py && python examples/quickstart/dtype.py

The family is stored in float32; a second copy is rounded to bfloat16, as most models on the Hub
are. Each is merged with both settings, and the merged task vectors are compared with those of a
merge that is float32 throughout.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from quickstart import FAMILY, MERGED, merge  # sets the environment before torch is loaded

# isort: split
import torch
from family import EXPERTS
from safetensors.torch import load_file, save_file

ROUNDED = FAMILY.with_name("family-bfloat16")
EXACT = {"dtype": "float32"}
SETTINGS = {
    "dtype: bfloat16": {"dtype": "bfloat16"},
    "dtype: float32, out_dtype: bfloat16": {"dtype": "float32", "out_dtype": "bfloat16"},
}


def round_family() -> None:
    """Write a copy of the family with every tensor rounded to bfloat16."""
    shutil.rmtree(ROUNDED, ignore_errors=True)
    for name in ("base", *EXPERTS):
        shutil.copytree(FAMILY / name, ROUNDED / name)
        file = ROUNDED / name / "model.safetensors"
        rounded = {key: tensor.bfloat16() for key, tensor in load_file(file).items()}
        save_file(rounded, file, {"format": "pt"})


def merged_with(dtypes: dict[str, str], family: Path, out: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an ACE merge of `family` under these dtype settings."""
    config = {
        "merge_method": "ace",
        "base_model": f"./{family.name}/base",
        "models": [{"model": f"./{family.name}/{name}"} for name in EXPERTS],
        **dtypes,
    }
    merge(config, MERGED / out)
    return load_file(MERGED / out / "model.safetensors")


def error(got: dict, exact: dict, base: dict) -> float:
    """Return the relative Frobenius error of the merged task vectors, over the whole model."""
    squares = [
        ((got[n].double() - exact[n].double()).square().sum(), (exact[n] - base[n]).square().sum())
        for n in exact
    ]
    wrong, whole = (float(torch.stack([s[k] for s in squares]).sum()) for k in (0, 1))
    return (wrong / whole) ** 0.5


def main() -> None:
    if not (MERGED / "ace").exists():
        sys.exit("Run quickstart.py first: it trains the family.")
    round_family()
    print(f"{'checkpoints':<12}{'setting':<38}{'error of the merged task vector':>32}")
    for stored, family in (("float32", FAMILY), ("bfloat16", ROUNDED)):
        exact = merged_with(EXACT, family, f"{stored}-exact")
        base = load_file(family / "base" / "model.safetensors")
        for n, (title, dtypes) in enumerate(SETTINGS.items()):
            got = merged_with(dtypes, family, f"{stored}-{n}")
            print(f"{stored:<12}{title:<38}{error(got, exact, base):>32.4f}", flush=True)


if __name__ == "__main__":
    main()
