# SPDX-License-Identifier: Apache-2.0
"""Text in Markdown: names are shown as they are, whatever is in them; what model cards share."""

from __future__ import annotations

import re

from mergekit.merge_methods import MergeMethod

# Settings that our own sentences name, such as `epsilon_scale`; letters cannot do any harm.
_SETTING = re.compile(r"(`[\w: ]+`)")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
_SPECIAL = re.compile(
    r"[\\`*\[\]$~]"
    r"|(?<![^\W_])_+|_+(?![^\W_])"  # within a word an underscore is only that
    r"|^(?:[-+#=]|\d+(?=[.)]))"
)


def method_link(method: MergeMethod) -> str:
    """Return a merge method's name for people, with a link to where it is described."""
    name, url = method.spec.pretty_name or method.spec.name, method.spec.reference_url
    return f"[{name}]({url})" if url else name


def citation_blocks(method: MergeMethod) -> list[str]:
    """Return the papers behind a method in BibTeX; none of one that is not ours."""
    return [f"```bibtex\n{one.bibtex}\n```" for one in getattr(method, "citations", ())]


def markdown_text(text: str) -> str:
    """Return text as Markdown that shows it: in a line, an entry of a list, or a cell of a table.

    Args:
        text: on one or more lines, which become one. What it has between backticks stays code if it
            is nothing but letters.
    """
    parts = _SETTING.split(" ".join(text.split()))
    return "".join(part if n % 2 else _escaped(part) for n, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = _SPECIAL.sub(lambda match: _behind_backslashes(match[0]), text)
    return "".join(_ENTITIES.get(character, character) for character in text)


def _behind_backslashes(found: str) -> str:
    if found[0].isdigit():  # `1.` begins a list; the full stop follows
        return f"{found}\\"
    return "".join(f"\\{character}" for character in found)
