# SPDX-License-Identifier: Apache-2.0
"""Text in Markdown is shown as it is: in a list, in a cell, whatever is in it."""

from __future__ import annotations

from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from mergekit_ace.report.markdown import markdown_text

GITHUB = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
NAMES = [
    "<script>alert(1)</script>",
    "<!-- mergekit-ace: end -->",
    "a|b",
    "first\nsecond",
    "# heading",
    "- entry",
    "1. entry",
    "1) entry",
    "[text](javascript:alert(1))",
    "![picture](http://example.com/p.png)",
    "<https://example.com>",
    "&lt;b&gt; & &amp;",
    "**bold** _slanted_ __both__ ~~gone~~ `code",
    "```\nfence",
    "\\|\\",
    "$x^2$",
    "~/models/a_b__c/_d_",
    "---",
    "=== x",
]


def texts(html: str) -> list[str]:
    """What is between the elements of a page."""
    return [unescape(part.partition(">")[2]) for part in html.split("<")]


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    wanted = " ".join(name.split())
    entry = GITHUB.render(f"* {markdown_text(name)}")
    assert entry.replace("\n", "").startswith("<ul><li>")
    assert entry.count("<") == 4  # nothing but the list and its entry
    assert wanted in texts(entry)
    table = GITHUB.render(f"| a | b |\n|---|---|\n| {markdown_text(name)} | 1 |")
    cells = texts(table[table.index("<tbody>") :])
    assert [cell for cell in cells if cell.strip()] == [wanted, "1"]


@given(st.text("\\`*_{}[]<>()#+-.!|~&$ab1 \n\"'=:/@", max_size=12))
def test_any_text(name):
    wanted = " ".join(f"x {name} y".split())
    entry = GITHUB.render(f"* {markdown_text(f'x {name} y')}").replace("\n", "")
    shown = entry.removeprefix("<ul><li>").removesuffix("</li></ul>")
    shown = shown.replace("<code>", "`").replace("</code>", "`")  # letters may be code
    assert "<" not in shown
    assert unescape(shown) == wanted


def test_our_own_settings_stay_code():
    text = markdown_text("leave `epsilon_scale` out; `heterogeneity: log_variance` of a<b")
    assert text == "leave `epsilon_scale` out; `heterogeneity: log_variance` of a&lt;b"


def test_paths_stay_as_they_are():
    path = "/home/me/my_models/llama-3.2_3b@main+adapter_1"
    assert markdown_text(path) == path
