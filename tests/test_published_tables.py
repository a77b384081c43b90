# SPDX-License-Identifier: Apache-2.0
"""`examples/llm/tables.py` on tiny models and samples made here; all but the downloads runs."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as tf
import yaml
from checkpoints import LLAMA, fine_tuned, tiny_llama
from configs import check_merge_config
from measured_files import needs_statistics
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mergekit_ace.plugin import our_methods

SUITES = sorted((Path(__file__).parents[1] / "examples" / "llm" / "suites").glob("*.yml"))
WORDS = "<s> </s> ? a photo of it is red blue big old not very".split()
HARNESS = pytest.mark.skipif(
    find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install '.[tables]'",
)


@pytest.fixture
def llm(example):
    """Import a module of examples/llm."""
    return partial(example, "llm")


def save_tokenizer(folder: Path, ending: str = "", **special: str) -> None:
    """Save a tokenizer with a token a word."""
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {ending}".strip(), pair=f"$A $B {ending}".strip(), special_tokens=[("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **special)
    fast.save_pretrained(folder)


def write_lines(path: Path, samples: list[dict]) -> dict:
    """Write samples as JSON lines; return the arguments of `load_dataset` for them."""
    path.write_text("\n".join(map(json.dumps, samples)), encoding="utf-8")
    return {"path": "json", "data_files": str(path), "split": "train"}


def checkpoint(folder: Path) -> dict:
    return {"model": str(folder), "gigabytes": 0.001}


@pytest.fixture
def run(llm, in_process, tmp_path, monkeypatch, capsys):
    """Run the program on a suite; return what it printed."""
    program = llm("tables")

    def run_suite(suite: dict, *flags: str) -> str:
        path = tmp_path / "tiny.yml"
        path.write_text(yaml.safe_dump(suite), encoding="utf-8")
        arguments = ["--suite", str(path), "--out", str(tmp_path / "out"), *flags]
        monkeypatch.setattr(sys, "argv", ["tables.py", *arguments])
        capsys.readouterr()
        program.main()
        return capsys.readouterr().out

    return run_suite


def results(tmp_path: Path, row: str) -> dict:
    return json.loads((tmp_path / "out" / "results" / f"{row}.json").read_text(encoding="utf-8"))


@pytest.fixture
def language_suite(tmp_path, monkeypatch):
    """Two experts of a Llama, and two multiple-choice tasks of the harness in local files."""
    # It asks a dozen commands about the machine, which takes two seconds a task.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    base = tiny_llama()
    experts = {"red": fine_tuned(base, 1), "blue": fine_tuned(base, 2)}
    for name, model in {"base": base, **experts}.items():
        model.save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    lines = [{"question": f"a {w} photo", "answer": n % 2} for n, w in enumerate(WORDS[3:])]
    data = write_lines(tmp_path / "questions.jsonl", lines)
    for name, choices in {"colours": ["red", "blue"], "sizes": ["big", "very big"]}.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": data["data_files"]}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}} is",
            "doc_to_target": "answer",
            "doc_to_choice": choices,
            "metric_list": [{"metric": "acc"}],
        }
        (tmp_path / "tasks").mkdir(exist_ok=True)
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return {
        "evaluator": "harness",
        "include_path": str(tmp_path / "tasks"),
        "out_dtype": "bfloat16",
        "base": checkpoint(tmp_path / "base"),
        "experts": {name: checkpoint(tmp_path / name) for name in ("red", "blue")},
        "tasks": {
            "colours": {"expert": "red", "metric": "acc,none"},
            "sizes": {"expert": "blue", "metric": "acc,none", "runs_code": True},
        },
        "rows": {
            "ties at 0.5": {
                "merge_method": "ties",
                "parameters": {"weight": 0.5, "density": 0.2, "normalize": False},
                "why": "a test",
            }
        },
        "published": [
            {"row": "experts", "source": "Table 1", "scores": {"colours": 80.0}},
            {"row": "TIES", "source": "Table 2", "scores": {"colours": 60.0}},
        ],
    }


@HARNESS
def test_language_models_by_the_harness(run, llm, language_suite, tmp_path, monkeypatch):
    flags = ["--methods", "ties at 0.5", "ace", "--limit", "7", "--confirm-run-unsafe-code"]
    shown = run(language_suite, *flags)
    for row in ("base", "experts", "ties at 0.5", "ace"):
        assert f"\n| {row} | " in shown
    assert "\n| *TIES* [2] | 60.0 | – | – |\n" in shown
    assert "\n| *TIES* [2] | 75.0 | – | – |\n" in shown
    assert "\n[2] Table 2\n" in shown
    assert shown.endswith((tmp_path / "out" / "tables.md").read_text(encoding="utf-8") + "\n")
    known = results(tmp_path, "ties-at-0-5")
    assert known["config"]["parameters"]["density"] == 0.2
    assert {task["samples"] for task in known["tasks"].values()} == {7}
    config = json.loads((tmp_path / "out" / "merged" / "ace" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"

    def scorer(*_):
        raise AssertionError("everything is evaluated already")

    monkeypatch.setattr(llm("tables"), "scorer", scorer)
    assert shown.endswith(run(language_suite, *flags))  # the same tables at once
    with pytest.raises(AssertionError, match="already"):
        run(language_suite, *flags, "--limit", "3")  # these are other results
    language_suite["tasks"]["colours"]["expert"] = "blue"
    with pytest.raises(SystemExit, match="results of other models or tasks: give another --out"):
        run(language_suite, *flags)


@HARNESS
def test_the_harness_has_the_tasks_of_the_suites(llm):
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.yaml")]
    known = set(re.findall(r"^task: (\S+)$", "\n".join(texts), re.MULTILINE))
    for path in SUITES:
        suite = llm("suite").load_suite(path.stem)
        if suite.evaluator == "harness":
            assert set(suite.tasks) <= known


def classifiers(kind: str) -> tuple[tf.PreTrainedModel, dict[str, tf.PreTrainedModel]]:
    """A base, and classifiers with heads of their own on encoders that have moved from it."""
    torch.manual_seed(0)
    if kind == "gpt2":
        size = {"vocab_size": 40, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config, head = tf.GPT2Config(**size), tf.GPT2ForSequenceClassification
        base = tf.GPT2LMHeadModel(config)
    else:
        config = tf.RobertaConfig(**LLAMA, pad_token_id=1)
        base, head = tf.RobertaForMaskedLM(config), tf.RobertaForSequenceClassification
    experts = {}
    for seed, (name, labels) in enumerate({"taste": 2, "kind": 3, "degree": 1}.items()):
        experts[name] = head(type(config)(**{**config.to_dict(), "num_labels": labels}))
        moved = fine_tuned(base, seed, 0.2).base_model.state_dict()
        experts[name].base_model.load_state_dict(moved)
    return base, experts


@pytest.fixture
def glue_suite(tmp_path):
    """A suite of three classifiers; one lies in a subfolder, as some on the Hub do."""

    def make(kind: str) -> dict:
        base, experts = classifiers(kind)
        base.save_pretrained(tmp_path / "base")
        save_tokenizer(tmp_path / "base")
        names = {name: checkpoint(tmp_path / name) for name in experts}
        names["degree"] |= {"model": str(tmp_path), "subfolder": "repository/degree"}
        for name, model in experts.items():
            model.save_pretrained(tmp_path / names[name].get("subfolder", name))
        texts = [f"{a} {b}" for a in WORDS[3:9] for b in WORDS[9:13]]
        samples = {
            "taste": [{"sentence": t, "label": n % 2} for n, t in enumerate(texts)],
            "kind": [{"one": t, "two": "very old", "label": n % 3} for n, t in enumerate(texts)],
            "degree": [{"one": t, "two": "not a", "label": n / 7} for n, t in enumerate(texts)],
        }
        metrics = {"taste": "accuracy_f1", "kind": "accuracy", "degree": "correlations"}
        tasks = {}
        for name, lines in samples.items():
            tasks[name] = {
                "expert": name,
                "data": write_lines(tmp_path / f"{name}.jsonl", lines),
                "columns": [key for key in lines[0] if key != "label"],
                "metric": metrics[name],
            }
        return {
            "evaluator": "glue",
            "encoder": type(base).__name__,
            "max_length": 8,
            "base": checkpoint(tmp_path / "base"),
            "experts": names,
            "tasks": tasks,
        }

    return make


@torch.no_grad()
def plain_correlations(model: tf.PreTrainedModel, samples: list[dict]) -> float:
    """The score on the task `degree`, one sample at a time, so that nothing is padded."""
    from scipy.stats import pearsonr, spearmanr  # they take long, and only this needs them

    predicted = []
    for sample in samples:
        words = f"{sample['one']} {sample['two']}".split()
        ids = torch.tensor([[WORDS.index(word) for word in words]])
        hidden = model.eval().base_model(ids).last_hidden_state
        # GPT-2 reads its last token, RoBERTa's head its first
        gpt2 = model.config.model_type == "gpt2"
        predicted.append(float(model.score(hidden[0, -1]) if gpt2 else model.classifier(hidden)))
    labels = [sample["label"] for sample in samples]
    return (pearsonr(predicted, labels)[0] + spearmanr(predicted, labels)[0]) / 2


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
def test_classifiers_keep_their_heads(run, glue_suite, tmp_path, kind):
    assert "| mean | " in run(glue_suite(kind), "--methods", "mean")
    base, experts = classifiers(kind)
    lines = (tmp_path / "degree.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    under_head = experts["degree"]
    expected = {"experts": plain_correlations(under_head, samples)}
    states = [model.base_model.state_dict() for model in experts.values()]
    mean = {name: torch.stack([s[name].float() for s in states]).mean(0) for name in states[0]}
    for row, encoder in {"mean": mean, "base": base.base_model.state_dict()}.items():
        under_head.base_model.load_state_dict(encoder)
        expected[row] = plain_correlations(under_head, samples)
    assert len({round(score, 3) for score in expected.values()}) == 3
    for row, score in expected.items():
        task = results(tmp_path, row)["tasks"]["degree"]
        assert task["score"] == pytest.approx(score, abs=1e-3), row
        assert task["samples"] == len(samples)


@pytest.fixture
def clip_suite(tmp_path):
    """Two vision towers of a CLIP, and small grey and coloured images."""
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as Picture

    torch.manual_seed(0)
    vision = {"image_size": 8, "patch_size": 4}
    text, towers = {"eos_token_id": 1}, {**LLAMA, "projection_dim": 16}
    base = tf.CLIPModel(
        tf.CLIPConfig(text_config=towers | text, vision_config=towers | vision, projection_dim=16)
    )
    base.save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base", "</s>", pad_token="</s>")  # CLIP reads its state there
    size = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    tf.CLIPImageProcessor(**size).save_pretrained(tmp_path / "base")
    tower = tf.CLIPVisionModel.from_pretrained(tmp_path / "base")
    for seed, name in enumerate(("red", "blue")):
        fine_tuned(tower, seed, 0.3).save_pretrained(tmp_path / name)
    noise = torch.randint(256, (20, 9, 12, 3), dtype=torch.uint8).numpy()
    images = [Picture.fromarray(pixels) for pixels in noise]
    images += [image.convert("L") for image in images]
    features = Features(image=Image(), label=ClassLabel(names=["red", "very_blue", "old"]))
    rows = {"image": images, "label": [n % 3 for n in range(40)]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "images.parquet")
    data = {"path": "parquet", "data_files": str(tmp_path / "images.parquet"), "split": "train"}
    task = {"data": data, "templates": ["a photo of {}", "it is a {}"]}
    return {
        "evaluator": "clip",
        "base": checkpoint(tmp_path / "base"),
        "experts": {name: checkpoint(tmp_path / name) for name in ("red", "blue")},
        "tasks": {name: {"expert": name, **task} for name in ("red", "blue")},
    }


def test_vision_towers_under_zero_shot_heads(run, clip_suite, tmp_path):
    """The heads have tests of their own, see training/test_zero_shot.py."""
    shown = run(clip_suite, "--methods", "mean", "tsv_m")
    assert "| tsv_m | " in shown
    load = tf.CLIPVisionModel.from_pretrained
    mean = load(tmp_path / "out" / "merged" / "mean")
    both = [load(tmp_path / name).state_dict() for name in ("red", "blue")]
    for name, tensor in mean.state_dict().items():
        assert torch.allclose(tensor, (both[0][name] + both[1][name]) / 2, atol=1e-6), name
    found = {row: results(tmp_path, row)["tasks"] for row in ("base", "experts", "mean")}
    assert {task["samples"] for tasks in found.values() for task in tasks.values()} == {40}
    assert len({tasks["red"]["score"] for tasks in found.values()}) > 1


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_suites_are_whole(llm, path):
    """Every merge of a suite is one that mergekit takes, and its published rows are complete."""
    suite = llm("suite").load_suite(path.stem)
    rows = llm("tables").merge_configs(suite)
    assert {"mean", "task_arithmetic", "ties", "dare_ties", "ace", "ace_relative", "wudi"} <= set(
        rows
    )
    known = {method.spec.name: method for method in our_methods()}
    for row in rows.values():
        method = row["merge_method"]
        assert method != "statsmerging"
        assert method not in known or not needs_statistics(known[method])
        check_merge_config({**row, "base_model": "base", "models": [{"model": "expert"}]})
    for row in suite.published:
        assert set(row.scores) in (set(), set(suite.tasks)), row.row
        assert row.scores or row.mean or row.share
    assert "# Sources\n" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_dry_run_writes_nothing(llm, run, path, tmp_path):
    flags = ["--suite", path.stem, "--dry-run", "--limit", "99", "--methods", "ace", "ties"]
    shown = run({}, *flags)
    suite = llm("suite").load_suite(path.stem)
    for expert in suite.experts.values():
        assert expert.model in shown
    assert shown.count(": 99 samples") == len(suite.tasks)
    assert shown.count("LEFT OUT") == sum(getattr(t, "runs_code", 0) for t in suite.tasks.values())
    assert "evaluations of 4 rows" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({}, ["--suite", "glue-gpt3"], "there is no suite 'glue-gpt3': give one of clip-8, glue-g"),
        ({}, ["--methods", "aces"], "has no row aces; its rows are mean, ace as"),
        ({"taskz": {}}, [], "taskz"),
        ({"experts": {}}, [], "names the expert '.*', not in experts"),
        ({"published": [{"row": "A", "source": "A", "scores": {"x": 1}}]}, [], "no task: .'x'"),
    ],
)
def test_mistakes_in_a_suite_or_on_the_command_line(run, change, flags, message):
    source = yaml.safe_load((SUITES[0].parent / "clip-8.yml").read_text(encoding="utf-8"))
    with pytest.raises(SystemExit, match=message):
        run(source | change, *flags)


def test_metrics_of_glue(llm):
    agreement = llm("evaluators").agreement
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0]])  # 0, 1, 1, 0
    assert agreement("accuracy", logits, [0, 1, 0, 0]) == 0.75
    assert agreement("accuracy_f1", logits, [0, 1, 0, 0]) == pytest.approx((0.75 + 2 / 3) / 2)
    assert agreement("matthews", logits, [0, 1, 0, 0]) == pytest.approx(1 / 3**0.5)
    numbers = torch.tensor([[1.0], [2.0], [4.0]])
    pearson = float(torch.corrcoef(torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 3.0]]))[0, 1])
    assert agreement("correlations", numbers, [1.0, 2.0, 3.0]) == pytest.approx((pearson + 1) / 2)


def test_means_and_shares(llm):
    """Tasks of one expert are averaged first; shares refer to the experts of the same source."""
    source = yaml.safe_load((SUITES[0].parent / "mergebench-3b.yml").read_text(encoding="utf-8"))
    source["published"] = [
        {"row": "experts", "source": "A", "scores": {"arc_fr": 50.0}},
        {"row": "other", "source": "B", "scores": {"arc_fr": 40.0}, "share": 77.0},
        {"row": "only a mean", "source": "C", "mean": 60.1},
    ]
    suite = llm("suite").HarnessSuite.model_validate(source)
    ours = {
        "experts": {"gsm8k_cot": 0.8, "arc_fr": 0.4, "arc_de": 0.2},
        "ace": {"gsm8k_cot": 0.6, "arc_fr": 0.4, "arc_de": 0.1},
    }
    shown = llm("comparison").compare(suite, ["gsm8k_cot", "arc_fr", "arc_de"], ours)
    assert "| ace | 60.0 | 40.0 | 10.0 | 42.5 |" in shown
    assert "| ace | 75.0 | 100.0 | 50.0 | 75.0 |" in shown
    assert "| *other* [2] | – | 40.0 | – | – |" in shown
    assert "| *other* [2] | – | 80.0 | – | 77.0 |" in shown
    assert shown.count("| *only a mean* [3] | – | – | – | 60.1 |") == 1
    assert shown.count("only a mean") == 1  # it has no share
