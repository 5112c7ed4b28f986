"""Keeps a server of many short-lived threads from spreading its memory over many heaps.

glibc gives threads heaps of their own, up to eight a core, and what one of them frees the others do
not reuse: a server whose connections come and go grows for as long as it takes to fragment all.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_ARENA_MAX = -8  # malloc.h


def limit_malloc_arenas(count: int = 2) -> None:
    """At most so many heaps in this process; to be called before its threads start.

    Best effort: a C library that does not know how is left as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, count)
