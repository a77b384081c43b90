# SPDX-License-Identifier: Apache-2.0
"""A base, two experts with texts of their own, and the merge of both by halves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from configs import write_task
from families import tokenizer, write_rows
from transformers import AutoModelForCausalLM

from mergekit_ace.training.tasks import write_own_texts

NAMES = ("base", "law", "medicine", "out")


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    base = tiny_llama()
    experts = [fine_tuned(base, seed, 0.3) for seed in (1, 2)]
    merge = tiny_llama()
    states = [expert.state_dict() for expert in experts]
    merge.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
    for name, model in zip(NAMES, (base, *experts, merge), strict=True):
        model.save_pretrained(folder / name)
        added = {"mask_token": "new"} if name == "law" else {}
        tokenizer(**added).save_pretrained(folder / name)
    for name, model in (("keep", base), ("law", experts[0])):
        write_own_texts(model.eval(), tokenizer(), 16, folder / f"{name}.jsonl", quiet=True)
    return folder


@pytest.fixture
def config(family_folder, tmp_path) -> dict:
    """A score.yml of models in `tmp_path`; medicine writes its texts."""
    shutil.copytree(family_folder, tmp_path, dirs_exist_ok=True)
    base, law, medicine, out = (str(tmp_path / name) for name in NAMES)
    texts = [{"path": f"{tmp_path / name}.jsonl", "text": "text"} for name in ("law", "keep")]
    return {
        "base_model": base,
        "models": [{"model": law, "data": texts[0]}, {"model": medicine}],
        "merges": [out],
        "keep": texts[1],
    }


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> Iterator[Path]:
    """A folder with a task of lm-evaluation-harness, which does not list its own ones."""
    harness = pytest.importorskip("lm_eval.tasks")
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"q": f"w{n}", "choices": ["w1", "w2"], "gold": n % 2} for n in range(8)]
    write_rows(folder / "rows.jsonl", rows)
    asked = {"text": "{{q}}", "choice": "{{choices}}", "target": "{{gold}}"}
    write_task(folder, "local_words", folder / "rows.jsonl", **asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "TaskManager", partial(harness.TaskManager, include_defaults=False))
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # runs pip
        yield folder


@pytest.fixture
def losses_by_hand() -> Callable[[str | Path, dict], np.ndarray]:
    def losses(folder: str | Path, data: dict) -> np.ndarray:
        model, found = AutoModelForCausalLM.from_pretrained(folder).double(), []
        for line in Path(data["path"]).read_text().splitlines():
            ids = torch.tensor([tokenizer()(json.loads(line)["text"])["input_ids"][:64]])
            with torch.no_grad():
                logits = model(ids).logits[0, :-1].log_softmax(-1)
            found.append(-float(logits.gather(1, ids[0, 1:, None]).sum()))
        return np.array(found)

    return losses
