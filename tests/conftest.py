# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest
import torch
import yaml
from click.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
# No calls home, and no sandbox, which root cannot have.
BROWSER_FLAGS = """--no-sandbox --disable-gpu --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-quic""".split()
NO_BROWSER = (
    "this test opens a page in a browser, and none is installed: "
    "apt-get install chromium, or playwright install chromium"
)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[torch.device]:
    """The GPU of this machine, or an imitated one, see `imitated_gpu`."""
    from imitated_gpu import GPU, imitated_gpu

    if torch.cuda.is_available():
        yield torch.device("cuda", 0)
        return
    with imitated_gpu(monkeypatch):
        yield GPU


def _runner(command: click.Command, folder: Path) -> Callable[..., Path]:
    """Run one of mergekit's own commands, in this process to spare its start.

    The function returned gives the output folder; a failure raises what the command raised.
    """

    def run(config: dict, *flags: str, out: str = "merged") -> Path:
        path = folder / f"{out}.yml"
        path.write_text(yaml.safe_dump(config))
        target = folder / out
        arguments = [str(path), str(target), "--quiet", *flags]
        result = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return target

    return run


@pytest.fixture
def mergekit_yaml(tmp_path: Path) -> Callable[..., Path]:
    from mergekit.scripts.run_yaml import main

    return _runner(main, tmp_path)


@pytest.fixture
def mergekit_pytorch(tmp_path: Path) -> Callable[..., Path]:
    from mergekit.scripts.merge_raw_pytorch import main

    return _runner(main, tmp_path)


@pytest.fixture
def mergekit_multi(tmp_path: Path) -> Callable[[list[dict]], Path]:
    from mergekit.scripts.multimerge import main

    def run(configs: list[dict]) -> Path:
        path, out = tmp_path / "multi.yml", tmp_path / "merged"
        path.write_text(yaml.safe_dump_all(configs))
        arguments = [str(path), "-I", str(tmp_path / "between"), "--out-path", str(out), "--quiet"]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return out

    return run


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Import a module of a folder of examples, as `example(folder, module)`.

    All modules of the examples are forgotten afterwards: several folders use the same names.
    """

    def load(folder: str, name: str) -> ModuleType:
        monkeypatch.syspath_prepend(EXAMPLES / folder)
        return importlib.import_module(name)

    yield load
    for name, module in list(sys.modules.items()):
        places = f"{vars(module).get('__file__')} {vars(module).get('__path__')}"
        if str(EXAMPLES) in places:
            del sys.modules[name]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the mergekit commands that an example starts by `subprocess.run` in this process.

    Importing mergekit anew takes seconds per command. Other commands run as ever.
    """
    start = subprocess.run

    def run(command: list, cwd: Path | None = None, **options) -> Any:
        from mergekit.scripts.run_yaml import main as mergekit_yaml

        from mergekit_ace.cli import main as mergekit_ace

        first, *arguments = [str(part) for part in command]
        if first == sys.executable:  # python -m MODULE …
            first, *arguments = arguments[1:]
        if "mergekit" not in Path(first).name:
            return start(command, cwd=cwd, **options)
        main = mergekit_ace if first == "mergekit_ace.cli" else mergekit_yaml
        with monkeypatch.context() as inside:
            inside.chdir(cwd or Path.cwd())
            CliRunner().invoke(main, arguments, catch_exceptions=False)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Start an installed browser; skip the test where there is none.

    With REQUIRE_BROWSER=1 in the environment, as `.ci/run` has it, a missing one is an error.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        own = playwright.chromium.executable_path
        found = found or (own if Path(own).exists() else None)
        if found is None and os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(NO_BROWSER)
        if found is None:
            pytest.skip(NO_BROWSER)
        browser = playwright.chromium.launch(executable_path=found, args=BROWSER_FLAGS)
        yield browser
        browser.close()
