# SPDX-License-Identifier: Apache-2.0
"""CLIP's image towers with heads made of prompts: trained, merged, and scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import fine_tuned
from families import (
    SMALL,
    answered,
    merge_of,
    parsed,
    tokenizer,
    train,
    write_rows,
)
from pydantic import ValidationError
from torch.nn.functional import normalize
from transformers import CLIPConfig, CLIPModel, CLIPVisionModel, CLIPVisionModelWithProjection

from mergekit_ace.naming import ConfigError
from mergekit_ace.training.tasks import zero_shot_head

PROMPTS = (["w1 w2", "w3 w4", ["w5", "w6 w7"]], ["w8", "w9 w1"])


def clip_family(folder: Path, **settings) -> dict:
    """A whole CLIP, and image towers of it, one without a projection."""
    words = tokenizer()
    text = {**SMALL, "projection_dim": 12, "vocab_size": 40, "max_position_embeddings": 16}
    text["eos_token_id"] = 3
    vision = {**SMALL, "projection_dim": 12, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    base = CLIPModel(config)
    base.save_pretrained(folder / "base")
    words.save_pretrained(folder / "base")
    models = []
    for k, kind in enumerate((CLIPVisionModelWithProjection, CLIPVisionModel)):
        tower = kind.from_pretrained(folder / "base")
        fine_tuned(tower, seed=k, scale=0.1).save_pretrained(folder / f"expert{k}")
        generator = torch.Generator().manual_seed(k)
        rows = [{"pixels": torch.rand(3, 8, 8, generator=generator).tolist()} for _ in range(20)]
        data = write_rows(folder / f"data{k}.jsonl", rows)
        data = {"path": data, "image": "pixels", "prompts": PROMPTS[k]}
        models.append({"model": str(folder / f"expert{k}"), "task": f"task{k}", "data": data})
    return {
        "base_model": str(folder / "base"),
        "models": models,
        "task": "zero-shot-image-classification",
        "learner": {"input": "direct"},
        "training": {"epochs": 2, "batch_size": 4, "learning_rate": 0.1},
        **settings,
    }


@torch.no_grad()
def logits_by_hand(folder: str, tower: CLIPVisionModel, pixels, prompts) -> torch.Tensor:
    """What CLIP says of images and texts, where a class with several prompts has their mean."""
    model, words = CLIPModel.from_pretrained(folder).eval(), tokenizer()
    rows = []
    for texts in ([p] if isinstance(p, str) else p for p in prompts):
        each = [model.text_model(**words(t, return_tensors="pt")).pooler_output for t in texts]
        rows.append(sum(normalize(model.text_projection(e), dim=-1)[0] for e in each))
    seen = model.visual_projection(tower(pixel_values=pixels).pooler_output)
    cosines = normalize(seen, dim=-1) @ normalize(torch.stack(rows), dim=-1).T
    return model.logit_scale.exp() * cosines


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    config = clip_family(folder / "family")
    return config, train(config, folder / "out"), folder / "out"


def test_the_merge_is_the_model_that_was_scored(trained, mergekit_yaml):
    """Labels are the answers of each tower with its prompts, and scores those of the merge."""
    config, file, out = trained
    merged = mergekit_yaml(merge_of(out))
    tower, info = CLIPVisionModel.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"]
    shares = []
    for row, (expert, prompts) in enumerate(zip(config["models"], PROMPTS, strict=True)):
        own = CLIPVisionModel.from_pretrained(expert["model"]).eval()
        for samples in answered(out, row).values():
            pixels = torch.cat([sample["pixel_values"] for sample in samples])
            answers = torch.cat([sample["hard"] for sample in samples])
            given = [
                logits_by_hand(config["base_model"], model, pixels, prompts).argmax(-1)
                for model in (own, tower.eval())
            ]
            assert torch.equal(given[0], answers)
        shares.append(float((given[1] == answers).float().mean()))  # the test split is the last
    assert file.contents.scores["StatsMerging"]["accuracy"] == pytest.approx(shares)


def test_a_head_needs_a_whole_clip(trained):
    with pytest.raises(ConfigError, match="give a whole CLIPModel with its tokenizer"):
        zero_shot_head(trained[0]["models"][1]["model"], PROMPTS[0])


def test_prompts_and_the_task_go_together(trained):
    config = trained[0]
    with pytest.raises(ValidationError, match="`prompts` belong to task: zero-shot"):
        parsed({**config, "task": "image-classification"})
    data = {n: v for n, v in config["models"][0]["data"].items() if n != "prompts"}
    with pytest.raises(ValidationError, match="`prompts` belong to task: zero-shot"):
        parsed({**config, "models": [{**config["models"][0], "data": data}]})
