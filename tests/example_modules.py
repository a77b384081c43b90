# SPDX-License-Identifier: Apache-2.0
"""Modules of the examples, imported for a while."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@contextmanager
def examples() -> Iterator[Callable[[str, str], ModuleType]]:
    """Import modules of a folder of examples, as `example(folder, module)`.

    All modules of the examples are forgotten afterwards: several folders use the same names.
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
