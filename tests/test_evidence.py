# SPDX-License-Identifier: Apache-2.0
"""The judge of `examples/evidence`: scores against plain ones, every family at its smallest."""

from __future__ import annotations

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import tiny_llama
from families import sentence, tokenizer
from mergekit.merge_methods import merge_state_dicts
from PIL import Image


@pytest.fixture
def evidence(example):
    """Import a module of the judge, whose dictionaries are learned by small models."""
    vars(example("evidence", "dictionaries")).update(
        HIDDEN=48, LAYERS=1, HEADS=2, INNER=64, EXAM_ROUNDS=1
    )
    example("evidence", "methods").LEARNING_STEPS = 2
    return partial(example, "evidence")


def test_kept_and_forgot_are_those_of_the_definition(evidence):
    """Of a base, two experts and two λ, on two texts of experts and two that nobody learned."""
    draws = np.random.default_rng(0)
    tokens = {name: draws.integers(3, 9, size=6).tolist() for name in ("a", "b", "old", "older")}

    def make_losses(low: float) -> dict:
        return {
            name: list(zip(draws.uniform(low, low + 2, len(counts)).tolist(), counts, strict=True))
            for name, counts in tokens.items()
        }

    base, *two, half, full = map(make_losses, (8, 2, 2, 7, 5))
    experts = dict(zip("ab", two, strict=True))
    judge_merges = evidence("scores").judge_merges
    result = judge_merges(base, experts, {0.5: half, 1.0: full})
    sums = {name: sum(loss for loss, _ in rows) for name, rows in base.items()}
    for place, merged in enumerate((half, full)):
        change = {name: sum(loss for loss, _ in merged[name]) - sums[name] for name in sums}
        kept = [
            change[name] / (sum(loss for loss, _ in experts[name][name]) - sums[name])
            for name in experts
        ]
        forgot = [change[name] / sum(tokens[name]) for name in ("old", "older")]
        assert result["kept"][place][0] == pytest.approx(sum(kept) / 2, abs=1e-4)
        assert result["forgot"][place][0] == pytest.approx(sum(forgot) / 2, abs=1e-4)
    best = {**base, **{name: experts[name][name] for name in experts}}
    result = judge_merges(base, experts, {0.5: base, 1.0: best})
    assert [value for value, _ in result["kept"]] == [0.0, 1.0]
    assert [value for value, _ in result["forgot"]] == [0.0, 0.0]
    assert result["at_budget"] == (1.0, 0.0)


def test_the_budget_on_lines_between_points(evidence):
    scores = evidence("scores")
    scales = np.array([0.5, 1.0, 1.5])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        kept, forgot = rng.uniform(-0.2, 1, 3), rng.uniform(-0.1, 0.2, 3)
        fine = np.linspace(0, 1.5, 300_001)
        lines = [np.interp(fine, [0, *scales], [0, *part]) for part in (kept, forgot)]
        naive = lines[0][lines[1] <= scores.BUDGET].max()
        assert scores.best_within(scales, kept, forgot)[0] == pytest.approx(naive, abs=1e-4)
    crossing = scores.best_within(scales, np.array([0.4, 0.8, 0.9]), np.array([0.0, 0.1, 0.3]))
    assert crossing == pytest.approx((0.6, 0.75))
    harmful = scores.best_within(scales, np.array([-0.4, -0.8, -1]), np.zeros(3))
    assert harmful == (0.0, 0.0)


@pytest.mark.parametrize(
    ("family", "methods"),
    [
        ("llama", ["ace", "tsv_m", "task_arithmetic"]),
        ("gpt2", ["ace_plus", "ace as in the paper"]),
        ("roberta", ["iso_c", "lines"]),
        ("images", ["ace", "lines", "statsmerging"]),
    ],
)
def test_the_program_at_its_smallest(evidence, run_example, tmp_path, monkeypatch, family, methods):
    results = tmp_path / "results.json"
    flags = ["--families", family, "--seeds", 0, "--small", tmp_path, "--methods", *methods]
    shown = run_example("evidence", "judge", *flags)
    _, *rows = sorted(json.loads(results.read_text()), key=lambda row: row.get("method", ""))
    assert {row["method"] for row in rows} == set(methods)
    for row in rows:
        assert f"{row['method']} keeps" in shown
        assert np.isfinite([*row["kept"], *row["forgot"]]).all()
        assert row["best_scale"] < row["scales"][-1] or row["scales"][-1] == 8.0
    before = results.read_bytes()
    monkeypatch.setattr(evidence("judge"), "merge_family", None)  # nothing is merged again
    run_example("evidence", "judge", *flags)
    assert results.read_bytes() == before


def test_every_row_merges_as_its_method_does(evidence, tmp_path):
    """The state at λ is W0 + λ (merged − W0), which is what `lambda` in a config does."""
    methods = evidence("methods")
    family = evidence("dictionaries").Dictionaries("llama", 0, tmp_path, 2)
    family.prepare()
    model = family.load(family.base)
    base = methods.read_state(model)
    experts = {n: methods.read_state(family.load(path)) for n, path in family.experts.items()}
    for row in methods.ROWS:
        if row.samples or row.own_texts:
            continue
        merged = methods.merge_family(row, family, base, experts)
        assert set(merged) == set(base), row.name
        methods.put_merge(model, base, merged, 0.5)
        put = model.state_dict()
        expected = {n: torch.lerp(base[n].double(), merged[n].double(), 0.5) for n in base}
        if row.method in ("ace", "iso_c"):
            models = dict(enumerate([base, *experts.values()]))
            halved = {**row.parameters, "lambda": 0.5}
            expected = merge_state_dicts(models, row.method, base=0, parameters=halved)
        for name, tensor in expected.items():
            torch.testing.assert_close(put[name].double(), tensor.double(), atol=1e-6, rtol=1e-4)


@pytest.fixture
def language(evidence, tmp_path, monkeypatch):
    """Return the language module, a tiny base model, and a cache that has all texts already."""
    sources = {"experts": "abc", "untrained": "yz", "repair": ""}
    rng = random.Random(0)
    for name in "abcyz":
        folder = tmp_path / "cache" / "texts" / name
        folder.mkdir(parents=True)
        for part in ("train", "validation", "test"):
            lines = [{"text": sentence(rng, 900)} for _ in range(3)]
            if name == "c":
                lines = [{"prompt": word, "answer": word} for word in sentence(rng, 500).split()]
            rows = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{part}.jsonl").write_text(rows)
    tokenizer().save_pretrained(tmp_path / "tiny")
    model = tiny_llama(max_position_embeddings=256, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tiny")
    module = evidence("language")
    monkeypatch.setattr(module, "read_sources", lambda kind: {name: {} for name in sources[kind]})
    monkeypatch.setattr(module, "SHORT", 2)
    monkeypatch.setattr(module, "TESTED", 3)
    monkeypatch.setattr("mergekit_ace.calibration.calibrate.SAMPLES", 4)
    return module, str(tmp_path / "tiny"), tmp_path / "cache"


@pytest.mark.parametrize("name", ["smollm", "smollm-muon", "smollm-sparse", "smollm-lora"])
def test_experts_of_a_language_model(evidence, language, monkeypatch, name):
    module, base, cache = language
    if name == "smollm-muon":  # three steps at the real rate are lost in the checkpoint's rounding
        monkeypatch.setitem(module.RATES, name, ("muon", 0.03))
    family = module.LanguageFamily(name, 0, 3, cache, base)
    family.prepare()
    methods = evidence("methods")
    before = methods.read_state(family.load(family.base))
    inside = {n for n in before if ".layers." in n and before[n].ndim == 2}
    for text, folder in family.experts.items():
        after = methods.read_state(family.load(folder))
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert inside <= moved if not family.adapters else inside == moved, text
        short = folder.with_name(folder.name.removesuffix("-3") + "-2")
        assert short.exists(), "one training leaves experts of both strengths"
        if name == "smollm-sparse":
            share = [float((before[n] != after[n]).float().mean()) for n in inside]
            assert 0 < np.mean(share) < 0.9
    losses = family.examine(family.load(family.base))
    assert {len(losses[text]) for text in "abc"} == {3}
    assert next(iter(losses["c"]))[1] < losses["a"][0][1] == 255, "answers alone are scored"
    judge = evidence("judge").Judge(family, cache)
    for wanted in ("ace", "ace_plus, own texts")[: 1 + (name == "smollm")]:
        result = judge.judge(next(row for row in methods.ROWS if row.name == wanted))
        assert np.isfinite([*result["kept"], *result["forgot"]]).all()
    assert list(judge.describe()["experts"]) == ["a", "b", "c"]


def test_documents_agree_with_the_results(evidence):
    """Tables and the picture are those that tables.py makes of results.json as it is."""
    tables = evidence("tables")
    results = tables.read_results()
    made = tables.make_tables(results)
    marks = 0
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        marks += len(tables.MARK.findall(text))
        assert tables.fill_in(text, made) == text, "python examples/evidence/tables.py mends it"
    assert marks >= 3
    with Image.open(tables.PICTURE) as picture:
        assert picture.text["Results"] == tables.digest()
    rows = {row.name for row in evidence("methods").ROWS}
    scores = evidence("scores")
    scales = [*scores.SCALES, *scores.LARGER]
    for result in results:
        assert result["family"] in evidence("judge").FAMILIES
        assert result.get("method") in {*rows, None}
        known = result.get("scales", scales)
        assert known == scales[: max(len(known), len(scores.SCALES))]


def test_means_over_seeds(evidence):
    value, error = evidence("tables").pool([(0.4, 0.03), (0.6, 0.04)])
    assert value == pytest.approx(0.5)
    assert error == pytest.approx(((0.03**2 + 0.04**2) / 2 + 0.01) ** 0.5)
