# SPDX-License-Identifier: Apache-2.0
"""What a merge says once at its end of many tensors, instead of once for each."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import Counter

LOG = logging.getLogger(__name__)
_COUNTS: Counter[str] = Counter()
_LOCK = threading.Lock()  # --multi-gpu merges tensors side by side


def notice(text: str) -> None:
    """Count a tensor of which something is to be said when the merge is done.

    Args:
        text: of the warning, with "{tensors}" where their number goes; each is said once.
    """
    with _LOCK:
        _COUNTS[text] += 1


def flush_notices() -> None:
    """Log one warning for everything that was counted, and forget it."""
    with _LOCK:
        counts = dict(_COUNTS)
        _COUNTS.clear()
    for text, count in counts.items():
        LOG.warning("%s", text.replace("{tensors}", f"{count} tensor{'s' if count > 1 else ''}"))


atexit.register(flush_notices)
