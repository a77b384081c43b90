# SPDX-License-Identifier: Apache-2.0
"""Matrices as they may lie in memory, and settings of torch that a merge leaves as they were."""

from __future__ import annotations

import pytest
import torch
from matrices import family, merge_matrix
from reference import task_vector_error
from threadpoolctl import threadpool_info
from torch import Tensor

from mergekit_ace.algebra import linalg
from mergekit_ace.algebra.linalg import full_precision


def precisions() -> list[str]:
    own = [backend.fp32_precision for backend in linalg._BACKENDS]
    return own or [torch.get_float32_matmul_precision()]


def threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("shape", [(12, 50), (40, 20)])
@pytest.mark.parametrize("layout", ["columns", "gaps in rows", "gaps in columns"])
def test_a_merge_reads_matrices_as_they_lie_in_memory(rng, shape, layout):
    base, experts = family(rng, *shape, 3, scales=[0.1, 1.0, 10.0])
    expected, _ = merge_matrix(base, experts)

    def stored(matrix: Tensor) -> Tensor:
        turned = layout != "gaps in rows"
        wide = torch.zeros(*(n + 3 for n in (matrix.mT if turned else matrix).shape))
        place = wide[1:-2, 2:-1]
        place.copy_(matrix.mT if turned else matrix)
        place = place.contiguous() if layout == "columns" else place
        return place.mT if turned else place

    merged, _ = merge_matrix(stored(base), [stored(expert) for expert in experts])
    assert task_vector_error(merged, expected, base) <= 1e-5


@pytest.mark.usefixtures("settings_put_back")
@pytest.mark.parametrize("setting", ["highest", "medium"])
@pytest.mark.parametrize("single", [True, False], ids=["one switch", "a switch per backend"])
def test_the_settings_of_the_caller_come_back(monkeypatch, setting, single):
    """Also where merges run side by side: the first to leave changes nothing for the other."""
    if single:
        monkeypatch.setattr(linalg, "_BACKENDS", [])
    torch.set_float32_matmul_precision(setting)
    before, outside = precisions(), threads()
    torch.set_num_threads(3)
    first, second = full_precision(), full_precision()
    for step in (first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None)):
        step()
        assert set(precisions()) <= {"ieee", "highest"}
        assert threads() == {3}
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    second.__exit__(None, None, None)
    assert precisions() == before
    assert torch.get_float32_matmul_precision() == setting
    torch.set_num_threads(1)
    assert threads() == outside
