# SPDX-License-Identifier: Apache-2.0
"""What the tables of mistakes have in common: the command and its answer."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from click.testing import CliRunner

from mergekit_ace.cli import main


def findings(folder: Path, config: dict | str, *flags: str) -> dict[str, str]:
    """Return what `check` says of a config, by level, with models named by their folders alone."""
    path = folder / "checked.yml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    result = CliRunner().invoke(main, ["check", str(path), "--json", *flags])
    if not result.output.startswith("{"):  # the command line refuses the file itself
        return {"error": result.output, "warning": ""}
    answer = json.loads(result.output[result.output.index("{") :])
    assert result.exit_code == (0 if answer["ok"] else 1), result.output
    told: dict[str, str] = {"error": "", "warning": ""}
    for finding in answer["findings"]:
        text = f"{finding['subject']}: {finding['message']} → {finding['remedy']}\n"
        told[finding["level"]] += text.replace(f"{folder}/", "")
    assert answer["ok"] == (not told["error"])
    return told
