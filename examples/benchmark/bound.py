# SPDX-License-Identifier: Apache-2.0
"""The unavoidable products and factorisations of a merge, by raw BLAS and LAPACK.

    python examples/benchmark/bound.py

prints at how many Gflop/s each library does the operations of a Llama layer: torch's own (MKL on
most CPUs, cuBLAS on a GPU), oneDNN through torch, and SciPy's (OpenBLAS, or Accelerate on a Mac).
`kernels.py` takes from here the least time in which the large matrix operations of a merge can be
done: on matrices that are there already, each by the library that is fastest for it, with nothing
formed, centred, measured, added up, copied or checked around them. None of our own code is in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from scipy.linalg import eigh_tridiagonal, get_blas_funcs, get_lapack_funcs
from torch import Tensor

# (m, k, n) of products, and (n, k) of symmetric ones, in a layer of Llama-3.2-1B
PRODUCTS = [(2048, 2048, 2048), (8192, 2048, 2048), (2048, 8192, 2048), (512, 2048, 2048)]
SYMMETRIC = [(2048, 2048), (2048, 8192), (6144, 8192)]


@dataclass
class Operation:
    """One matrix operation, and how often a merge needs it.

    Attributes:
        name: of it.
        flops: of one.
        libraries: calls that do it, by library.
        count: how often.
        fastest: the library that was fastest when all were tried; None before.
    """

    name: str
    flops: float
    libraries: dict[str, Callable[[], object]]
    count: int = 1
    fastest: str | None = field(default=None, init=False)


def measure(operations: list[Operation], synchronize: Callable[[], None]) -> float:
    """Return the seconds for all of them, one after the other; the first time all libraries try."""
    total = 0.0
    for operation in operations:
        if operation.fastest is None:
            times = {n: _seconds(call, synchronize, 2) for n, call in operation.libraries.items()}
            operation.fastest = min(times, key=times.__getitem__)
        call = operation.libraries[operation.fastest]
        total += operation.count * _seconds(call, synchronize, 1)
    return total


def _seconds(call: Callable[[], object], synchronize: Callable[[], None], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def operations(
    rows: int, columns: int, tasks: int, refined: bool, device: str
) -> dict[str, list[Operation]]:
    """Return the operations of every system that solves a matrix.

    Args:
        rows, columns: o and i.
        tasks: T.
        refined: with the spectral refinement.
        device: of the matrices.
    """
    systems = {"primal": _by_columns(rows, columns, tasks, device, mixing=False)}
    if rows > columns:
        systems["mixing"] = _by_columns(rows, columns, tasks, device, mixing=True)
    if rows * tasks < columns:
        size = rows * tasks
        systems["dual"] = [
            gram(size, columns, device),
            factor(size, device),
            solve(rows, size, device),
            product(rows, size, columns, device, 1 + refined),
        ]
    for name, system in systems.items():
        if refined:
            system += [] if name == "dual" else [product(rows, columns, columns, device)]
            system += _refinement(min(rows, columns), max(rows, columns), device)
    return systems


def _by_columns(
    rows: int, columns: int, tasks: int, device: str, *, mixing: bool
) -> list[Operation]:
    """The (i, i) system, solved for the result, or for a mixing matrix per task but one."""
    found = [gram(columns, rows, device, tasks), factor(columns, device)]
    if rows >= columns / 2:  # (C_t − C_r) S_t for all tasks but one
        found.append(product(rows, columns, columns, device, tasks - 1))
    else:
        found.append(product(rows, columns, rows, device, tasks - 1))
        found.append(product(rows, rows, columns, device, tasks - 1))
    if mixing:
        return [*found, solve(columns, columns, device, tasks - 1)]
    return [*found, solve(rows, columns, device)]


def _refinement(side: int, length: int, device: str) -> list[Operation]:
    """U_k V_kᵀ, k = 0.3 m: a Gram matrix in float64, its eigenvectors, two products in float32."""
    count = int(0.3 * side)
    return [
        gram(side, length, device, dtype=torch.float64),
        eigenvectors(side, count, device),
        product(count, side, length, device),
        product(side, count, length, device),
    ]


def product(m: int, k: int, n: int, device: str, count: int = 1) -> Operation:
    """C += A B in float32."""
    a, b, c = (
        torch.randn(m, k, device=device),
        torch.randn(k, n, device=device),
        _zeros(m, n, device),
    )
    calls: dict[str, Callable[[], object]] = {"torch": lambda: c.addmm_(a, b)}
    if device == "cpu":
        (gemm,) = get_blas_funcs(["gemm"], dtype="float32")
        given = {"beta": 1.0, "c": c.numpy().T, "overwrite_c": 1}
        calls["scipy"] = lambda: gemm(1.0, b.numpy().T, a.numpy().T, **given)
        turned = b.T.contiguous()
        onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
        if onednn is not None:
            calls["onednn"] = lambda: onednn(a, turned, None, "none", [], "")
    return Operation(f"product {m} x {k} x {n}", 2.0 * m * k * n, calls, count)


def gram(
    n: int, k: int, device: str, count: int = 1, dtype: torch.dtype = torch.float32
) -> Operation:
    """C += F Fᵀ, one triangle."""
    f, c = torch.randn(n, k, device=device, dtype=dtype), _zeros(n, n, device, dtype)
    calls: dict[str, Callable[[], object]] = {"torch": lambda: c.addmm_(f, f.T)}
    if device == "cpu":
        (syrk,) = get_blas_funcs(["syrk"], dtype=_name(dtype))
        given = {"beta": 1.0, "c": c.numpy().T, "trans": 1, "overwrite_c": 1}
        calls["scipy"] = lambda: syrk(1.0, f.numpy().T, **given)
    return Operation(f"symmetric product {n} x {k}, {_name(dtype)}", 1.0 * n * n * k, calls, count)


def factor(n: int, device: str) -> Operation:
    """The Cholesky factor, with a copy of the matrix."""
    matrix = _definite(n, device)
    calls: dict[str, Callable[[], object]] = {"torch": lambda: torch.linalg.cholesky(matrix)}
    if device == "cpu":
        (potrf,) = get_lapack_funcs(["potrf"], dtype="float32")
        calls["scipy"] = lambda: potrf(matrix.clone().numpy().T, overwrite_a=1, clean=0)
    return Operation(f"Cholesky factor {n}", n**3 / 3, calls)


def solve(m: int, n: int, device: str, count: int = 1) -> Operation:
    """Rows times the inverse, by its factor."""
    lower, rows = torch.linalg.cholesky(_definite(n, device)), torch.randn(m, n, device=device)
    calls: dict[str, Callable[[], object]] = {"torch": lambda: torch.cholesky_solve(rows.T, lower)}
    if device == "cpu":
        (potrs,) = get_lapack_funcs(["potrs"], dtype="float32")
        calls["scipy"] = lambda: potrs(lower.numpy().T, rows.clone().numpy().T, overwrite_b=1)
    return Operation(f"solve {m} x {n}", 2.0 * m * n * n, calls, count)


def eigenvectors(n: int, count: int, device: str) -> Operation:
    """The leading eigenvectors, in float64; as 4/3 n³ operations, of the tridiagonal form alone."""
    matrix = _definite(n, device).double()
    calls: dict[str, Callable[[], object]] = {"torch": lambda: torch.linalg.eigh(matrix)}
    if device == "cpu":
        sytrd, ormqr = get_lapack_funcs(["sytrd", "ormqr"], dtype="float64")
        room = 64 * (n + 65)

        def by_parts() -> object:
            given = matrix.clone().numpy().T
            found, diagonal, beside, scales, _ = sytrd(given, lower=1, lwork=room, overwrite_a=1)
            _, vectors = eigh_tridiagonal(diagonal, beside, check_finite=False)
            return ormqr("L", "N", found[1:, :-1], scales, vectors[1:, n - count :], lwork=room)

        calls["scipy"] = by_parts
    return Operation(f"{count} eigenvectors of {n}", 4 * n**3 / 3, calls)


def _zeros(m: int, n: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(m, n, device=device, dtype=dtype)


def _definite(size: int, device: str) -> Tensor:
    """A symmetric positive definite matrix, quickly: diagonally dominant."""
    matrix = torch.randn(size, size, device=device).tril_()
    matrix += matrix.T.clone()
    matrix.diagonal().add_(4 * size**0.5)
    return matrix


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[2])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--divide", type=int, default=1, help="sides of all matrices by that")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device, by = arguments.device, arguments.divide
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    makers = [partial(product, m // by, k // by, n // by, device) for m, k, n in PRODUCTS]
    makers += [partial(gram, n // by, k // by, device) for n, k in SYMMETRIC]
    makers.append(partial(gram, 2048 // by, 2048 // by, device, dtype=torch.float64))
    makers += [partial(factor, n // by, device) for n in (2048, 6144)]
    makers += [partial(solve, m // by, n // by, device) for m, n in ((2048, 2048), (2048, 6144))]
    makers.append(partial(eigenvectors, 2048 // by, 614 // by, device))
    print(f"{'Gflop/s':38} {'torch':>8} {'onednn':>8} {'scipy':>8}")
    for make in makers:
        made = make()
        rates = {
            name: made.flops / 1e9 / _seconds(call, synchronize, arguments.rounds)
            for name, call in made.libraries.items()
        }
        cells = " ".join(
            f"{rates[name]:8.0f}" if name in rates else " " * 8
            for name in ("torch", "onednn", "scipy")
        )
        print(f"{made.name:38} {cells}", flush=True)


if __name__ == "__main__":
    main()
