"""What nodes say to each other, and how much of it one believes.

A connection opens with a handshake (peer_identity.py); afterwards the opener asks and the other
answers, one at a time. Nothing here names a memory address except Opened, which belongs to
one-sided reads (transport_nixl.py). Counts and sizes are bounded before anything is allocated.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from runtime.store.blocks import KEY_BYTES, BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.wire import FrameError

PROTOCOL_VERSION: Final = 1
MAX_BLOCKS: Final = 4096  # of one request
MAX_BLOCK_BYTES: Final = 1 << 30
MAX_CHANGES: Final = 8192  # of one announcement or page
MAX_REQUEST_S: Final = 3600.0
HANDSHAKE_MAX_BYTES: Final = 2048

Use = Literal["fetch", "put", "control"]
Tier = Literal["memory", "ssd"]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=200)]
Nonce = Annotated[bytes, Meta(min_length=16, max_length=16)]
Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
Counter = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Announcement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A copy that a node holds.

    Attributes:
        key: Of the block, 32 bytes.
        region: First key of its region.
        index: Position in the region.
        depth: Position in its chain.
        length: Bytes.
        tier: Where the node holds it.
        is_owned: Whether the node is responsible for it; else it is a replica.
    """

    key: Key
    region: Key
    index: Annotated[int, Meta(ge=0, lt=2**31)]
    depth: Annotated[int, Meta(ge=0, lt=2**31)]
    length: Annotated[int, Meta(ge=1, le=MAX_BLOCK_BYTES)]
    tier: Tier
    is_owned: bool


class Removal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A copy that a node no longer holds."""

    key: Key
    tier: Tier


# Handshake, in this order; Refused may come instead of Challenge or Welcome.
class Hello(msgspec.Struct, tag=True, array_like=True):
    """Who opens the connection, and for what."""

    version: int
    cluster: Text
    node: Name
    incarnation: Counter
    use: Use
    nonce: Nonce


class Challenge(msgspec.Struct, tag=True, array_like=True):
    """Who answers, and proof that it knows the secret."""

    node: Name
    incarnation: Counter
    nonce: Nonce
    proof: Mac


class Proof(msgspec.Struct, tag=True, array_like=True):
    """Proof that the opener knows the secret."""

    proof: Mac


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """The handshake is over; requests may follow."""


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The handshake is over; the connection is about to close."""

    reason: Text


# Requests
class Fetch(msgspec.Struct, tag=True, array_like=True):
    """Send these blocks, each only if it fits into its room of bytes."""

    keys: Annotated[list[Key], Meta(min_length=1, max_length=MAX_BLOCKS)]
    rooms: Annotated[list[int], Meta(min_length=1, max_length=MAX_BLOCKS)]
    left_s: float


class Put(msgspec.Struct, tag=True, array_like=True):
    """Make room for a region; as many blocks as Room says follow."""

    infos: Annotated[list[BlockInfo], Meta(min_length=1, max_length=MAX_BLOCKS)]
    is_owned: bool
    left_s: float


class Announce(msgspec.Struct, tag=True, array_like=True):
    """Changes number first to last of the sender's holdings, net."""

    first: Counter
    last: Counter
    added: Annotated[list[Announcement], Meta(max_length=MAX_CHANGES)]
    removed: Annotated[list[Removal], Meta(max_length=MAX_CHANGES)]


class AskPage(msgspec.Struct, tag=True, array_like=True):
    """What do you hold, behind this key?"""

    after: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    limit: Annotated[int, Meta(ge=1, le=MAX_CHANGES)]


class Ping(msgspec.Struct, tag=True, array_like=True):
    """I live; so many changes of my holdings were announced up to now."""

    last: Counter


class Describe(msgspec.Struct, tag=True, array_like=True):
    """How can your memory be read from afar?"""


class Open(msgspec.Struct, tag=True, array_like=True):
    """Keep these blocks where they are until Close, or until the time is over."""

    keys: Annotated[list[Key], Meta(min_length=1, max_length=MAX_BLOCKS)]
    left_s: float


class Close(msgspec.Struct, tag=True, array_like=True):
    """The blocks opened may go."""


Request = Fetch | Put | Announce | AskPage | Ping | Describe | Open


# Replies
class Blocks(msgspec.Struct, tag=True, array_like=True):
    """What follows as raw bytes, in order; none for a miss."""

    infos: Annotated[list[BlockInfo | None], Meta(max_length=MAX_BLOCKS)]


class Room(msgspec.Struct, tag=True, array_like=True):
    """So many leading blocks of the region may follow."""

    count: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]


class Stored(msgspec.Struct, tag=True, array_like=True):
    """So many leading blocks are committed."""

    count: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]


class Done(msgspec.Struct, tag=True, array_like=True):
    """Heard."""


class Page(msgspec.Struct, tag=True, array_like=True):
    """What the node holds, by ascending key, empty at the end; changes up to last are in it."""

    held: Annotated[list[Announcement], Meta(max_length=2 * MAX_CHANGES)]
    last: Counter


class Described(msgspec.Struct, tag=True, array_like=True):
    """Blob for the transfer library; empty if the memory cannot be read from afar."""

    blob: Annotated[bytes, Meta(max_length=1 << 20)]


class Opened(msgspec.Struct, tag=True, array_like=True):
    """Per key what and at which address; none for a miss, address 0 if not in readable memory."""

    blocks: Annotated[list[tuple[BlockInfo, Counter] | None], Meta(max_length=MAX_BLOCKS)]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """Not done, and why; the connection remains in step."""

    reason: Text


def time_left(left_s: float) -> Deadline:
    """Deadline of a request as its sender states it.

    Raises:
        FrameError: If that is no sensible number of seconds.
    """
    if not 0 < left_s <= MAX_REQUEST_S:
        raise FrameError(f"a request with {left_s} s left, 0 to {MAX_REQUEST_S} s are allowed")
    return Deadline.after(left_s)


def check_info(info: BlockInfo) -> None:
    """Checks what arrived about a block.

    Raises:
        FrameError: If a field is out of its range.
    """
    if not (
        len(info.key) == len(info.region) == KEY_BYTES
        and len(info.parent) in (0, KEY_BYTES)
        and 0 <= info.index < 2**31
        and 0 <= info.depth < 2**31
        and 0 < info.length <= MAX_BLOCK_BYTES
        and 0 <= info.crc < 2**32
        and len(info.tenant) in (0, 16)
    ):
        raise FrameError("a block whose fields are out of range")
