"""Arguments of the store's verbs: checked in one place, so that every way to a store refuses alike.

All raise ``ValueError`` that names the argument, what was found and what is allowed, before
anything is asked of a node. No message carries a key.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

from runtime.store.blocks import KEY_BYTES
from runtime.store.messages import MAX_BLOCKS, TENANT_SIZES

MOST_CATEGORY: Final = 2**31 - 1
MOST_BLOCK_BYTES: Final = 2**40 - 1
MOST_CHECKSUM: Final = 2**32 - 1


def checked_keys(keys: Sequence[bytes]) -> Sequence[bytes]:
    """A chain of at most 65,536 keys: ``bytes`` of 32 each."""
    if len(keys) > MAX_BLOCKS:
        raise ValueError(f"keys: a chain has at most {MAX_BLOCKS:,} blocks, found {len(keys):,}")
    for key in keys:
        if not isinstance(key, bytes):
            raise ValueError(f"keys: every key must be bytes, found {type(key).__name__}")
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"keys: every key must have {KEY_BYTES} bytes, found one of {len(key)}"
            )
    return keys


def checked_tenant(tenant: bytes) -> bytes:
    """The tag of a tenant: none, or 16 bytes."""
    if not isinstance(tenant, bytes):
        raise ValueError(f"tenant: must be bytes, found {type(tenant).__name__}")
    if len(tenant) not in TENANT_SIZES:
        raise ValueError(f"tenant: must have 0 or 16 bytes, found {len(tenant)}")
    return tenant


def checked_category(category: int) -> int:
    """The kind of a request: 0 to 2**31 - 1."""
    return _whole(category, "category", 0, MOST_CATEGORY)


def checked_sizes(sizes: Sequence[int], first: int, num_keys: int) -> tuple[int, list[int]]:
    """Position of the first block, and the bytes of each block from there on."""
    first = _whole(first, "first", 0, num_keys)
    if first + len(sizes) != num_keys:
        raise ValueError(
            f"{num_keys} keys from {first} on need {num_keys - first} blocks, found {len(sizes)}"
        )
    return first, [_whole(size, "size of a block", 1, MOST_BLOCK_BYTES) for size in sizes]


def checked_checksums(checksums: Sequence[int], most: int) -> list[int]:
    """CRC32C of blocks that were written; no more than there is room for."""
    if len(checksums) > most:
        raise ValueError(f"checksums: at most {most} were reserved, found {len(checksums)}")
    return [_whole(one, "checksums", 0, MOST_CHECKSUM) for one in checksums]


def _whole(value: Any, name: str, least: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: must be a whole number, found {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name}: must be from {least} to {most}, found {number}")
    return number
