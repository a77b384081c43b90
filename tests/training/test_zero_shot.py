# SPDX-License-Identifier: Apache-2.0
"""CLIP's image towers with heads made of prompts: trained, merged, and scored."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from checkpoints import fine_tuned, rewrite, tiny
from families import SMALL, VIT, answered, merge_of, pixels, save_trained, tokenizer, train
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPVisionModel, CLIPVisionModelWithProjection

from mergekit_ace.naming import ConfigError
from mergekit_ace.training.tasks import zero_shot_head

PROMPTS = (["w1 w2", "w3 w4", ["w5", "w6 w7"]], ["w8", "w9 w1"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A whole CLIP, and image towers of it, one without a projection."""
    folder = tmp_path_factory.mktemp("clip")
    text = SMALL | {"eos_token_id": 3, "projection_dim": 12}
    vision = VIT | {"num_channels": 3, "projection_dim": 12}
    base = tiny(CLIPModel, text_config=text, vision_config=vision, projection_dim=12)
    base.save_pretrained(folder / "base")
    towers = [
        fine_tuned(kind.from_pretrained(folder / "base"), seed=k, scale=0.1)
        for k, kind in enumerate((CLIPVisionModelWithProjection, CLIPVisionModel))
    ]
    task, columns = "zero-shot-image-classification", {"image": "pixels"}
    config = save_trained(folder, task, base, towers, partial(pixels, channels=3), columns)
    tokenizer().save_pretrained(folder / "base")
    for expert, prompts in zip(config["models"], PROMPTS, strict=True):
        expert["data"]["prompts"] = prompts
    return config, train(config, folder / "out"), folder / "out"


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


def test_the_merge_is_the_model_that_was_scored(trained, mergekit_yaml):
    """Labels are the answers of each tower with its prompts, and scores those of the merge."""
    config, file, out = trained
    merged = mergekit_yaml(merge_of(out))
    tower, info = CLIPVisionModel.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"]
    shares = []
    for row, (expert, prompts) in enumerate(zip(config["models"], PROMPTS, strict=True)):
        own = CLIPVisionModel.from_pretrained(expert["model"]).eval()
        samples = answered(out, row)["test"]
        seen = torch.cat([sample["pixel_values"] for sample in samples])
        answers = torch.cat([sample["hard"] for sample in samples])
        given, mine = (
            logits_by_hand(config["base_model"], model, seen, prompts).argmax(-1)
            for model in (own, tower.eval())
        )
        assert torch.equal(given, answers)
        shares.append(float((mine == answers).float().mean()))
    assert file.contents.scores["StatsMerging"]["accuracy"] == pytest.approx(shares)


def test_prompts_need_a_whole_clip(trained, tmp_path):
    folder = shutil.copytree(trained[0]["base_model"], tmp_path / "part")
    rewrite(folder, lambda tensors: tensors.pop("visual_projection.weight"))
    with pytest.raises(ConfigError, match="give a whole CLIPModel with its tokenizer"):
        zero_shot_head(str(folder), PROMPTS[0])
