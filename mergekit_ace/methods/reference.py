# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace methods`: the reference of our merge methods, from what they know of themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from mergekit import merge_methods
from mergekit.merge_methods.base import ParameterScope, ParameterSpec

from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.methods.parameters import describe_type

HEAD = """\
# Merge methods

Look up what a method does, and its parameters, which stand under `parameters:` of a config. W0 is
a weight of the base with o rows (outputs) and i columns (inputs), Δ_t the task vector of expert t
of T, which is the expert's weight minus W0, and X the merged task vector.
[What is computed](../algebra/README.md#notation) explains the other symbols and
[every `layout`](../algebra/README.md#layouts).

`mergekit-ace methods --markdown` prints this page, and a test compares both.
[CONTRIBUTING](../../.github/CONTRIBUTING.md#add-a-method) shows how to add a method.
"""


def known_methods() -> dict[str, TaskVectorMethod]:
    """Return the methods of our kind that are registered with mergekit, by name."""
    methods = merge_methods.registered_methods()
    return {m.spec.name: m for m in methods if isinstance(m, TaskVectorMethod)}


def find_methods(name: str | None = None) -> list[TaskVectorMethod]:
    """Return all methods, or the one of a name.

    Raises:
        ValueError: there is no such method; the message lists those that there are.
    """
    known = known_methods()
    if name is None:
        return list(known.values())
    if name not in known:
        raise ValueError(f"there is no method {name!r} here; there are {', '.join(known)}")
    return [known[name]]


def reference_text(methods: Iterable[TaskVectorMethod]) -> str:
    """Return the reference for a terminal."""
    return "\n\n".join("\n".join(_text(method)) for method in methods)


def reference_markdown(methods: Iterable[TaskVectorMethod]) -> str:
    """Return the reference as Markdown, with the head of `methods/README.md`."""
    return "\n".join([HEAD, *("\n".join(_markdown(method)) for method in methods)])


def _text(method: TaskVectorMethod) -> Iterator[str]:
    spec = method.spec
    yield f"{spec.name}: {spec.pretty_name}, {spec.reference_url}"
    yield _filled(f"{method.summary} {_reading(method)}", 2)
    yield ""
    for parameter in spec.parameters:
        yield f"  {parameter.name}: {_default(parameter)}; {_allowed(parameter)}"
        yield _filled(parameter.description or "", 6)
    yield ""
    yield from (textwrap.indent(citation.bibtex, "  ") for citation in method.citations)


def _markdown(method: TaskVectorMethod) -> Iterator[str]:
    spec = method.spec
    yield f"## `{spec.name}`: {spec.pretty_name}\n"
    yield f"{method.summary} {_reading(method)} [Paper]({spec.reference_url}).\n"
    yield "| parameter | default | allowed | meaning |"
    yield "|---|---|---|---|"
    for parameter in spec.parameters:
        allowed, about = _allowed(parameter), parameter.description
        yield f"| `{parameter.name}` | {_default(parameter)} | {allowed} | {about} |"
    yield ""
    yield from (f"```bibtex\n{citation.bibtex}\n```\n" for citation in method.citations)


def _reading(method: TaskVectorMethod) -> str:
    """Return how the method reads tensors."""
    if not method.layouts:
        return "It reads tensors entry by entry."
    tables = " and tables of rows" if "table" in method.layouts else ""
    return f"It reads matrices{tables}, also in stacks; vectors are averaged."


def _filled(text: str, indent: int) -> str:
    spaces = " " * indent
    return textwrap.fill(text, 96, initial_indent=spaces, subsequent_indent=spaces)


def _default(parameter: ParameterSpec) -> str:
    value = parameter.default
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _allowed(parameter: ParameterSpec) -> str:
    own = "; per expert" if parameter.scope == ParameterScope.NON_BASE else ""
    return describe_type(parameter.value_type) + own
