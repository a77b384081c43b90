# SPDX-License-Identifier: Apache-2.0
"""The unavoidable products and factorisations of a merge, without anything around them.

No task vector is formed, centred or measured, nothing is added up, copied or checked: only the
large matrix operations that the closed form and its refinement consist of, on matrices that are
there already, by the library that is fastest on the machine. A merge cannot be faster than the
cheapest of the systems that it can solve.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from mergekit_ace.algebra.eigen import leading_eigenpairs
from mergekit_ace.algebra.linalg import add_gram, cholesky_, set_product_, solve_


def operations(
    rows: int, columns: int, tasks: int, refined: bool, device: str
) -> dict[str, list[Callable[[], object]]]:
    """The large operations of the systems, as calls without arguments.

    Args:
        rows, columns: o and i.
        tasks: T.
        refined: with the spectral refinement.
        device: of the matrices.
    """
    systems = {"primal": _primal(rows, columns, tasks, refined, device)}
    if rows > columns:
        systems["mixing"] = _primal(rows, columns, tasks, refined, device, mixing=True)
    if rows * tasks < columns:
        systems["dual"] = _dual(rows, columns, tasks, refined, device)
    return systems


def measure(operations: list[Callable[[], object]], synchronize: Callable[[], None]) -> float:
    """Seconds for all of them, one after the other."""
    synchronize()
    start = time.perf_counter()
    for operation in operations:
        operation()
    synchronize()
    return time.perf_counter() - start


def _primal(
    rows: int, columns: int, tasks: int, refined: bool, device: str, *, mixing: bool = False
) -> list[Callable[[], object]]:
    """By the (i, i) system, solved for the result, or for a mixing matrix per task but one."""
    matrix = torch.randn(rows, columns, device=device)
    square, system = torch.zeros(columns, columns, device=device), _definite(columns, device)
    result = torch.empty(rows, columns, device=device)
    calls: list[Callable[[], object]] = [lambda: add_gram(square, matrix.mT)] * tasks
    if rows >= columns / 2:  # (C_t − C_r) S_t for all tasks but one
        calls += [lambda: set_product_(result, matrix, system.mT)] * (tasks - 1)
    else:
        small = torch.empty(rows, rows, device=device)
        calls += [lambda: set_product_(small, matrix, matrix.mT)] * (tasks - 1)
        calls += [lambda: set_product_(result, small, matrix)] * (tasks - 1)
    calls.append(lambda: cholesky_(system.clone()))
    factor = torch.linalg.cholesky(system)
    if mixing:
        calls += [lambda: solve_(system.clone().mT, factor)] * (tasks - 1)
    else:
        calls.append(lambda: solve_(matrix.clone(), factor))
    if refined:
        calls.append(lambda: set_product_(result, matrix, system.mT))
        calls += _spectrum(matrix, result)
    return calls


def _dual(
    rows: int, columns: int, tasks: int, refined: bool, device: str
) -> list[Callable[[], object]]:
    size = rows * tasks
    stack = torch.randn(size, columns, device=device)
    products, system = torch.zeros(size, size, device=device), _definite(size, device)
    left = torch.randn(rows, size, device=device)
    result = torch.empty(rows, columns, device=device)
    factor = torch.linalg.cholesky(system)
    calls: list[Callable[[], object]] = [
        lambda: add_gram(products, stack),
        lambda: cholesky_(system.clone()),
        lambda: solve_(left.clone(), factor),
        lambda: set_product_(result, left, stack),
    ]
    if refined:
        calls.append(lambda: set_product_(result, left, stack))
        calls += _spectrum(stack[:rows], result)
    return calls


def _spectrum(matrix: Tensor, result: Tensor) -> list[Callable[[], object]]:
    """U_k V_kᵀ, k = 0.3 m: a Gram matrix in float64, its eigenvectors in float32, two products."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    side, length = wide.shape
    exact = wide.double()
    gram = torch.zeros(side, side, dtype=torch.float64, device=matrix.device)
    definite = _definite(side, str(matrix.device))
    leading = torch.randn(side, int(0.3 * side), device=matrix.device)
    along = torch.empty(leading.shape[1], length, device=matrix.device)
    target = result if matrix.shape[0] <= matrix.shape[1] else result.mT
    return [
        lambda: add_gram(gram, exact),
        lambda: leading_eigenpairs(definite.clone(), leading.shape[1]),
        lambda: set_product_(along, leading.mT, wide),
        lambda: set_product_(target, leading, along),
    ]


def _definite(size: int, device: str) -> Tensor:
    matrix = torch.randn(size, size, device=device)
    matrix = matrix @ matrix.mT
    matrix.diagonal().add_(size)
    return matrix
