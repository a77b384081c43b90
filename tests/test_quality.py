# SPDX-License-Identifier: Apache-2.0
"""The benchmark of merge methods: its families, and what it makes of scores, on tiny models."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import save_family, tiny_llama
from transformers import LlamaForCausalLM

from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import load_rows


@pytest.fixture
def family(benchmark, tmp_path):
    """Three experts; the nearer a model is to an expert, the better it does on its task."""
    paths = save_family(tiny_llama(), tmp_path, experts=3)
    states = [LlamaForCausalLM.from_pretrained(path).state_dict() for path in paths]

    class Near(benchmark("evidence.families").Family):
        old = ("old",)
        base = Path(paths[0])
        experts = {str(t): Path(path) for t, path in enumerate(paths[1:])}  # noqa: RUF012

        def train(self):
            pass

        def load(self, folder):
            return LlamaForCausalLM.from_pretrained(folder).eval()

        def accuracy(self, model, task, split, half=None):
            wanted = states[0] if task == "old" else states[1 + int(task)]
            got = model.state_dict()
            away = sum(float((got[n] - t).square().sum()) for n, t in wanted.items())
            start = sum(float((states[1][n] - t).square().sum()) for n, t in states[0].items())
            return 1 / (1 + away / start)

    return Near("near", 0, tmp_path, None)


def test_the_program_at_its_smallest(benchmark, run_example, tmp_path):
    quality = benchmark("quality")
    flags = "--families llama --experts 2 --seeds 0 --rows ties --small".split()
    run = partial(run_example, "benchmark", "quality", *flags, tmp_path)
    shown = run("--pictures", tmp_path / "pictures")
    for row in ("base", "each expert", "ties"):
        assert f"\n| {row} | 0." in shown
    lines = quality.read_results(tmp_path / "results.jsonl")
    assert len(lines) == 3
    run()  # nothing is repeated
    assert quality.read_results(tmp_path / "results.jsonl") == lines
    assert {path.name for path in tmp_path.iterdir()} == {
        "llama-0", "pictures", "results.jsonl"
    }  # fmt: skip


def test_a_whole_name_is_that_row_alone(benchmark):
    quality = benchmark("quality")
    rows = quality.choose_rows(quality.parse(["--rows", "ace_relative", "ace E"]))
    names = ["ace E1 (ridge only)", "ace E2 (+ normalisation)", "ace E3 (+ prior)", "ace_relative"]
    assert [row.name for row in rows] == names


def test_rows_that_do_not_exist(benchmark, tmp_path):
    quality = benchmark("quality")
    flags = ["--small", str(tmp_path), "--rows", "ties", "direct"]
    with pytest.raises(SystemExit, match=r"begins with 'direct'; some need .* --learning"):
        quality.choose_rows(quality.parse(flags))
    rows = quality.choose_rows(quality.parse([*flags, "--learning"]))
    assert {row.name.partition(":")[0] for row in rows} == {"ties", "direct"}


def test_every_row_merges(benchmark, family, monkeypatch):
    quality, rows = benchmark("quality"), benchmark("evidence.rows")
    monkeypatch.setattr(quality, "SCALES", (0.3, 1.0, 1.4))
    examiner = benchmark("evidence.scoring").Examiner(family)
    names = [row.name for row in rows.TABLE + rows.SWEEPS]
    assert len(set(names)) == len(names)
    for row in rows.TABLE:
        line = quality.examine_row(examiner, row)
        assert set(line["curve"]) == {"0.3", "1", "1.4"}
        assert all(0 < line[kind]["mean"] <= 1 for kind in ("published", "best"))
        whole = {scale: score["whole"] for scale, score in line["curve"].items()}
        assert whole[f"{line['best_scale']:g}"] == max(whole.values())
    line = quality.examine_row(examiner, rows.SWEEPS[0])
    assert "curve" not in line
    assert "best" not in line


def test_a_merge_is_mergekits_own(benchmark, family, mergekit_yaml):
    """In memory, as the benchmark does it, and by the command."""
    rows, scoring = benchmark("evidence.rows"), benchmark("evidence.scoring")
    examiner = scoring.Examiner(family)
    merged, _ = examiner.merge(rows.Row("a", "ace", {"epsilon": 1e-3}))
    config = {
        "merge_method": "ace",
        "base_model": str(family.base),
        "models": [{"model": str(path)} for path in family.experts.values()],
        "parameters": {"epsilon": 1e-3},
        "dtype": "float32",
    }
    on_disk = LlamaForCausalLM.from_pretrained(mergekit_yaml(config)).state_dict()
    for name, tensor in on_disk.items():
        assert torch.equal(merged[name], tensor), name


def test_scales_start_at_the_origin(benchmark, family):
    rows, scoring = benchmark("evidence.rows"), benchmark("evidence.scoring")
    examiner = scoring.Examiner(family)
    row = rows.Row("cart", "cart", origin={"lambda": 0.0})
    mean, _ = examiner.merge(rows.Row("linear", "linear", {"weight": 1.0}, with_base=False))
    origin, (merged, _) = examiner.origin(row), examiner.merge(row)
    half, _ = examiner.merge(row, {"lambda": 0.5})
    for name, tensor in mean.items():
        torch.testing.assert_close(origin[name], tensor)
    examiner.put(origin, merged, 0.5)
    for name, tensor in examiner.model.state_dict().items():
        torch.testing.assert_close(tensor, half[name])
    examiner.put(examiner.base, merged, 0.0)
    assert all(torch.equal(t, examiner.base[n]) for n, t in examiner.model.state_dict().items())


def test_base_and_experts(benchmark, family):
    quality = benchmark("quality")
    lines = quality.examine_family(benchmark("evidence.scoring").Examiner(family))
    assert [line["row"] for line in lines] == ["base", "each expert"]
    assert lines[0]["published"]["old"] == 1
    assert lines[0]["published"]["new"]["0"] == pytest.approx(0.5)
    assert lines[1]["published"]["mean"] == pytest.approx(1)
    assert lines[1]["spread"] >= 1


def test_results_are_kept_and_not_repeated(benchmark, tmp_path, capsys):
    quality = benchmark("quality")
    path, known = tmp_path / "results.jsonl", {}
    head = {"family": "f", "experts": 4, "row": "ties", "group": "table"}
    for seed, mean in ((0, 0.5), (1, 0.7), (0, 0.6)):
        score = {"new": {}, "mean": mean, "old": 0.9}
        line = {**head, "seed": seed, "published": score, "best": score, "best_scale": 1.0}
        quality.keep([line], known, path)
    assert "f 1 ties: 0.700, best λ 1: 0.700" in capsys.readouterr().out
    lines = quality.read_results(path)
    assert [line["published"]["mean"] for line in lines] == [0.6, 0.7]
    assert len(path.read_text().splitlines()) == 3
    results, place = benchmark("evidence.results"), {"family": "f", "experts": 4, "seed": 0}
    assert results.is_known(place, "ties", known)
    assert not results.is_known(place, "sce", known)
    known[quality.key({**place, "row": "ties"})]["code"] = "of another version"
    assert not results.is_known(place, "ties", known)
    results.print_tables([*lines, {**lines[0], "experts": 8}])
    text = capsys.readouterr().out
    assert text.count("| ties | 0.650 ± 0.050 (old 0.90) | 0.600 (old 0.90) |") == 2
    assert "| | f, 4 experts | f, 8 experts |" in text
    assert "table, as published" in text


def test_rows_with_data_say_what_they_were_scored_on(benchmark, capsys):
    results = benchmark("evidence.results")
    head = {"family": "f", "experts": 4, "group": "learned", "row": "direct"}
    lines = [
        {**head, "seed": seed, "published": {"mean": mean, "seen": seen, "old": 1.0}}
        for seed, mean, seen in ((0, 0.5, 0.7), (1, 0.6, 0.9))
    ]
    results.print_tables(lines)
    shown = capsys.readouterr().out
    assert "accuracy on words that no sample asks, ± half the range / the others" in shown
    assert "| direct | 0.550 ± 0.050 / 0.800 |" in shown


def test_changes_since_a_summary(benchmark, tmp_path):
    results = benchmark("evidence.results")
    head = {"family": "f", "seed": 0, "experts": 4}
    lines = [
        {**head, "row": "ties", "published": {"mean": 0.5}, "best": {"mean": 0.6}},
        {**head, "row": "base", "published": {"mean": 0.1}},
    ]
    results.write_summary(lines, tmp_path / "summary.json")
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["f/4/0/ties"] == {"published": 0.5, "best": 0.6}
    assert not list(results.changes(lines, tmp_path / "summary.json"))
    lines[0]["published"]["mean"] = 0.52  # noise
    lines[0]["best"]["mean"] = 0.5
    lines.append({**head, "row": "new", "published": {"mean": 0.9}})
    (moved,) = results.changes(lines, tmp_path / "summary.json")
    assert moved == "f/4/0/ties, best: 0.600 before, 0.500 now"


def test_pictures(benchmark, tmp_path):
    quality, pictures = benchmark("quality"), benchmark("evidence.pictures")
    lines = []
    for seed in (0, 1):
        for experts in (2, 4):
            for name in ("ace_relative", "ties"):
                score = {"new": {}, "mean": 0.1 * experts + 0.01 * seed, "old": 1.0}
                curve = {"0.5": {"new": 0.1}, "1": {"new": 0.2}}
                head = {"family": "f", "seed": seed, "experts": experts, "row": name}
                lines.append({**head, "group": "table", "published": score, "best": score,
                              "curve": curve, "best_scale": 1.0})  # fmt: skip
        for epsilon in ("0.01", "1"):
            row = {"family": "f", "seed": seed, "experts": 4, "row": f"ace at ε = {epsilon}"}
            lines.append({**row, "group": "ace over ε", "published": {"mean": 0.3}})
    assert json.loads(json.dumps(lines)) == lines
    four = [line for line in lines if line["experts"] == 4]
    for family, spread in zip(pictures.STRENGTHS, (1.5, 5.0, 40.0), strict=True):
        own = [{**line, "family": family} for line in four]
        own.append({**own[0], "row": "each expert", "spread": spread})
        lines += own
    made = pictures.draw_all(lines, tmp_path / "pictures")
    names = "bars.png scale.png epsilon.png experts.png strengths.png"
    assert [path.name for path in made] == names.split()
    over = pictures._over_spreads(lines, "ties")
    assert list(over) == pytest.approx([1.5, 5.0, 40.0])
    assert over[next(iter(over))] == pytest.approx([0.4, 0.41])
    assert all(path.stat().st_size > 5000 for path in made)
    assert quality.key(lines[0]) == ("f", 0, 2, "ace_relative")


def test_every_learned_row_is_a_training_of_its_own(benchmark):
    rows = benchmark("evidence.rows")
    data = {"path": "samples.jsonl", "messages": "talk"}
    models = [{"model": name, "data": data} for name in ("a", "b")]
    seen = []
    every = rows.LEARNED + rows.ENTROPY + rows.SAMPLED + rows.GENERALISED + rows.REGULARISED
    assert all(row.with_data for row in every)
    assert not any(row.with_data for row in rows.TABLE + rows.SWEEPS)
    for row in every:
        if row.learn is None:  # stands beside them
            continue
        settings = dict(row.learn)
        counts = ("samples", "rehearsed", "words", "validation")
        samples = tuple(settings.pop(name, None) for name in counts)
        config = {"base_model": "base", "models": models, "task": "causal-lm", **settings}
        if samples[1]:
            config["rehearsal"] = data
        config = TrainConfig.model_validate(config)
        basis = "task_vector" if row.method == "statsmerging" else row.method
        assert config.basis in (basis, "ties")
        seen.append((row.name, samples, config))
    assert len({name for name, *_ in seen}) == len(seen)
    for number, one in enumerate(seen):
        assert one[1:] not in [other[1:] for other in seen[:number]], one[0]


def test_samples_are_chats_that_the_teacher_answered(benchmark, tmp_path):
    dictionaries = benchmark("evidence.dictionaries")
    torch.manual_seed(0)
    model = dictionaries.new_model("llama").eval()
    model.save_pretrained(tmp_path / "base")
    family = benchmark("evidence.families").make_family("llama", 0, folder=tmp_path)
    family.base, family.experts = tmp_path / "base", {"4": tmp_path / "base"}
    config = family.unlabelled(12, rehearsed=5)
    data = config["models"][0]["data"]
    with open(data["path"], encoding="utf-8") as file:
        talks = [json.loads(line)[data["messages"]] for line in file]
    assert len(talks) == 12
    tokenizer = dictionaries.new_tokenizer()
    for talk in talks[:3]:
        marked = tokenizer.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        tokens = marked["input_ids"]
        mask = marked["assistant_masks"].bool()
        # the line as the exam has it, but for the values: those are what the model says itself
        assert tokens.shape == (1, 2 + 4 * dictionaries.PAIRS)
        assert int(tokens[0, 1]) == dictionaries.MASK + 1 + 4
        assert mask.nonzero()[:, 1].tolist() == list(range(4, tokens.shape[1], 4))
        with torch.no_grad():
            said = model(input_ids=tokens).logits.argmax(-1)
        assert torch.equal(said[:, :-1][mask[:, 1:]], tokens[mask])
    with open(config["rehearsal"]["path"], encoding="utf-8") as file:
        languages = [json.loads(line)["line"][0]["content"] for line in file]
    assert languages == [f"language{n}" for n in (0, 1, 2, 3, 0)]
    asked, others = map(set, dictionaries.halves())
    assert (asked | others, asked & others) == (set(range(dictionaries.WORDS)), set())
    assert questions_of(talks) < {f"key{n}" for n in asked}


def questions_of(talks) -> set[str]:
    """Return the words that chats ask."""
    return {turn["content"] for talk in talks for turn in talk if turn["role"] == "user"}


def test_other_words_tell_when_to_stop(benchmark, tmp_path):
    dictionaries = benchmark("evidence.dictionaries")
    dictionaries.new_model("llama").save_pretrained(tmp_path / "base")
    family = benchmark("evidence.families").make_family("llama", 0, folder=tmp_path)
    family.base, family.experts = tmp_path / "base", {"4": tmp_path / "base"}
    config = TrainConfig.model_validate(family.unlabelled(40, words=18, validation=6))
    rows = load_rows(config.models[0].data, 0)
    assert [len(part) for part in rows.values()] == [32, 4, 4]
    train, validation, test = (questions_of(part["line"]) for part in rows.values())
    assert validation == test
    assert (len(train), len(validation), train & validation) == (12, 6, set())
    assert train | validation == {f"key{n}" for n in dictionaries.halves()[0][:18]}


def test_the_exam_by_halves(benchmark, tmp_path):
    """A family that knows the words of the samples, and no other ones."""
    dictionaries = benchmark("evidence.dictionaries")
    families = benchmark("evidence.families")
    family = families.make_family("gpt2", 0, folder=tmp_path)
    asked = torch.tensor(dictionaries.halves()[0])

    def knows(model, tokens, labels):
        words = dictionaries.asked_words(tokens, labels)
        right = torch.nn.functional.one_hot(labels[labels != -100], dictionaries.VOCABULARY)
        return right * torch.isin(words, asked)[:, None]

    families.answer, answer = knows, families.answer
    try:
        shares = [family.accuracy(None, "4", "test", half) for half in (None, "seen", "unseen")]
    finally:
        families.answer = answer
    assert shares == [0.5, 1.0, 0.0]


def test_samples_of_masked_models_are_lines_with_masks(benchmark, tmp_path):
    dictionaries = benchmark("evidence.dictionaries")
    dictionaries.new_model("roberta").save_pretrained(tmp_path / "base")
    family = benchmark("evidence.families").make_family("roberta", 0, folder=tmp_path)
    family.base, family.experts = tmp_path / "base", {"4": tmp_path / "base"}
    config = TrainConfig.model_validate(family.unlabelled(12, rehearsed=5))
    assert config.task == "masked-lm"
    tokenizer = dictionaries.new_tokenizer()
    for data, numbers in ((config.models[0].data, [4] * 12), (config.rehearsal, [0, 1, 2, 3, 0])):
        with open(data.path, encoding="utf-8") as file:
            lines = [tokenizer(json.loads(line)[data.text])["input_ids"] for line in file]
        assert [line[:2] for line in lines] == [
            [dictionaries.BOS, dictionaries.MASK + 1 + number] for number in numbers
        ]
        for line in lines:
            masks = [place for place, token in enumerate(line) if token == dictionaries.MASK]
            assert masks == list(range(4, 2 + 4 * dictionaries.PAIRS, 4))
            assert max(line) < dictionaries.FIRST_VALUE, "no answer is told"


def test_languages(benchmark):
    dictionaries = benchmark("evidence.dictionaries")
    maps = dictionaries.make_languages(0)
    assert len(maps) == dictionaries.LANGUAGES
    for answers in maps:
        assert answers.sort().values.tolist() == list(range(dictionaries.WORDS))
    for dialect in dictionaries.DIALECTS:
        shared = (maps[dialect] == maps[0]).float().mean()
        assert 0.4 < shared < 0.6
    assert not torch.equal(maps[4], dictionaries.make_languages(1)[4])
    for split, rounds in dictionaries.ROUNDS.items():
        tokens, labels = dictionaries.exam(5, maps, split)
        asked = labels != -100
        assert int(asked.sum()) == rounds * dictionaries.WORDS
        assert torch.equal(tokens[asked], labels[asked])
        keys = tokens.roll(2, 1)[asked]  # key = value
        values = maps[5][keys - dictionaries.FIRST_KEY] + dictionaries.FIRST_VALUE
        assert torch.equal(values, labels[asked])
    first = dictionaries.exam(5, maps, "test")[0]
    assert not torch.equal(first[:16], dictionaries.exam(5, maps, "validation")[0])


def test_a_study_merges_a_model(benchmark, family):
    rows, scoring = benchmark("evidence.rows"), benchmark("evidence.scoring")
    examiner = scoring.Examiner(family)
    method, _ = examiner.merge(rows.Row("a", "ace_relative", {"ridge_floor": False}))
    matrices, fixed = rows.STUDIED[:2]
    merged, _ = examiner.merge(fixed)
    for name, tensor in method.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)
    merged, _ = examiner.merge(matrices)
    changed = [name for name, t in method.items() if (merged[name] - t).abs().max() > 1e-5]
    assert changed == ["model.embed_tokens.weight"]


def test_a_tied_head_is_merged_once(benchmark, tmp_path):
    model = benchmark("evidence.dictionaries").new_model("llama-tied")
    model.save_pretrained(tmp_path / "base")
    family = benchmark("evidence.families").make_family("llama-tied", 0, folder=tmp_path)
    family.base, family.experts = tmp_path / "base", {"4": tmp_path / "base"}
    examiner = benchmark("evidence.scoring").Examiner(family)
    assert "lm_head.weight" not in examiner.base
    changed = {name: tensor + 1 for name, tensor in examiner.base.items()}
    examiner.put(examiner.base, changed, 1.0)
    head = examiner.model.get_output_embeddings().weight
    torch.testing.assert_close(head, examiner.base["model.embed_tokens.weight"] + 1)


@pytest.mark.parametrize("name", ["llama", "llama-lora", "llama-linear", "gpt2", "roberta"])
def test_a_family_trains(benchmark, tmp_path, name):
    make_family = benchmark("evidence.families").make_family
    family = make_family(name, 0, experts=2, folder=tmp_path, steps=2)
    family.train()
    assert family.tasks == ("4", "5")
    examiner = benchmark("evidence.scoring").Examiner(family)
    changed = [n for n, t in examiner.experts["4"].items() if not torch.equal(t, examiner.base[n])]
    matrices = [n for n in changed if examiner.base[n].ndim == 2]
    assert len(matrices) >= 4
    if name in ("llama-lora", "llama-linear"):  # nothing but the linear layers
        assert changed == matrices
        assert len(matrices) == 7
    if name == "llama-lora":  # adapters of rank 8
        delta = examiner.experts["4"][matrices[0]] - examiner.base[matrices[0]]
        assert torch.linalg.matrix_rank(delta, rtol=1e-4) <= 8
    rows = benchmark("evidence.rows")
    merged, _ = examiner.merge(rows.Row("a", "ace_relative"))
    examiner.put(examiner.base, merged, 1.0)
    score = examiner.examine("validation")
    assert set(score.new) == {"4", "5"}
    if name in ("llama", "gpt2", "roberta"):
        settings = {"samples": 8, "training": {"epochs": 1, "batch_size": 8}}
        examiner.merge(rows.Row("learned", "statsmerging", learn=settings))
        (file,) = tmp_path.glob("learned/*/coefficients.safetensors")
        when = file.stat().st_mtime_ns
        learned, _ = examiner.merge(rows.Row("learned", "statsmerging", learn=settings))
        assert file.stat().st_mtime_ns == when
        assert learned.keys() == merged.keys()
        assert any(not torch.equal(learned[n], t) for n, t in merged.items())
    before = family.base.stat().st_mtime_ns
    family.train()  # what is there is not trained again
    assert family.base.stat().st_mtime_ns == before


def test_the_image_family(benchmark, tmp_path):
    make_family = benchmark("evidence.families").make_family
    family = make_family("images", 0, experts=2, folder=tmp_path, steps=2)
    family.train()
    examiner = benchmark("evidence.scoring").Examiner(family)
    rows = benchmark("evidence.rows")
    for row in (rows.Row("a", "ace_relative"), rows.Row("b", "lines")):
        merged, _ = examiner.merge(row)
        examiner.put(examiner.base, merged, 1.0)
        score = examiner.examine("test")
        assert set(score.new) == {"digits", "turns"}
        assert score.old is None
        assert score.whole == score.mean
