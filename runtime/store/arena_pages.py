"""Page tables ahead of time: the first touch of a mapped page costs more than copying it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref

_MADV_POPULATE_READ = 22  # Linux 5.14
_STEP_BYTES = 64 << 20
_SMALL_BYTES = 16 << 20


def map_pages_ahead(memory: memoryview, size: int) -> None:
    """Enter the pages of a shared mapping into this process's page table, in the background.

    Best effort: a kernel that does not know how leaves it to the first touch. The pages exist
    already, so nothing is allocated but page tables.

    Args:
        memory: The whole mapping; must outlive nothing: the thread gives up when it is gone.
        size: Its bytes.
    """
    if size < _SMALL_BYTES:
        return
    thread = threading.Thread(
        target=_populate, args=(weakref.ref(memory), size), name="store-pages", daemon=True
    )
    thread.start()


def _populate(reference: weakref.ref[memoryview], size: int) -> None:
    with contextlib.suppress(OSError, AttributeError, ValueError, BufferError, TypeError):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for at in range(0, size, _STEP_BYTES):
            memory = reference()
            if memory is None:
                return
            length = min(_STEP_BYTES, size - at)
            # Holding an export keeps the mapping from being closed meanwhile.
            piece = memory[at : at + length]
            address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            failed = madvise(address, length, _MADV_POPULATE_READ)
            del piece, memory
            if failed:
                return
