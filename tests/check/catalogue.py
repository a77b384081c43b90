# SPDX-License-Identifier: Apache-2.0
"""What the tests of `check` have in common: the command, its answer, and changes of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import yaml
from checkpoints import ace_config
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mergekit_ace.cli import main

NAMES = ("base", "expert0", "expert1")
NOTHING = {"error": "", "warning": ""}


def family_config(folder: Path) -> dict:
    """Return a merge of the family that `save_family` has saved in a folder."""
    return ace_config([str(folder / name) for name in NAMES])


def findings(folder: Path, config: dict | str, *flags: str) -> dict[str, str]:
    """Return what `check` says of a config, by level, with models named by their folders alone."""
    path = folder / "checked.yml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    result = CliRunner().invoke(main, ["check", str(path), *flags])
    told, level = dict(NOTHING), "error"  # of a file that the command line itself refuses
    for line in result.stdout.splitlines() or [result.stderr]:
        if line.startswith(("nothing to complain about", "errors: ")):
            break
        level = line.partition(":")[0] if line.startswith(("error: ", "warning: ")) else level
        told[level] += line.replace(f"{folder}/", "").replace("    → ", " → ") + "\n"
    assert result.exit_code == bool(told["error"]), result.output
    return {level: text.replace("\n →", " →") for level, text in told.items()}


def rewrite(path: str | Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a model."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def add(path: str | Path, **tensors: Tensor) -> None:
    """Add tensors to a model; a double underscore in a name stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    rewrite(path, lambda stored: stored.update(named))


def configure(path: str | Path, **changes: object) -> None:
    """Change `config.json` of a model."""
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def save_tokenizer(path: str | Path, words: list[str]) -> None:
    """Save a tokenizer of words, which are numbered in their order."""
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
