# SPDX-License-Identifier: Apache-2.0
"""An adapter that is written is loaded by PEFT and transformers, and means the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from mergekit.common import ModelPath
from peft_models import (
    CASES,
    changed,
    largest_difference,
    merged_by_peft,
    trained,
)
from safetensors.torch import load_file

from mergekit_ace.adapters.command import result_config, write_adapter
from mergekit_ace.adapters.read import Adapter, Change, read_adapter
from mergekit_ace.algebra.low_rank import LowRank

WRITTEN = [case for case in CASES if not case.startswith("saved")]


def write(
    adapter: Adapter,
    folder: Path,
    merged: Iterable[tuple[Change, LowRank | None]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write factors by change, by default those of an adapter."""
    pairs = [(change, change.factors()) for change in adapter.changes.values()]
    changes, factors = zip(*(pairs if merged is None else merged), strict=True)
    rank = max(delta.rank if delta else 1 for delta in factors)
    base = ModelPath(path="some/base", revision="v2")
    config = result_config(adapter.network, changes, rank, base)
    folder.mkdir(exist_ok=True)
    write_adapter(folder, config, adapter.network, changes, iter(factors), dtype)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.fixture
def adapter(tmp_path) -> Adapter:
    made = trained("patterns", tmp_path / "in")
    return read_adapter(str(made.folder), made.network())


@pytest.mark.parametrize("case", WRITTEN)
def test_peft_loads_what_was_read(case, tmp_path):
    made = trained(case, tmp_path / "in")
    adapter = read_adapter(str(made.folder), made.network())
    write(adapter, tmp_path / "out")
    assert largest_difference(merged_by_peft(made.base, tmp_path / "out"), made.merged) < 2e-6
    again = read_adapter(str(tmp_path / "out"), made.network())
    assert set(again.changes) == set(adapter.changes)
    assert largest_difference(changed(again, made.weights), made.merged) < 2e-6
    write(again, tmp_path / "once more")
    assert config_of(tmp_path / "once more") == config_of(tmp_path / "out")


def test_the_config(tmp_path):
    """vLLM takes `lora_alpha / r` for all modules."""
    made = trained("linear", tmp_path / "in")
    adapter = read_adapter(str(made.folder), made.network())
    write(adapter, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert config["r"] == config["lora_alpha"] == 4
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/base", "v2")
    assert config["inference_mode"] is True
    assert config["use_rslora"] is False
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    assert {name.rpartition(".lora_")[2] for name in names} == {"A.weight", "B.weight"}


@pytest.mark.parametrize("case", ["experts", "table"])
def test_no_change_is_loaded_as_none(case, tmp_path):
    made = trained(case, tmp_path / "in")
    adapter = read_adapter(str(made.folder), made.network())
    first, *others = adapter.changes.values()
    write(adapter, tmp_path / "out", [(first, first.factors()), *((one, None) for one in others)])
    before, after = made.base.state_dict(), merged_by_peft(made.base, tmp_path / "out")
    assert [n for n in before if not torch.equal(before[n], after[n])] == [first.name]


def test_a_failure_leaves_an_earlier_result_as_it_was(adapter, tmp_path):
    out = tmp_path / "out"
    write(adapter, out)
    (out / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in out.iterdir()}
    first, *others = adapter.changes.values()
    huge = LowRank(first.factors().left * 1e9, first.factors().right, first.shape)
    with pytest.raises(ValueError, match=rf"{first.name}.*float16.*bfloat16"):
        write(adapter, out, [(first, huge), *((one, None) for one in others)], torch.float16)
    with pytest.raises(ValueError, match="nothing"):
        write(adapter, out, [(first, None)])
    assert {path: path.read_bytes() for path in Path(out).iterdir()} == before


@pytest.mark.parametrize("case", ["linear", "experts"])
@torch.no_grad()
def test_transformers_loads_it_by_itself(case, tmp_path):
    made = trained(case, tmp_path / "in")
    write(read_adapter(str(made.folder), made.network()), tmp_path / "out")
    merged = copy.deepcopy(made.base).eval()
    merged.load_state_dict(made.merged)
    tokens = torch.arange(8)[None]
    made.base.eval().load_adapter(str(tmp_path / "out"))
    torch.testing.assert_close(made.base(tokens).logits, merged(tokens).logits, rtol=0, atol=1e-5)
