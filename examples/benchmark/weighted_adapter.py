# SPDX-License-Identifier: Apache-2.0
"""PEFT's `add_weighted_adapter`: a process of its own that `adapters.py` starts.

    python examples/benchmark/weighted_adapter.py TYPE OUT BASE ADAPTER ADAPTER …

PEFT merges adapters of a model. It needs none of the base's weights for that, so all entries of a
weight are one number here, which takes no memory.
"""

from __future__ import annotations

import sys

import torch
from accelerate import init_empty_weights
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

# `svd` is of the full change: PEFT computes the vectors beyond it as well, unless told otherwise.
OPTIONS = {"ties": {"density": 0.5}, "svd": {"svd_full_matrices": False}}


def hollow_model(base: str) -> nn.Module:
    """Return the model of a config, whose weights are zeros that take no memory."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return model


def main() -> None:
    kind, out, base, *adapters = sys.argv[1:]
    names = [str(number) for number in range(len(adapters))]
    model = PeftModel.from_pretrained(
        hollow_model(base), adapters[0], adapter_name="0", low_cpu_mem_usage=True
    )
    for name, adapter in zip(names[1:], adapters[1:], strict=True):
        model.load_adapter(adapter, adapter_name=name, low_cpu_mem_usage=True)
    options = {"combination_type": kind, **OPTIONS.get(kind, {})}
    if kind == "svd":
        options["svd_rank"] = sum(model.peft_config[name].r for name in names)
    model.add_weighted_adapter(names, [1.0] * len(names), "merged", **options)
    model.save_pretrained(out, selected_adapters=["merged"])


if __name__ == "__main__":
    main()
