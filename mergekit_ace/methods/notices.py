# SPDX-License-Identifier: Apache-2.0
"""What a merge says once at its end of many tensors, instead of once for each."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

LOG = logging.getLogger(__name__)
_COUNTS: dict[tuple[str, str], tuple[int, Callable[[int], str]]] = {}
_LOCK = threading.Lock()  # --multi-gpu merges tensors side by side


def notice(method: str, key: str, text_for_count: Callable[[int], str]) -> None:
    """Count a tensor of which something is to be said when the merge is done.

    Args:
        method: whose merge it is.
        key: what is to be said; each is said once.
        text_for_count: from the number of tensors to the warning.
    """
    with _LOCK:
        count, _ = _COUNTS.get((method, key), (0, text_for_count))
        _COUNTS[method, key] = count + 1, text_for_count


def flush_notices() -> None:
    """Log one warning for everything that was counted, and forget it."""
    with _LOCK:
        counts = dict(_COUNTS)
        _COUNTS.clear()
    for (method, _), (count, text_for_count) in counts.items():
        LOG.warning("%s: %s", method, text_for_count(count))


atexit.register(flush_notices)
