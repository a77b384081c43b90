# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from peft_models import CASES, changed, largest_difference, trained

from mergekit_ace.adapters.peft_adapter import read_adapter


@pytest.mark.parametrize("case", CASES)
def test_changes_are_what_peft_merges(case, tmp_path):
    made = trained(case, tmp_path)
    adapter = read_adapter(str(tmp_path), made.network())
    moved = {n for n in made.weights if not torch.equal(made.weights[n], made.merged[n])}
    assert set(adapter.changes) >= moved
    assert largest_difference(changed(adapter, made.weights), made.merged) < 2e-6
