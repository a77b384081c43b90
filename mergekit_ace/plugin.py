# SPDX-License-Identifier: Apache-2.0
"""The one list of our merge methods, and their registration with mergekit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergekit.merge_methods import MergeMethod

# Module and class of every merge method. A new one is a file, and a line here.
METHODS = (
    "mergekit_ace.methods.ace:AceMerge",
    "mergekit_ace.methods.ace_relative:RelativeAceMerge",
    "mergekit_ace.methods.statsmerging:StatsMerge",
    "mergekit_ace.methods.peers.tsv_m:TsvMerge",
    "mergekit_ace.methods.peers.iso_c:IsoCMerge",
    "mergekit_ace.methods.peers.iso_cts:IsoCtsMerge",
    "mergekit_ace.methods.peers.wudi:WudiMerge",
    "mergekit_ace.methods.peers.cart:CartMerge",
    "mergekit_ace.methods.peers.consensus_ta:ConsensusMerge",
    "mergekit_ace.methods.peers.lines:LinesMerge",
    "mergekit_ace.methods.peers.regmean:RegMeanMerge",
    "mergekit_ace.methods.peers.fisher:FisherMerge",
)
SUPPORTED = "mergekit >=0.1.5,<0.2"
_FIRST, _BEYOND = (0, 1, 5), (0, 2)


def our_methods(listed: Iterable[str] = METHODS) -> tuple[MergeMethod, ...]:
    """Return one instance of every listed merge method."""
    classes = []
    for entry in listed:
        module, _, name = entry.partition(":")
        classes.append(getattr(import_module(module), name))
    return tuple(method() for method in classes)


def register(listed: Sequence[str] = METHODS) -> None:
    """Make our merge methods available by name in mergekit; again is the same as once.

    Args:
        listed: module and class of each, see `METHODS`.

    Raises:
        RuntimeError: the installed mergekit is not one that we work with.
        ValueError: another method has taken one of our names.
    """
    _check_version(version("mergekit"))
    from mergekit import merge_methods

    known = {method.spec.name: method for method in merge_methods.registered_methods()}
    for method in our_methods(listed):
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
