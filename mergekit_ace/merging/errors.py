# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in a merge by shards; messages name the remedy."""

from __future__ import annotations


class MergeError(RuntimeError):
    """The merge cannot start, or cannot go on."""


class OutputError(MergeError):
    """The result cannot be written; to try again at once would be of no use."""
