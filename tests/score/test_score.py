# SPDX-License-Identifier: Apache-2.0
"""`score`, from a config to a table: losses, answers, tasks, and what goes on after a stop."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from checkpoints import ace_config, configure, fine_tuned, tiny_llama
from commands import run_config
from families import tokenizer, write_rows
from peft_models import train_by_chance
from transformers import AutoModelForCausalLM

from mergekit_ace.files.saving import file_states
from mergekit_ace.score import score as module
from mergekit_ace.score.results import forgot, kept

score = partial(run_config, "score")


def content(out: Path) -> dict:
    return json.loads((out / "scores.json").read_text())


def test_kept_and_forgot_are_those_of_the_losses(config, losses_by_hand, tmp_path):
    """A second and a third merge are the expert, which keeps all, and the base, nothing.

    The texts of the other expert are the base's, so that it gains nothing; the base writes `keep`.
    """
    law, merge, base = config["models"][0], config["merges"][0], config["base_model"]
    config["models"][1]["data"] = config.pop("keep")
    config["merges"] += [law["model"], base]
    found = score(config, tmp_path / "scores")
    scores, folders = content(tmp_path / "scores"), (base, law["model"], merge)
    before, expert, after = (losses_by_hand(folder, law["data"]).sum() for folder in folders)
    share, error = scores["kept"][merge]["law"]
    assert share == pytest.approx((before - after) / (before - expert), rel=1e-4)
    assert 0 < error < 0.5
    (written,) = (tmp_path / "scores" / "texts").iterdir()
    before, _, after = (losses_by_hand(folder, {"path": written}) for folder in folders)
    rise = (after - before).sum() / (30 * len(before))
    assert scores["forgot"][merge][0] == pytest.approx(rise, rel=1e-4)
    assert scores["texts_written_by_models"] == ["keep"]
    for said in (
        f"{share:.3f} ± {error:.3f}",
        "forgot* (nats)",
        "* on texts that the model wrote itself",
        "medicine is no better than the base on its texts",
    ):
        assert said in found
    assert "Scores" in (tmp_path / "scores" / "scores.html").read_text()
    for merge, kept_share in ((law["model"], 1), (base, 0)):
        assert scores["kept"][merge]["law"] == pytest.approx([kept_share, 0], abs=1e-6)
        assert scores["kept"][merge]["medicine"] is None
    assert scores["forgot"][base] == pytest.approx([0, 0], abs=1e-6)


def test_it_goes_on_where_it_stopped(config, tmp_path, monkeypatch):
    loaded, usual = [], module.sequence_losses

    def stopped(model, samples, *, title, quiet):
        loaded.append(title)
        if len(loaded) == 4:
            raise KeyboardInterrupt
        return usual(model, samples, title=title, quiet=quiet)

    monkeypatch.setattr("mergekit_ace.score.score.sequence_losses", stopped)
    score(config, tmp_path / "scores", fails=True)
    score(config, tmp_path / "scores")
    assert len(loaded) == 1 + len(set(loaded)), "only what was stopped is measured again"
    paths = [module.__file__, __file__]
    assert [*file_states(paths)] == [*file_states(paths[::-1])]
    whole = content(tmp_path / "scores")
    score(config, tmp_path / "scores")
    assert len(loaded) == 1 + len(set(loaded))
    fine_tuned(tiny_llama(), 7, 0.3).save_pretrained(config["merges"][0])
    score(config, tmp_path / "scores")
    assert len(loaded) == 4 + len(set(loaded)), "the merge was measured anew, on three texts"
    Path(config["base_model"], "tokenizer_config.json").touch()
    score(config, tmp_path / "scores")
    assert len(loaded) == 4 + 2 * len(set(loaded)), "all read other tokens"
    assert content(tmp_path / "scores")["kept"] != whole["kept"]


def test_all_models_read_the_same_tokens(config, tmp_path, monkeypatch):
    """As many as base and experts have positions for, and of equal rows one."""
    read, usual = [], module.read_rows
    monkeypatch.setattr(module, "read_rows", lambda *a: read.append(a[0].path) or usual(*a))
    configure(config["models"][1]["model"], max_position_embeddings=20)
    rows = Path(config["keep"]["path"])
    rows.write_text(2 * rows.read_text())
    score(config, tmp_path / "scores")
    measured = content(tmp_path / "scores")["measured"]["keep"].values()
    assert all([count for _, count in one["losses"]] == 16 * [19] for one in measured)
    assert len(read) == len({*read}) == 3


def test_adapters_and_configs_are_models_like_others(config, losses_by_hand, tmp_path):
    """A merge whose config has changed is made anew, and an adapter writes texts of its own."""
    adapted = train_by_chance(tiny_llama, tmp_path / "adapter", target_modules=["q_proj"], r=2)
    adapted.base.save_pretrained(config["base_model"])
    merge = ace_config([config["base_model"], *(one["model"] for one in config["models"])])
    path, adapter = tmp_path / "a+ce.yml", f"{config['base_model']}+{tmp_path / 'adapter'}"
    config["merges"], rises = [str(path), adapter], []
    config["models"][1] = {"model": adapter}
    for scale in (1.0, 0.5):
        path.write_text(yaml.safe_dump(merge | {"parameters": {"lambda": scale}}))
        score(config, tmp_path / "scores", "--trust-remote-code")
        scores = content(tmp_path / "scores")
        assert list(scores["kept"]) == [str(path), adapter]
        rises.append(scores["forgot"][str(path)])
        (folder,) = (tmp_path / "scores" / "merges").iterdir()  # the older one is gone
        assert '"trust_remote_code": true' in (folder / "merge_manifest.json").read_text()
    assert rises[0] != rises[1]
    (texts,) = (tmp_path / "scores" / "texts").iterdir()
    assert len({*texts.read_text().splitlines()}) == 64, "drawn, not the likeliest"
    whole = tiny_llama()
    whole.load_state_dict(adapted.merged)
    whole.save_pretrained(tmp_path / "whole")
    before, loss = (
        sorted(losses_by_hand(folder, config["keep"]))
        for folder in (config["base_model"], str(tmp_path / "whole"))
    )
    measured = sorted(one for one, _ in scores["measured"]["keep"][adapter]["losses"])
    assert measured == pytest.approx(loss, rel=1e-6)
    assert loss != pytest.approx(before, rel=1e-4)


def test_questions_are_scored_by_the_answer_and_by_exact_match(config, tmp_path):
    """An answer needs no end token, and `generation_config.json` takes no part.

    Texts are cut to the 32 positions of the models, of which the first is given.
    """
    expert = AutoModelForCausalLM.from_pretrained(config["models"][0]["model"])
    words, rows = tokenizer(), []
    for number in range(18):
        prompt = torch.tensor([words(f"w{number} w{2 * number}")["input_ids"]])
        answer = expert.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
        if answer[0, 2:].min() > 3:  # only words
            rows.append({"q": f"w{number} w{2 * number}", "a": words.decode(answer[0, 2:5])})
    assert len(rows) > 3
    expert.generation_config.update(repetition_penalty=5.0, eos_token_id=[*range(4, 40)])
    expert.generation_config.save_pretrained(config["models"][0]["model"])
    path = write_rows(tmp_path / "qa.jsonl", rows)
    config["models"][0]["data"] = {"path": path, "prompt": "q", "completion": "a"}
    (tmp_path / "k").mkdir()
    for split in ("train", "test"):
        rows = [{"text": " ".join(["w1", "w2"] * pairs)} for pairs in (40, 40, 1)]
        write_rows(tmp_path / "k" / f"{split}.jsonl", rows)
    splits = {"test_split": "test", "held_out": 2, "samples": 1}
    config["keep"] = {"path": str(tmp_path / "k"), "text": "text", **splits}
    score(config, tmp_path / "scores")
    scores = content(tmp_path / "scores")
    tokens = {count for _, count in scores["measured"]["law"]["base"]["losses"]}
    assert tokens == {4}, "three tokens and the end"
    counts = [count for _, count in scores["measured"]["keep"]["base"]["losses"]]
    assert (len(counts), max(counts)) == (2, 31)
    answers = scores["tables"]["exact answers: law"]
    assert answers["law"][0] == 1
    assert set(answers) == {"law", "base", config["merges"][0]}


@pytest.mark.parametrize(
    ("written", "ended", "same"),
    [
        (" 12 ", True, True),
        ("12 apples", True, False),
        ("12 apples", False, True),
        ("123", False, False),
        ("12 or 13\nQuestion: 5", False, False),
    ],
)
def test_an_answer_ends_where_the_model_or_its_line_does(written, ended, same):
    assert module.same_answer("12", written, ended=ended) == same


def test_tasks_run_by_the_real_harness(config, tasks, tmp_path):
    config["models"][1] |= {"tasks": ["local_words"], "limit": 6}
    config["task_folder"] = str(tasks)
    found = score(config, tmp_path / "scores")
    results = content(tmp_path / "scores")["tables"]["local_words (acc)"]
    assert set(results) == {"base", "medicine", config["merges"][0]}
    for value, error in results.values():
        assert error >= 0
        assert value * 6 == pytest.approx(round(value * 6))
    assert "local_words (acc)" in found
    config["models"][1]["tasks"] = ["no_such_task"]
    assert "has no task no_such_task" in score(config, tmp_path / "others", fails=True)


def test_a_missing_extra_and_a_full_gpu_have_remedies(config, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("mergekit_ace.score.score.sequence_losses", full)
    found = score(config, tmp_path / "scores", fails=True)
    assert f"{config['models'][0]['model']} does not fit on the GPU" in found
    assert "give `dtype: bfloat16`, or --device cpu" in found
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    config["models"][0] = {"model": config["models"][0]["model"], "tasks": ["local_words"]}
    assert "pip install 'mergekit-ace[score]'" in score(config, tmp_path / "scores", fails=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"merges": ["a", "a"]}, "`merges` has a twice"),
        ({"merges": ["a/m.yml", "b/m.yml"]}, "two merge configs have one file name"),
        ({"models": [{"model": "org/keep"}]}, "an expert is called keep"),
        ({"models": [{"model": "a/law"}], "merges": ["law"]}, "an expert is called law"),
        ({"keep": {"path": "keep.jsonl", "prompt": "q"}}, "needs a `completion` of each prompt"),
        ({"keep": {"path": "keep.jsonl", "image": "q"}}, "needs the column messages or"),
        ({"keep": {"path": "none.jsonl", "text": "q"}}, "cannot be read: FileNotFoundError"),
    ],
)
def test_mistakes_are_named(config, tmp_path, change, said):
    assert said in score(config | change, tmp_path / "scores", fails=True)


def test_short_texts_and_a_folder_with_other_things_are_named(config, tmp_path):
    config["keep"] = {"path": write_rows(tmp_path / "k.jsonl", [{"text": "w1"}]), "text": "text"}
    found = score(config, tmp_path / "scores", fails=True)
    assert "no held-out sample has anything to predict" in found
    assert "holds other things than scores" in score(config, tmp_path, fails=True)
    chats = write_rows(tmp_path / "c.jsonl", [{"m": [{"role": "user", "content": "w1 w2"}]}] * 2)
    for folder in map(Path, [config["base_model"], *config["merges"]]):
        words = tokenizer()
        words.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
        words.save_pretrained(folder)
    config["keep"] = {"path": chats, "messages": "m"}
    found = score(config, tmp_path / "scores", fails=True)
    assert "no chat ends with an answer" in found


def test_errors_of_figures_are_those_of_many_samples():
    """The bootstrap's error is the spread over data sets that are drawn anew."""
    rng = np.random.default_rng(0)

    def draw(count: int = 50) -> list[list[tuple[float, int]]]:
        hard = rng.normal(100, 10, count)
        shares = rng.normal(0.8, 0.3, count)
        gains = rng.uniform(10, 30, count)
        rows = (hard, hard - gains, hard - shares * gains)
        return [[(float(one), 20) for one in row] for row in rows]

    repeated = [draw() for _ in range(200)]
    rises = [forgot(base, merge) for base, _, merge in repeated]
    for figures in ([kept(*one) for one in repeated], rises):
        spread, expected = np.std([f.value for f in figures]), np.mean([f.error for f in figures])
        assert spread == pytest.approx(expected, rel=0.15)
