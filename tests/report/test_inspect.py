# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace inspect` on whole checkpoints."""

from __future__ import annotations

import json
import math
import os
from html import unescape
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import ace_config, fine_tuned, save_family, tiny_llama
from click.testing import CliRunner
from coefficient_files import make_file
from filelock import FileLock
from measured_files import measured_checkpoints, needs_statistics
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from mergekit_ace.cli import main
from mergekit_ace.plugin import our_methods
from mergekit_ace.report.inspect import LOCK_FILE, InspectTensor

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def inspect(tmp_path):
    """Run the command on a config; the report's folder, or the error's message."""

    def run(config: dict, *flags: str, out: str = "report", fails: bool = False):
        path = tmp_path / "inspected.yml"
        path.write_text(yaml.safe_dump(config))
        arguments = ["inspect", str(path), str(tmp_path / out), "--quiet", *flags]
        result = CliRunner().invoke(main, arguments)
        assert (result.exit_code != 0) == fails, result.output
        if fails:
            assert isinstance(result.exception, SystemExit), result.exception
            return result.output
        return tmp_path / out

    return run


def lines_of(folder: Path) -> dict[str, dict]:
    lines = map(json.loads, (folder / "report.jsonl").read_text().splitlines())
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
    ("scales", "branches"), [([0.02, 0.02, 0.06], {False, True}), ([0.001, 0.3, 0.05], {True})]
)
def test_every_number_against_float64(tmp_path, inspect, scales, branches):
    paths = save_family(tiny_llama(), tmp_path, experts=3, scales=scales)
    folder = inspect(ace_config(paths))
    base, *experts = map(tensors_of, paths)
    lines = lines_of(folder)
    assert lines.keys() == base.keys()
    seen = set()
    for name, line in lines.items():
        deltas = [expert[name] - base[name] for expert in experts]
        tau = [float(d.square().sum()) for d in deltas]
        assert line["tau"] == pytest.approx(tau)
        assert line["relative_size"] == pytest.approx(
            [math.sqrt(t) / float(base[name].norm()) for t in tau]
        )
        assert line["unchanged"] == [float((d == 0).double().mean()) for d in deltas]
        cosine = float((deltas[0] * deltas[2]).sum()) / math.sqrt(tau[0] * tau[2])
        assert line["cosine"][0][2] == pytest.approx(cosine, abs=1e-6)
        if base[name].ndim < 2:
            assert line["rule"] == "mean"
            assert "subspaces" not in line
            continue
        logs = [math.log(t) for t in tau]
        mean = sum(logs) / 3
        variance = sum((v - mean) ** 2 for v in logs) / 2
        assert line["log_variance"] == pytest.approx(variance)
        # where τ is close to 1 it has a pole, and float32's last digits show
        assert line["gamma"] == pytest.approx(variance / mean**2, rel=1e-4)
        heterogeneous = variance > 1
        assert line["heterogeneous"] == line["refined"] == heterogeneous
        seen.add(line["heterogeneous"])
        sigma = torch.linalg.matrix_norm(deltas[1], 2)
        assert line["subspaces"]["stable_rank"][1] == pytest.approx(float(tau[1] / sigma**2), 1e-4)
        assert line["ridge"] == pytest.approx(naive_ridge(deltas, line["normalized"]))
    assert seen == branches


def test_files_and_words(tmp_path, inspect):
    paths = save_family(tiny_llama(), tmp_path, scales=[0.02, 0.001])
    folder = inspect(ace_config(paths))
    summary = json.loads((folder / "summary.json").read_text())
    base, *experts = map(tensors_of, paths)
    deltas = [torch.cat([(e[n] - base[n]).flatten() for n in base]) for e in experts]
    whole = torch.cat([t.flatten() for t in base.values()])
    assert summary["norm"] == pytest.approx([float(d.norm()) for d in deltas])
    assert summary["relative_size"] == pytest.approx(
        [float(d.norm() / whole.norm()) for d in deltas]
    )
    cosine = float(deltas[0] @ deltas[1] / deltas[0].norm() / deltas[1].norm())
    assert summary["cosine"][0][1] == pytest.approx(cosine, abs=1e-6)
    times = f"expert1 has moved {summary['norm'][0] / summary['norm'][1]:.0f} times less"
    assert any(times in sentence for sentence in summary["sentences"])
    page = (folder / "report.html").read_text()
    assert times in page
    assert "model.layers.1.mlp.down_proj.weight" in page


def test_a_killed_inspection_goes_on(tmp_path, inspect, monkeypatch):
    config = ace_config(save_family(tiny_llama(), tmp_path))
    whole = lines_of(inspect(config, out="whole"))
    execute, calls = InspectTensor.execute, []

    def dies(self, **arguments):
        if len(calls) == 7:
            raise KeyboardInterrupt
        calls.append(self.merge.output_weight.name)
        return execute(self, **arguments)

    monkeypatch.setattr(InspectTensor, "execute", dies)
    inspect(config, fails=True)
    monkeypatch.undo()
    report = tmp_path / "report" / "report.jsonl"
    assert len(report.read_text().splitlines()) == 7
    assert not (tmp_path / "report" / "report.html").exists()
    with open(report, "a") as file:
        file.write('{"tensor": "model.norm.we')  # cut in the middle of a line
    again = []

    def counted(self, **arguments):
        again.append(self.merge.output_weight.name)
        return execute(self, **arguments)

    monkeypatch.setattr(InspectTensor, "execute", counted)
    found = lines_of(inspect(config))
    assert not set(again) & set(calls)
    assert len(again) + len(calls) == len(whole)
    for line in (*found.values(), *whole.values()):
        del line["seconds"]
    assert found == whole


def test_another_inspection_in_the_folder(tmp_path, inspect):
    config = ace_config(save_family(tiny_llama(), tmp_path))
    inspect(config)
    absolute = {"epsilon": 1.0, "epsilon_scale": "absolute"}
    config["parameters"] = {**absolute, "adaptive_normalization": "never"}
    message = inspect(config, fails=True)
    assert "changed since then: config.parameters" in message
    assert "--overwrite" in message
    folder = inspect(config, "--overwrite")
    assert lines_of(folder)[QUERY]["epsilon"] == [1.0, 1.0]


def test_two_inspections_into_one_folder(tmp_path, inspect):
    config = ace_config(save_family(tiny_llama(), tmp_path))
    (tmp_path / "report").mkdir()
    with FileLock(tmp_path / "report" / LOCK_FILE):
        message = inspect(config, "--overwrite", fails=True)
    assert f"another inspection is writing to {tmp_path / 'report'}; wait for it" in message
    folder = inspect(config)
    assert not (folder / LOCK_FILE).exists()


def test_changed_checkpoints_are_another_inspection(tmp_path, inspect):
    paths = save_family(tiny_llama(), tmp_path)
    inspect(ace_config(paths))
    os.utime(Path(paths[1]) / "model.safetensors", ns=(1, 1))
    assert "changed since then: files" in inspect(ace_config(paths), fails=True)


def test_filters_and_samples(tmp_path, inspect):
    model = tiny_llama(num_hidden_layers=6)
    config = ace_config(save_family(model, tmp_path))
    names = lines_of(inspect(config, "--tensors", "q_proj", "--tensors", "norm", out="some"))
    assert all("q_proj" in name or "norm" in name for name in names)
    assert len(names) == 6 * 3 + 1
    sampled = lines_of(inspect(config, "--tensors", "proj", "--sample", "14", out="few"))
    assert len(sampled) == 14
    assert len({name.split(".")[-2] for name in sampled}) == 7  # of every kind
    assert {name.split(".")[2] for name in sampled} >= {"0", "5"}  # and over all depths
    assert len(lines_of(inspect(config, "--sample", "2", out="two"))) == 2
    assert "no tensor contains 'router'" in inspect(config, "--tensors", "router", fails=True)


def test_conv1d_weights_are_looked_at_as_they_are_merged(tmp_path, inspect):
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    paths = save_family(GPT2LMHeadModel(config), tmp_path)
    lines = lines_of(inspect(ace_config(paths)))
    base, *experts = map(tensors_of, paths)
    name = next(n for n in lines if n.endswith("h.0.mlp.c_fc.weight"))
    assert lines[name]["layout"] == "transposed"
    stored = name if name in base else name.removeprefix("transformer.")
    deltas = [(expert[stored] - base[stored]).T for expert in experts]
    assert lines[name]["ridge"] == pytest.approx(naive_ridge(deltas, False))


def test_parameters_with_filters_and_layer_gradients(tmp_path, inspect):
    config = ace_config(save_family(tiny_llama(num_hidden_layers=3), tmp_path))
    config["parameters"] = {
        "epsilon": [0.1, 0.3],
        "epsilon_scale": "absolute",
        "adaptive_normalization": "never",
        "layout": [{"filter": "embed", "value": "mean"}, {"value": "auto"}],
    }
    config["models"][1]["parameters"] = {"weight": [{"filter": "k_proj", "value": 0}, {"value": 1}]}
    lines = lines_of(inspect(config))
    assert lines["model.embed_tokens.weight"]["rule"] == "mean"
    assert lines["model.layers.1.mlp.up_proj.weight"]["epsilon"] == pytest.approx([0.2, 0.2])
    assert lines["model.layers.1.self_attn.k_proj.weight"]["rule"] == "single"


def test_slices_read_the_layers_that_they_name(tmp_path, inspect):
    paths = save_family(tiny_llama(num_hidden_layers=3), tmp_path)
    config = ace_config(paths)
    del config["models"]
    config["slices"] = [{"sources": [{"model": p, "layer_range": [1, 3]} for p in paths]}]
    lines = lines_of(inspect(config))
    base, expert, _ = map(tensors_of, paths)
    for written, read in ((0, 1), (1, 2)):
        name = f"model.layers.{read}.mlp.up_proj.weight"
        tau = float((expert[name] - base[name]).square().sum())
        line = lines[f"model.layers.{written}.mlp.up_proj.weight"]
        assert line["tau"][0] == pytest.approx(tau)
    assert "model.layers.2.mlp.up_proj.weight" not in lines


def test_vocabularies_are_aligned_as_in_the_merge(tmp_path, inspect):
    paths = save_family(tiny_llama(), tmp_path)
    words = [f"w{n}" for n in range(40)]
    for path, more in zip(paths, ([], [], ["new", "words"]), strict=True):
        if more:
            fine_tuned(tiny_llama(vocab_size=42), seed=4).save_pretrained(path)
        tokenizer = Tokenizer(WordLevel({w: n for n, w in enumerate(words + more)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    folder = inspect({**ace_config(paths), "tokenizer": {"source": "base"}})
    line = lines_of(folder)["model.embed_tokens.weight"]
    assert line["shape"] == [40, 32]
    base, _, expert = map(tensors_of, paths)
    delta = expert["model.embed_tokens.weight"][:40] - base["model.embed_tokens.weight"]
    assert line["tau"][1] == pytest.approx(float(delta.square().sum()))


def test_other_methods_are_looked_at_with_the_defaults_of_ace(tmp_path, inspect):
    paths = save_family(tiny_llama(), tmp_path)
    config = ace_config(paths, merge_method="task_arithmetic", parameters={"weight": 0.5})
    expected = lines_of(inspect(ace_config(paths), out="ace"))
    found = lines_of(inspect(config))
    assert found[QUERY]["tau"] == expected[QUERY]["tau"]
    assert found[QUERY]["ridge"] == expected[QUERY]["ridge"]
    assert found[QUERY]["method"] == "task_arithmetic"
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Task Arithmetic: expert0, expert1" in page
    assert "are what ACE-Merging would make of these experts with its defaults" in page
    assert "To cite" not in page


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_method_shows_what_it_would_do_itself(tmp_path, inspect, mergekit_yaml, method):
    paths = save_family(tiny_llama(), tmp_path, scales=[0.02, 0.05])
    name, lines = method.spec.name, tmp_path / "r.jsonl"
    config = ace_config(paths, merge_method=name, parameters={"report": str(lines)})
    if name == "statsmerging":
        for number, model in enumerate(config["models"]):
            model["parameters"] = {"weight": 0.25 + number}
    if needs_statistics(method):
        config["parameters"]["statistics"] = measured_checkpoints(tmp_path / "stats", paths)
    merged = tensors_of(mergekit_yaml(config))
    done = {line["tensor"]: line for line in map(json.loads, lines.read_text().splitlines())}
    folder = inspect(config)
    found = lines_of(folder)
    assert found.keys() == done.keys()
    for tensor, line in done.items():
        assert line["method"] == name
        assert {key: found[tensor][key] for key in line if key not in ("seconds", "layout")} == {
            key: value for key, value in line.items() if key not in ("seconds", "layout")
        }
    line, base = found[QUERY], tensors_of(paths[0])
    assert line["rule"] == name
    # what is shown is the spectrum of what is added to the base
    sigma = torch.linalg.svdvals(merged[QUERY] - base[QUERY])
    after = line["spectrum"]["after"]
    assert after == pytest.approx(sigma[: len(after)].tolist(), rel=1e-3)
    words = f"{sum(line['rule'] == name for line in done.values())} {method.own_rule}"
    for file in ("report.html", "summary.json"):
        text = unescape((folder / file).read_text())
        assert words in text
        assert method.summary in text
        assert method.citations[0].key in text
    assert ("gamma" in line) == (name == "ace")


def test_coefficients_of_statsmerging(tmp_path, inspect):
    paths = save_family(tiny_llama(), tmp_path)
    names = list(load_file(Path(paths[0]) / "model.safetensors"))
    file = make_file(names, paths[1:])
    file.save(tmp_path / "coefficients.safetensors")
    path = str(tmp_path / "coefficients.safetensors")
    config = ace_config(paths, merge_method="statsmerging", parameters={"coefficients": path})
    folder = inspect(config)
    for name, line in lines_of(folder).items():
        expected = file.coefficients[:, names.index(name)].tolist()
        assert line["coefficients"] == pytest.approx(expected)
    assert "Merging coefficients" in (folder / "report.html").read_text()
    os.utime(path, ns=(1, 1))  # trained again
    assert f"changed since then: files.{path}" in inspect(config, fails=True)


def test_tied_heads_and_a_model_without_a_base(tmp_path, inspect):
    base = tiny_llama(tie_word_embeddings=True)
    paths = save_family(base, tmp_path)
    fine_tuned(tiny_llama(), seed=3).save_pretrained(tmp_path / "untied")
    lines = lines_of(inspect(ace_config(paths)))
    assert "lm_head.weight" not in lines
    linear = {"merge_method": "linear", "models": [{"model": p} for p in paths]}
    linear["parameters"] = {"weight": 1}
    assert "add a line base_model:" in inspect(linear, out="linear", fails=True)


UP = "model.layers.0.mlp.up_proj.weight"
WRONG = {  # what is done to the tensors of an expert, and what is said
    "NaN": (lambda t: t[QUERY].fill_(math.nan), [QUERY, "expert0 contains NaN or Inf"]),
    "codes": (
        lambda t: t.update({UP: t[UP].to(torch.int8)}),
        [f"expert0 has 1 tensors in I8, which cannot be merged: {UP}; save it in"],
    ),
    "missing": (
        lambda t: t.pop("model.norm.weight"),
        ["expert0 lacks 1 of 21 tensors: model.norm.weight; replace the model"],
    ),
    "damaged": (None, ["expert0/model.safetensors is damaged"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_experts_that_cannot_be_inspected(tmp_path, inspect, case):
    change, words = WRONG[case]
    paths = save_family(tiny_llama(), tmp_path)
    file = Path(paths[1]) / "model.safetensors"
    tensors = load_file(file)
    if change is None:
        file.write_bytes(file.read_bytes()[:-100])
    else:
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
    message = inspect(ace_config(paths), fails=True)
    assert all(word in message for word in words), message
    assert not (tmp_path / "report" / "report.html").exists()


def test_missing_models_and_folders_that_cannot_be_used(tmp_path, inspect):
    paths = save_family(tiny_llama(), tmp_path)
    missing = ace_config([*paths, str(tmp_path / "nowhere")])
    assert "nowhere" in inspect(missing, fails=True)
    (tmp_path / "file").write_text("")
    assert "file/report" in inspect(ace_config(paths), out="file/report", fails=True)


def test_an_expert_that_is_the_base_saved_through_bfloat16(tmp_path, inspect):
    """Beside a real one; layer 1 of the other one has learned something."""
    paths = save_family(tiny_llama(), tmp_path, experts=2)
    file = Path(paths[2]) / "model.safetensors"
    saved = {name: t.bfloat16().float() for name, t in load_file(Path(paths[0], file.name)).items()}
    learned = load_file(file)
    saved |= {name: t.bfloat16().float() for name, t in learned.items() if "layers.1." in name}
    save_file(saved, file, {"format": "pt"})
    folder = inspect(ace_config(paths))
    for name, line in lines_of(folder).items():
        base = load_file(Path(paths[0], file.name))[name]
        changed = [1, 1] if "layers.1." in name else [1, 0]
        if torch.equal(saved[name], base):
            changed[1] = 0
        assert line["changed"] == changed
    said = (folder / "summary.json").read_text()
    assert "expert1 is left out of" in said
