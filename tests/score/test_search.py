# SPDX-License-Identifier: Apache-2.0
"""`search`: trials are merges, the best is written and tested, and a study goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import torch
import yaml
from checkpoints import ace_config, tiny_llama
from commands import run_config
from peft_models import train_by_chance
from reference import task_vector_error
from transformers import AutoModelForCausalLM

from mergekit_ace.score import search as module
from mergekit_ace.score.config import SearchSpace
from mergekit_ace.score.space import SearchedMerge

load = AutoModelForCausalLM.from_pretrained


@pytest.fixture
def merge_config(config, tmp_path):
    """Write the config of a merge by a method, and return its path."""

    def write(method: str, **more) -> str:
        experts = [one["model"] for one in config["models"]]
        merge = ace_config([config["base_model"], *experts], merge_method=method, **more)
        if method == "task_arithmetic":
            merge["models"][0]["parameters"] = {"weight": 0.8}
            merge["parameters"] = {"weight": 0.5}
        path = tmp_path / f"{method}.yml"
        path.write_text(yaml.safe_dump(merge))
        return str(path)

    return write


@pytest.fixture
def settings(config, merge_config, tmp_path) -> dict:
    """A search.yml of a few trials, with its score.yml; medicine writes its texts."""
    (tmp_path / "score.yml").write_text(yaml.safe_dump(config))
    merges = [merge_config("ace"), merge_config("tsv_m")]
    search = {"lambda": [0.2, 1.5], "weight": [0.3, 3], "by": "expert"}
    score = str(tmp_path / "score.yml")
    return {"score": score, "merge": merges, "search": search, "trials": 12, "budget": 1.0}


run = partial(run_config, "search")


def trials(out: Path) -> list:
    return optuna.load_study(study_name="search", storage=f"sqlite:///{out / 'study.db'}").trials


def results(out: Path) -> dict:
    return json.loads((out / "search.json").read_text())


def done(out: Path) -> list[tuple]:
    """Return parameters and values of the trials that came to an end."""
    return [(t.params, t.values) for t in trials(out) if t.state.name == "COMPLETE"]


def test_the_best_merge_is_written_and_tested(
    config, settings, losses_by_hand, mergekit_yaml, tmp_path
):
    out = tmp_path / "best"
    found = run(settings, out)
    assert len(done(out)) == 12
    assert "not of tsv_m, of which only λ is" in found
    best, plain = results(out)["best found"], results(out)["best λ alone"]
    assert best["validation"]["forgot"][0] <= 1.0
    assert best["validation"]["aim"] >= plain["validation"]["aim"]
    again = mergekit_yaml(yaml.safe_load((out / "merge.yml").read_text()), out="again")
    merged, expected = (load(folder).state_dict() for folder in (out / "model", again))
    assert all(torch.equal(tensor, merged[name]) for name, tensor in expected.items())
    keep = [losses_by_hand(folder, config["keep"]) for folder in (config["base_model"], again)]
    # Rows are drawn in a random order, of which the texts to test are every second one.
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))[1::2]
    rise = (keep[1] - keep[0])[order].sum() / (30 * len(order))
    assert best["test"]["forgot"][0] == pytest.approx(rise, abs=1e-4)
    assert f"{best['test']['kept'][0]:.3f} ± {best['test']['kept'][1]:.3f}" in found
    assert "believe their figures" in (out / "search.html").read_text()
    assert "changed since then: search.budget" in run({**settings, "budget": 0.5}, out, fails=True)
    before = done(out)
    run({**settings, "trials": 13}, out)
    assert done(out)[:-1] == before
    assert len(done(out)) == 13


def test_a_study_that_was_stopped_goes_on_alike(settings, tmp_path, monkeypatch):
    """All trials that nothing beats are the frontier."""
    settings |= {"search": {"lambda": [0.6, 1.5], "by": ["depth", "kind"]}, "trials": 6}
    settings |= {"merge": settings["merge"][1], "aim": "frontier"}
    run(settings, tmp_path / "whole")
    usual, calls = module.sequence_losses, []

    def stopped(*given, **options):
        calls.append(options)
        if len(calls) in (2, 10):  # of the first trial and of a later one
            raise KeyboardInterrupt
        return usual(*given, **options)

    monkeypatch.setattr(module, "sequence_losses", stopped)
    for fails in (True, True, False):
        run(settings, tmp_path / "parts", fails=fails)
    assert done(tmp_path / "parts") == done(tmp_path / "whole")
    assert [t.state.name for t in trials(tmp_path / "parts")].count("FAIL") == 2
    best = [results(tmp_path / name)["best found"]["parameters"] for name in ("parts", "whole")]
    assert best[0] == best[1]
    points = results(tmp_path / "whole")["trials"]
    for one in points:
        better = [p for p in points if p["aim"] > one["aim"] and p["forgot"] < one["forgot"]]
        assert not (one["frontier"] and better)
    assert any(one["frontier"] for one in points)
    assert "frontier" in (tmp_path / "whole" / "search.html").read_text()


def test_a_merge_is_measured_once(settings, tmp_path, monkeypatch):
    """Where the best λ is a bound, the sampler asks for it again and again."""
    usual, calls = module.sequence_losses, []
    monkeypatch.setattr(
        module, "sequence_losses", lambda *a, **b: calls.append(b) or usual(*a, **b)
    )
    few = {"merge": settings["merge"][1], "search": {"lambda": [0.7, 0.7001]}}
    run(settings | few, tmp_path / "best")
    assert len(done(tmp_path / "best")) == 12
    assert len(calls) == 2 * (2 + 2 + 2), "on two texts: two trials, finalists, and their tests"


STALLING = """
import itertools, pathlib, sys, time
from mergekit_ace.cli import main
from mergekit_ace.score import search
usual, calls, mark = search.sequence_losses, itertools.count(), pathlib.Path(sys.argv.pop(1))
def stalling(*given, **options):
    if next(calls) == 4:  # within the second trial
        mark.touch()
        time.sleep(600)
    return usual(*given, **options)
search.sequence_losses = stalling
main()
"""


def test_processes_share_a_study_and_one_is_killed(settings, tmp_path, monkeypatch):
    out, path, mark = tmp_path / "best", tmp_path / "best.yml", tmp_path / "stalled"
    settings |= {"merge": settings["merge"][1], "search": {"lambda": [0.2, 1.5]}, "trials": 10}
    path.write_text(yaml.safe_dump(settings))
    arguments = [sys.executable, "-c", STALLING, mark, "search", path, out, "--quiet"]
    other = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not mark.exists():
        assert time.monotonic() < deadline
        assert other.poll() is None
        time.sleep(0.2)
    assert "another run is writing to" in run(settings, out, "--overwrite", fails=True)
    assert done(out)
    usual, calls = module.sequence_losses, []

    def killing(*given, **options):
        calls.append(options)
        if len(calls) == 4:
            running = [t for t in trials(out) if t.state.name == "RUNNING"]
            assert len({t.user_attrs["worker"] for t in running}) == 2, "both are at work"
            other.kill()
            other.wait()
        return usual(*given, **options)

    monkeypatch.setattr(module, "sequence_losses", killing)
    run(settings, out)
    states = [trial.state.name for trial in trials(out)]
    assert sorted({*states}) == ["COMPLETE", "FAIL"]
    assert (states.count("COMPLETE"), states.count("FAIL")) == (10, 1)
    plain = [params for params, _ in done(out)][:9]
    assert {0.5, 0.7, 0.85, 1.0} <= {one["lambda"] for one in plain}, "nothing is lost"
    best, alone = results(out)["best found"], results(out)["best λ alone"]
    assert alone["parameters"] == best["parameters"], "nothing but λ is searched"


@pytest.mark.parametrize(
    ("method", "parts", "adapt"),
    [
        ("ace", ["kind"], False),
        ("ace", ["depth"], False),
        ("ace", ["kind"], True),
        ("ace_plus", ["depth", "kind"], False),
        ("ace_plus", ["depth"], True),
        ("task_arithmetic", ["depth", "kind"], False),
        ("tsv_m", ["depth"], False),
    ],
)
def test_a_trial_is_the_merge_of_its_config(
    method, parts, adapt, config, merge_config, mergekit_yaml, tmp_path
):
    """And where all parameters are 1, the merge of the config that is searched."""
    for number, expert in enumerate(config["models"] if adapt else ()):
        modules = ["q_proj", "up_proj", "down_proj"]
        one = train_by_chance(tiny_llama, tmp_path / f"a{number}", number, target_modules=modules)
        one.base.save_pretrained(config["base_model"])
        expert["model"] = f"{config['base_model']}+{one.folder}"
    by, middle = ["expert", *parts], {"depth": "middle", "kind": "attention"}
    space = SearchSpace.model_validate({"lambda": [0.2, 1.5], "weight": [0.3, 3], "by": by})
    merge = SearchedMerge(Path(merge_config(method)), space, config["base_model"])
    merge.make(tmp_path / "merges", quiet=True)
    model = load(config["base_model"])
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    merge.load(model, base, SimpleNamespace(trust_remote_code=False, task="causal-lm"))
    rng = torch.Generator().manual_seed(0)
    values = {name: 0.3 + float(torch.rand(1, generator=rng)) for name in merge.ranges}
    assert (sum(name.startswith("weight.") for name in values) == 2) == (method != "tsv_m")
    assert ".".join(["lambda", *(middle[part] for part in parts)]) in values
    merge.write(values, tmp_path, "of a test")
    exact = ("--lora-merge-cache", tmp_path / "cache", "--lora-merge-dtype", "float32")
    for chosen, path in (
        (values, tmp_path / "merge.yml"),
        (dict.fromkeys(values, 1.0), Path(merge_config(method))),
    ):
        merge.set(chosen)
        other = load(mergekit_yaml(yaml.safe_load(path.read_text()), *exact))
        for name, parameter in other.named_parameters():
            pair = model.get_parameter(name).detach(), parameter.detach()
            assert torch.equal(*pair) or task_vector_error(*pair, base[name]) <= 1e-3, name


def test_a_task_is_an_aim(config, settings, tasks, tmp_path):
    config["models"][1] |= {"tasks": ["local_words"], "data": config["models"][0]["data"]}
    config["task_folder"] = str(tasks)
    Path(settings["score"]).write_text(yaml.safe_dump(config))
    settings |= {"trials": 2, "merge": settings["merge"][1], "search": {"lambda": [0.9, 1.5]}}
    out = tmp_path / "task"
    run({**settings, "aim": {"kept": 1, "local_words": 3}}, out, "--trust-remote-code")
    for made in (out / "merges" / "tsv_m-0", out / "model"):
        assert '"trust_remote_code": true' in (made / "merge_manifest.json").read_text()
    test = results(out)["best found"]["test"]
    assert test["aim"] == pytest.approx((test["kept"][0] + 3 * test["local_words"][0]) / 4)
    assert test["local_words"][0] in (0, 0.25, 0.5, 0.75, 1), "of every second question"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"search": {"lambda": [0.2, 1.5], "by": "expert"}}, "`weight: [0.3, 3]` and `by: expert`"),
        ({"search": {"lambda": [2, 1]}}, "starts above its end"),
        ({"search": {"weight": [1, 2], "by": "experts"}}, "there is no `lambda:`"),
        ({"aim": {"gsm8k": 1}}, "`aim` has gsm8k, which is neither `kept` nor a task"),
        ({"merge": "tsv_m"}, "not of tsv_m; leave out `weight` and `by: expert`"),
        ({"merge": "linear"}, "linear has no λ that scales all"),
        ({"merge": "cart"}, "cart has no λ that scales all"),
        ({"score": "none.yml"}, "none.yml cannot be read"),
    ],
)
def test_mistakes_are_named(settings, merge_config, change, said, tmp_path):
    if "merge" in change:
        change = {"merge": merge_config(change["merge"])}
    assert said in run(settings | change, tmp_path / "best", fails=True).replace("\n", " ")
    assert not (tmp_path / "best" / module.LOCK).exists()


def test_other_mistakes_are_named(config, settings, merge_config, tmp_path, monkeypatch):
    path, keep = merge_config("ace", base_model=config["merges"][0]), Path(config["keep"]["path"])
    assert "its base model is" in run({**settings, "merge": path}, tmp_path / "best", fails=True)
    settings["merge"] = merge_config("ace")
    keep.write_text("\n".join(keep.read_text().splitlines()[:5]))
    found = run(settings, tmp_path / "few", fails=True)
    assert "keep has 5 texts; a search needs 8" in found
    (tmp_path / "few" / "study.db").unlink()
    found = run(settings, tmp_path / "few", "--overwrite", fails=True)
    assert "holds other things than a search" in found
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert "pip install 'mergekit-ace[search]'" in run(settings, tmp_path / "best", fails=True)
