# SPDX-License-Identifier: Apache-2.0
"""Nothing that lies on a disk is executed: not by a merge, nor by what looks at models first."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import ace_config, save_family, tiny_llama
from click.testing import CliRunner
from safetensors.torch import load_file

from mergekit_ace.cli import main

PROJECT = Path(__file__).parents[1]
SOURCES = [*PROJECT.glob("mergekit_ace/**/*.py"), *PROJECT.glob("examples/**/*.py")]
FORBIDDEN = {
    "pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "dill": {"load", "loads"},
    "joblib": {"load"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "torch": {"load"},
    "numpy": {"load"},
    "np": {"load"},
    "yaml": {"load", "full_load", "unsafe_load"},
}


def test_no_module_executes_what_it_reads():
    """By such a call, by `eval` or `exec`, or by trusting the code of models unasked."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    found = {str(path): executed(tree) for path, tree in trees.items()}
    assert {path: calls for path, calls in found.items() if calls} == {}


def executed(tree: ast.Module) -> list[str]:
    """What of a module could execute what it reads."""
    found = []
    allowed = [node.func for node in ast.walk(tree) if loads_weights_only(node)]
    for node in ast.walk(tree):
        if node in allowed:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in FORBIDDEN.get(node.value.id, ()):
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            taken = {alias.name for alias in node.names}
            found += sorted(taken & FORBIDDEN.get(node.module or "", set()))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in ("eval", "exec") else []
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += ["trust_remote_code"] if getattr(node.value, "value", None) is True else []
    return found


def loads_weights_only(node: ast.AST) -> bool:
    """Whether a call is `torch.load(…, weights_only=True)`, which executes nothing."""
    if not isinstance(node, ast.Call):
        return False
    given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
    return given.get("weights_only") is True and ast.unparse(node.func) == "torch.load"


class Command:
    """Executes a command when it is unpickled."""

    def __init__(self, stolen: Path):
        self.stolen = stolen

    def __reduce__(self):
        return shutil.copytree, (str(PROJECT / "tests" / "golden"), str(self.stolen))


@pytest.fixture(params=["one file", "indexed", "state_dict", "legacy", "TorchScript"])
def hostile(request, tmp_path) -> tuple[Path, Path]:
    """A config one of whose experts is a `.bin` that does something; what it would leave."""
    paths = save_family(tiny_llama(), tmp_path)
    file = Path(paths[1], "model.safetensors")
    stolen = tmp_path / "stolen"
    content = {**load_file(file), "command": Command(stolen)}
    file.unlink()
    if request.param == "state_dict":
        content = {"state_dict": content}
    name = "pytorch_model.bin"
    if request.param == "indexed":
        name = "pytorch_model-00001-of-00001.bin"
        index = {"metadata": {}, "weight_map": dict.fromkeys(content, name)}
        Path(paths[1], "pytorch_model.bin.index.json").write_text(json.dumps(index))
    if request.param == "TorchScript":
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(Path(paths[1], name)))
        return write_config(tmp_path, paths), stolen
    modern = request.param != "legacy"
    torch.save(content, Path(paths[1], name), _use_new_zipfile_serialization=modern)
    return write_config(tmp_path, paths), stolen


def write_config(folder: Path, paths: list[str]) -> Path:
    config = folder / "merge.yml"
    config.write_text(yaml.safe_dump(ace_config(paths)))
    return config


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file that looks like a TorchScript")
def test_an_old_checkpoint_that_does_something(hostile, tmp_path):
    config, stolen = hostile
    for command, *flags in (["merge"], ["merge", "--lazy-unpickle"], ["check"], ["inspect"]):
        out = [] if command == "check" else [str(tmp_path / f"{command}{len(flags)}")]
        result = CliRunner().invoke(main, [command, str(config), *out, *flags])
        assert not stolen.exists(), command
        assert result.exit_code == 1, command
        assert isinstance(result.exception, SystemExit), (command, result.exception)
        assert "weights_only" not in result.output  # torch's advice is to trust the file
