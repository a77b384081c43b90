# SPDX-License-Identifier: Apache-2.0
"""mergekit's flags on a command of ours; mergekit is imported once they are asked for."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mergekit.options import MergeOptions


class CommandWithFlags(click.Command):
    """A command that takes all flags of `mergekit-yaml` beside its own."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        *rest, last = own  # --help stays at the end
        return [*rest, *_mergekit().params, last]


def take_options(values: dict[str, Any]) -> MergeOptions:
    """Return mergekit's options from the values of a command line, and remove them from there."""
    command = _mergekit()
    flags = {parameter.name: values.pop(parameter.name) for parameter in command.params}
    assert command.callback is not None  # it is `_options`
    return command.callback(**flags)


@lru_cache(maxsize=1)
def _mergekit() -> click.Command:
    from mergekit.options import add_merge_options

    return click.command()(add_merge_options(_options))


def _options(merge_options: MergeOptions) -> MergeOptions:
    return merge_options
