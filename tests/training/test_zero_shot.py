# SPDX-License-Identifier: Apache-2.0
"""CLIP's image towers with heads made of prompts: trained, merged, and scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import fine_tuned
from families import SMALL, answered, parsed, tokenizer, train, write_rows
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import CLIPConfig, CLIPModel, CLIPVisionModel, CLIPVisionModelWithProjection

from mergekit_ace.training import statistics
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import zero_shot_head

PROMPTS = (["w1 w2", "w3 w4", ["w5", "w6 w7"]], ["w8", "w9 w1"])


def clip_family(folder: Path, **settings) -> dict:
    """A whole CLIP, and image towers of it, one without a projection."""
    words = tokenizer()
    text = {
        **SMALL,
        "projection_dim": 12,
        "vocab_size": 40,
        "max_position_embeddings": 16,
        "eos_token_id": 3,
    }
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
    merged = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()))
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


def test_a_head_needs_a_whole_clip(trained, tmp_path):
    folder = trained[0]["models"][1]["model"]
    tokenizer().save_pretrained(tmp_path)
    CLIPVisionModel.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match="give a whole CLIPModel with its tokenizer"):
        zero_shot_head(str(tmp_path), PROMPTS[0])


def test_prompts_and_the_task_go_together(trained):
    config, _, _ = trained
    with pytest.raises(ValidationError, match="no other task takes them"):
        parsed({**config, "task": "image-classification"})
    data = {n: v for n, v in config["models"][0]["data"].items() if n != "prompts"}
    with pytest.raises(ValidationError, match="`prompts` of the classes are what"):
        parsed({**config, "models": [{**config["models"][0], "data": data}]})


def test_a_tower_that_lacks_more_than_its_projection(tmp_path):
    config = clip_family(tmp_path)
    path = Path(config["models"][0]["model"], "model.safetensors")
    tensors = load_file(path)
    lost = next(name for name in tensors if name.endswith("mlp.fc1.weight"))
    save_file({n: t for n, t in tensors.items() if n != lost}, path, {"format": "pt"})
    with pytest.raises(TrainingError, match=r"mlp\.fc1\.weight"):
        train(config, tmp_path / "out")


def test_fisher_information_is_of_answers_by_the_prompts(tmp_path, monkeypatch):
    seen = []
    honest = statistics.sum_fisher

    def watched(model, names, samples, logits, *more):
        seen.append(logits(next(iter(samples))).shape[-1])
        return honest(model, names, samples, logits, *more)

    monkeypatch.setattr(statistics, "sum_fisher", watched)
    config = {**clip_family(tmp_path), "measure": ["fisher"]}
    config = statistics.StatisticsConfig.model_validate(config)
    statistics.measure_statistics(config, tmp_path / "out", quiet=True)
    assert seen == [len(prompts) for prompts in PROMPTS]
