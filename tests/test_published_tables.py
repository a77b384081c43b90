# SPDX-License-Identifier: Apache-2.0
"""`examples/llm/tables.py` on tiny models and samples made here; all but the downloads runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
import yaml
from checkpoints import fine_tuned, tiny_llama
from configs import EXAMPLES, check_merge_config, write_task
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SUITES = sorted((EXAMPLES / "llm" / "suites").glob("*.yml"))
WORDS = "<s> </s> ? a photo of it is red blue big old not very".split()


@pytest.fixture
def run(run_example, in_process, tmp_path):
    """Run the program on a suite; return what it printed."""

    def run_suite(suite: dict, *flags: str) -> str:
        path = tmp_path / "tiny.yml"
        path.write_text(yaml.safe_dump(suite), encoding="utf-8")
        files = ["--suite", path, "--out", tmp_path / "out"]
        return run_example("llm", "tables", *files, "--methods", *flags)

    return run_suite


def save(folder: Path, base: tf.PreTrainedModel, experts: dict, **tokenizer: str) -> dict:
    """Save models, and a tokenizer with a token a word; return their part of a suite."""
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if tokenizer:  # CLIP reads its state at the end of a text
        ends = {"single": "$A </s>", "special_tokens": [("</s>", 1)]}
        words.post_processor = processors.TemplateProcessing(**ends)
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", **tokenizer)
    for name, model in {"base": base, **experts}.items():
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    known = {n: {"model": str(folder / n), "gigabytes": 0.001} for n in ("base", *experts)}
    return {"base": known.pop("base"), "experts": known}


def write_lines(path: Path, samples: list[dict]) -> dict:
    """Write samples as JSON lines; return the arguments of `load_dataset` for them."""
    path.write_text("\n".join(map(json.dumps, samples)), encoding="utf-8")
    return {"path": "json", "data_files": str(path), "split": "train"}


def results(tmp_path: Path, row: str) -> dict:
    return json.loads((tmp_path / "out" / "results" / f"{row}.json").read_text(encoding="utf-8"))


def test_language_models_by_the_harness(run, example, tmp_path, monkeypatch):
    """Two multiple-choice tasks in local files; a second run evaluates nothing anew."""
    pytest.importorskip("lm_eval", reason="pip install '.[tables]'")
    # It asks a dozen commands about the machine, which takes two seconds a task.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    base = tiny_llama()
    suite = save(tmp_path, base, {"red": fine_tuned(base, 1), "blue": fine_tuned(base, 2)})
    lines = [{"question": f"a {w} photo", "answer": n % 2} for n, w in enumerate(WORDS[3:])]
    data = write_lines(tmp_path / "questions.jsonl", lines)
    (tmp_path / "tasks").mkdir()
    for name, choices in {"colours": ["red", "blue"], "sizes": ["big", "very big"]}.items():
        asked = {"text": "{{question}} is", "choice": choices, "target": "answer"}
        write_task(tmp_path / "tasks", name, data["data_files"], **asked)
    suite |= {"evaluator": "harness", "include_path": str(tmp_path / "tasks")}
    suite["tasks"] = {
        "colours": {"expert": "red", "metric": "acc,none"},
        "sizes": {"expert": "blue", "metric": "acc,none", "runs_code": True},
    }
    ties = {"merge_method": "ties", "parameters": {"weight": 0.5, "density": 0.2}, "why": "a test"}
    suite |= {"rows": {"ties at 0.5": ties}, "out_dtype": "bfloat16"}
    suite["published"] = [{"row": "TIES", "source": "Table 2", "scores": {"colours": 60.0}}]
    flags = ["ties at 0.5", "ace", "--limit", "7", "--confirm-run-unsafe-code"]
    shown = run(suite, *flags)
    for row in ("base", "experts", "ties at 0.5", "ace", "*TIES* [1]"):
        assert f"\n| {row} | " in shown
    known = results(tmp_path, "ties-at-0-5")
    assert known["config"]["parameters"]["density"] == 0.2
    assert {task["samples"] for task in known["tasks"].values()} == {7}
    monkeypatch.setattr(example("llm", "tables"), "scorer", None)
    assert shown.endswith(run(suite, *flags))
    suite["tasks"]["colours"]["expert"] = "blue"
    with pytest.raises(SystemExit, match="results of other models or tasks: give another --out"):
        run(suite, *flags)


def test_classifiers_keep_their_heads(run, tmp_path):
    """One of them lies in a subfolder, as some on the Hub do."""
    base, experts = tiny_model("GPT2LMHeadModel", "gpt2", layers=2), {}
    for seed, (name, labels) in enumerate({"kind": 3, "below/degree": 1}.items()):
        own = tf.GPT2Config(**{**base.config.to_dict(), "num_labels": labels})
        experts[name] = tf.GPT2ForSequenceClassification(own)
        moved = fine_tuned(base, seed, 0.2).base_model.state_dict()
        experts[name].base_model.load_state_dict(moved)
    suite = save(tmp_path, base, experts)
    suite["experts"]["below/degree"] |= {"model": str(tmp_path), "subfolder": "below/degree"}
    suite |= {"evaluator": "glue", "encoder": type(base).__name__, "max_length": 8, "tasks": {}}
    pairs = [(f"{a} {b}", "not a") for a in WORDS[3:9] for b in WORDS[9:13]]
    for name, metric, scale in (("kind", "accuracy", 1), ("below/degree", "correlations", 7)):
        samples = [{"one": a, "two": b, "label": n % 3 / scale} for n, (a, b) in enumerate(pairs)]
        data = write_lines(tmp_path / f"{scale}.jsonl", samples)
        task = {"expert": name, "data": data, "columns": ["one", "two"], "metric": metric}
        suite["tasks"][name] = task
    assert "| mean | " in run(suite, "mean")
    task = results(tmp_path, "mean")["tasks"]["below/degree"]
    assert -1 <= task["score"] <= 1
    assert task["samples"] == len(samples)


def test_vision_towers_under_zero_shot_heads(run, tmp_path):
    """On grey and coloured images; the heads have tests of their own."""
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as Picture

    base = tiny_model("CLIPModel", "clip", layers=2)
    base.save_pretrained(tmp_path / "base")
    side = base.config.vision_config.image_size
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    tf.CLIPImageProcessor(**size).save_pretrained(tmp_path / "base")
    tower = tf.CLIPVisionModel.from_pretrained(tmp_path / "base")
    names = ("red", "blue")
    experts = {name: fine_tuned(tower, n, 0.3) for n, name in enumerate(names)}
    suite = save(tmp_path, base, experts, pad_token="</s>")
    noise = torch.randint(256, (20, 9, 12, 3), dtype=torch.uint8).numpy()
    images = [Picture.fromarray(pixels) for pixels in noise]
    images += [image.convert("L") for image in images]
    features = Features(image=Image(), label=ClassLabel(names=["red", "very_blue", "old"]))
    rows = {"image": images, "label": [n % 3 for n in range(40)]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "images.parquet")
    data = {"path": "parquet", "data_files": str(tmp_path / "images.parquet"), "split": "train"}
    task = {"data": data, "templates": ["a photo of {}", "it is a {}"]}
    suite["tasks"] = {name: {"expert": name, **task} for name in names}
    run(suite | {"evaluator": "clip"}, "mean")
    load = tf.CLIPVisionModel.from_pretrained
    both = [load(tmp_path / name).state_dict() for name in names]
    for name, tensor in load(tmp_path / "out" / "merged" / "mean").state_dict().items():
        assert torch.allclose(tensor, (both[0][name] + both[1][name]) / 2, atol=1e-6), name
    found = [results(tmp_path, row)["tasks"] for row in ("base", "experts", "mean")]
    assert {task["samples"] for tasks in found for task in tasks.values()} == {40}
    assert len({tasks["red"]["score"] for tasks in found}) > 1


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_suites_are_whole(example, run_example, tmp_path, path):
    """mergekit takes all merges, published rows are complete, and a dry run writes nothing."""
    suite = example("llm", "suite").load_suite(path.stem)
    rows = example("llm", "tables").merge_configs(suite)
    assert {"mean", "task_arithmetic", "ties", "dare_ties", "ace", "wudi"} <= set(rows)
    for row in rows.values():
        assert row["merge_method"] not in ("statsmerging", "regmean", "fisher")
        check_merge_config({**row, "base_model": "base", "models": [{"model": "expert"}]})
    for row in suite.published:
        assert set(row.scores) in (set(), set(suite.tasks)), row.row
        assert row.scores or row.mean or row.share
    out = ["--out", tmp_path / "out", "--limit", 99, "--methods", "ace", "ties"]
    shown = run_example("llm", "tables", "--suite", path.stem, "--dry-run", *out)
    assert all(expert.model in shown for expert in suite.experts.values())
    assert shown.count(": 99 samples") == len(suite.tasks)
    assert shown.count("LEFT OUT") == sum(getattr(t, "runs_code", 0) for t in suite.tasks.values())
    assert not (tmp_path / "out").exists()
