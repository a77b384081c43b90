# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace methods`: the reference of our merge methods, from what they know of themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mergekit import merge_methods
from mergekit.merge_methods.base import ParameterScope, ParameterSpec

from mergekit_ace.methods.base import TaskVectorMethod, describe_type

HEAD = """\
# Merge methods

Parameters stand under `parameters:` of a config; each has its default, what is allowed, and its
meaning. W0 is a weight of the base with o rows (outputs)
and i columns (inputs), Δ_t the task vector of expert t of T, which is the expert's weight minus W0,
and X the merged task vector. [What is computed](../algebra/README.md#notation) explains the other
symbols and [every `layout`](../algebra/README.md#layouts). Methods read matrices, also in stacks,
and average vectors, unless they say otherwise.

`mergekit-ace methods NAME` prints a method with its parameters and its papers in BibTeX, and
`mergekit-ace methods --markdown` this page.
[CONTRIBUTING](../../.github/CONTRIBUTING.md#add-a-method) shows how to add a method.
"""


def find_methods(name: str | None = None) -> list[TaskVectorMethod]:
    """Return all methods of our kind that mergekit has, or the one of a name; else an error."""
    registered = merge_methods.registered_methods()
    known = {m.spec.name: m for m in registered if isinstance(m, TaskVectorMethod)}
    if name is not None and name not in known:
        raise ValueError(f"there is no method {name!r} here; there are {', '.join(known)}")
    return list(known.values()) if name is None else [known[name]]


def method_reference(methods: Sequence[TaskVectorMethod], *, whole_page: bool) -> str:
    """Return the reference in Markdown: parameters of several methods once, then every method.

    The whole page has a head, and no papers in BibTeX.
    """
    lines = {m.spec.name: {p.name: _line(p) for p in m.spec.parameters} for m in methods}
    counts = Counter(line for own in lines.values() for line in own.values())
    common = [line for line, count in counts.items() if count > 1]
    parts = [HEAD] if whole_page else []
    if common:
        parts += ["## Parameters of several methods\n", *common, ""]
    for method in methods:
        spec, own = method.spec, lines[method.spec.name]
        parts.append(f"## `{spec.name}`: {spec.pretty_name}\n")
        reading = "" if method.layouts else " It reads tensors entry by entry."
        if "table" in method.layouts:
            reading = " It also reads tables of rows (`layout: table`)."
        parts.append(f"{method.summary}{reading} [Paper]({spec.reference_url}).\n")
        if shared := [f"`{name}`" for name, line in own.items() if line in common]:
            parts.append(f"Described above: {', '.join(shared)}.\n")
        if special := [line for line in own.values() if line not in common]:
            parts += [*special, ""]
        parts += [] if whole_page else [f"{citation}\n" for citation in method.citations]
    return "\n".join(parts)


def _line(parameter: ParameterSpec) -> str:
    default = parameter.default
    if isinstance(default, bool) or default is None:
        default = {True: "true", False: "false", None: "not set"}[default]
    allowed = describe_type(parameter.value_type)
    if parameter.scope == ParameterScope.NON_BASE:
        allowed += "; per expert"
    return f"* `{parameter.name}`: {default}; {allowed}. {parameter.description}"
