# SPDX-License-Identifier: Apache-2.0
"""Which tensors adapters change, where names or layers could mislead."""

from __future__ import annotations

import pytest
from checkpoints import tiny_llama
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from peft_models import config_of, save_adapters, tied_llama

from mergekit_ace.adapters.adapter_merge import AdapterMerge
from mergekit_ace.adapters.adapter_plan import AdapterPlan, plan_adapters
from mergekit_ace.files.models import headers_only


def plan(config: dict) -> AdapterPlan:
    return plan_adapters(MergeConfiguration.model_validate(config), "", MergeOptions(quiet=True))


@pytest.mark.parametrize("build", [tied_llama, tiny_llama])
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_table_and_a_head_are_told_apart(tmp_path, build, module):
    paths = save_adapters(tmp_path, build, {"target_modules": [module]})
    (tensor,) = plan(config_of(paths, "ace")).tensors
    assert module in tensor.planned.name
    assert module in tensor.known[0].name


def test_every_layer_may_have_adapters_of_its_own(tmp_path):
    options = {"target_modules": ["q_proj"]}
    base, *adapters = save_adapters(tmp_path, tiny_llama, options, options)
    config = config_of([base], "ace")
    config.pop("models")
    config["slices"] = [
        {"sources": [{"model": model, "layer_range": [n, n + 1]} for model in (base, expert)]}
        for n, expert in enumerate(f"{base}+{adapter}" for adapter in adapters)
    ]
    planned = plan(config)
    merge = AdapterMerge(planned)
    assert len(planned.tensors) == 2
    with headers_only(planned.checkpoints):
        for tensor, adapter in zip(planned.tensors, planned.adapters, strict=True):
            own = adapter.low_rank(tensor.known[0].name)
            merged = merge.merge(tensor)
            assert float((merged.delta.dense() - own.dense()).abs().max()) < 1e-12
            assert sum(map(bool, merged.tau)) == 1
