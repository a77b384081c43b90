# SPDX-License-Identifier: Apache-2.0
"""No module calls what executes files; pickles are among tests/files/test_checkpoints.py."""

from __future__ import annotations

import re
from pathlib import Path

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
