# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import importlib
import runpy
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import yaml
from click.testing import CliRunner

if TYPE_CHECKING:
    import torch  # for names alone: the process that only starts the workers need not wait for it

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
# No calls home, and no sandbox, which root cannot have.
BROWSER_FLAGS = """--no-sandbox --disable-gpu --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-quic""".split()


# Files of few tests that take long: these come first, then those of most tests, so that no worker
# is left alone with them at the end.
SLOW = ("test_evidence", "test_kills", "test_install", "test_cluster", "test_published_tables")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.stem not in SLOW, -counts[item.path], item.path))


@pytest.fixture
def rng() -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gpu(monkeypatch) -> Iterator[torch.device]:
    """The GPU of this machine, or an imitated one, see `imitated_gpu`."""
    import torch
    from imitated_gpu import GPU, imitated_gpu

    if torch.cuda.is_available():
        yield torch.device("cuda", 0)
        return
    with imitated_gpu(monkeypatch):
        yield GPU


@pytest.fixture
def mergekit_yaml(tmp_path: Path) -> Callable[..., Path]:
    """Run one of mergekit's own commands, in this process to spare its start.

    The function returned gives the output folder; a failure raises what the command raised.
    """

    def run(config: dict, *flags: str, out: str = "merged", script: str = "run_yaml") -> Path:
        path = tmp_path / f"{out}.yml"
        path.write_text(yaml.safe_dump(config))
        command = importlib.import_module(f"mergekit.scripts.{script}").main
        arguments = [str(path), str(tmp_path / out), "--quiet", *flags]
        result = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return tmp_path / out

    return run


@pytest.fixture
def settings_put_back() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(before)


@pytest.fixture
def example() -> Iterator[Callable[[str, str], ModuleType]]:
    """Import modules of the examples, as `example(folder, module)`.

    All of them are forgotten afterwards: several folders use the same names.
    """
    with pytest.MonkeyPatch.context() as patch:

        def load(folder: str, name: str) -> ModuleType:
            patch.syspath_prepend(EXAMPLES / folder)
            return importlib.import_module(name)

        yield load
    for name, module in list(sys.modules.items()):
        places = f"{vars(module).get('__file__')} {vars(module).get('__path__')}"
        if str(EXAMPLES) in places:
            del sys.modules[name]


@pytest.fixture
def run_example(example, monkeypatch, capsys) -> Callable[..., str]:
    """Run a program of the examples in this process; the function returns what it printed."""

    def run(folder: str, name: str, *arguments: object) -> str:
        program = example(folder, name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        capsys.readouterr()
        program.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Python in this process where an example calls `subprocess.run`.

    Importing torch and mergekit anew takes seconds per command. Other commands run as ever.
    """
    start = subprocess.run

    def run(command: list, cwd: Path | None = None, check: bool = False, **options):
        first, *arguments = map(str, command)
        if first != sys.executable:
            return start(command, cwd=cwd, check=check, **options)
        with (
            monkeypatch.context() as inside,
            redirect_stdout(StringIO()) as output,
            redirect_stderr(StringIO()) as errors,
        ):
            inside.chdir(cwd or Path.cwd())
            inside.setattr(sys, "argv", arguments)
            code = run_python(*arguments)
        done = subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())
        if check:
            done.check_returncode()
        return done

    monkeypatch.setattr("subprocess.run", run)


def run_python(first: str, *arguments: str) -> int:
    """Do what `python` does with `-m MODULE` of a click command, or with a file; the status."""
    try:
        if first == "-m":
            importlib.import_module(arguments[0]).main(arguments[1:])
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        return int(bool(end.code))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Start an installed browser; without one skip, or fail where `.ci/run` requires one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        own = playwright.chromium.executable_path
        found = found or (own if Path(own).exists() else None)
        if found is None:
            missing = pytest.fail if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip
            missing("no browser is installed: apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=found, args=BROWSER_FLAGS)
        yield browser
        browser.close()
