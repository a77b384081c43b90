# SPDX-License-Identifier: Apache-2.0
"""The pages: what they link to exists, what they tell people to write works, and they are short."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest
from configs import check_config, read_config

from mergekit_ace.cli import main

PROJECT = Path(__file__).resolve().parents[2]
# Not deeper in the examples: programs write models there, with cards of their own.
PLACES = ("*.md", ".github/*.md", "examples/*.md", "examples/*/*.md", "mergekit_ace/**/*.md")
READMES = sorted(path for place in PLACES for path in PROJECT.glob(place))
PAGES = {str(path.relative_to(PROJECT)): path.read_text(encoding="utf-8") for path in READMES}
README = PAGES["README.md"]
WORDS = {
    "README.md": 1500,
    "mergekit_ace/algebra/README.md": 1600,
    "mergekit_ace/methods/README.md": 2000,
    "examples/training/README.md": 1480,
}

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"mergekit-ace ([a-z]+)\b")
CALL = re.compile(r"^ {4,}mergekit-ace ([a-z]+) ([^#\n]*)", re.MULTILINE)
PROGRAM = re.compile(r"python ((?:[\w-]+/)*[\w-]+\.py)\b")
YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
# What a fragment of a `train.yml` is completed with.
TRAINING = {
    "base_model": "base",
    "models": [{"model": name, "data": {"path": "a.jsonl", "text": "text"}} for name in ("a", "b")],
    "task": "causal-lm",
}
RECOMMENDED = {  # where the table of methods says what to take for a family of the judge
    "smollm 40 steps": "language model |",
    "smollm-control": "language model |",
    "smollm-muon 40 steps": "language model |",
    "smollm-lora": "LoRA adapters",
    "smollm-lora-fast": "LoRA adapters",
    "images": "image classifiers",
}


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_pages_are_short():
    assert len(README.splitlines()) <= 180
    for name, text in PAGES.items():
        assert len(text.split()) <= WORDS.get(name, 1200), name
    assert sum(len(text.split()) for text in PAGES.values()) <= 14_000


@pytest.mark.parametrize("name", PAGES)
def test_links_point_to_something(name):
    path, text = PROJECT / name, PAGES[name]
    assert text.count("](") == len(LINK.findall(text)), "a link has no end"
    for link in LINK.findall(text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert PROJECT in target.parents, link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", PAGES)
def test_commands_parse(name):
    """Commands, their options and numbers of arguments exist, and so do programs."""
    text = PAGES[name]
    assert set(COMMAND.findall(text)) <= {*main.commands}
    for command, line in CALL.findall(text):
        arguments = shlex.split(line.partition("&&")[0])
        flags = {flag for one in main.commands[command].params for flag in one.opts}
        assert {word for word in arguments if word.startswith("-")} <= flags, (command, line)
    for program in PROGRAM.findall(text):
        assert (PROJECT / program).exists() or ((PROJECT / name).parent / program).exists() or any(
            (folder / program).exists() for folder in (PROJECT / "examples").iterdir()
        ), program  # fmt: skip


def test_every_command_and_kind_of_config_is_shown():
    assert {*main.commands} <= set(COMMAND.findall(README))
    blocks = [block for text in PAGES.values() for block in YAML.findall(text)]
    for name in ("merge_method:", "base_model:", "teacher:", "merged_model:", "merges:"):
        assert any(name in block for block in blocks)


@pytest.mark.parametrize("name", PAGES)
def test_configs_are_valid(name):
    for block in YAML.findall(PAGES[name]):
        source = read_config(block)
        if not {"base_model", "models", "teacher", "search"} & set(source):
            source = TRAINING | source
        check_config(source)


@pytest.mark.parametrize(("family", "start"), RECOMMENDED.items())
def test_the_readme_recommends_what_the_judge_puts_first(example, family, start):
    (row,) = (line for line in README.splitlines() if line.startswith("| ") and start in line)
    recommended, kept = re.search(r"`(\w+)`", row.split("|")[2])[1], defaultdict(list)
    for result in example("evidence", "tables").read_results():
        own = family in (result["family"], f"{result['family']} {result['variant']}")
        method = result.get("method", "statsmerging")
        if own and method not in ("statsmerging", "ace_plus, own texts"):  # which read samples
            kept[method].append(result["at_budget"][0])
    first = max(mean(figures) for figures in kept.values())
    assert mean(kept[recommended]) >= first - 0.005


def test_pages_repeat_the_benchmark():
    benchmark = PAGES["examples/benchmark/README.md"]
    assert "| 272 s | 8.0 GB |" in benchmark
    assert "| 1B | 4.5 min | 20 s | 8.0 GB |" in README


def test_the_tests_of_ci_are_those_of_contributors():
    page = PAGES[".github/CONTRIBUTING.md"]
    (command,) = re.findall(r"^    (\S+ python -m pytest -n .*?) +#", page, re.MULTILINE)
    assert command in (PROJECT / ".ci" / "run").read_text("utf-8").splitlines()
