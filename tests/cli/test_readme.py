# SPDX-License-Identifier: Apache-2.0
"""The README files: what they link to exists, and what they tell people to write works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from configs import check_config, read_config

from mergekit_ace.cli import main

PROJECT = Path(__file__).resolve().parents[2]
# Not deeper in the examples: programs write models there, with cards of their own.
PLACES = ("*.md", ".github/*.md", "examples/*.md", "examples/*/*.md", "mergekit_ace/**/*.md")
READMES = sorted(path for place in PLACES for path in PROJECT.glob(place))

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"mergekit-ace ([a-z]+)\b")
PROGRAM = re.compile(r"python ((?:[\w-]+/)*[\w-]+\.py)\b")
YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
# What a fragment of a `train.yml` is completed with.
TRAINING = {
    "base_model": "base",
    "models": [{"model": name, "data": {"path": "a.jsonl", "text": "text"}} for name in ("a", "b")],
    "task": "causal-lm",
}


def identify(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a file."""
    prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_the_readme_is_short():
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    assert len(text.split()) <= 2600


@pytest.mark.parametrize("path", READMES, ids=identify)
def test_links_point_to_something(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("](") == len(LINK.findall(text)), "a link has no end"
    for link in LINK.findall(text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert PROJECT in target.parents, link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("path", READMES, ids=identify)
def test_commands_exist(path):
    text = path.read_text(encoding="utf-8")
    known = {*main.commands}
    assert set(COMMAND.findall(text)) <= known
    for program in PROGRAM.findall(text):
        assert (PROJECT / program).exists() or (path.parent / program).exists() or any(
            (folder / program).exists() for folder in (PROJECT / "examples").iterdir()
        ), program  # fmt: skip


def test_every_command_is_in_the_readme():
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert {*main.commands} <= set(COMMAND.findall(text))


@pytest.mark.parametrize("path", READMES, ids=identify)
def test_configs_are_valid(path):
    for block in YAML.findall(path.read_text(encoding="utf-8")):
        source = read_config(block)
        if not {"base_model", "models", "teacher"} & set(source):
            source = TRAINING | source
        check_config(source)


def test_every_kind_of_config_is_shown():
    blocks = [block for path in READMES for block in YAML.findall(path.read_text("utf-8"))]
    for name in ("merge_method:", "base_model:", "teacher:", "merged_model:"):
        assert any(name in block for block in blocks)


def test_the_tests_of_ci_are_those_of_the_readme():
    (command,) = re.findall(
        r"pip install -e '\.\[test\]' && (.* pytest .*)", (PROJECT / "README.md").read_text("utf-8")
    )
    assert command in (PROJECT / ".ci" / "run").read_text("utf-8").splitlines()
