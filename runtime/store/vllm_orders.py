"""What the scheduler's half of the connector tells the workers' half, once per engine step.

Every order is about store blocks of one request: block i holds tokens [i B, (i + 1) B).
"""

from __future__ import annotations

from dataclasses import dataclass, field

Pages = tuple[int, ...]  # the engine's block ids of one store block


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """What one worker's part of a block holds; equal for workers that hold the same.

    Attributes:
        layout: How the engine packs a page, and every layer's type and shape.
        layers: Layers held, such as ``"0-31"``.
        kv_heads: Key-value heads held, such as ``"0-7"``.
        block_bytes: Bytes of one store block.
    """

    layout: str
    layers: str
    kv_heads: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class ChainPart:
    """Keys of a request's chain from a position on; what stood there before is replaced.

    Attributes:
        request_id: Of the engine.
        start: Position of the first key.
        keys: By rank identity, in the order of `StepOrders.identities`: consecutive keys.
        tenant: Tag of the tenant's salt.
    """

    request_id: str
    start: int
    keys: tuple[tuple[bytes, ...], ...]
    tenant: bytes


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Bring blocks ``first ..`` of a chain into these pages; `ABSENT` pages are not touched."""

    request_id: str
    first: int
    pages: tuple[Pages, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Blocks ``first ..`` of a chain lie in these pages once this step's forward has run.

    Attributes:
        request_id: Of the engine.
        first: Position of the first block.
        pages: Of each block.
        is_fresh: Whether pages named by earlier orders are no longer the request's.
        is_last: Whether the pages are kept for this order alone.
    """

    request_id: str
    first: int
    pages: tuple[Pages, ...]
    is_fresh: bool = False
    is_last: bool = False


@dataclass(slots=True)
class StepOrders:
    """All orders of one step.

    Attributes:
        identities: Of all workers, without repetition; a chain part has keys for each.
        chains: Come first.
        loads: Independent of the step's forward.
        saves: After the step's forward.
        is_idle: Whether the step runs no forward.
    """

    identities: tuple[RankIdentity, ...] = ()
    chains: list[ChainPart] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    is_idle: bool = False
