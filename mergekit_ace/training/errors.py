# SPDX-License-Identifier: Apache-2.0
"""Errors whose message is all that a user needs to see."""

from __future__ import annotations


class TrainingError(ValueError):
    """Something in the config, the models or the data is wrong; the message says what to do."""


class Diverged(TrainingError):
    """The loss is no longer a number; the last good checkpoint is kept."""
