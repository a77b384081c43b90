# SPDX-License-Identifier: Apache-2.0
"""Memory that is free, and seen to be."""

from __future__ import annotations

import ctypes
import sys

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
# Blocks of this size or more are the system's own. A quarter of it doubles the time of a step, for
# every page is then fetched anew; twice of it leaves gradients in the heap.
LARGE = 4 * 2**20


def return_large_blocks() -> bool:
    """Let the C library give large blocks back to the system as soon as they are freed.

    By default glibc keeps blocks of up to 32 MB in its heap once one of that size has been freed.
    There they lie between smaller ones that live on, and a training holds up to two models' worth
    of memory that nobody uses. Only glibc does so; elsewhere nothing is changed.

    Returns:
        Whether this is glibc, which has obeyed.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, LARGE))
