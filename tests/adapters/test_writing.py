# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from peft_models import CASES, changed, largest_difference, merged_by_peft, trained

from mergekit_ace.adapters.peft_adapter import read_adapter
from mergekit_ace.adapters.writing import AdapterWriter


def written(adapter, folder, dtype=torch.float32):
    with AdapterWriter(folder, [adapter], "base", dtype) as writer:
        for name, change in adapter.changes.items():
            if change.kind in ("bias", "saved"):
                writer.add_full(change, adapter.full(name))
            else:
                writer.add_low_rank(change, adapter.low_rank(name))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_was_read(case, tmp_path):
    made = trained(case, tmp_path / "in")
    adapter = read_adapter(str(made.folder), made.network())
    out = written(adapter, tmp_path / "out")
    assert largest_difference(merged_by_peft(made.base, out), made.merged) < 2e-6
    again = read_adapter(str(out), made.network())
    assert set(again.changes) == set(adapter.changes)
    assert largest_difference(changed(again, made.weights), made.merged) < 2e-6
