# SPDX-License-Identifier: Apache-2.0
"""The one list of our merge methods, and their registration with mergekit."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergekit.merge_methods import MergeMethod

SUPPORTED = "mergekit >=0.1.5,<0.2"
_FIRST, _BEYOND = (0, 1, 5), (0, 2)


def our_methods() -> tuple[MergeMethod, ...]:
    """One instance of every merge method of this package."""
    from mergekit_ace.methods.ace import AceMerge
    from mergekit_ace.methods.ace_relative import RelativeAceMerge
    from mergekit_ace.methods.peers import peer_methods
    from mergekit_ace.methods.statsmerging import StatsMerge

    return (AceMerge(), RelativeAceMerge(), StatsMerge(), *peer_methods())


def register() -> None:
    """Make our merge methods available by name in mergekit; again is the same as once.

    Raises:
        RuntimeError: the installed mergekit is not one that we work with.
        ValueError: another method has taken one of our names.
    """
    _check_version(version("mergekit"))
    from mergekit import merge_methods

    known = {method.spec.name: method for method in merge_methods.registered_methods()}
    for method in our_methods():
        name = method.spec.name
        if name not in known:
            merge_methods.register(method)
        elif type(known[name]) is not type(method):
            raise ValueError(
                f"merge method {name!r} is already registered by {type(known[name]).__module__}"
            )


def _check_version(installed: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    if not _FIRST <= numbers < _BEYOND:
        raise RuntimeError(
            f"mergekit {installed} is installed, but this release works with {SUPPORTED}; "
            f"pip install '{SUPPORTED.replace(' ', '')}'"
        )
