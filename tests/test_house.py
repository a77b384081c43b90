# SPDX-License-Identifier: Apache-2.0
"""What keeps the code findable: few files, few hops, one name for one thing, no way upwards.

The numbers below only go down. `python tests/test_house.py` lowers them to what the code needs.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

LIMITS = {
    "files": 63,
    "lines": 15220,
    "lines of a file": 498,
    "parameters of a function": 8,
    "functions with more than 8 parameters": 0,
    "our modules that one imports": 14,
    "files that a tensor of ace enters": 8,
}
# Layers from the bottom to the top; a module alone is named by its file.
LAYERS = """naming files algebra methods plugin planning adapters check merging report training
    calibration score cli""".split()
ELSEWHERE = {"merge_config": "planning", "train": "cli"}
# How many imports climb from a layer to one above it.
CLIMBS: dict[str, int] = {}

PACKAGE = Path(__file__).parents[1] / "mergekit_ace"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): TREES[path] for path in FILES}


def statements(body: list[ast.stmt], *, late: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield imports, but for those that only serve types; with `late`, in functions, too."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse, late=late)
        elif late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, name, []), late=late)
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body, late=late)


def imports_of(tree: ast.Module, *, late: bool = False) -> set[str]:
    found = set()
    for node in statements(tree.body, late=late):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module and not node.level:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def ours(name: str, *, late: bool = False) -> set[str]:
    """Return the modules of the package that one of them imports."""
    packages = {name, "mergekit_ace"}  # every module belongs to the package
    return {other for other in imports_of(MODULES[name], late=late) if other in MODULES} - packages


def layer(name: str) -> str:
    first = name.split(".")[1]
    return ELSEWHERE.get(first, first)


def climbs() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in MODULES:
        if name == "mergekit_ace":  # it only loads the plug-in
            continue
        for other in ours(name, late=True):
            low, high = layer(name), layer(other)
            if LAYERS.index(low) < LAYERS.index(high):
                found[f"{low} -> {high}"] += 1
    return found


def parameters() -> Iterator[int]:
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = node.args
                yield len(given.posonlyargs + given.args + given.kwonlyargs)


def files_of_a_tensor() -> set[str]:
    """Return the files of the package that are entered while `ace` merges one matrix."""
    import torch
    from mergekit.merge_methods import merge_tensors

    tensors = list(torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(0)))
    merge_tensors(tensors, "ace", base_index=0)  # what is done once
    entered = set()
    sys.settrace(lambda frame, *_: entered.add(frame.f_code.co_filename))
    try:
        merge_tensors(tensors, "ace", base_index=0)
    finally:
        sys.settrace(None)
    return {path for path in entered if path.startswith(str(PACKAGE))}


def measured() -> dict[str, int]:
    """Return every number that has a limit."""
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in FILES]
    counts = list(parameters())
    return {
        "files": sum(path.name != "__init__.py" for path in FILES),
        "lines": sum(lengths),
        "lines of a file": max(lengths),
        "parameters of a function": max(counts),
        "functions with more than 8 parameters": sum(count > 8 for count in counts),
        "our modules that one imports": max(len(ours(name)) for name in MODULES),
        "files that a tensor of ace enters": len(files_of_a_tensor()),
    }


@pytest.fixture(scope="module")
def numbers() -> dict[str, int]:
    return measured()


@pytest.mark.parametrize("name", LIMITS)
def test_limits_hold(numbers, name):
    assert numbers[name] <= LIMITS[name]


def test_nothing_climbs_but_what_is_listed():
    found = climbs()
    assert {way: n for way, n in found.items() if n > CLIMBS.get(way, 0)} == {}


def test_no_two_public_definitions_share_a_name():
    places = defaultdict(list)
    for name, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_imports_make_no_circle():
    graph = {name: ours(name) for name in MODULES}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_the_mathematics_knows_neither_mergekit_nor_accelerate():
    for path in (PACKAGE / "algebra").glob("*.py"):
        for name in imports_of(TREES[path], late=True):
            package, *inside = name.split(".")
            assert package not in ("mergekit", "accelerate", "transformers"), path
            assert package != "mergekit_ace" or inside[:1] in ([], ["algebra"]), path


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_every_file_and_public_definition_says_what_it_is_about(path):
    assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(TREES[path])
    for node in TREES[path].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def lower_limits() -> None:
    """Write today's numbers into this file where they are below the limits."""
    place = Path(__file__)
    text = place.read_text(encoding="utf-8")
    for name, now in (measured() | climbs()).items():
        limit = LIMITS.get(name, CLIMBS.get(name, 0))
        text = re.sub(rf'("{name}": )\d+', rf"\g<1>{min(now, limit)}", text)
    for way in CLIMBS.keys() - climbs().keys():
        text = re.sub(rf' *"{way}": \d+,\n', "", text)
    place.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    lower_limits()
