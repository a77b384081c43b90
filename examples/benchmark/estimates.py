# SPDX-License-Identifier: Apache-2.0
"""How far the forms of the closed form know their own errors in float32.

    python examples/benchmark/estimates.py

solves families of five kinds, over sizes and condition numbers, in float32 and in float64 and holds
the error that a form estimates against the one that it has. The constants of these estimates, in
`mergekit_ace/algebra/` (`primal.py`, `dual.py`), were chosen by this table: an estimate should not
be below the error, and not far above it, or float64 is taken without need.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mergekit_ace import AceOptions, IllConditionedError
from mergekit_ace.algebra.closed_form import solve
from mergekit_ace.algebra.covariance import estimate_covariances
from mergekit_ace.algebra.linalg import full_precision
from mergekit_ace.algebra.task_vectors import select_active

KINDS = ("noise", "low rank", "low rank and noise", "spiked", "near-duplicates")
SHAPES = {
    "primal": [(96, 80), (300, 256), (512, 512)],
    "tall": [(300, 80), (1024, 256), (1024, 512)],
    "dual": [(32, 120), (96, 400), (256, 1024)],
}
# Errors below this are the rounding of X itself.
SMALLEST = 1e-7


def family(kind: str, shape: tuple[int, int], scales: list[float]) -> tuple[Tensor, list[Tensor]]:
    """A base near zero, so that its rounding is not the error, and an expert per scale."""
    rng = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng)

    rows, columns = shape
    shared, base = draw(rows, columns), 1e-6 * draw(rows, columns)
    members = []
    for scale in scales:
        noise, low = draw(rows, columns), draw(rows, 8) @ draw(8, columns)
        if kind == "spiked":
            left, values, right = torch.linalg.svd(noise, full_matrices=False)
            noise = left * torch.logspace(0, -4, len(values)) @ right * (rows * columns) ** 0.5
        delta = {
            "low rank": low,
            "low rank and noise": low + 0.1 * noise,
            "near-duplicates": shared + 1e-3 * noise,
        }.get(kind, noise)
        members.append(base + scale * (delta + 0.1 * draw(columns)))
    return base, members


def ratios(form: str, kind: str, divide: int) -> Iterator[tuple[float, float, float]]:
    """Return error, estimate and condition number of every case that float32 can solve at all."""
    for shape in SHAPES[form]:
        shape = (shape[0] // divide, shape[1] // divide)
        for exponent in (-4, -3, -2, -1, 0):
            for factors in ((1, 1), (1, 1, 1), (0.1, 1, 3)):
                base, members = family(kind, shape, [10.0**exponent * f for f in factors])
                active = select_active(base, members, [1.0] * len(members), torch.float32)
                options = AceOptions(epsilon=1e-5)
                try:
                    coarse, exact = (
                        solve(
                            estimate_covariances(
                                base, active, options, normalized=False, dtype=dtype
                            ),
                            form,
                            prior=True,
                            refined=False,
                        )
                        for dtype in (torch.float32, torch.float64)
                    )
                except IllConditionedError:  # float32 says itself that it would not do
                    continue
                error = float((coarse.merged - exact.merged).norm() / exact.merged.norm())
                yield error, coarse.error, exact.condition


@full_precision()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[2])
    parser.add_argument("--divide", type=int, default=1, help="sides of all matrices by that")
    arguments = parser.parse_args()
    print("estimated over real error; cases with an error of at least 1e-7")
    print("form    family               cases   least  median    most   condition, at most")
    for form in SHAPES:
        for kind in KINDS:
            show(form, kind, ratios(form, kind, arguments.divide))


def show(form: str, kind: str, cases: Iterator[tuple[float, float, float]]) -> None:
    """Print a row of the table."""
    found = [case for case in cases if case[0] >= SMALLEST]
    if not found:
        print(f"{form:7} {kind:20} {0:5}")
        return
    quotients = sorted(estimate / error for error, estimate, _ in found)
    middle, most = quotients[len(quotients) // 2], quotients[-1]
    condition = max(condition for *_, condition in found)
    print(
        f"{form:7} {kind:20} {len(found):5} {quotients[0]:7.2f} {middle:7.2f} "
        f"{most:7.1f}   {condition:.0e}",
        flush=True,
    )
    assert math.isfinite(most)


if __name__ == "__main__":
    main()
