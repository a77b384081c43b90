# SPDX-License-Identifier: Apache-2.0
"""Nothing that lies on a disk is executed: not by a merge, nor by what looks at models first."""

from __future__ import annotations

import json
import re
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
# Calls that may execute what they read, and models whose code is trusted unasked.
FORBIDDEN = re.compile(
    r"""\b(?:pickle|cloudpickle|dill|marshal)\.loads?\(|\bUnpickler\b|\b(?:joblib|numpy|np)\.load\(
    |\bshelve\.open\(|\byaml\.(?:full_|unsafe_)?load\(|\btrust_remote_code=True\b
    |(?<![\w.])(?:eval|exec)\(|\btorch\.load\((?![^()]*(?:\([^()]*\)[^()]*)*weights_only=True)
    |\bfrom\ (?:pickle|cloudpickle|dill|marshal|shelve|joblib)\ import""",
    re.VERBOSE,
)


def test_no_module_executes_what_it_reads():
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    found = {str(path): FORBIDDEN.findall(text) for path, text in texts.items()}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_what_is_found():
    calls = ("torch.load(path)", "pickle.load(f)", "eval(text)", "f(trust_remote_code=True)")
    assert all(map(FORBIDDEN.search, calls))
    assert not FORBIDDEN.search("torch.load(str(path), weights_only=True); yaml.safe_load(text)")


class Command:
    """Executes a command when it is unpickled."""

    def __init__(self, stolen: Path):
        self.stolen = stolen

    def __reduce__(self):
        return shutil.copytree, (str(PROJECT / "tests" / "golden"), str(self.stolen))


@pytest.fixture(params=["whole", "indexed"])
def hostile(request, tmp_path) -> tuple[Path, Path]:
    """A config one of whose experts is a `.bin` that does something; what it would leave."""
    paths = save_family(tiny_llama(), tmp_path)
    file = Path(paths[1], "model.safetensors")
    stolen = tmp_path / "stolen"
    content = {**load_file(file), "command": Command(stolen)}
    file.unlink()
    name = "pytorch_model.bin"
    if request.param == "indexed":
        name = "pytorch_model-00001-of-00001.bin"
        index = {"metadata": {}, "weight_map": dict.fromkeys(content, name)}
        Path(paths[1], "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save(content, Path(paths[1], name))
    config = tmp_path / "merge.yml"
    config.write_text(yaml.safe_dump(ace_config(paths)))
    return config, stolen


def test_an_old_checkpoint_that_does_something(hostile, tmp_path):
    config, stolen = hostile
    for command, *flags in (["merge"], ["merge", "--lazy-unpickle"], ["check"], ["inspect"]):
        out = [] if command == "check" else [str(tmp_path / f"{command}{len(flags)}")]
        result = CliRunner().invoke(main, [command, str(config), *out, *flags])
        assert not stolen.exists(), command
        assert result.exit_code == 1, command
        assert isinstance(result.exception, SystemExit), (command, result.exception)
        assert "weights_only" not in result.output  # torch's advice is to trust the file
