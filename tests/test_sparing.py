# SPDX-License-Identifier: Apache-2.0
"""A device that runs out of memory: imitated, since a test machine may have none."""

from __future__ import annotations

import pytest
import torch
from matrices import family
from mergekit.merge_methods import merge_tensors

from mergekit_ace.algebra.adaptive import merge_tensor
from mergekit_ace.methods import ace, ace_relative
from mergekit_ace.methods.peers import decomposed as peer


@pytest.fixture
def full_device(monkeypatch):
    """Let the first `failures` attempts run out of memory; collects the options of all."""

    def arrange(failures: int) -> list:
        seen = []

        def merge(*arguments, least_memory):
            seen.append(least_memory)
            if len(seen) <= failures:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return merge_tensor(*arguments, least_memory=least_memory)

        monkeypatch.setattr(ace, "merge_tensor", merge)
        return seen

    return arrange


@pytest.mark.parametrize(("failures", "where"), [(1, "least"), (2, "CPU")])
def test_goes_on_with_one_warning(rng, caplog, full_device, failures, where):
    base, experts = family(rng, 30, 20, 3)
    expected = merge_tensors([base, *experts], "ace", base_index=0)
    assert not caplog.records
    seen = full_device(failures)
    merged = merge_tensors([base, *experts], "ace", base_index=0)
    torch.testing.assert_close(merged, expected)
    assert seen == [False, True, True][: failures + 1]
    (record,) = caplog.records
    assert where in record.getMessage()
    assert "a tensor does not fit" in record.getMessage()


def test_names_the_tensor(rng, caplog, full_device):
    base, experts = family(rng, 6, 5, 2)
    full_device(1)
    merge_tensors([base, *experts], "ace", base_index=0, name="model.norm.weight")
    assert "tensor model.norm.weight does not fit" in caplog.text


@pytest.mark.parametrize(("method", "module"), [("tsv_m", peer), ("ace_relative", ace_relative)])
def test_other_methods_go_on_too(rng, caplog, monkeypatch, method, module):
    base, experts = family(rng, 30, 20, 3)
    expected = merge_tensors([base, *experts], method, base_index=0)
    name = "by_layout" if module is peer else "merge_tensor_relative"
    original, failures = getattr(module, name), [1, 2]

    def merge(*arguments, **keywords):
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, name, merge)
    torch.testing.assert_close(merge_tensors([base, *experts], method, base_index=0), expected)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{method}: a tensor does not fit")
    assert "CPU" in record.getMessage()


def test_no_memory_anywhere(rng, full_device):
    base, experts = family(rng, 6, 5, 2)
    full_device(3)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        merge_tensors([base, *experts], "ace", base_index=0)
