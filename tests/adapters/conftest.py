# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from checkpoints import tiny_llama
from peft_models import LINEAR, save_adapters


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> list[str]:
    """A llama, and three adapters of different ranks and targets."""
    every = {"target_modules": LINEAR, "lora_alpha": 0.3, "r": 2, "task_type": "CAUSAL_LM"}
    some = {**every, "target_modules": ["q_proj", "up_proj"], "r": 4}
    folder = tmp_path_factory.mktemp("family")
    return save_adapters(folder, tiny_llama, every, {**every, "r": 3}, some)
