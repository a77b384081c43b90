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


def answer(folder: Path, config: dict | str, *flags: str) -> dict:
    """Return what `check --json` says of a config."""
    path = folder / "checked.yml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    result = CliRunner().invoke(main, ["check", str(path), "--json", *flags])
    if not result.output.startswith("{"):  # the command line refuses the file itself
        refusal = {"level": "error", "subject": "", "message": result.output, "remedy": ""}
        return {"ok": False, "findings": [refusal]}
    told = json.loads(result.output)
    assert result.exit_code == (0 if told["ok"] else 1), result.output
    return told


def findings(folder: Path, config: dict | str, *flags: str) -> dict[str, str]:
    """Return what `check` says of a config, by level, with models named by their folders alone."""
    told = answer(folder, config, *flags)
    texts = dict(NOTHING)
    for finding in told["findings"]:
        text = f"{finding['subject']}: {finding['message']} → {finding['remedy']}\n"
        texts[finding["level"]] += text.replace(f"{folder}/", "")
    assert told["ok"] == (not texts["error"])
    return texts


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
