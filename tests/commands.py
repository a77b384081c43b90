# SPDX-License-Identifier: Apache-2.0
"""The command line in this process."""

from __future__ import annotations

from click.testing import CliRunner

from mergekit_ace.cli import main


def command(*arguments: object, fails: bool = False) -> str:
    """Run `mergekit-ace`, and return what it says; it may only end with a message."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert (result.exit_code != 0) == fails, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output
