"""What a client and the server of its node say to each other over the unix socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from runtime.store.blocks import KEY_BYTES, BlockInfo
from runtime.store.wire import FrameError

VERSION: Final = 2
MAX_BLOCKS: Final = 65_536  # of one chain
TENANT_SIZES: Final = (0, 16)  # bytes of a tenant's tag
_Keys = Annotated[bytes, Meta(max_length=MAX_BLOCKS * KEY_BYTES)]
_Lengths = Annotated[list[Annotated[int, Meta(ge=1, lt=2**40)]], Meta(max_length=MAX_BLOCKS)]
_Checksums = Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=MAX_BLOCKS)]
_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Tag = Annotated[bytes, Meta(max_length=16)]


class Hello(msgspec.Struct, tag=True, array_like=True):
    """First message. Connections of one session hold their leases together."""

    version: int
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """The memory to map, and which start of the server this is."""

    arena: str
    node: str
    server: _Number


class Lookup(msgspec.Struct, tag=True, array_like=True):
    """How many leading blocks are stored?"""

    keys: _Keys


class Count(msgspec.Struct, tag=True, array_like=True):
    """A number."""

    count: _Number


class Load(msgspec.Struct, tag=True, array_like=True):
    """Hold the valid leading blocks."""

    keys: _Keys
    left_s: _Seconds
    category: Annotated[int, Meta(ge=0, lt=2**31)]
    is_checked: bool
    tenant: _Tag


class Offer(msgspec.Struct, tag=True, array_like=True):
    """One tuple a block: slot, generation, what it is."""

    lease_id: _Number
    blocks: list[tuple[int, int, BlockInfo]]


class Release(msgspec.Struct, tag=True, array_like=True):
    """Not answered."""

    lease_id: _Number


class Doubt(msgspec.Struct, tag=True, array_like=True):
    """A block looks wrong: is it? Not answered."""

    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Reserve(msgspec.Struct, tag=True, array_like=True):
    """Room for the new end of a chain."""

    keys: _Keys
    lengths: _Lengths
    first: _Number
    tenant: _Tag
    is_durable: bool


class Room(msgspec.Struct, tag=True, array_like=True):
    """Slots for the leading new blocks."""

    reservation_id: _Number
    start: _Number
    slots: list[int]
    reason: str


class Commit(msgspec.Struct, tag=True, array_like=True):
    """Blocks are written."""

    reservation_id: _Number
    checksums: _Checksums
    is_durable: bool
    left_s: _Seconds


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Not answered."""

    reservation_id: _Number


class Flush(msgspec.Struct, tag=True, array_like=True):
    """Wait until all is on SSD."""

    left_s: _Seconds


class Stats(msgspec.Struct, tag=True, array_like=True):
    """Counts and gauges?"""


class Text(msgspec.Struct, tag=True, array_like=True):
    """JSON."""

    text: str


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The request could not be served."""

    reason: str


Request = Lookup | Load | Release | Doubt | Reserve | Commit | Abort | Flush | Stats
Reply = Welcome | Count | Offer | Room | Text | Failed


def joined(keys: Sequence[bytes]) -> bytes:
    """Keys back to back.

    Raises:
        ValueError: If one has not 32 bytes, or there are too many.
    """
    if len(keys) > MAX_BLOCKS:
        raise ValueError(f"a chain of {len(keys):,} blocks; at most {MAX_BLOCKS:,} are allowed")
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"every key must have {KEY_BYTES} bytes")
    return b"".join(keys)


def parted(keys: bytes) -> list[bytes]:
    """The keys that ``joined`` put together.

    Raises:
        FrameError: If there is a piece of a key.
    """
    if len(keys) % KEY_BYTES:
        raise FrameError("a piece of a key")
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
