# SPDX-License-Identifier: Apache-2.0
"""The command line in this process."""

from __future__ import annotations

from pathlib import Path

import yaml
from click.testing import CliRunner

from mergekit_ace.cli import main


def command(*arguments: object, fails: bool = False) -> str:
    """Run `mergekit-ace`, and return what it says; it may only end with a message."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert (result.exit_code != 0) == fails, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def run_config(
    name: str, config: dict, out: Path, *flags: object, fails: bool = False, quiet: bool = True
) -> str:
    """Run a command on a config, which is written beside the folder of its results."""
    path = out.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config))
    return command(name, path, out, *flags, *["--quiet"] * quiet, fails=fails)
