# SPDX-License-Identifier: Apache-2.0
"""The study of a real language model, on a tiny one and a few made-up texts."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import fine_tuned, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = {"colours": "red green blue black white".split(), "animals": "cat dog cow ant bee".split()}
OPTIONS = ["left", "right", "up"]


@pytest.fixture
def llm(example, in_process):
    """Import a module of the study; its merges run in this process."""
    return partial(example, "llm")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, so that any text can be written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{option}"[:2] for option in OPTIONS]
    merges = [("Ġ", word[1]) for word in words]
    names = ["<end>", *alphabet, *words]
    raw = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


@pytest.fixture
def base(tmp_path, tokenizer) -> Path:
    """A random Llama with its tokenizer."""
    model = tiny_llama(
        vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def data(tmp_path) -> Path:
    """Two experts of text, one of questions, a text that nobody learns, and two prompts."""
    rng = random.Random(0)
    content: dict = {"experts": {}, "untrained": {}, "prompts": []}
    for name, words in WORDS.items():
        (tmp_path / name).mkdir()
        for number in range(6):
            text = " ".join(rng.choices(words, k=900))
            (tmp_path / name / f"{number}.txt").write_text(text)
        content["experts"][name] = {"folder": name, "files": "*.txt"}
    lines = [{"prompt": f"{n} {n % 3}:", "answer": OPTIONS[n % 3]} for n in range(1500)]
    (tmp_path / "ways.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content["experts"]["ways"] = {"files": "ways.jsonl", "reader": "questions", "options": OPTIONS}
    content["untrained"]["others"] = {"folder": "animals", "files": "*.txt"}
    content["prompts"] = [{"text": "red"}, {"chat": "Which animal?"}]
    path = tmp_path / "my.yml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def study(llm, base, data, tmp_path, monkeypatch):
    """Run the program with some flags, on two steps of training; return its output folder."""

    def run(*flags: str) -> Path:
        out = tmp_path / "out"
        arguments = ["--base", base, "--data", data, "--output", out, "--steps", "2"]
        sizes = ["--sizes", "1", "2", "1"]
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments), *sizes, *flags])
        program = llm("run")
        monkeypatch.setattr(program, "SCALES", (0.4, 1.0, 1.4))
        program.main()
        return out

    return run


def test_the_program_from_end_to_end(study, monkeypatch, capsys):
    monkeypatch.setattr("mergekit_ace.training.own_texts.LENGTH", 16)  # a hundred texts are written
    flags = ["--rows", "mean", "task_arithmetic", "sce", "ace, e", "ace_relative, 16 samples"]
    flags += ["fisher", "ace, mix 0.5", "ace, own", "calibrated ace_"]
    out = study(*flags)
    table = (out / "table.md").read_text()
    printed = capsys.readouterr().out
    assert table in printed
    spent = r"(\d+) s of training, (\d+) s of merging, (\d+) s of exams; (\d+) s in all"
    *parts, total = map(int, re.search(spent, printed).groups())
    assert sum(parts) <= total + 2, "each is rounded"
    titles = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    for title in ("| base", "| expert ways", "| mean (linear)", "| task_arithmetic, best λ",
                  "| ace, embeddings averaged, best λ", "| ace_relative, 16 samples",
                  "| fisher, 16 samples", "| ace, mix 0.5, 16 samples",
                  "| ace, own texts", "| calibrated ace_relative, own texts"):  # fmt: skip
        assert title in titles
    assert (out / "picture.png").stat().st_size > 5000
    answers = (out / "answers.md").read_text()
    assert answers.count("| sce, best λ |") == 2
    assert not any(path.is_dir() for path in (out / "merges").iterdir()), "merges take much space"
    results = (out / "results.jsonl").read_bytes()
    with open(out / "results.jsonl", "ab") as file:
        file.write(b'{"key": "cut off')  # as a kill would leave it
    study(*flags)
    assert (out / "table.md").read_text() == table
    assert (out / "results.jsonl").read_bytes().startswith(results)
    assert len((out / "results.jsonl").read_bytes().splitlines()) == len(results.splitlines()) + 1
    study("--only-print", *flags)
    assert (out / "table.md").read_text() == table
    capsys.readouterr()
    study(*flags)
    assert "0 s of training, 0 s of merging, 0 s of exams" in capsys.readouterr().out


def test_calibration_from_end_to_end(llm, base, data, tmp_path, monkeypatch, capsys):
    """Both calibrated merges are measured beside the merge that they come from, then deleted."""
    flags = ["--base", base, "--data", data, "--output", tmp_path / "out", "--steps", 2,
             "--sizes", 1, 2, 1, "--samples", 2, "--scale", 0.7]  # fmt: skip
    program = llm("calibration")
    monkeypatch.setattr(program, "KEEP", "others")

    def tables(*more: object) -> str:
        monkeypatch.setattr(sys, "argv", ["calibration.py", *map(str, [*flags, *more])])
        program.main()
        return capsys.readouterr().out

    first = tables()
    assert "## full, 2 steps, seed 0: animals, colours, ways" in first
    rows = [line.split(" | ") for line in first.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == [
        "| ace, λ 0.7", "| calibrated, all of the way", "| calibrated, half of the way",
    ]  # fmt: skip
    assert len({row[1] for row in rows[2:]}) == 3, "three models"
    assert not any(path.is_dir() for path in (tmp_path / "out" / "merges").iterdir())
    assert first[first.index("##") :] == tables("--only-print")
    with pytest.raises(SystemExit, match="not measured yet"):
        tables("--only-print", "--ridge", 0.2)
    others = tables("--nothing-kept", "--ridge", 0.1)
    assert not {row for row in others.splitlines() if "calibrated," in row} & {*first.splitlines()}
    with pytest.raises(SystemExit, match="not measured yet"):
        tables("--only-print", "--row", "ace, from outputs")
    with pytest.raises(SystemExit, match="'ace, from' begins several rows"):
        tables("--only-print", "--row", "ace, from")
    monkeypatch.setattr(program, "KEEP", "english")
    with pytest.raises(SystemExit, match=r"has no text 'english' .* --nothing-kept"):
        tables()


@pytest.fixture
def family(llm, base, tmp_path):
    """Two experts of a base; return what makes a merge of them by a row at a λ."""
    merges = llm("merges")
    model = LlamaForCausalLM.from_pretrained(base)
    members = {name: tmp_path / name for name in ("law", "medicine")}
    for seed, folder in enumerate(members.values()):
        fine_tuned(model, seed).to(torch.bfloat16).save_pretrained(folder)

    def merge(row, scale: float):
        return merges.Merge(row, scale, base, members, {}, tmp_path / "merges")

    return merge


def test_a_scaled_merge_is_that_of_the_command(llm, family, base, data):
    """λ is applied by the program: the weights are those that the method's own `lambda` gives."""
    measure, sources, merges = llm("measure"), llm("sources"), llm("merges")
    examiner = measure.Examiner(base, {}, {}, measure.Sizes(1, 1, 1), sources.read_sources(data))
    start = measure.read_tensors(base)
    for row in merges.ROWS:
        if not row.scaled or row.method in ("sce", "karcher"):  # which have no λ
            continue
        examiner.put(family(row, row.published).make(), 0.7 / row.published)
        scaled = examiner.model.state_dict()
        wanted = measure.read_tensors(family(row, 0.7).make())
        distance = {name: (scaled[name] - wanted[name]).norm() for name in wanted}
        change = {name: (wanted[name] - start[name]).norm() for name in wanted}
        assert sum(change.values()) > 0, row.name
        for name, tensor in wanted.items():  # all are rounded to bfloat16
            assert distance[name] <= 0.02 * change[name] + 2**-8 * tensor.norm(), (row.name, name)


def test_results_are_those_of_the_code_as_it_is(llm, family, tmp_path, monkeypatch):
    merges, experts = llm("merges"), llm("experts")
    rows = {row.name: row for row in [*merges.ROWS, *merges.ON_DEMAND]}
    package = tmp_path / "package"
    for name in ("algebra", "methods", "training", "coefficients"):
        (package / name).mkdir(parents=True)
        (package / name / "one.py").write_text("ONE = 1\n")
    monkeypatch.setattr(merges, "PACKAGE", package)

    def names() -> list[str]:
        return [family(rows[name], 1.0).target.name
                for name in ("ties", "ace", "fisher, 16 samples")]  # fmt: skip

    first = names()
    (package / "training" / "one.py").write_text("ONE = 2\n")
    assert [a == b for a, b in zip(first, names(), strict=True)] == [True, True, False]
    (package / "methods" / "peers.py").write_text("TWO = 2\n")
    assert [a == b for a, b in zip(first, names(), strict=True)] == [True, False, False]
    one = tmp_path / "one.py"
    one.write_text("ONE = 1\n")
    before = experts.digest_of_files(one)
    one.write_text("ONE = 2\n")
    assert experts.digest_of_files(one) != before


def test_rows_are_chosen_by_name_or_beginning(llm):
    choose_rows = llm("run").choose_rows
    assert [row.name for row in choose_rows(["ace", "fisher"])] == ["ace", "fisher, 16 samples"]
    assert not any(row.samples or row.learn for row in choose_rows(None))
    with pytest.raises(SystemExit, match=r"No row begins with 'tie_s'\. There are: mean"):
        choose_rows(["ace", "tie_s"])


def test_training_goes_on_where_it_was(llm, base, data, tmp_path, monkeypatch):
    sources, experts = llm("sources"), llm("experts")
    texts = sources.Texts(sources.read_sources(data).experts["colours"], tmp_path / "texts")
    monkeypatch.setattr(experts, "WARM_UP", 1)
    made = {}
    for kind in ("full", "lora"):
        for steps in ((3, 6), (6,)):
            folder = tmp_path / f"models-{kind}-{len(steps)}"
            for count in steps:
                expert = experts.train_expert(base, texts, experts.Recipe(kind, 0, count), folder)
            made[kind, len(steps)] = llm("measure").read_tensors(expert)
        whole, stopped = made[kind, 1], made[kind, 2]
        assert "lm_head.weight" not in whole, "tied weights are stored once"
        start = llm("measure").read_tensors(base)
        for name, tensor in whole.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, stopped[name]), (kind, name)
        assert any(not torch.equal(start[n].bfloat16(), tensor) for n, tensor in whole.items())
        recipe = experts.Recipe(kind, 0, 6, "float32")
        with monkeypatch.context() as patched:
            patched.setattr(torch.optim.AdamW, "step", None)  # all steps are done
            expert = experts.train_expert(base, texts, recipe, folder)
        precise = llm("measure").read_tensors(expert)
        for name, tensor in precise.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor.bfloat16(), whole[name]), (kind, name)


def test_adapters_begin_apart(llm, data, tmp_path):
    sources, experts = llm("sources"), llm("experts")
    read = sources.read_sources(data).experts
    ways, colours = (sources.Texts(read[name], tmp_path / "texts") for name in ("ways", "colours"))
    gentle = experts.Recipe("lora-gentle")
    starts = {experts.adapter_seed(texts, recipe) for texts in (ways, colours)
              for recipe in (gentle, experts.Recipe("lora-gentle", seed=1))}  # fmt: skip
    assert len(starts) == 4
    made_of = experts.ingredients(tmp_path / "base", ways, gentle)
    assert made_of["start"] in starts
    assert "start" not in experts.ingredients(tmp_path / "base", ways, experts.Recipe("full"))


def test_an_untied_base_is_the_same_model_with_a_head_of_its_own(llm, base, tmp_path):
    experts, read = llm("experts"), llm("measure").read_tensors
    tied = experts.prepare_base(str(base), tmp_path / "models")
    untied = experts.prepare_base(str(base), tmp_path / "models", untied=True)
    tensors = read(untied)
    assert torch.equal(tensors.pop("lm_head.weight"), tensors["model.embed_tokens.weight"])
    assert {*tensors} == {*read(tied)}
    assert all(torch.equal(tensor, read(tied)[name]) for name, tensor in tensors.items())
    assert not json.loads((untied / "config.json").read_text())["tie_word_embeddings"]


def test_held_out_groups_were_never_seen(llm, data, tmp_path, tokenizer):
    sources = llm("sources")
    read = sources.read_sources(data)
    for name in ("colours", "ways"):
        texts = sources.Texts(read.experts[name], tmp_path / "texts")
        groups = [{line["group"] for line in texts.lines(part)}
                  for part in ("train", "validation", "test")]  # fmt: skip
        assert all(groups)
        assert not groups[0] & groups[1]
        assert not groups[2] & (groups[0] | groups[1])
    ids, labels = texts.sequences("test", tokenizer, 2)
    assert ids.shape == labels.shape == (2, sources.LENGTH)
    scored = labels != -100
    assert torch.equal(ids[scored], labels[scored])
    text = tokenizer.decode(ids[0][scored[0]])
    assert set(text.split()) == set(OPTIONS), "only answers are scored"
    one = sources.Source("one", {"folder": "colours", "files": "0.txt"}, tmp_path)
    with pytest.raises(SystemExit, match=r"one has 1 files .* needs three"):
        sources.Texts(one, tmp_path / "texts")


def test_right_answers(llm):
    right_answers = llm("measure").right_answers
    asked = torch.tensor([[0, 1, 1, 0, 1, 1, 1]]).bool()
    right = torch.tensor([[1, 1, 1, 1, 1, 0, 1]]).bool()
    assert right_answers(asked, right, only_first=False) == [1, 0]
    assert right_answers(asked, right, only_first=True) == [1, 1]


def test_what_is_kept_and_its_error(llm):
    share_kept = llm("measure").share_kept
    rng = torch.Generator().manual_seed(0)
    gains = 1 + 0.2 * torch.rand(400, generator=rng)
    noise = 0.1 * torch.randn(400, generator=rng)
    base = {"loss": [10.0] * 400}
    expert = {"loss": (10 - gains).tolist()}
    assert share_kept(base, expert, expert)[0] == pytest.approx(1)
    assert share_kept(base, expert, base)[0] == pytest.approx(0)
    merged = {"loss": (10 - 0.5 * gains + noise).tolist()}
    share, away = share_kept(base, expert, merged)
    error = sum(value**2 for value in away) ** 0.5
    assert share == pytest.approx(0.5, abs=4 * error)
    assert error == pytest.approx(0.1 / 1.1 / 20, rel=0.2)


def test_differences_are_paired(llm):
    """Two merges that differ by the same amount on every sequence do so without an error."""
    results = llm("results")

    def scores(*losses: float) -> dict:
        one = {"loss": list(losses), "tokens": [10] * len(losses), "right": [5] * len(losses)}
        return {"law": one, "others": one}

    def line(row: str, kind: str, *losses: float) -> dict:
        return {"row": row, "kind": kind, "scale": 1.0, "seconds": 2.0, "scores": scores(*losses)}

    merges = [
        line("task_arithmetic", "best", 15, 18, 15, 18),
        line("ace", "published", 13, 16, 13, 16),
    ]
    family = results.Family(
        "two", scores(20, 20, 20, 20), {"law": scores(10, 10, 10, 10)}, merges, ["others"]
    )
    assert family.mean_share(merges[0]["scores"])[0] == pytest.approx(0.35)
    assert results.root_of_squares(family.mean_share(merges[0]["scores"])[1]) > 0.05
    difference = family.difference(merges[1])
    assert difference == (pytest.approx(0.2), pytest.approx(0))
    assert family.difference(merges[0]) is None
    table = results.tables(family)
    assert "| ace | 1 | 0.550 ± 0.087 | +0.200 ± 0.000 | 0.55 | 1.450 | 2 |" in table
    assert "| base |  |  |  | 0.00 | 2.000 |  |" in table
    other = replace(family, title="other", merges=merges[1:])
    overview = results.overview([family, other])
    assert "| ace | 0.550 ± 0.087 | 0.550 ± 0.087 | 0.550 |" in overview
    assert "| task_arithmetic, best λ | 0.350 ± 0.087, λ 1 |  |  |" in overview
    assert "## All families" in results.pages([family, other])
    assert "All families" not in results.pages([family])


def test_words_of_pages_and_manuals(llm):
    sources = llm("sources")
    page = "<html><head><title>no</title></head><body><p>a &amp;\n b</p><script>x</script></body>"
    assert sources.strip_html(page) == "a & b"
    manual = '.\\" a comment\n.TH LS 1\n.SH NOMBRE\n\\fBls\\fR \\- lista\n.PP\nMuestra \\-a.\n'
    assert sources.strip_roff(manual) == "NOMBRE\nls - lista\n\nMuestra -a."


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"file": "*.txt"}, "law has the setting file, which does not exist"),
        ({"files": "*.txt", "reader": "pdf"}, "law has the reader pdf, which does not exist"),
        ({"folder": "law"}, "law does not say which `files` hold its text"),
    ],
)
def test_mistakes_in_a_file_of_sources(llm, tmp_path, entry, message):
    (tmp_path / "my.yml").write_text(yaml.safe_dump({"experts": {"law": entry}}))
    with pytest.raises(SystemExit, match=message):
        llm("sources").read_sources(tmp_path / "my.yml")


def test_the_sources_are_complete(llm):
    sources = llm("sources")
    data = sources.read_sources(Path(sources.__file__).parent / "data" / "sources.yml")
    trained = [source for source in data.experts.values() if source.trained]
    assert len(trained) >= 5
    assert len(data.untrained) == 3
    assert len(data.prompts) == 10
