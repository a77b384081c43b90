# SPDX-License-Identifier: Apache-2.0
"""What keeps the code findable: few files, few hops, one name for one thing, no way upwards.

The numbers below only go down; a fix may add lines, up to 14,000.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

LIMITS = {
    "files": 56,
    "lines": 13813,
    "lines of a file": 486,
    "parameters of a function": 8,
    "our modules that one imports": 12,
    "files that a tensor of ace enters": 7,
}
# Layers from the bottom to the top; a module alone is named by its file.
LAYERS = """naming files algebra methods plugin planning adapters check merging report training
    calibration score cli""".split()
ELSEWHERE = {"architecture": "planning", "merge_config": "planning", "train": "cli"}
PACKAGE = Path(__file__).parents[1] / "mergekit_ace"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): TREES[path] for path in FILES}


def statements(tree: ast.AST, *, late: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield imports, but for those that only serve types; with `late`, in functions, too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif late or not isinstance(node, ast.FunctionDef):
            yield from statements(node, late=late)


def imports_of(tree: ast.Module, *, late: bool = False) -> set[str]:
    found = set()
    for node in statements(tree, late=late):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def ours(name: str, *, late: bool = False) -> set[str]:
    """Return the modules of the package that one of them imports."""
    packages = {name, "mergekit_ace"}  # every module belongs to the package
    return (imports_of(MODULES[name], late=late) & MODULES.keys()) - packages


def height(name: str) -> int:
    """Return the place of a module's layer in LAYERS."""
    first = name.split(".")[1]
    return LAYERS.index(ELSEWHERE.get(first, first))


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
    return {
        "files": sum(path.name != "__init__.py" for path in FILES),
        "lines": sum(lengths),
        "lines of a file": max(lengths),
        "parameters of a function": max(parameters()),
        "our modules that one imports": max(len(ours(name)) for name in MODULES),
        "files that a tensor of ace enters": len(files_of_a_tensor()),
    }


@pytest.fixture(scope="module")
def numbers() -> dict[str, int]:
    return measured()


@pytest.mark.parametrize("name", LIMITS)
def test_limits_hold(numbers, name):
    assert numbers[name] <= LIMITS[name]


def test_no_import_climbs():
    modules = [name for name in MODULES if name != "mergekit_ace"]  # it only loads the plug-in
    imports = [(name, other) for name in modules for other in ours(name, late=True)]
    assert [pair for pair in imports if height(pair[0]) < height(pair[1])] == []


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


def test_nothing_foreign_runs_unasked():
    """Ruff looks for pickles, `eval` and their like."""
    trusting = re.compile(r"trust_remote_code=True\b|torch\.load\((?!.*weights_only=True)")
    sources = [*FILES, *PACKAGE.parent.glob("examples/**/*.py")]
    assert not [path for path in sources if trusting.search(path.read_text(encoding="utf-8"))]
