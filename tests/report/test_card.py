# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace card`."""

from __future__ import annotations

import json
from html import unescape
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from checkpoints import ace_config, add, save_family, tiny_llama
from commands import command
from huggingface_hub import ModelCard
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from safetensors.torch import load_file
from tiny_models import tiny_model

from mergekit_ace.report.card import markdown_text

TITLE = "## How this merge was made"
GITHUB = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
GENERATION = json.dumps({"eos_token_id": [3, 5]})


@pytest.fixture
def merged(tmp_path, mergekit_yaml) -> tuple[Path, Path, list[str]]:
    """A merge, its report, and its models, the first of which left a tensor as it was."""
    paths = save_family(tiny_llama(num_hidden_layers=1), tmp_path, scales=[0.02, 0.05])
    norm = load_file(Path(paths[0]) / "model.safetensors")["model.norm.weight"]
    add(paths[1], model__norm__weight=norm)
    Path(paths[0], "generation_config.json").write_text(GENERATION)
    report = tmp_path / "ace.jsonl"
    config = ace_config(paths, parameters={"report": str(report)})
    weights = [{"filter": "q_proj", "value": 2.0}, {"value": 1.0}]
    config["models"][0]["parameters"] = {"weight": weights}
    return mergekit_yaml(config), report, paths


def card(out: Path, report: Path, *flags: str, fails: bool = False) -> str:
    """Return the card, or what the command says."""
    said = command("card", out, "--report", report, *flags, fails=fails)
    return said if fails else (out / "README.md").read_text()


def test_what_the_section_says(merged):
    """Once, however often it is written."""
    out, report, paths = merged
    before = (out / "README.md").read_text()
    text = card(out, report)
    assert text.startswith(before.rstrip())
    for package in ("mergekit", "mergekit-ace", "torch"):
        assert f"{package} {version(package)}" in text
    assert "12 tensors of 2 experts" in text
    base, *experts = (load_file(Path(p) / "model.safetensors") for p in paths)
    squares = [sum(float((e[n] - base[n]).square().sum()) for n in base) for e in experts]
    weights = ("1 to 1.33", "0.667 to 1")  # of weights 2 and 1, their mean is 1
    for path, weight, square in zip(paths[1:], weights, squares, strict=True):
        assert f"| {path} | {weight} | {square**0.5:.3g} | {square / sum(squares):.0%} |" in text
    parsed = ModelCard.load(out / "README.md")
    assert parsed.data.library_name == "transformers"
    assert "mergekit" in parsed.data.tags
    (out / "README.md").write_text(text + "\nWritten by hand afterwards.\n")
    again = card(out, report)
    assert again.count(TITLE) == text.count(TITLE) == 1
    assert "Written by hand afterwards." in again


def change(report: Path, **values: object) -> Path:
    """Write fields into all lines of a report."""
    lines = [json.loads(line) | values for line in report.read_text().splitlines()]
    report.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return report


def test_errors(merged):
    out, report, paths = merged
    said = card(out, change(report, models=["a", "b"]), fails=True)
    assert "the report is of another merge: by ace of a, b, and" in said
    said = card(out, change(report, models=paths[1:], method="tsv_m"), fails=True)
    assert "another merge: by tsv_m of" in said
    (out / "README.md").unlink()
    assert "README.md" in card(out, change(report, method="ace"), fails=True)
    (out / "mergekit_config.yml").unlink()
    assert "without --no-write-model-card" in card(out, report, fails=True)


HOSTILE = "a|b <script>alert(1)</script> $x^2$ `c`\n\n# d <!-- mergekit-ace: end -->"


def test_names_that_would_be_markup_are_text(merged, tmp_path):
    """In the list and in the tables; and the section can be renewed."""
    out, report, paths = merged
    strange = tmp_path / " ".join(HOSTILE.replace("/", "").split())
    Path(paths[1]).rename(strange)
    content = yaml.safe_load((out / "mergekit_config.yml").read_text())
    content["models"][0]["model"] = str(strange)
    (out / "mergekit_config.yml").write_text(yaml.safe_dump(content))
    change(report, models=[str(strange), paths[2]], versions={"torch": HOSTILE})
    text = card(out, report)
    page = GITHUB.render(text[text.index(TITLE) : text.rindex("<!--")])
    assert not any(part in page for part in ("<script", "<!--", "<h1"))
    assert unescape(page).count(f"<td>{strange}</td>") == 1
    assert card(out, report) == text


@given(st.text("\\`*_{}[]<>()#+-.!|~&$ab1 \n\"'=:/@", max_size=12))
@example("<!-- mergekit-ace: end -->")
def test_any_name_is_shown_as_it_is(name):
    wanted = " ".join(f"x {name} y".split())
    entry = GITHUB.render(f"* {markdown_text(wanted)}").replace("\n", "")
    assert "<" not in (shown := entry.removeprefix("<ul><li>").removesuffix("</li></ul>"))
    assert unescape(shown) == wanted
    table = GITHUB.render(f"| a | b |\n|---|---|\n| {markdown_text(name)} | 1 |")
    cells = table[table.index("<tbody>") :].split("<td>")[1:]
    assert [unescape(cell.partition("<")[0]) for cell in cells] == [" ".join(name.split()), "1"]


def test_without_a_report(merged):
    out, _, paths = merged
    before, added = (out / "README.md").read_text(), out / "generation_config.json"
    assert f"added generation_config.json of {paths[0]}" in command("card", out)
    assert added.read_text() == GENERATION
    assert (out / "README.md").read_text() == before
    added.write_text("{}")  # by hand
    assert "has all files" in command("card", out)
    assert added.read_text() == "{}"


def test_tensors_that_are_gone(tmp_path, mergekit_yaml):
    """`mergekit-yaml` overlooks the encoder of ViT under the names that it has on the Hub."""
    model = tiny_model("ViTForImageClassification", "vit", layers=1)
    text = command("card", mergekit_yaml(ace_config(save_family(model, tmp_path))), fails=True)
    assert "it lacks 16 tensors" in text
    assert "mergekit-ace merge --unplanned merge" in text
    whole = save_family(model, tmp_path / "whole", save_original_format=False)
    assert "has all files" in command("card", mergekit_yaml(ace_config(whole), out="again"))
