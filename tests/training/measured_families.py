# SPDX-License-Identifier: Apache-2.0
"""Families whose statistics are measured, and how."""

from __future__ import annotations

from pathlib import Path

import torch
from families import llama_family, tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from mergekit_ace.measurements import Statistics, load_statistics
from mergekit_ace.training.measuring import StatisticsConfig, measure_statistics


def measure(config: dict, out: Path, *kinds: str, **options) -> Statistics:
    settings = StatisticsConfig.model_validate({**config, "measure": kinds or ["covariances"]})
    return load_statistics(str(measure_statistics(settings, out, quiet=True, **options)))


def gpt2_family(folder: Path) -> dict:
    """Experts whose matrices are stored the other way round, with a tied head."""
    config = llama_family(folder / "llama")
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    base = GPT2LMHeadModel(GPT2Config(**shape, **dropout, bos_token_id=2, eos_token_id=3))
    places = []
    for number in range(3):
        places.append(str(folder / f"gpt2-{number}"))
        with torch.no_grad():
            for parameter in base.parameters() if number else ():
                parameter.add_(0.05 * torch.randn(parameter.shape))
        base.save_pretrained(places[-1])
        tokenizer().save_pretrained(places[-1])
    config["base_model"] = places[0]
    for expert, place in zip(config["models"], places[1:], strict=True):
        expert["model"] = place
    return config
