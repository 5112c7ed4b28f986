"""Block tables of running sequences on the device, at one fixed address.

A sequence has a slot: a row of ``[slots, max_blocks, block_pages]``. Only blocks that came since
the last step are copied. What a window has left behind stays named and is never read: kernels
begin at the first key that some query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.model.kv_cache import LEFT_BEHIND, KvCache
from runtime.model.step_upload import StepUpload

ROWS_AT_A_TIME: Final = 1024


@dataclass(slots=True)
class _Slot:
    """Whose table lies in it: the sequence, which birth of it, and how many blocks are there."""

    sequence: int
    birth: int
    blocks: int = 0


class TableSlots:
    """Tables of up to ``slots`` sequences.

    Attributes:
        tables: [slots + 1, max_blocks, block_pages] int32; the last slot is the spare one.
        spare: Number of the slot whose one block belongs to no sequence: rows that only fill up a
            batch are written there.

    Args:
        cache: Of the sequences.
        slots: Sequences of a step at most.
        max_blocks: Of a sequence.
        device: Where the tables are put.
        spare_pages: [block_pages] page ids of the spare block; None: none.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        slots: int,
        max_blocks: int,
        device: torch.device,
        spare_pages: NDArray[np.int32] | None = None,
    ) -> None:
        block_pages = cache.layout.block_pages
        self._cache, self.spare, self.max_blocks = cache, slots, max_blocks
        shape = (slots + 1, max_blocks, block_pages)
        self.tables = torch.full(shape, LEFT_BEHIND, dtype=torch.int32, device=device)
        self._rows = self.tables.view(-1, block_pages)
        self._held: list[_Slot | None] = [None] * slots
        self._slot_of: dict[int, int] = {}
        self._upload = StepUpload(ROWS_AT_A_TIME * (1 + block_pages), device)
        if spare_pages is not None:
            self._copy(np.array([slots * max_blocks]), spare_pages[None])

    def place(self, sequences: Sequence[int]) -> list[int]:
        """Slots of these sequences, whose tables are complete on the device from now on.

        Raises:
            ValueError: If they are more than there are slots, or one has too many blocks.
        """
        slots = [self._slot(sequence, sequences) for sequence in sequences]
        targets: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int32]] = []
        for sequence, number in zip(sequences, slots, strict=True):
            held, table = self._held[number], self._cache.table(sequence)
            assert held is not None  # _slot has seen to it
            if len(table) > self.max_blocks:
                raise ValueError(
                    f"sequence {sequence} has {len(table)} blocks, tables hold {self.max_blocks}"
                )
            if len(table) > held.blocks:
                new = np.arange(held.blocks, len(table))
                targets.append(number * self.max_blocks + new)
                rows.append(table[held.blocks :])
                held.blocks = len(table)
        if targets:
            self._copy(np.concatenate(targets), np.concatenate(rows))
        return slots

    def _slot(self, sequence: int, wanted: Sequence[int]) -> int:
        number, birth = self._slot_of.get(sequence), self._cache.birth(sequence)
        if number is not None:
            held = self._held[number]
            assert held is not None
            if held.birth != birth:
                self._held[number] = _Slot(sequence, birth)
            return number
        number = self._free_slot(wanted)
        self._held[number] = _Slot(sequence, birth)
        self._slot_of[sequence] = number
        return number

    def _free_slot(self, wanted: Sequence[int]) -> int:
        """An empty slot; else that of a sequence that has gone, or waits."""
        keep, here = set(wanted), set(self._cache.sequences)
        waiting = None
        for number, held in enumerate(self._held):
            if held is None:
                return number
            if held.sequence not in here:
                del self._slot_of[held.sequence]
                return number
            if held.sequence not in keep:
                waiting = number
        if waiting is None:
            raise ValueError(f"{len(wanted)} sequences in a step, at most {len(self._held)} may be")
        held = self._held[waiting]
        assert held is not None
        del self._slot_of[held.sequence]
        return waiting

    def _copy(self, targets: NDArray[np.int64], rows: NDArray[np.int32]) -> None:
        width = rows.shape[1]
        for begin in range(0, len(targets), ROWS_AT_A_TIME):
            to = targets[begin : begin + ROWS_AT_A_TIME].astype(np.int32)
            count = len(to)
            both = np.concatenate([to, rows[begin : begin + count].ravel()])
            sent = self._upload.write(both)
            self._rows.index_copy_(0, sent[:count].long(), sent[count:].view(count, width))
