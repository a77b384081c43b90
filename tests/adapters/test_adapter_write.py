# SPDX-License-Identifier: Apache-2.0
"""An adapter that is written is loaded by PEFT and transformers, and means the same."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama
from peft_models import (
    CASES,
    Nested,
    changed,
    gpt2,
    largest_difference,
    merged_by_peft,
    mixtral,
    train_by_chance,
    trained,
)
from safetensors.torch import load_file
from torch import Tensor

from mergekit_ace.adapters.read import Adapter, read_adapter
from mergekit_ace.adapters.write import write_adapter
from mergekit_ace.algebra.low_rank import LowRank


def held(adapter: Adapter):
    """What an adapter changes, as a merge of it alone would be."""
    for name, change in adapter.changes.items():
        yield change, adapter.full(name) if change.kind == "saved" else adapter.low_rank(name)


def write(adapter: Adapter, folder, dtype=torch.float32) -> None:
    write_adapter(folder, [adapter], held(adapter), "some/base", dtype, "v2")


def write_sum(adapters: list[Adapter], folder) -> dict[str, Tensor]:
    """Write the sum of adapters of factors; return what it adds to every weight."""
    parts = defaultdict(list)
    for adapter in adapters:
        for name, change in adapter.changes.items():
            parts[name].append((change, adapter.low_rank(name)))
    merged = []
    for ((change, _), *_), factors in ((those, [f for _, f in those]) for those in parts.values()):
        left = torch.cat([each.left for each in factors], dim=-1)
        right = torch.cat([each.right for each in factors], dim=-2)
        merged.append((change, LowRank(left, right, change.shape)))
    write_adapter(folder, adapters, merged, "base", torch.float32)
    return {change.name: total.dense() for change, total in merged}


def added(base, folder) -> dict[str, Tensor]:
    """What PEFT adds to the weights that an adapter changes."""
    before, after = base.state_dict(), merged_by_peft(base, folder)
    moved = (name for name in after if not torch.equal(after[name], before[name]))
    return {name: (after[name] - before[name]).double() for name in moved}


def config_of(folder) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.parametrize("case", CASES)
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


SUMS = {
    "modules of their own": (
        tiny_llama,
        [
            {"target_modules": ["q_proj", "v_proj"], "r": 3, "use_rslora": True},
            {"target_modules": ["q_proj", "down_proj"], "r": 5},
            {"target_modules": ["down_proj"], "r": 2, "layers_to_transform": [1]},
        ],
    ),
    "endings of names": (
        Nested,
        [
            {"target_modules": ["proj"], "r": 2},
            {"target_modules": ["block.proj", "my_proj"], "r": 3},
            {"target_modules": "proj|layers.1|layers.11", "r": 4},
        ],
    ),
    "transposed": (gpt2, [{"target_modules": ["c_proj"]}, {"target_modules": ["c_attn"], "r": 3}]),
    "experts": (
        mixtral,
        [
            {"target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"], "r": 2},
            {"target_modules": ["v_proj"], "target_parameters": ["experts.gate_up_proj"], "r": 2},
        ],
    ),
}


@pytest.mark.parametrize("case", SUMS)
def test_ranks_that_differ_between_modules(case, tmp_path):
    build, options = SUMS[case]
    adapters = []
    for number, own in enumerate(options):
        made = train_by_chance(build, tmp_path / str(number), number, lora_alpha=5, **own)
        adapters.append(read_adapter(str(made.folder), made.network()))
    deltas = write_sum(adapters, tmp_path / "out")
    loaded = added(made.base, tmp_path / "out")
    assert loaded.keys() == deltas.keys()
    assert max(float((loaded[n] - deltas[n]).abs().max()) for n in deltas) < 2e-6
    for name, change in read_adapter(str(tmp_path / "out"), made.network()).changes.items():
        own = sum(a.changes[name].rank for a in adapters if name in a.changes)
        assert change.rank == own or (change.kind == "parameter" and change.rank >= own)


def test_short_names_and_a_scale_of_1(tmp_path):
    """vLLM takes `lora_alpha / r` for all modules, and buffers of the largest rank."""
    adapters = []
    for number, targets in enumerate((["q_proj", "v_proj"], ["q_proj"])):
        made = train_by_chance(
            tiny_llama, tmp_path / str(number), r=3, lora_alpha=5, target_modules=targets,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        adapters.append(read_adapter(str(made.folder), made.network()))
    write_sum(adapters, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert config["r"] == config["lora_alpha"] == 6
    assert config["rank_pattern"] == config["alpha_pattern"] == {"v_proj": 3}
    assert config["task_type"] == "CAUSAL_LM"
    assert config["base_model_name_or_path"] == "base"
    assert config["inference_mode"] is True
    assert config["use_rslora"] is False
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    assert {name.rpartition(".lora_")[2] for name in names} == {"A.weight", "B.weight"}


@pytest.fixture
def adapter(tmp_path) -> Adapter:
    made = trained("patterns", tmp_path / "in")
    return read_adapter(str(made.folder), made.network())


def test_the_base_and_its_revision(adapter, tmp_path):
    write(adapter, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/base", "v2")


@pytest.mark.parametrize("case", ["linear", "experts", "table", "transposed"])
def test_a_rank_of_0_is_loaded_as_no_change(case, tmp_path):
    made = trained(case, tmp_path / "in")
    adapter = read_adapter(str(made.folder), made.network())
    empty = [
        (change, LowRank(whole.left[..., :0], whole.right[..., :0, :], whole.shape))
        for change, whole in held(adapter)
    ]
    write_adapter(tmp_path / "out", [adapter], empty, "base", torch.float32)
    assert added(made.base, tmp_path / "out") == {}


def test_saved_tensors_alone(tmp_path):
    """PEFT loads an adapter without factors by a name that no module has."""
    made = trained("saved", tmp_path / "in")
    adapter = read_adapter(str(made.folder), made.network())
    saved = [(change, tensor) for change, tensor in held(adapter) if change.kind == "saved"]
    write_adapter(tmp_path / "out", [adapter], saved, "base", torch.float32)
    after = merged_by_peft(made.base, tmp_path / "out")
    assert torch.equal(after["lm_head.weight"], made.merged["lm_head.weight"])


def test_bfloat16_is_the_rounding_of_the_factors(adapter, tmp_path):
    write(adapter, tmp_path / "out", torch.bfloat16)
    again = read_adapter(str(tmp_path / "out"), adapter.network)
    for name in adapter.changes:
        left = adapter.low_rank(name).left.bfloat16().double()
        assert torch.equal(again.low_rank(name).left, left)


def test_numbers_beyond_the_dtype_are_refused_and_the_folder_is_no_adapter(adapter, tmp_path):
    name, change = next(iter(adapter.changes.items()))
    factors = adapter.low_rank(name)
    huge = LowRank(factors.left * 1e9, factors.right, factors.shape)
    with pytest.raises(ValueError, match=rf"{name}.*float16.*bfloat16"):
        write_adapter(tmp_path / "out", [adapter], [(change, huge)], "base", torch.float16)
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_an_earlier_result_as_it_was(adapter, tmp_path):
    out = tmp_path / "out"
    write(adapter, out)
    (out / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in out.iterdir()}

    def failing():
        yield next(held(adapter))
        raise KeyError

    with pytest.raises(KeyError):
        write_adapter(out, [adapter], failing(), "b", torch.float32)
    with pytest.raises(ValueError, match="nothing"):
        write_adapter(out, [adapter], [], "b", torch.float32)
    assert {path: path.read_bytes() for path in Path(out).iterdir()} == before


@pytest.mark.parametrize("case", ["linear", "experts", "transposed"])
@torch.no_grad()
def test_transformers_loads_it_by_itself(case, tmp_path):
    made = trained(case, tmp_path / "in")
    write(read_adapter(str(made.folder), made.network()), tmp_path / "out")
    merged = copy.deepcopy(made.base).eval()
    merged.load_state_dict(made.merged)
    tokens = torch.arange(8)[None]
    made.base.eval().load_adapter(str(tmp_path / "out"))
    torch.testing.assert_close(made.base(tokens).logits, merged(tokens).logits, rtol=0, atol=1e-5)
