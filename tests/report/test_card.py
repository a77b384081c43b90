# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace card`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from html import unescape
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import ace_config, save_family, tiny_llama
from click.testing import CliRunner
from coefficient_files import make_file
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from measured_files import measured_checkpoints, needs_statistics
from safetensors.torch import load_file, save_file
from test_architectures import MODELS, SAVE

from mergekit_ace.cli import main
from mergekit_ace.plugin import our_methods

TITLE = "## How this merge was made"


@pytest.fixture
def merged(tmp_path, mergekit_yaml) -> tuple[Path, Path, list[str]]:
    """A merge, its report, and its models, the first of which left a tensor as it was."""
    paths = save_family(tiny_llama(), tmp_path, scales=[0.02, 0.05])
    base, first = (load_file(Path(path) / "model.safetensors") for path in paths[:2])
    first["model.norm.weight"] = base["model.norm.weight"]
    save_file(first, Path(paths[1]) / "model.safetensors", metadata={"format": "pt"})
    report = tmp_path / "ace.jsonl"
    out = mergekit_yaml(ace_config(paths, parameters={"report": str(report)}))
    return out, report, paths


def card(out: Path, report: Path, *flags: str, fails: bool = False) -> str:
    arguments = ["card", str(out), "--report", str(report), "--quiet", *flags]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code != 0) == fails, result.output
    return result.output if fails else (out / "README.md").read_text()


def test_what_the_section_says(merged):
    out, report, paths = merged
    before = (out / "README.md").read_text()
    text = card(out, report)
    assert text.startswith(before.rstrip())
    assert text.count(TITLE) == 1
    assert "[ACE-Merging](https://arxiv.org/abs/2603.02945)" in text
    assert "@inproceedings{xu2026ace," in text
    for package in ("mergekit", "mergekit-ace", "torch"):
        assert f"{package} {version(package)}" in text
    assert "draws no random numbers" in text
    assert "ACE-Merging solves one ridge regression per matrix" in text
    assert "21 tensors of 2 experts" in text
    for path in paths:
        whole = hashlib.sha256()
        file = (Path(path) / "model.safetensors").read_bytes()
        whole.update(hashlib.sha256(file).digest())
        assert f"| {path} | SHA-256 `{whole.hexdigest()}` |" in text
    base, *experts = (load_file(Path(p) / "model.safetensors") for p in paths)
    squares = [sum(float((e[n] - base[n]).square().sum()) for n in base) for e in experts]
    for path, square in zip(paths[1:], squares, strict=True):
        assert f"| {path} | 1 | {square**0.5:.3g} | {square / sum(squares):.0%} |" in text


def test_twice_is_one_section(merged):
    out, report, _ = merged
    once = card(out, report)
    assert card(out, report) == once
    (out / "README.md").write_text(once + "\nWritten by hand afterwards.\n")
    again = card(out, report, "--seed", "7")
    assert again.count(TITLE) == 1
    assert "Written by hand afterwards." in again
    assert "| seed | 7 |" in again


def test_the_card_still_parses(merged):
    out, report, _ = merged
    card(out, report)
    parsed = ModelCard.load(out / "README.md")
    assert parsed.data.library_name == "transformers"
    assert "mergekit" in parsed.data.tags
    assert TITLE in parsed.text


def test_with_an_inspection(merged, tmp_path):
    out, _, paths = merged
    config = tmp_path / "merged.yml"
    inspected = tmp_path / "inspected"
    result = CliRunner().invoke(main, ["inspect", str(config), str(inspected), "--quiet"])
    assert result.exit_code == 0, result.output
    text = card(out, inspected / "report.jsonl")
    assert "% of the base |" in text
    assert paths[1] in text


def test_learned_coefficients(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(), tmp_path)
    names = list(load_file(Path(paths[0]) / "model.safetensors"))
    file = make_file(names, paths[1:], config={"training": {"seed": 11}})
    file.save(tmp_path / "c.safetensors")
    parameters = {"coefficients": str(tmp_path / "c.safetensors")}
    config = ace_config(paths, merge_method="statsmerging", parameters=parameters)
    out = mergekit_yaml(config)
    inspected = tmp_path / "inspected"
    CliRunner().invoke(main, ["inspect", str(tmp_path / "merged.yml"), str(inspected), "--quiet"])
    text = card(out, inspected / "report.jsonl")
    assert "| seed | 11 (of the training of the coefficients) |" in text
    low, high = file.coefficients[0].min(), file.coefficients[0].max()
    assert f"| {paths[1]} | {low:.3g} to {high:.3g} |" in text
    assert "arXiv:2506.04567" in text


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_method_is_cited(tmp_path, mergekit_yaml, method):
    paths = save_family(tiny_llama(), tmp_path)
    name, report = method.spec.name, tmp_path / "r.jsonl"
    config = ace_config(paths, merge_method=name, parameters={"report": str(report)})
    if name == "statsmerging":
        for model in config["models"]:
            model["parameters"] = {"weight": 0.5}
    if needs_statistics(method):
        config["parameters"]["statistics"] = measured_checkpoints(tmp_path / "stats", paths)
    out = mergekit_yaml(config)
    text = card(out, report)
    assert f"By [{method.spec.pretty_name}]({method.spec.reference_url})" in text
    assert method.summary[1:] in text
    assert method.own_rule in text
    assert text.count("```bibtex") == len(method.citations)
    assert all(citation.bibtex in text for citation in method.citations)
    assert "draws no random numbers" in text
    result = CliRunner().invoke(main, ["report", str(report), str(tmp_path / "p.html")])
    assert result.exit_code == 0, result.output
    page = unescape((tmp_path / "p.html").read_text())
    assert f"<title>{method.spec.pretty_name}: expert0, expert1</title>" in page
    assert method.summary in page
    assert method.citations[0].key in page


def test_a_method_of_mergekit(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(), tmp_path)
    config = ace_config(paths, merge_method="task_arithmetic", parameters={"weight": 0.5})
    out = mergekit_yaml(config)
    inspected = tmp_path / "inspected"
    CliRunner().invoke(main, ["inspect", str(tmp_path / "merged.yml"), str(inspected), "--quiet"])
    text = card(out, inspected / "report.jsonl")
    assert "By [Task Arithmetic](" in text
    assert "what ACE-Merging would make of these experts" in text
    assert "bibtex" not in text
    assert "| seed | none given |" in text


def test_inputs_that_are_gone(merged):
    out, report, paths = merged
    (Path(paths[2]) / "model.safetensors").unlink()
    assert f"| {paths[2]} | not on the machine that wrote this |" in card(out, report)


def test_what_lies_beside_the_inputs_is_not_hashed(merged):
    out, report, paths = merged
    before = card(out, report)
    (Path(paths[1]) / "loop.safetensors").symlink_to("loop.safetensors")
    (Path(paths[1]) / "adapter_model.safetensors").write_text("junk")
    (out / "adapter_model.safetensors").write_text("junk")
    assert card(out, report) == before


def test_errors(merged, tmp_path):
    out, report, paths = merged
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({**line, "models": ["a", "b"]}) + "\n" for line in lines))
    assert "the report is of another merge" in card(out, other, fails=True)
    other.write_text(json.dumps({**lines[0], "method": "tsv_m"}) + "\n")
    assert "another merge: by tsv_m" in card(out, other, fails=True)
    other.write_text(json.dumps({**lines[0], "tensor": "h.0.attn.weight"}) + "\n")
    assert "has no tensor h.0.attn.weight" in card(out, other, fails=True)
    one = [{**line, "models": line["models"][:1]} for line in lines]
    for line in one:
        for key, value in line.items():
            if isinstance(value, list) and key not in ("shape", "models"):
                line[key] = value[:1]
    other.write_text("".join(json.dumps(line) + "\n" for line in one))
    assert f"{out} was made from {paths[2]} too" in card(out, other, fails=True)
    shape = [*lines[0]["shape"][:-1], 7]
    other.write_text(json.dumps({**lines[0], "shape": shape}) + "\n")
    assert f"and {tuple(shape)} there" in card(out, other, fails=True)
    (out / "mergekit_config.yml").rename(out / "c.yml")
    assert "no mergekit_config.yml" in card(out, report, fails=True)
    (out / "README.md").unlink()
    assert "without --no-write-model-card" in card(out, report, fails=True)
    assert yaml.safe_load((out / "c.yml").read_text())["base_model"] == paths[0]


HOSTILE = "a|b <script>alert(1)</script> $x^2$ `c`\n\n# d <!-- mergekit-ace: end -->"


def test_names_that_would_be_markup_are_text(merged, tmp_path):
    """In the list, in the tables, in the pictures; and the section can be renewed."""
    out, report, paths = merged
    strange = tmp_path / " ".join(HOSTILE.replace("/", "").split())
    Path(paths[1]).rename(strange)
    text = (out / "mergekit_config.yml").read_text()
    content = yaml.safe_load(text)
    content["models"][0]["model"] = str(strange)
    (out / "mergekit_config.yml").write_text(yaml.safe_dump(content))
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    for line in lines:
        line["models"][0] = str(strange)
        line["versions"] = {"torch": HOSTILE, "mergekit": "0.1.5"}
    report.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = (out / "README.md").read_text()
    text = card(out, report)
    section = text[text.index(TITLE) :]
    assert "<script" not in section
    assert section.count("<!--") == 1  # the end of the section
    assert not [line for line in section.splitlines() if line.startswith("# ")]
    page = MarkdownIt("commonmark").enable("table").render(section)
    for table in page.split("<table>")[1:]:
        widths = {row.count("<td>") for row in table.partition("</table>")[0].split("<tr>")[2:]}
        assert len(widths) == 1
    shown = unescape(page.replace("<code>", "`").replace("</code>", "`"))
    assert shown.count(f"<td>{strange}</td>") == 2
    assert card(out, report) == text
    (out / "README.md").write_text(before)
    assert card(out, report) == text


# What `mergekit-yaml` leaves out of a result.

GENERATION = json.dumps({"eos_token_id": [3, 5]})


def complete(out: Path, *flags: str, fails: bool = False) -> str:
    result = CliRunner().invoke(main, ["card", str(out), "--quiet", *flags])
    assert (result.exit_code != 0) == fails, result.output
    return result.output


@pytest.fixture
def paths(tmp_path) -> list[str]:
    paths = save_family(tiny_llama(), tmp_path)
    Path(paths[0], "generation_config.json").write_text(GENERATION)
    return paths


def test_without_a_report(paths, mergekit_yaml):
    out = mergekit_yaml(ace_config(paths))
    assert not (out / "generation_config.json").exists()
    before = (out / "README.md").read_text()
    assert f"added generation_config.json of {paths[0]}" in complete(out)
    assert (out / "generation_config.json").read_text() == GENERATION
    assert (out / "README.md").read_text() == before
    assert "has all files" in complete(out)


def test_with_a_report(tmp_path, paths, mergekit_yaml):
    report = tmp_path / "r.jsonl"
    out = mergekit_yaml(ace_config(paths, parameters={"report": str(report)}))
    text = complete(out, "--report", str(report))
    assert f"added generation_config.json of {paths[0]}" in text
    assert "## How this merge was made" in (out / "README.md").read_text()


def test_what_was_changed_by_hand_stays(paths, mergekit_yaml):
    out = mergekit_yaml(ace_config(paths))
    (out / "generation_config.json").write_text("{}")
    assert "has all files" in complete(out)
    assert (out / "generation_config.json").read_text() == "{}"


def test_models_beside_the_result(tmp_path, paths, mergekit_yaml, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("beside").mkdir()  # a name of its own: mergekit remembers models by their names
    for path in paths:
        shutil.move(path, "beside")
    out = mergekit_yaml(ace_config([f"./beside/{Path(path).name}" for path in paths]))
    os.chdir("/")
    assert "added generation_config.json of ./beside/base" in complete(out)


def test_tensors_that_are_gone(tmp_path, mergekit_yaml):
    """`mergekit-yaml` overlooks the encoder of ViT under the names that it has on the Hub."""
    torch.manual_seed(0)
    paths = save_family(MODELS["vit"][0](), tmp_path)
    text = complete(mergekit_yaml(ace_config(paths)), fails=True)
    assert "it lacks 32 tensors" in text
    assert "mergekit-ace merge --unplanned merge" in text
    whole = save_family(MODELS["vit"][0](), tmp_path / "whole", **SAVE["vit"])
    assert "has all files" in complete(mergekit_yaml(ace_config(whole), out="again"))


def test_a_folder_that_mergekit_did_not_write(tmp_path):
    assert "no mergekit_config.yml" in complete(tmp_path, fails=True)
