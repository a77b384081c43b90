# SPDX-License-Identifier: Apache-2.0
"""The judge of `examples/evidence`: scores against plain ones, every family at its smallest."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import tiny_llama
from mergekit.merge_methods import merge_state_dicts
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def evidence(example):
    """Import a module of the judge."""
    return partial(example, "evidence")


def random_losses(texts: dict[str, int], low: float, seed: int) -> dict:
    rng = random.Random(seed)
    return {
        name: [(rng.uniform(low, low + 2), rng.randint(3, 9)) for _ in range(count)]
        for name, count in texts.items()
    }


@pytest.fixture
def losses() -> tuple[dict, dict, dict]:
    """Of a base, two experts and three λ, on two texts of experts and two that nobody learned."""
    texts = {"a": 7, "b": 5, "old": 6, "older": 4}
    base = random_losses(texts, 8, 0)
    experts = {name: random_losses(texts, 2, seed) for seed, name in enumerate("ab", 1)}
    merged = {scale: random_losses(texts, 9 - 4 * scale, 9) for scale in (0.5, 1.0, 1.5)}
    merged = {
        scale: {
            name: [(loss, count) for (loss, _), (_, count) in zip(rows, base[name], strict=True)]
            for name, rows in one.items()
        }
        for scale, one in merged.items()
    }
    return base, experts, merged


def test_kept_and_forgot_are_those_of_the_definition(evidence, losses):
    base, experts, merged = losses
    result = evidence("scores").judge_merges(base, experts, merged)
    for place, one in enumerate(merged.values()):
        total = {
            title: {name: sum(loss for loss, _ in rows) for name, rows in texts.items()}
            for title, texts in {"base": base, "merge": one, **experts}.items()
        }
        kept = {
            name: (total["base"][name] - total["merge"][name])
            / (total["base"][name] - total[name][name])
            for name in "ab"
        }
        forgot = [
            (total["merge"][name] - total["base"][name]) / sum(count for _, count in base[name])
            for name in ("old", "older")
        ]
        for name in "ab":
            assert result["experts"][name][place] == pytest.approx(kept[name], abs=1e-4)
        assert result["kept"][place].value == pytest.approx(sum(kept.values()) / 2, abs=1e-4)
        assert result["forgot"][place].value == pytest.approx(sum(forgot) / 2, abs=1e-4)


def test_the_expert_keeps_all_and_the_base_nothing(evidence, losses):
    base, experts, _ = losses
    own = {name: experts[name][name] for name in "ab"}
    best = {**base, **own}
    result = evidence("scores").judge_merges(base, experts, {0.5: base, 1.0: best})
    assert [figure.value for figure in result["kept"]] == [0.0, 1.0]
    assert [figure.value for figure in result["forgot"]] == [0.0, 0.0]
    assert result["at_budget"] == (1.0, 0.0)
    assert result["best_scale"] == 1.0


def test_the_budget_on_lines_between_points(evidence):
    scores = evidence("scores")
    scales = np.array([0.5, 1.0, 1.5])
    crossing = scores.best_within(scales, np.array([0.4, 0.8, 0.9]), np.array([0.0, 0.1, 0.3]))
    assert crossing == pytest.approx((0.6, 0.75))
    falling = scores.best_within(scales, np.array([0.4, 0.8, 0.7]), np.array([-0.1, 0.0, 0.01]))
    assert falling == pytest.approx((0.8, 1.0))
    early = scores.best_within(scales, np.array([0.4, 0.8, 0.9]), np.array([0.2, 0.3, 0.4]))
    assert early == pytest.approx((0.1, 0.125)), "from the base, which forgets nothing"
    harmful = scores.best_within(scales, np.array([-0.4, -0.8, -1]), np.zeros(3))
    assert harmful == (0.0, 0.0)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        kept, forgot = rng.uniform(-0.2, 1, 3), rng.uniform(-0.1, 0.2, 3)
        fine = np.linspace(0, 1.5, 300_001)
        lines = [np.interp(fine, [0, *scales], [0, *part]) for part in (kept, forgot)]
        naive = lines[0][lines[1] <= scores.BUDGET].max()
        assert scores.best_within(scales, kept, forgot)[0] == pytest.approx(naive, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "methods"),
    [
        ("llama", ["ace", "tsv_m", "task_arithmetic"]),
        ("llama-muon", ["ace"]),
        ("gpt2", ["ace_relative", "ace, paper's letter"]),
        ("roberta", ["iso_c", "lines"]),
        ("images", ["wudi", "lines", "statsmerging"]),
    ],
)
def test_the_program_at_its_smallest(evidence, run_example, tmp_path, monkeypatch, family, methods):
    results = tmp_path / "results.json"
    flags = ["--families", family, "--seeds", 0, "--small", tmp_path, "--methods", *methods]
    shown = run_example("evidence", "judge", *flags)
    facts, *rows = sorted(json.loads(results.read_text()), key=lambda row: row.get("method", ""))
    assert set(facts["facts"]["experts"]) <= set(facts["facts"]["base"])
    assert {row["method"] for row in rows} == set(methods)
    scales = list(evidence("scores").SCALES)
    for row in rows:
        assert f"{row['method']} keeps" in shown
        assert row["scales"] == scales
        for figures in (*row["kept"], *row["forgot"]):
            assert np.isfinite(figures).all()
    before = results.read_bytes()
    monkeypatch.setattr(evidence("judge"), "merge_family", None)  # nothing is merged again
    run_example("evidence", "judge", *flags)
    assert results.read_bytes() == before


def test_every_row_merges_as_its_method_does(evidence, tmp_path):
    """The state at λ is W0 + λ (merged − W0), which is what `lambda` in a config does."""
    methods, family = (
        evidence("methods"),
        evidence("dictionaries").Dictionaries("llama", 0, tmp_path, 2),
    )
    family.prepare()
    model = family.load(family.base)
    base = methods.read_state(model)
    experts = {n: methods.read_state(family.load(path)) for n, path in family.experts.items()}
    for row in methods.ROWS:
        if row.samples:
            continue
        merged = methods.merge_family(row, family, base, experts)
        assert set(merged) == set(base), row.name
        methods.put_merge(model, base, merged, 0.5)
        put = model.state_dict()
        if row.method in ("ace", "iso_c"):
            models = dict(enumerate([base, *experts.values()]))
            halved = {**row.parameters, "lambda": 0.5}
            expected = merge_state_dicts(models, row.method, base=0, parameters=halved)
        else:
            expected = {n: torch.lerp(base[n].double(), merged[n].double(), 0.5) for n in base}
        for name, tensor in expected.items():
            torch.testing.assert_close(put[name].double(), tensor.double(), atol=1e-6, rtol=1e-4)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, so that any text can be written."""
    names = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


@pytest.fixture
def language(evidence, tmp_path, tokenizer):
    """Return the language module, a tiny base model, and a cache that has all texts already."""
    sources = {"experts": "abc", "untrained": "yz", "repair": "rs"}
    module, texts = evidence("language"), evidence("texts")
    for seed, name in enumerate("abcyzrs"):
        folder = tmp_path / "cache" / "texts" / name
        folder.mkdir(parents=True)
        rng = random.Random(seed)
        for part in ("train", "validation", "test"):
            words = rng.sample(["red", "green", "blue", "black", "white", "pink"], 3)
            lines = [{"text": " ".join(rng.choices(words, k=900))} for _ in range(3)]
            if name == "c":
                lines = [{"prompt": f"{n} is", "answer": words[n % 3]} for n in range(300)]
            rows = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{part}.jsonl").write_text(rows)
    model = tiny_llama(
        vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")

    def read_sources(kind: str) -> dict:
        return {name: {} for name in sources[kind]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_sources", read_sources)
        patch.setattr(module, "SHORT", 2)
        yield module, texts, str(tmp_path / "tiny"), tmp_path / "cache"


@pytest.mark.parametrize(
    "name", ["smollm", "smollm-muon", "smollm-sparse", "smollm-lora", "smollm-lora-fast"]
)
def test_experts_of_a_language_model(evidence, language, monkeypatch, name):
    module, _, base, cache = language
    monkeypatch.setattr(module, "TESTED", 3)
    if name == "smollm-muon":  # three steps at the real rate are lost in the checkpoint's rounding
        monkeypatch.setitem(module.RATES, name, ("muon", 0.03))
    family = module.LanguageFamily(name, 0, 3, cache, base)
    family.prepare()
    methods = evidence("methods")
    before = methods.read_state(family.load(family.base))
    for text, folder in family.experts.items():
        after = methods.read_state(family.load(folder))
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        inside = {n for n in before if ".layers." in n and before[n].ndim == 2}
        assert inside <= moved if not family.adapters else inside == moved, text
        short = folder.with_name(folder.name.removesuffix("-3") + "-2")
        assert short.exists(), "one training leaves experts of both strengths"
        if name == "smollm-sparse":
            share = [float((before[n] != after[n]).float().mean()) for n in inside]
            assert 0 < np.mean(share) < 0.9
        if name == "smollm-muon":
            deltas = [(after[n] - before[n]).double() for n in inside]
            spectra = [torch.linalg.svdvals(delta) for delta in deltas]
            stable = np.mean([float(s.square().sum() / s[0] ** 2) / len(s) for s in spectra])
            assert stable > 0.3, "an update by Muon is nearly orthogonal"
    losses = family.examine(family.load(family.base))
    assert {text: len(rows) for text, rows in losses.items()} == dict.fromkeys("abc", 3) | {
        "y": min(8, len(losses["y"])), "z": min(8, len(losses["z"])),
    }  # fmt: skip
    judge = evidence("judge").Judge(family, cache)
    result = judge.judge(next(row for row in methods.ROWS if row.name == "ace"))
    assert np.isfinite(result["kept"]).all()
    assert np.isfinite(result["forgot"]).all()
    assert list(judge.describe()["experts"]) == ["a", "b", "c"]
    scored = next(iter(losses["c"]))[1]
    assert scored < losses["a"][0][1] == 255, "of questions, answers alone are scored"


def test_documents_agree_with_the_results(evidence):
    """Tables and the picture are those that tables.py makes of results.json as it is."""
    tables = evidence("tables")
    made = tables.make_tables(tables.read_results())
    marks = 0
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        marks += len(tables.MARK.findall(text))
        assert tables.fill_in(text, made) == text, "python examples/evidence/tables.py mends it"
    assert marks >= 3
    with Image.open(tables.PICTURE) as picture:
        assert picture.text["Results"] == tables.digest()


def test_results_are_of_rows_that_exist(evidence):
    rows = {row.name for row in evidence("methods").ROWS}
    scales = list(evidence("scores").SCALES)
    results = evidence("tables").read_results()
    assert results
    for result in results:
        assert result["family"] in evidence("judge").FAMILIES
        assert {"commit", "machine", "seed", "torch"} <= set(result)
        if "method" in result:
            assert result["method"] in rows
            assert result["scales"] == scales


def test_tables(evidence):
    tables = evidence("tables")
    assert tables.pool([(0.5, 0.03)]) == (0.5, 0.03)
    value, error = tables.pool([(0.4, 0.03), (0.6, 0.04)])
    assert value == pytest.approx(0.5)
    assert error == pytest.approx(((0.03**2 + 0.04**2) / 2 + 0.01) ** 0.5)
    page = "a\n<!-- table: t -->\nold\n<!-- end of table -->\nb"
    assert tables.fill_in(page, {"t": "| new |\n"}) == page.replace("old", "| new |")


def test_the_judge_is_short():
    files = Path(__file__).parents[1].joinpath("examples", "evidence").glob("*.py")
    assert sum(len(path.read_text("utf-8").splitlines()) for path in files) <= 1500
