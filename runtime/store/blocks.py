"""What every part of the store says about one block, and how blocks are checked."""

from __future__ import annotations

from typing import Any

import crc32c
import msgspec

KEY_BYTES = 32
NO_KEY = b""


class BlockInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One block of a prefix; the same on the wire, in memory and on SSD.

    Attributes:
        key: Content key, 32 bytes.
        parent: Key of the block before it; empty for a first block.
        region: First key of the region (the blocks of one put) it was stored with.
        index: Position in that region.
        depth: Position in its chain, 0 for a first block.
        length: Bytes.
        crc: CRC32C of the bytes.
        tenant: Tag of the tenant's salt; empty for the shared tenant.
    """

    key: bytes
    parent: bytes
    region: bytes
    index: int
    depth: int
    length: int
    crc: int
    tenant: bytes = b""


def checksum(data: Any, before: int = 0) -> int:
    """CRC32C (Castagnoli) of a buffer; ``before``: the sum of what comes before it."""
    return int(crc32c.crc32c(data, before))
