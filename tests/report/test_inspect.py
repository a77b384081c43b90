# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace inspect` on whole checkpoints."""

from __future__ import annotations

import json
import math
from html import unescape
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import ace_config, rewrite, save_family, save_tokenizer, tiny_llama
from commands import command
from matrices import deltas_of
from measured_files import measured_checkpoints, needs_statistics
from peft_models import config_of, save_adapters
from safetensors.torch import load_file
from test_architectures import small_model
from torch import Tensor

from mergekit_ace.adapters.read import read_adapter
from mergekit_ace.algebra import linalg
from mergekit_ace.algebra.task_vectors import compare_entries
from mergekit_ace.plugin import our_methods

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def inspect(tmp_path):
    """Run the command on a config; the report's folder, or the error's message."""

    def run(config: dict, *flags: str, out: str = "report", fails: bool = False):
        path = tmp_path / "inspected.yml"
        path.write_text(yaml.safe_dump(config))
        said = command("inspect", path, tmp_path / out, "--quiet", *flags, fails=fails)
        return said if fails else tmp_path / out

    return run


def lines_of(folder: Path, name: str = "report.jsonl") -> dict[str, dict]:
    lines = map(json.loads, (folder / name).read_text().splitlines())
    return {line["tensor"]: line for line in lines}


def tensors_of(path: str) -> dict[str, Tensor]:
    return {n: t.double() for n, t in load_file(Path(path) / "model.safetensors").items()}


def naive_ridge(deltas: list[Tensor], normalized: bool) -> float:
    """ε̄ in mean eigenvalues of the sum of the covariances."""
    total = 0
    for delta in deltas:
        centred = delta - delta.mean(0)
        gram = centred.T @ centred
        total = total + gram / (float(gram.trace()) if normalized else 1.0)
    return 0.01 * len(total) * float(total.square().sum() / total.trace() ** 2)


@pytest.mark.parametrize(
    ("scales", "branches"),
    [([0.02, 0.02, 0.03], {False}), ([0.02, 0.02, 0.06], {False, True}), ([0.001, 0.3, 0.05], {1})],
)
def test_every_number_against_float64(tmp_path, inspect, scales, branches):
    paths = save_family(tiny_llama(num_hidden_layers=1), tmp_path, experts=3, scales=scales)
    folder = inspect(ace_config(paths))
    base, *experts = map(tensors_of, paths)
    lines = lines_of(folder)
    assert lines.keys() == base.keys()
    seen = set()
    for name, line in lines.items():
        deltas = [expert[name] - base[name] for expert in experts]
        tau = [float(d.square().sum()) for d in deltas]
        assert line["tau"] == pytest.approx(tau)
        sizes = [math.sqrt(t) / float(base[name].norm()) for t in tau]
        assert line["relative_size"] == pytest.approx(sizes)
        assert line["unchanged"] == [float((d == 0).double().mean()) for d in deltas]
        cosine = float((deltas[0] * deltas[2]).sum()) / math.sqrt(tau[0] * tau[2])
        assert line["cosine"][0][2] == pytest.approx(cosine, abs=1e-6)
        if base[name].ndim < 2:
            assert line["rule"] == "mean"
            continue
        logs = torch.tensor(tau, dtype=torch.float64).log()
        assert line["log_variance"] == pytest.approx(float(logs.var()))
        # where τ is close to 1 it has a pole, and float32's last digits show
        assert line["gamma"] == pytest.approx(float(logs.var() / logs.mean() ** 2), rel=1e-4)
        assert line["heterogeneous"] == line["refined"] == (float(logs.var()) > 1)
        seen.add(line["heterogeneous"])
        raised = line["ridge"] / naive_ridge(deltas, line["normalized"])  # where one is weak
        assert raised == pytest.approx(1) or (raised > 1 and float(logs.var()) > 0.5)
    assert seen == branches
    norms = [math.sqrt(sum(line["tau"][t] for line in lines.values())) for t in range(3)]
    times = f"expert0 has moved {max(norms) / norms[0]:.0f} times less"
    page = (folder / "report.html").read_text()
    assert (times in page) == (norms[0] < 0.1 * max(norms))
    assert "model.layers.0.mlp.down_proj.weight" in page


def test_another_inspection_in_the_folder(tmp_path, inspect):
    """It stays where a new one is refused, or fails."""
    paths = save_family(tiny_llama(num_hidden_layers=1), tmp_path)
    folder = inspect(ace_config(paths))
    config = ace_config(paths, parameters={"epsilon": 1.0, "epsilon_scale": "absolute"})
    message = inspect(config, fails=True)
    assert f"{folder} holds another inspection" in message
    assert "--overwrite" in message
    inspect(config, "--overwrite")
    assert lines_of(folder)[QUERY]["epsilon"] == [1.0, 1.0]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    rewrite(paths[1], lambda tensors: tensors[QUERY].fill_(math.nan))
    message = inspect(config, "--overwrite", fails=True)
    assert f"{QUERY} of model {paths[1]} contains NaN or Inf" in message
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "config.json").touch()
    assert "holds a model; choose" in inspect(config, "--overwrite", fails=True)


def test_filters_and_samples(tmp_path, inspect):
    config = ace_config(save_family(tiny_llama(num_hidden_layers=3), tmp_path))
    names = lines_of(inspect(config, "--tensors", "q_proj", "--tensors", "norm", out="some"))
    assert all("q_proj" in name or "norm" in name for name in names)
    assert len(names) == 3 * 3 + 1
    sampled = lines_of(inspect(config, "--tensors", "proj", "--sample", "14", out="few"))
    assert len(sampled) == 14
    assert len({name.split(".")[-2] for name in sampled}) == 7  # of every kind
    assert {name.split(".")[2] for name in sampled} >= {"0", "2"}  # and over all depths
    assert "no tensor contains 'router'" in inspect(config, "--tensors", "router", fails=True)


def test_other_methods_are_looked_at_with_the_defaults_of_ace(tmp_path, inspect, mergekit_yaml):
    paths = save_family(tiny_llama(num_hidden_layers=1), tmp_path)
    config = ace_config(paths, merge_method="task_arithmetic", parameters={"weight": 0.5})
    expected = lines_of(inspect(ace_config(paths), out="ace"))[QUERY]
    found = lines_of(inspect(config))[QUERY]
    assert [found[field] == expected[field] for field in ("tau", "ridge", "weight")] == [True] * 3
    assert found["method"] == "task_arithmetic"
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Task Arithmetic: expert0, expert1" in page
    assert "To cite" not in page
    out = mergekit_yaml(config)
    command("card", out, "--report", tmp_path / "report" / "report.jsonl")
    card = (out / "README.md").read_text()
    decided = "what ACE-Merging would make of these experts with its defaults"
    assert decided in page
    for shown in ("By [Task Arithmetic](", decided, "% of the base |"):
        assert shown in card
    assert "bibtex" not in card


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_method_shows_what_it_would_do_itself(tmp_path, inspect, mergekit_yaml, method):
    """The check of its config finds nothing, and the card of its result cites it."""
    paths = save_family(tiny_llama(num_hidden_layers=1), tmp_path, scales=[0.02, 0.05])
    name, lines = method.spec.name, tmp_path / "r.jsonl"
    config = ace_config(paths, merge_method=name, parameters={"report": str(lines)})
    if name == "statsmerging":
        for number, model in enumerate(config["models"]):
            model["parameters"] = {"weight": 0.25 + number}
    if needs_statistics(method):
        config["parameters"]["statistics"] = measured_checkpoints(tmp_path / "stats", paths)
    out = mergekit_yaml(config)
    assert command("check", tmp_path / "merged.yml").startswith("nothing to complain about")
    done = lines_of(tmp_path, "r.jsonl")
    folder = inspect(config)
    found = lines_of(folder)
    assert found.keys() == done.keys()
    for tensor, line in done.items():
        del line["seconds"]
        assert {key: found[tensor][key] for key in line} == line
    assert found[QUERY]["rule"] == name
    words = f"{sum(line['rule'] == name for line in done.values())} {method.rules[name]}"
    command("report", lines, tmp_path / "merge.html")
    page = (tmp_path / "merge.html").read_text()
    assert page.count("<tr><td>") == len(done)
    assert 'id="plot-similarity"' not in page  # a merge does not look that closely
    command("card", out, "--report", lines)
    card = (out / "README.md").read_text()
    assert f"By [{method.spec.pretty_name}]({method.spec.reference_url})" in card
    page = unescape((folder / "report.html").read_text())
    for text in (page, card):
        shown = (words, method.summary[1:], *(one.splitlines()[0] for one in method.citations))
        assert all(part in text for part in shown)


def test_tensors_without_numbers_are_named(tmp_path, inspect):
    model = small_model("resnet")
    paths = save_family(model, tmp_path)
    folder = inspect(ace_config(paths))
    counters = {n for n, t in model.state_dict().items() if not t.is_floating_point()}
    assert counters
    assert not counters & lines_of(folder).keys()
    assert "Not compared, because " in (folder / "report.html").read_text()


def test_models_that_are_missing_and_folders_that_cannot_be_used(tmp_path, inspect):
    paths = save_family(tiny_llama(num_hidden_layers=1, tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in lines_of(inspect(ace_config(paths), out="tied"))
    assert "nowhere" in inspect(ace_config([*paths, str(tmp_path / "nowhere")]), fails=True)
    (tmp_path / "file").write_text("")
    assert "file/report" in inspect(ace_config(paths), out="file/report", fails=True)
    models = [{"model": path} for path in paths]
    linear = {"merge_method": "linear", "models": models, "parameters": {"weight": 1}}
    assert "add a line base_model:" in inspect(linear, out="linear", fails=True)


def test_a_tokenizer_with_more_tokens_than_a_table_has_rows(tmp_path, inspect):
    paths = save_family(tiny_llama(), tmp_path)
    for path in paths:
        save_tokenizer(path, map(str, range(40)), ["new"] * (path == paths[1]))
    config = ace_config(paths, tokenizer={"source": paths[1]})
    assert "model.embed_tokens.weight" in lines_of(inspect(config, "--tensors", "embed"))


def test_adapters(tmp_path, inspect):
    paths = save_adapters(tmp_path, tiny_llama, {"target_modules": ["q_proj"], "lora_alpha": 4})
    line = lines_of(inspect(config_of(paths, "ace")))[QUERY]
    change = read_adapter(paths[1], tiny_llama().to("meta")).changes[QUERY]
    assert line["tau"] == pytest.approx([change.factors().energy], rel=1e-4)


@pytest.mark.parametrize("shape", [(24, 40), (7,), (2, 5, 6), (), (0, 4)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_comparison(rng, monkeypatch, shape, scale):
    monkeypatch.setattr(linalg, "BLOCK_ENTRIES", 400)
    base = scale * torch.randn(shape, generator=rng)
    experts = [base + s * scale * torch.randn(shape, generator=rng) for s in (0.1, 1.0)]
    experts += [torch.where(torch.rand(shape, generator=rng) < 0.5, base, experts[1]), base.clone()]
    found = compare_entries(base, experts)
    deltas = [d.flatten() for d in deltas_of(base, experts)]
    assert found["base_norm"] == pytest.approx(float(base.double().norm()))
    assert found["norm"] == pytest.approx([float(d.norm()) for d in deltas])
    unchanged = [float((d == 0).double().mean()) if len(d) else 1.0 for d in deltas]
    assert found["unchanged"] == pytest.approx(unchanged)
    for s, one in enumerate(deltas):
        for t, other in enumerate(deltas):
            cosine = None
            if one.norm() and other.norm():
                product = (one / one.norm()) @ (other / other.norm())
                cosine = pytest.approx(float(product), abs=1e-6)
            assert found["cosine"][s][t] == cosine
