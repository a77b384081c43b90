# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace methods`: the reference of our merge methods, from what they know of themselves."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from mergekit import merge_methods
from mergekit.merge_methods.base import ParameterScope, ParameterSpec

from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.methods.parameters import describe_type

HEAD = """\
# Merge methods

Parameters stand under `parameters:` of a config. W0 is a weight of the base with o rows (outputs)
and i columns (inputs), Δ_t the task vector of expert t of T, which is the expert's weight minus W0,
and X the merged task vector. [What is computed](../algebra/README.md#notation) explains the other
symbols and [every `layout`](../algebra/README.md#layouts). Methods read matrices, also in stacks,
and average vectors, unless they say otherwise.

`mergekit-ace methods NAME` prints a method with its parameters and its papers in BibTeX, and
`mergekit-ace methods --markdown` this page.
[CONTRIBUTING](../../.github/CONTRIBUTING.md#add-a-method) shows how to add a method.
"""
TABLE = "| parameter | default | allowed | meaning |\n|---|---|---|---|"


def find_methods(name: str | None = None) -> list[TaskVectorMethod]:
    """Return all methods of our kind that mergekit has, or the one of a name; else an error."""
    registered = merge_methods.registered_methods()
    known = {m.spec.name: m for m in registered if isinstance(m, TaskVectorMethod)}
    if name is not None and name not in known:
        raise ValueError(f"there is no method {name!r} here; there are {', '.join(known)}")
    return list(known.values()) if name is None else [known[name]]


def reference_text(methods: Iterable[TaskVectorMethod]) -> str:
    """Return the reference for a terminal."""
    return "\n\n".join("\n".join(_text(method)) for method in methods)


def _text(method: TaskVectorMethod) -> Iterator[str]:
    spec = method.spec
    yield f"{spec.name}: {spec.pretty_name}, {spec.reference_url}"
    yield _filled(f"{method.summary}{_reading(method)}", 2)
    yield ""
    for parameter in spec.parameters:
        yield f"  {parameter.name}: {_default(parameter)}; {_allowed(parameter)}"
        yield _filled(parameter.description or "", 6)
    yield ""
    yield from (textwrap.indent(citation, "  ") for citation in method.citations)


def reference_markdown(methods: Sequence[TaskVectorMethod]) -> str:
    """Return the reference as Markdown: parameters of several methods once, then every method."""
    rows = {m.spec.name: {p.name: _row(p) for p in m.spec.parameters} for m in methods}
    counts = Counter(row for own in rows.values() for row in own.values())
    common = [row for row, count in counts.items() if count > 1]
    parts = [HEAD]
    if common:
        parts += ["## Parameters of several methods\n", TABLE, *common, ""]
    for method in methods:
        spec, own = method.spec, rows[method.spec.name]
        parts.append(f"## `{spec.name}`: {spec.pretty_name}\n")
        parts.append(f"{method.summary}{_reading(method)} [Paper]({spec.reference_url}).\n")
        if shared := [f"`{name}`" for name, row in own.items() if row in common]:
            parts.append(f"Described above: {', '.join(shared)}.\n")
        if special := [row for row in own.values() if row not in common]:
            parts += [TABLE, *special, ""]
    return "\n".join(parts)


def _row(parameter: ParameterSpec) -> str:
    allowed, about = _allowed(parameter), parameter.description
    return f"| `{parameter.name}` | {_default(parameter)} | {allowed} | {about} |"


def _reading(method: TaskVectorMethod) -> str:
    """Return how the method reads tensors, unless it is as matrices and vectors."""
    if not method.layouts:
        return " It reads tensors entry by entry."
    return " It also reads tables of rows." if "table" in method.layouts else ""


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
