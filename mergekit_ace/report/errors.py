# SPDX-License-Identifier: Apache-2.0
"""Errors whose message is all that a user needs to see."""

from __future__ import annotations


class ReportError(ValueError):
    """Something in the config, the models or the folder is wrong; the message says what to do."""
