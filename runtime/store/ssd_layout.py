"""Bytes of the SSD tier: one header page per segment file, one per record.

    segment file   | segment header, 1 page | record | record | ...
    record         | record header, 1 page  | data, padded to whole pages |

Records start on pages, so appending one never rewrites a page of one that is durable already. A
record header names its own place (store, segment, offset) beside its key: a record that was moved,
swapped with another or copied from another store does not pass for the one looked for. The index
keeps the same header bytes.
"""

from __future__ import annotations

import struct

import msgspec

from runtime.store.blocks import KEY_BYTES, BlockInfo, checksum

PAGE_BYTES = 4096
VERSION = 1
STORE_BYTES = 16
TENANT_BYTES = 32

_CRC = struct.Struct("<I")
_SEGMENT_MAGIC = b"PTSSEGMT"
_SEGMENT = struct.Struct("<8sHxxxxxx16sQ")
_RECORD_MAGIC = b"PTSR"
# magic, version, lengths of parent and tenant, store, segment, offset, key, parent, region, tenant,
# index, depth, length, CRC of the data
_RECORD = struct.Struct("<4sHBB16sQQ32s32s32s32sIIQI")
_WHOLE = struct.Struct(_RECORD.format + "I")  # and its own CRC
HEADER_BYTES = _WHOLE.size
_U32 = 1 << 32

Buffer = bytes | bytearray | memoryview


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where the record of a block lies.

    Attributes:
        segment: Id of the segment file.
        offset: Byte at which its header starts, a multiple of the page.
        info: The block.
    """

    segment: int
    offset: int
    info: BlockInfo

    @property
    def size_bytes(self) -> int:
        """Bytes of the record, header and padding included."""
        return record_bytes(self.info.length)

    @property
    def end(self) -> int:
        """First byte behind the record."""
        return self.offset + record_bytes(self.info.length)


def record_bytes(length: int) -> int:
    """Bytes of a block of ``length`` bytes in a segment: header page and padding included."""
    return PAGE_BYTES + -(-length // PAGE_BYTES) * PAGE_BYTES


def require_storable(info: BlockInfo) -> None:
    """Check that a record header can hold what is said of a block.

    Raises:
        ValueError: If a field is out of its range; keys are not shown.
    """
    lengths = {"key": len(info.key), "region": len(info.region)}
    for field, length in lengths.items():
        if length != KEY_BYTES:
            raise ValueError(f"{field} has {length} bytes, expected {KEY_BYTES}")
    if len(info.parent) not in (0, KEY_BYTES):
        raise ValueError(f"parent has {len(info.parent)} bytes, expected 0 or {KEY_BYTES}")
    if len(info.tenant) > TENANT_BYTES:
        raise ValueError(f"tenant has {len(info.tenant)} bytes, at most {TENANT_BYTES} are kept")
    for field, value in (("index", info.index), ("depth", info.depth), ("crc", info.crc)):
        if not 0 <= value < _U32:
            raise ValueError(f"{field} is {value}, expected 0 to 2^32 - 1")
    if info.length < 0:
        raise ValueError(f"length is {info.length}, expected 0 or more bytes")


def pack_record(store: bytes, place: Place) -> bytes:
    """Header of a record, ``HEADER_BYTES`` long; its own CRC32C comes last."""
    info = place.info
    head = _RECORD.pack(
        _RECORD_MAGIC,
        VERSION,
        len(info.parent),
        len(info.tenant),
        store,
        place.segment,
        place.offset,
        info.key,
        info.parent,
        info.region,
        info.tenant,
        info.index,
        info.depth,
        info.length,
        info.crc,
    )
    return head + _CRC.pack(checksum(head))


def unpack_record(
    store: bytes, header: Buffer, shared: dict[bytes, bytes] | None = None
) -> Place | None:
    """What a record header says; None if it is damaged, of another version or of another store.

    Args:
        store: Id of the store that must have written it.
        header: At least ``HEADER_BYTES`` bytes.
        shared: Byte strings met before: the parent or region of one block is the key of another,
            and is kept once.
    """
    if len(header) < HEADER_BYTES:
        return None
    fields = _WHOLE.unpack_from(header)
    magic, version, parent_bytes, tenant_bytes, owner, segment, offset = fields[:7]
    if magic != _RECORD_MAGIC or version != VERSION or owner != store:
        return None
    if checksum(memoryview(header)[: _RECORD.size]) != fields[-1]:
        return None
    key, parent, region, tenant, index, depth, length, crc, _ = fields[7:]
    parent, tenant = parent[:parent_bytes], tenant[:tenant_bytes]
    if shared is not None:
        once = shared.setdefault
        key, parent = once(key, key), once(parent, parent)
        region, tenant = once(region, region), once(tenant, tenant)
    return Place(segment, offset, BlockInfo(key, parent, region, index, depth, length, crc, tenant))


def pack_segment(store: bytes, segment: int) -> bytes:
    """The header page of a segment file."""
    head = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, store, segment)
    return (head + _CRC.pack(checksum(head))).ljust(PAGE_BYTES, b"\0")


def is_segment(page: Buffer, store: bytes, segment: int) -> bool:
    """Whether a page is the header of that segment of that store."""
    return bytes(page) == pack_segment(store, segment)
