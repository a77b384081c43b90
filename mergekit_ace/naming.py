# SPDX-License-Identifier: Apache-2.0
"""Names of tensors and models; lists and numbers in messages; the errors that carry these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath


class ConfigError(ValueError):
    """Something that cannot be done as it was asked for; the message says what to do instead."""


class FileError(RuntimeError):
    """A file that is missing, damaged or something else; the message names it and the remedy.

    No ValueError: mergekit plans within pydantic validators, which would bury one in a report.
    """


# `model.layers.11.mlp.up_proj.weight`: stack `model.layers`, block 11. Experts of a mixture and
# members of a Sequential inside of a block are numbered too; the first number is the block.
_BLOCK = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<number>\d+)\.")
_INPUT = re.compile(r"embed|shared|patch|(^|\.)(wte|wpe|cls_token|class_token|stem|conv1)(\.|$)")


def block_of(name: str) -> str:
    """Return the block of a tensor: `model.layers.11`, or its module outside of blocks."""
    match = _BLOCK.match(name)
    return name[: match.end() - 1] if match else name.rpartition(".")[0] or name


def within_block(name: str) -> str:
    """Return a name without its block: `.mlp.up_proj.weight`; as it is outside of blocks."""
    return name.removeprefix(block_of(name)) if _BLOCK.match(name) else name


def without_numbers(name: str) -> str:
    """Return a name without its numbers: `model.layers.*.mlp.up_proj.weight`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def is_running_statistic(name: str) -> bool:
    """Tell whether a tensor is a mean or variance of inputs that a BatchNorm has seen."""
    return name.endswith((".running_mean", ".running_var"))


def is_counter(name: str) -> bool:
    """Tell whether a tensor is the number of batches that a BatchNorm has seen."""
    return name.endswith(".num_batches_tracked")


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts layer 10 behind layer 9."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def layer_of(name: str) -> int | None:
    """Return the number of a tensor's layer in its stack, from 0; None outside of stacks."""
    match = _BLOCK.match(name)
    return int(match["number"]) if match else None


def stack_size(name: str, names: Iterable[str]) -> int:
    """Return how many layers the stack of a tensor has, by all names; 0 outside of stacks."""
    match = _BLOCK.match(name)
    return _stack_sizes(names).get(match["stack"], 0) if match else 0


def _stack_sizes(names: Iterable[str]) -> dict[str | None, int]:
    sizes: dict[str | None, int] = {}
    for match in filter(None, map(_BLOCK.match, names)):
        stack, layer = match["stack"], int(match["number"])
        sizes[stack] = max(sizes.get(stack, 0), layer + 1)
    return sizes


def relative_depths(names: Iterable[str]) -> dict[str, float]:
    """Return the relative depth of every tensor, from 0 (the input) to 1 (the output).

    Block b of a stack of B blocks, counted from 0, stands at (b + 1) / (B + 1); embeddings at 0,
    and whatever else is outside of the stacks (final norms, heads) at 1.
    """
    names = list(names)
    sizes, depths = _stack_sizes(names), {}
    for name in names:
        match = _BLOCK.match(name)
        if match:
            depths[name] = (int(match["number"]) + 1) / (sizes[match["stack"]] + 1)
        else:
            depths[name] = 0.0 if _INPUT.search(name) else 1.0
    return depths


def short_names(paths: Sequence[str]) -> list[str]:
    """Return names of models: the ends of their paths, with as few parts as tell them apart."""
    parts = [PurePath(path).parts for path in paths]
    for count in range(1, max(map(len, parts), default=0)):
        ends = ["/".join(own[-count:]) for own in parts]
        if len(set(ends)) == len(ends):
            return ends
    return list(paths)


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def in_bytes(count: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
