# SPDX-License-Identifier: Apache-2.0
"""Statistics of samples, and merges by them, against plain float64 passes; runs that go wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import families
import pytest
import torch
from checkpoints import ace_config, state
from commands import command, run_config
from measured_files import measure
from naive_peers import naive_fisher, naive_regmean
from reference import naive_mean, task_vector_error
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from mergekit_ace.algebra.ridge import MeasuredCovariance
from mergekit_ace.files.statistics import Statistics
from mergekit_ace.naming import ConfigError, FileError
from mergekit_ace.training import statistics
from mergekit_ace.training.statistics import StatisticsConfig


def inputs_in_float64(model: nn.Module, samples: list[dict]) -> dict:
    """X of every linear layer by parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[torch.Tensor]] = {}

    def keep(module, args, kwargs, output):
        given = (*args, *kwargs.values())[0]
        found.setdefault(names[id(module.weight)], []).append(given.flatten(0, -2).clone())

    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        for sample in samples:
            model(**sample)
    return {key: torch.cat(parts) for key, parts in found.items()}


def texts(config: dict, number: int) -> list[dict]:
    """The samples of an expert as a user would read them, one by one."""
    lines = Path(config["models"][number]["data"]["path"]).read_text().splitlines()
    return [
        dict(families.tokenizer()(json.loads(line)["text"], return_tensors="pt")) for line in lines
    ]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> dict:
    return families.llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("make", "kind", "count"),
    [(families.llama, LlamaForCausalLM, 15), (families.gpt2, GPT2LMHeadModel, 8)],
)
def test_what_is_measured_and_merged(tmp_path, mergekit_yaml, make, kind, count):
    """Covariances against float64; layers with the same inputs share a covariance.

    `fisher` and `regmean` merge whole checkpoints by what was measured.
    """
    config = {**make(tmp_path / "family"), "measure": ["covariances", "fisher"]}
    file = tmp_path / "stats" / "statistics.json"
    assert run_config("statistics", config, tmp_path / "stats").strip().endswith(str(file))
    found = Statistics(file)
    for number, expert in enumerate(config["models"]):
        model = AutoModelForCausalLM.from_pretrained(expert["model"]).eval().double()
        samples = texts(config, number)
        assert found.index.experts[number].samples == len(samples)
        assert found.index.experts[number].tokens == sum(s["input_ids"].numel() for s in samples)
        for name, rows in inputs_in_float64(model, samples).items():
            packed = found.read(number, f"covariance/{found.tensors[name].inputs}")
            measured = MeasuredCovariance(packed, rows.shape[1]).matrix(rows)
            torch.testing.assert_close(measured, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
    if make is families.llama:
        shared = [found.tensors[f"model.layers.1.self_attn.{n}_proj.weight"].inputs for n in "qkvo"]
        assert shared[0] == shared[1] == shared[2] != shared[3]

    paths = [config["base_model"], *(e["model"] for e in config["models"])]
    merged = {}
    for method in ("fisher", "regmean"):
        merge = ace_config(paths, merge_method=method, parameters={"statistics": str(file)})
        merged[method] = state(kind, mergekit_yaml(merge, out=method))[1]
        assert "arxiv.org/abs/" in (tmp_path / method / "README.md").read_text()
    model, base = state(kind, paths[0])
    experts = [state(kind, path)[1] for path in paths[1:]]
    regressed = 0
    for name, tensor in base.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        turned = isinstance(module, Conv1D) and tensor.ndim == 2
        stored = [tensor, *(expert[name] for expert in experts)]
        stored += [merged[method][name] for method in merged]
        stored += [found.read(t, f"fisher/{name}") for t in (0, 1)]
        origin, *versions, fisher, regmean, one, two = (t.T if turned else t for t in stored)
        deltas = [version.double() - origin for version in versions]
        expected = origin + naive_fisher(deltas, [one, two], [1.0, 1.0])
        assert task_vector_error(fisher, expected, origin) <= 1e-4, name
        inputs, expected = found.tensors[name].inputs, naive_mean(origin, versions)
        if tensor.ndim == 2 and inputs and "wte" not in name:
            packed = [found.read(t, f"covariance/{inputs}") for t in (0, 1)]
            read = [MeasuredCovariance(each, origin.shape[1]) for each in packed]
            known = [each.matrix(torch.zeros(1).double()) for each in read]
            expected = origin + naive_regmean(deltas, known, [1.0, 1.0])
            regressed += 1
        assert task_vector_error(regmean, expected, origin) <= 1e-4, name
    assert regressed == count


def test_statistics_that_lack_an_expert_or_have_changed(tmp_path):
    config = families.llama(tmp_path / "family", experts=3)
    paths = [config["base_model"], *(e["model"] for e in config["models"])]
    file = Path(measure({**config, "models": config["models"][:2]}, tmp_path / "stats").path)
    merge = ace_config(paths, merge_method="regmean", parameters={"statistics": str(file)})
    out = tmp_path / "out"
    run_config("merge", {**merge, "models": merge["models"][:2]}, out)
    command("check", tmp_path / "out.yml")
    file.write_text(file.read_text() + "\n")
    said = command("merge", tmp_path / "out.yml", out, "--quiet", "--resume", fails=True)
    assert "statistics.json" in said
    assert f"holds nothing of {paths[3]}" in run_config("merge", merge, out, fails=True)
    assert f"holds nothing of {paths[3]}" in command("check", tmp_path / "out.yml", fails=True)


def test_experts_without_data_write_texts_of_their_own(llama, tmp_path):
    """What is measured is what the files of their texts hold, which a user may change."""
    own = {**llama, "models": [{**one, "data": None} for one in llama["models"]]}
    found = measure(own, tmp_path / "own")
    files = [tmp_path / "own" / "texts" / f"{n}.jsonl" for n in range(len(own["models"]))]
    given = [{**one, "data": {"path": str(file), "text": "text"}}
             for one, file in zip(llama["models"], files, strict=True)]  # fmt: skip
    again = measure({**llama, "models": given}, tmp_path / "given")
    name = found.tensors["model.layers.1.mlp.down_proj.weight"].inputs
    for number, expert in enumerate(found.index.experts):
        assert expert.samples == statistics.OWN_TEXTS
        one, other = (s.read(number, f"covariance/{name}") for s in (found, again))
        torch.testing.assert_close(one, other)
    assert files[0].read_bytes() != files[1].read_bytes()
    files[0].write_text(json.dumps({"text": "w1 w2 w3"}) + "\n")
    (tmp_path / "own" / "experts" / "0-covariances.safetensors").unlink()
    assert measure(own, tmp_path / "own").index.experts[0].tokens == 3


@pytest.mark.parametrize(
    ("make", "kind"),
    [(families.mixtral, AutoModelForCausalLM), (families.vit, AutoModelForImageClassification)],
)
def test_every_kind_of_model(tmp_path, make, kind):
    config = make(tmp_path / "family")
    found = measure(config, tmp_path / "out", "covariances", "fisher")
    model = kind.from_pretrained(config["models"][0]["model"])
    for name, parameter in model.named_parameters():
        if found.tensors[name].fisher:
            fisher = found.read(1, f"fisher/{name}")
            assert fisher.shape == parameter.shape
            assert bool((fisher >= 0).all())
        else:  # heads, and what is packed in memory only
            assert name.startswith("classifier.") or parameter.ndim == 3
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "classifier":
            assert found.tensors[f"{name}.weight"].inputs is not None


def test_fisher_information(llama, tmp_path):
    """Against one backward pass per sample in float64, with the same answers drawn."""
    found = measure(llama, tmp_path / "out", "fisher")
    assert found.index.measured == ("fisher",)
    model = AutoModelForCausalLM.from_pretrained(llama["models"][1]["model"]).double()
    generator = torch.Generator().manual_seed(0)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    samples = found.index.experts[1].samples
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0)).tolist()
    read = texts(llama, 1)
    for number in order:
        model.zero_grad()
        scores = model(**read[number]).logits[0, :-1].log_softmax(-1)
        drawn = torch.multinomial(scores.detach().exp().float(), 1, generator=generator)
        scores.gather(-1, drawn).sum().backward()
        for name, parameter in model.named_parameters():
            expected[name] += parameter.grad.square() / samples
    for name, information in expected.items():
        got = found.read(1, f"fisher/{name}").double()
        torch.testing.assert_close(got, information, rtol=1e-3, atol=1e-6)


def test_an_interrupted_run_goes_on(llama, tmp_path, monkeypatch):
    """Another one in its folder replaces it only where that is asked for; damage is named."""
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        families.killed_after(patched, statistics, "measure_expert", 1)
        with pytest.raises(families.Killed):
            measure(llama, out)
    first, index = out / "experts" / "0-covariances.safetensors", out / "statistics.json"
    assert not index.exists()
    before = first.stat().st_mtime_ns
    whole = measure(llama, out)
    assert first.stat().st_mtime_ns == before
    assert len(whole.index.experts) == 2
    before, other = index.stat().st_mtime_ns, {**llama, "exclude": ["mlp"]}
    with monkeypatch.context() as patched:
        patched.setattr(statistics, "load_reader", None)  # nothing is left to load a model for
        assert measure(llama, out).index == whole.index
        assert index.stat().st_mtime_ns == before, "a merge that has begun with it goes on"
        with pytest.raises(ConfigError, match=r"holds the state of another run.*exclude"):
            measure(other, out)
    found = measure(other, out, overwrite=True)
    assert found.tensors["model.layers.0.mlp.up_proj.weight"].inputs is None
    assert found.tensors["model.layers.0.self_attn.q_proj.weight"].inputs is not None
    first.write_bytes(first.read_bytes()[:-10])
    with pytest.raises(FileError, match=r"the statistics of task0 cannot be used: .*is damaged"):
        Statistics(out)
    shutil.rmtree(out / "state")  # as one may to have its room
    for kind in ("statistics.json", "experts/"):
        with pytest.raises(ConfigError, match=f"out holds {kind}.* which is not of this run"):
            measure(llama, out)
        index.unlink(missing_ok=True)
    assert measure(llama, out, overwrite=True).tensors == whole.tensors


def test_what_cannot_be_measured_or_read(llama, tmp_path, monkeypatch):
    """A ResNet has convolutions, and no linear layer but its head."""
    with pytest.raises(ConfigError, match="nothing of which covariances could be measured"):
        measure(families.resnet(tmp_path / "family"), tmp_path / "out")
    images = families.vit(tmp_path / "images")
    data = Path(images["models"][0]["data"]["path"])
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[3]["pixels"][0][0][0] = float("nan")
    families.write_rows(data, rows)
    with pytest.raises(ConfigError, match=r"expert0 answers NaN or Inf to a sample of data"):
        measure(images, tmp_path / "nan")
    assert not (tmp_path / "nan" / "statistics.json").exists()
    monkeypatch.setattr(statistics, "load_reader", None)  # said before a model is loaded
    with pytest.raises(ConfigError, match="exclude: 'no_such' is part of no name"):
        measure({**llama, "exclude": ["no_such"]}, tmp_path / "out2")
    config = families.bert(tmp_path / "texts")
    config["models"][1].pop("data")
    with pytest.raises(ValueError, match="task1 has no data: add samples of what it is for"):
        StatisticsConfig.model_validate(config)
    with pytest.raises(FileError, match="missing; give the one that"):
        Statistics(tmp_path / "none")
    (tmp_path / "foreign.json").write_text('{"format": "something else"}')
    with pytest.raises(FileError, match="is no file of statistics"):
        Statistics(tmp_path / "foreign.json")
