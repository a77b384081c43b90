# SPDX-License-Identifier: Apache-2.0
"""What the tables of mistakes have in common: families that are built once, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from click.testing import CliRunner

from mergekit_ace.cli import main
from mergekit_ace.preflight import check as check_module
from mergekit_ace.preflight.estimate import Rates

RATES = Rates(operations=1e11, memory=1e10, read=1e9)


def do_not_calibrate(monkeypatch) -> None:
    """Spare the half second in which the rates of this machine are measured."""
    monkeypatch.setattr(check_module, "calibrate", lambda device: RATES)


def findings(folder: Path, config: dict | str, *flags: str) -> dict[str, str]:
    """Return what `check` says of a config, by level, with models named by their folders alone."""
    path = folder / "checked.yml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    result = CliRunner().invoke(main, ["check", str(path), "--json", *flags])
    answer = json.loads(result.output[result.output.index("{") :])
    assert result.exit_code == (0 if answer["ok"] else 1), result.output
    told: dict[str, str] = {"error": "", "warning": ""}
    for finding in answer["findings"]:
        text = f"{finding['subject']}: {finding['message']} → {finding['remedy']}\n"
        told[finding["level"]] += text.replace(f"{folder}/", "")
    assert answer["ok"] == (not told["error"])
    return told
