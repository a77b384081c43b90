# SPDX-License-Identifier: Apache-2.0
"""A device that runs out of memory: imitated, since a test machine may have none."""

from __future__ import annotations

import pytest
import torch
from matrices import family
from mergekit.merge_methods import MergeMethod, merge_tensors
from mergekit.merge_methods.base import TensorGroup
from torch import Tensor

from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.plugin import our_methods


class FullDevice(AceMerge):
    """`ace` on a device where the first attempts run out of memory."""

    def __init__(self, failures: int):
        self.failures = failures
        self.seen: list[bool] = []

    def merge(self, tensors, settings, *, least_memory=False, observe=None):
        self.seen.append(least_memory)
        if len(self.seen) <= self.failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().merge(tensors, settings, least_memory=least_memory)


def merge_with(method: MergeMethod, tensors: list[Tensor], name: str | None = None) -> Tensor:
    group = TensorGroup.from_tensors(tensors, base_index=0, name=name)
    return method([group])[0]


@pytest.mark.parametrize(("failures", "where"), [(1, "least"), (2, "CPU")])
def test_goes_on_with_one_warning(rng, caplog, failures, where):
    base, experts = family(rng, 30, 20, 3)
    expected = merge_tensors([base, *experts], "ace", base_index=0)
    assert not caplog.records
    method = FullDevice(failures)
    torch.testing.assert_close(merge_with(method, [base, *experts]), expected)
    assert method.seen == [False, True, True][: failures + 1]
    (record,) = caplog.records
    assert where in record.getMessage()
    assert "a tensor does not fit" in record.getMessage()


def test_names_the_tensor(rng, caplog):
    base, experts = family(rng, 6, 5, 2)
    merge_with(FullDevice(1), [base, *experts], "model.norm.weight")
    assert "tensor model.norm.weight does not fit" in caplog.text


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_method_goes_on(rng, caplog, monkeypatch, method):
    base, experts = family(rng, 30, 20, 3)
    name = method.spec.name
    parameters = {"weight": [0.2, 0.3, 0.4]} if name == "statsmerging" else {}
    arguments = {"base_index": 0, "parameters": parameters}
    expected = merge_tensors([base, *experts], name, **arguments)
    original, failures = type(method).merge, [1, 2]

    def merge(*arguments, **keywords):
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*arguments, **keywords)

    monkeypatch.setattr(type(method), "merge", merge)
    torch.testing.assert_close(merge_tensors([base, *experts], name, **arguments), expected)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name}: a tensor does not fit")
    assert "CPU" in record.getMessage()


def test_no_memory_anywhere(rng):
    base, experts = family(rng, 6, 5, 2)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        merge_with(FullDevice(3), [base, *experts])
