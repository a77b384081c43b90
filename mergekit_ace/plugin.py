# SPDX-License-Identifier: Apache-2.0
"""The one list of our merge methods, and their registration with mergekit."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergekit.merge_methods import MergeMethod

LOG = logging.getLogger(__name__)
# Module and class of every merge method. A new one is a class, and a line here.
METHODS = (
    "mergekit_ace.methods.ace:AceMerge",
    "mergekit_ace.methods.ace:PlusAceMerge",
    "mergekit_ace.methods.statsmerging:StatsMerge",
    "mergekit_ace.methods.peers:TsvMerge",
    "mergekit_ace.methods.peers:IsoCMerge",
    "mergekit_ace.methods.peers:IsoCtsMerge",
    "mergekit_ace.methods.peers:ActMatMerge",
    "mergekit_ace.methods.peers:WudiMerge",
    "mergekit_ace.methods.peers:CartMerge",
    "mergekit_ace.methods.peers:ConsensusMerge",
    "mergekit_ace.methods.peers:LinesMerge",
    "mergekit_ace.methods.peers:RegMeanMerge",
    "mergekit_ace.methods.peers:FisherMerge",
)
SUPPORTED = "mergekit>=0.1.5,<0.2"


def our_methods(listed: Iterable[str] = METHODS) -> tuple[MergeMethod, ...]:
    """Return one instance of every listed merge method."""
    entries = (entry.partition(":") for entry in listed)
    return tuple(getattr(import_module(module), name)() for module, _, name in entries)


def register(listed: Sequence[str] = METHODS) -> None:
    """Make our merge methods available by name in mergekit; again is the same as once.

    A name that another method has taken is left to it, with a warning.
    """
    installed = version("mergekit")
    if not (0, 1, 5) <= tuple(map(int, re.findall(r"\d+", installed)[:3])) < (0, 2):
        raise RuntimeError(
            f"mergekit {installed} is installed, but this release works with {SUPPORTED}; "
            f"pip install '{SUPPORTED}'"
        )
    from mergekit import merge_methods

    known = {method.spec.name: method for method in merge_methods.registered_methods()}
    for method in our_methods(listed):
        name = method.spec.name
        if name not in known:
            merge_methods.register(method)
        elif type(known[name]) is not type(method):
            LOG.warning(
                "merge method %r is left to %s, which has taken that name before mergekit-ace",
                name, type(known[name]).__module__,
            )  # fmt: skip
