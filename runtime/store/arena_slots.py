"""The slot table of an arena: one record per slot, in the shared memory itself.

A record says what its slot holds. It is written by the serving process alone, after the data and
with a checksum of its own, so that a server that starts again after a crash can take the committed
blocks over from the memory that outlived it. Readers in other processes look at ``generation``
only: it changes whenever the slot gets other bytes.
"""

from __future__ import annotations

import struct
from typing import Literal

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.errors import StoreUnavailableError

RECORD_BYTES = 192
_GENERATION = struct.Struct("<Q")
_RECORD = struct.Struct("<QIIIIQ16s32s32s32s")  # generation .. region, 144 bytes
_CRC = struct.Struct("<I")
_STATE_OFFSET = 8

SlotState = Literal["free", "owned", "replica"]
_STATES: tuple[SlotState, ...] = ("free", "owned", "replica")
_BEING_WRITTEN = 3  # by a client; holds nothing, but is not free either
_NONE = bytes(32)


class SlotTable:
    """Records of all slots, over shared memory."""

    def __init__(self, memory: memoryview, num_slots: int) -> None:
        """Look at a table.

        Args:
            memory: [num_slots * RECORD_BYTES] bytes.
            num_slots: Slots of the arena.
        """
        self._open: memoryview | None = memory
        self.num_slots = num_slots

    @property
    def _memory(self) -> memoryview:
        memory = self._open
        if memory is None:
            raise StoreUnavailableError("the shared memory is closed")
        return memory

    def generation(self, slot: int) -> int:
        """Number of contents the slot has had.

        Raises:
            StoreUnavailableError: As of every method, if the table is closed.
        """
        (generation,) = _GENERATION.unpack_from(self._memory, slot * RECORD_BYTES)
        return int(generation)

    def renew(self, slot: int) -> int:
        """Mark the slot as free of any contents, under its next generation, which is returned."""
        at = slot * RECORD_BYTES
        generation = (self.generation(slot) + 1) % 2**64
        struct.pack_into("<I", self._memory, at + _STATE_OFFSET, 0)
        _GENERATION.pack_into(self._memory, at, generation)
        return generation

    def lend(self, slot: int) -> None:
        """A client is about to write to the slot, which holds nothing."""
        struct.pack_into("<I", self._memory, slot * RECORD_BYTES + _STATE_OFFSET, _BEING_WRITTEN)

    def is_lent(self, slot: int) -> bool:
        """Whether a client may be writing to the slot."""
        (state,) = struct.unpack_from("<I", self._memory, slot * RECORD_BYTES + _STATE_OFFSET)
        return bool(state == _BEING_WRITTEN)

    def write(self, slot: int, info: BlockInfo, state: SlotState) -> None:
        """Say what the slot holds: its bytes are in place."""
        at = slot * RECORD_BYTES
        record = self._packed(self.generation(slot), info, state)
        body = memoryview(record)[_STATE_OFFSET + 4 :]
        end = at + len(record)
        self._memory[at + _STATE_OFFSET + 4 : end] = body
        _CRC.pack_into(self._memory, end, checksum(record))
        struct.pack_into("<I", self._memory, at + _STATE_OFFSET, _STATES.index(state))

    def read(self, slot: int) -> tuple[BlockInfo, SlotState] | None:
        """What the slot holds; None if nothing, or if its record is broken."""
        at = slot * RECORD_BYTES
        record = bytes(self._memory[at : at + _RECORD.size])
        _, state, index, depth, crc, length, tenant, key, parent, region = _RECORD.unpack(record)
        (found,) = _CRC.unpack_from(self._memory, at + _RECORD.size)
        if not 1 <= state < len(_STATES) or found != checksum(record):
            return None
        info = BlockInfo(
            key=key,
            parent=b"" if parent == _NONE else parent,
            region=region,
            index=index,
            depth=depth,
            length=length,
            crc=crc,
            tenant=b"" if tenant == _NONE[:16] else tenant,
        )
        return info, _STATES[state]

    def close(self) -> None:
        """Let go of the shared memory."""
        self._open = None  # not released: another thread may be reading at this very moment

    def _packed(self, generation: int, info: BlockInfo, state: SlotState) -> bytes:
        return _RECORD.pack(
            generation,
            _STATES.index(state),
            info.index,
            info.depth,
            info.crc,
            info.length,
            info.tenant or _NONE[:16],
            info.key,
            info.parent or _NONE,
            info.region,
        )
