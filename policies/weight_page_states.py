"""State of every plane and table of every block, its pages, and the moves that are legal.

    HOST --start--> IN_FLIGHT --landed--> GPU --retire--> RETIRING --readers done--> HOST
                    IN_FLIGHT --fail/cancel--> HOST  (pages return when the copy has really ended)
                    RETIRING --wanted again--> GPU   (no copy)

Parts are addressed by keys, ``block * S + part`` (policies/weight_page_parts.py). Which moves to
make is decided in policies/weight_page_moves.py; here they are carried out, refused if illegal,
and written into the history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_history import Event, ResidentTables
from policies.weight_page_ledger import PageLedger
from policies.weight_page_orders import PartCopies, PartList
from policies.weight_page_parts import BlockParts, HeldPages

HOST: Final = 0
IN_FLIGHT: Final = 1
GPU: Final = 2
RETIRING: Final = 3
NO_READER: Final = -1
NOT_ENQUEUED: Final = 1 << 62  # a start that no step reaches

Keys = NDArray[np.int64]


class PartStates:
    """Struct of arrays over all parts; see the module text.

    Attributes:
        state: [n, S] uint8, HOST, IN_FLIGHT, GPU or RETIRING.
        draining: [n, S] bool, IN_FLIGHT parts that are not wanted any more.
        last_reader: [n, S] int64, last step built before the commit that made a part superfluous.
        started_step: [n, S] int64, when a copy started (or its driver last reported progress).
        checksum: [n, S] uint32, CRC-32 of each part's stream on the host, or None.
    """

    def __init__(
        self,
        parts: BlockParts,
        ledger: PageLedger,
        *,
        checksum: NDArray[np.uint32] | None,
        history: Callable[[Event], None] | None,
    ) -> None:
        shape = (parts.num_blocks, parts.num_parts)
        if checksum is not None and checksum.shape != shape:
            raise ValueError(f"checksum must be {shape}, not {checksum.shape}")
        self.parts, self.ledger, self.checksum = parts, ledger, checksum
        self.state = np.full(shape, HOST, np.uint8)
        self.draining = np.zeros(shape, np.bool_)
        self.last_reader = np.full(shape, NO_READER, np.int64)
        self.started_step = np.zeros(shape, np.int64)
        self.landed_parts = self.parts_wanted_again = self.freed_pages = 0
        self._held = HeldPages(parts)
        self._cancels: list[int] = []
        self._drain_reason: dict[int, str] = {}
        self._history = history

    def load(self, keys: Keys) -> bool:
        """Give resident parts their first pages; False if they do not fit (nothing changes)."""
        pages = self.ledger.take(int(self._held.counts(keys).sum()), "weights")
        if pages is None:
            return False
        self._held.write(keys, pages)
        self.state.ravel()[keys] = GPU
        return True

    def write_start(self, bits: Keys, lowest: Keys, highest: Keys, tables: ResidentTables) -> None:
        """Introduce every block with the pages it holds into the history."""
        if self._history is None:
            return
        for block, q in enumerate(bits.tolist()):
            held = self.copies_of(block * self.parts.num_parts + np.flatnonzero(self.state[block]))
            pages = []
            for copy, part in enumerate(held.parts.tolist()):
                kind, number = self.parts.name(part)
                pages.append({kind: number, "pages": held.page_list(copy).tolist()})
            ranges = {"qmin": int(lowest[block]), "qmax": int(highest[block])}
            self._history(
                {"ev": "init", "block": block, "q": q, **ranges, "tables": tables, "pages": pages}
            )

    def start(self, keys: Keys, *, step: int) -> PartCopies:
        """HOST to IN_FLIGHT, with pages that the caller knows to be free."""
        self._must_be(keys, HOST, "copied")
        pages = self.ledger.take(int(self._held.counts(keys).sum()), "weights")
        if pages is None:
            raise RuntimeError("a copy was started without free pages")
        self._held.write(keys, pages)
        self.state.ravel()[keys] = IN_FLIGHT
        self.started_step.ravel()[keys] = step
        copies = self.copies_of(keys)
        if self._history is not None:
            for copy, key in enumerate(keys.tolist()):
                source = {} if self.checksum is None else {"checksum": int(self.checksum.flat[key])}
                self._write("xfer", key, pages=copies.page_list(copy).tolist(), **source)
        return copies

    def landed(self, keys: Keys) -> None:
        """IN_FLIGHT to GPU; no kernel has read them yet."""
        self._must_be(keys, IN_FLIGHT, "landed")
        self.state.ravel()[keys] = GPU
        self.last_reader.ravel()[keys] = NO_READER
        self.landed_parts += len(keys)
        if self._history is not None:
            for key in keys.tolist():
                self._write("xfer_ok", key)

    def ended(self, keys: Keys, reason: str) -> None:
        """IN_FLIGHT to HOST: the copies have failed, the device writes to their pages no more."""
        self._must_be(keys, IN_FLIGHT, "ended")
        self.state.ravel()[keys] = HOST
        self.draining.ravel()[keys] = False
        self.ledger.give(self._held.clear(keys), "weights")
        for key in keys.tolist():
            why = self._drain_reason.pop(key, reason)
            cancelled = why not in ("copy error", "time-out", "checksum")
            self._write("cancel" if cancelled else "xfer_fail", key, reason=why)

    def abandon(self, keys: Keys, reason: str) -> None:
        """Parts that no width needs any more: landed ones retire, copies under way drain.

        The pages of a draining copy stay reserved until it is reported as landed or failed.
        """
        states = self.state.ravel()[keys]
        self.state.ravel()[keys[states == GPU]] = RETIRING
        drains = keys[(states == IN_FLIGHT) & ~self.draining.ravel()[keys]]
        self.draining.ravel()[drains] = True
        self._cancels.extend(drains.tolist())
        self._drain_reason.update(dict.fromkeys(drains.tolist(), reason))

    def retire(self, keys: Keys, *, last_reader: int) -> None:
        """GPU to RETIRING: steps up to ``last_reader`` may still read these parts."""
        self._must_be(keys, GPU, "retired")
        self.state.ravel()[keys] = RETIRING
        self.last_reader.ravel()[keys] = last_reader

    def want_again(self, keys: Keys) -> None:
        """RETIRING to GPU: their bytes are still there."""
        self._must_be(keys, RETIRING, "wanted again")
        self.state.ravel()[keys] = GPU
        self.parts_wanted_again += len(keys)
        if self._history is not None:
            for key in keys.tolist():
                self._write("reraise", key)

    def release(self, before_step: int) -> tuple[PartList, int]:
        """RETIRING to HOST where every reader was built before ``before_step``.

        Returns:
            The parts that are free now, and how many pages went back to the arena.
        """
        keys = np.flatnonzero(self.state == RETIRING)
        keys = keys[self.last_reader.ravel()[keys] < before_step]
        blocks, parts = np.divmod(keys, self.parts.num_parts)
        pages = self._held.read(keys)
        if self._history is not None:
            copies = self.copies_of(keys)
            for copy, key in enumerate(keys.tolist()):
                self._write("free", key, pages=copies.page_list(copy).tolist())
        self._held.clear(keys)
        self.state.ravel()[keys] = HOST
        self.ledger.give(pages, "weights")
        self.freed_pages += len(pages)
        return PartList(blocks, parts), len(pages)

    def late(self, step: int, timeout_steps: int) -> Keys:
        """Copies under way that are wanted and have not landed in time."""
        waits = (self.state == IN_FLIGHT) & ~self.draining
        keys = np.flatnonzero(waits)
        late: Keys = keys[step - self.started_step.ravel()[keys] >= timeout_steps]
        return late

    def copies_of(self, keys: Keys) -> PartCopies:
        """Parts with the pages they hold."""
        first = np.concatenate([[0], np.cumsum(self._held.counts(keys))])
        blocks, parts = np.divmod(keys, self.parts.num_parts)
        return PartCopies(blocks, parts, first, self._held.read(keys))

    def take_cancels(self) -> PartList:
        """Copies that began to drain since the last call."""
        blocks, parts = np.divmod(np.array(self._cancels, np.int64), self.parts.num_parts)
        self._cancels.clear()
        return PartList(blocks, parts)

    def check(self) -> None:
        """Recount pages.

        Raises:
            RuntimeError: If states, page lists and the arena's ledger disagree.
        """
        pages = int(self.parts.pages[self.state != HOST].sum())
        held = self._held.num_held(), self.ledger.held_pages("weights")
        if held != (pages, pages):
            raise RuntimeError(f"parts hold {pages} pages; page lists and the arena say {held}")
        if np.any(self.draining & (self.state != IN_FLIGHT)):
            raise RuntimeError("a copy drains that is not under way")
        self.ledger.check()

    def _must_be(self, keys: Keys, state: int, move: str) -> None:
        wrong = keys[self.state.ravel()[keys] != state]
        if len(wrong):
            block, part = divmod(int(wrong[0]), self.parts.num_parts)
            kind, number = self.parts.name(part)
            names = ("on the host", "in flight", "on the device", "retiring")
            raise RuntimeError(
                f"block {block} {kind} {number} cannot be {move}: it is "
                f"{names[self.state[block, part]]}"
            )

    def _write(self, event: str, key: int, **more: Any) -> None:
        if self._history is not None:
            block, part = divmod(key, self.parts.num_parts)
            kind, number = self.parts.name(part)
            self._history({"ev": event, "block": block, kind: number, **more})
