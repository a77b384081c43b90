# SPDX-License-Identifier: Apache-2.0
"""What keeps the code findable: one name for one thing, and no way round in a circle."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mergekit_ace"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_two_public_definitions_share_a_name():
    places = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module_name(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def imports_of(tree: ast.Module) -> set[str]:
    """Modules of the package that are imported when a module is: not later, not for types only."""
    found = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.update({node.module, *(f"{node.module}.{a.name}" for a in node.names)})
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Try | ast.With):
                visit(node.body)

    visit(tree.body)
    return found


def test_imports_make_no_circle():
    names = {module_name(path): path for path in FILES}
    graph = {
        name: {other for other in imports_of(TREES[path]) if other in names and other != name}
        for name, path in names.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_the_mathematics_knows_neither_mergekit_nor_accelerate():
    for path in (PACKAGE / "algebra").glob("*.py"):
        for name in imports_of(TREES[path]):
            package, *inside = name.split(".")
            assert package not in ("mergekit", "accelerate", "transformers"), path
            assert package != "mergekit_ace" or inside[:1] in ([], ["algebra"]), path


def test_every_file_is_one_subject():
    """A file of over 700 lines is two; every module says what it is about, and its licence."""
    for path, tree in TREES.items():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 700, path
        assert ast.get_docstring(tree), path
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


def test_public_definitions_have_docstrings():
    missing = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node in tree.body
            if public and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{module_name(path)}.{node.name}")
    assert missing == []
