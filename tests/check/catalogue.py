# SPDX-License-Identifier: Apache-2.0
"""What the tests of `check` have in common: the command, and its answer."""

from __future__ import annotations

from pathlib import Path

import yaml
from checkpoints import tiny_llama
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model

from mergekit_ace.cli import main

NOTHING = {"error": "", "warning": ""}


def save_adapter(base: str = "", revision: str | None = None, **model: object) -> Path:
    """Save an adapter, for a tiny llama, as `adapter`; its settings."""
    targets = ["q_proj", "down_proj"]
    adapter = get_peft_model(tiny_llama(**model), LoraConfig(r=2, target_modules=targets))
    settings = adapter.peft_config["default"]
    settings.base_model_name_or_path = base or str(Path("base").absolute())
    settings.revision = revision
    adapter.save_pretrained("adapter")
    return Path("adapter", "adapter_config.json")


def write_config(config: dict | str) -> Path:
    """Write a config, in which `./` is the present folder: headers are cached by their paths."""
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    Path("checked.yml").write_text(text.replace("./", f"{Path.cwd()}/"))
    return Path("checked.yml")


def findings(config: dict | str, *flags: str) -> dict[str, str]:
    """Return what `check` says of a config, by level; models are named by their folders alone."""
    result = CliRunner().invoke(main, ["check", str(write_config(config)), *flags])
    told, level = dict(NOTHING), "error"  # of a file that the command line itself refuses
    for line in result.stdout.splitlines() or [result.stderr]:
        if line.startswith(("nothing to complain about", "errors: ")):
            break
        level = line.partition(":")[0] if line.startswith(("error: ", "warning: ")) else level
        told[level] += line.replace(f"{Path.cwd()}/", "").replace("    → ", " → ") + "\n"
    assert result.exit_code == bool(told["error"]), result.output
    return {level: text.replace("\n →", " →") for level, text in told.items()}
