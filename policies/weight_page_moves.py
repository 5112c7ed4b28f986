"""Which width a block is led to, which raise may start, and where a failed one ends.

A raise reserves the pages of all its planes and tables or none. If pages are on their way back
(drops of the same plan, copies that drain) it waits for them; if none are, it is given up. A copy
that fails lowers the desired width to the highest one that the rest still reaches. What the driver
tells and is told stands in policies/weight_page_table.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_faults import MovementFaults
from policies.weight_page_history import ResidentTables
from policies.weight_page_orders import PartCopies
from policies.weight_page_parts import BlockParts
from policies.weight_page_reach import WidthParts, fitting
from policies.weight_page_states import GPU, HOST, IN_FLIGHT, RETIRING, PartStates
from policies.weight_page_widths import NO_PLAN, BlockWidths, Ints


class WidthMoves:
    """The decisions of the weight page table; it shares widths, states and faults with it.

    Attributes:
        needs: Planes and tables of each width.
    """

    def __init__(
        self,
        parts: BlockParts,
        widths: BlockWidths,
        states: PartStates,
        faults: MovementFaults,
        *,
        tables: ResidentTables,
        timeout_steps: int,
    ) -> None:
        self.needs = WidthParts(parts, tables)
        self._parts, self._timeout_steps = parts, timeout_steps
        self._widths, self._states, self._faults = widths, states, faults
        self._waiting = np.zeros(0, np.int64)
        self._waiting_since = np.zeros(parts.num_blocks, np.int64)

    @property
    def pages_returning(self) -> int:
        """Pages that will go back to the arena without a further plan."""
        leaving = (self._states.state == RETIRING) | self._states.draining
        dropping = self.needs.read_at(self._widths.bits) & ~self.needs.read_at(self._widths.desired)
        dropping[self._widths.desired >= self._widths.bits] = False
        return int(self._parts.pages[leaving | dropping].sum())

    def refuse(self, blocks: Ints, bits: Ints, step: int) -> Ints:
        """Desired widths with those of pinned blocks and of raises held back at q."""
        q = self._widths.bits[blocks]
        pinned = self._faults.pinned[blocks] & (bits != q)
        early = (bits > q) & (step < self._faults.retry_step[blocks]) & ~pinned
        self._faults.note(blocks[pinned], "pinned")
        self._faults.note(blocks[early], "back-off")
        accepted: Ints = np.where(pinned | early, q, bits)
        return accepted

    def lead(self, blocks: Ints, target: Ints, reason: str, *, count: bool = False) -> None:
        """Set desired widths and abandon what neither they nor the committed ones need."""
        self._widths.desired[blocks] = target
        self._waiting = self._waiting[~np.isin(self._waiting, blocks)]
        surplus = ~(self.needs.read_at(target) | self.needs.read_at(self._widths.bits[blocks]))
        surplus &= self._states.state[blocks] != HOST
        keys = self.needs.keys(blocks, surplus & (self._states.state[blocks] != RETIRING))
        if count:
            under_way = surplus & (self._states.state[blocks] == IN_FLIGHT)
            under_way &= ~self._states.draining[blocks]
            self._faults.note(blocks[under_way.any(axis=1)], reason)
        self._states.abandon(keys, reason)

    def give_up(self, blocks: Ints, reason: str) -> None:
        """Lead blocks back to their committed widths and take them out of their plans."""
        self._widths.plan_of[blocks] = NO_PLAN
        self.lead(blocks, self._widths.bits[blocks], reason)

    def wait(self, blocks: Ints, step: int) -> None:
        """Enter raises whose copies have still to start, behind those that wait already."""
        lacking = blocks[self._lacks(blocks).any(axis=1)]
        self._waiting = np.concatenate([self._waiting, lacking])
        self._waiting_since[lacking] = step

    def _lacks(self, blocks: Ints) -> NDArray[np.bool_]:
        """[k, S]: parts of the desired width for which a copy has still to start."""
        absent = (self._states.state[blocks] == HOST) | self._states.draining[blocks]
        lacks: NDArray[np.bool_] = self.needs.read_at(self._widths.desired[blocks]) & absent
        return lacks

    def start_waiting(self, step: int) -> PartCopies:
        """Start the raises whose pages are all free, in order; give up those without hope."""
        blocks = self._waiting
        if not len(blocks):
            return self._states.copies_of(np.zeros(0, np.int64))
        lacks = self._lacks(blocks)
        need = (self._parts.pages[blocks] * lacks).sum(axis=1)
        drains = (lacks & self._states.draining[blocks]).any(axis=1)
        fits = fitting(np.where(drains, 0, need), self._states.ledger.free_pages) & ~drains
        copies = self._states.start(self.needs.keys(blocks[fits], lacks[fits]), step=step)
        self._waiting = blocks[~fits]
        late = step - self._waiting_since[blocks] >= self._timeout_steps
        hopeless = ~fits & (late | (~drains & (self.pages_returning == 0)))
        self._faults.note(blocks[hopeless & drains], "draining")
        self._faults.note(blocks[hopeless & ~drains], "no pages")
        self._settle(blocks[hopeless])
        return copies

    def time_out(self, step: int) -> None:
        """Give up copies that have not landed in time."""
        keys = self._states.late(step, self._timeout_steps)
        if len(keys):
            self._states.abandon(keys, "time-out")
            self._failed(np.unique(keys // self._parts.num_parts), "time-out", step)

    def fail(self, keys: Ints, reason: str, step: int) -> None:
        """Copies have ended without success."""
        if len(keys):
            self._states.ended(keys, reason)
            self._failed(np.unique(keys // self._parts.num_parts), reason, step)

    def _failed(self, blocks: Ints, reason: str, step: int) -> None:
        self._faults.fail(blocks, reason, step=step)
        self._settle(blocks)

    def _settle(self, blocks: Ints) -> None:
        """Lower desired widths to the highest that parts here or under way still reach."""
        state = self._states.state[blocks]
        coming = (state == GPU) | ((state == IN_FLIGHT) & ~self._states.draining[blocks])
        reached = self.needs.reached(
            self._widths.bits[blocks], self._widths.desired[blocks], coming
        )
        self._widths.plan_of[blocks[reached == self._widths.bits[blocks]]] = NO_PLAN
        self.lead(blocks, reached, "raise failed")
        self._widths.close_finished()

    def commit(self) -> Ints:
        """Move committed widths; returns the blocks that moved."""
        blocks = np.flatnonzero(self._widths.plan_of != NO_PLAN)
        have = self._states.state[blocks] == GPU
        reached = self.needs.reached(self._widths.bits[blocks], self._widths.desired[blocks], have)
        moves = reached != self._widths.bits[blocks]
        blocks, reached = blocks[moves], reached[moves]
        old = self._widths.bits[blocks]
        self._widths.commit(blocks, reached)
        superseded = self.needs.keys(blocks, self.needs.read_at(old) & ~self.needs.read_at(reached))
        self._states.retire(superseded, last_reader=self._widths.last_built)
        self._faults.succeeded(blocks[reached > old])
        moved: Ints = blocks
        return moved
