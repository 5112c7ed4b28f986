"""The weight page table: when the committed width of a block may move, and what must be copied.

The driver (simulated or real) tells what happened and at which step; the table answers with
orders. Widths move in ``boundary`` only: between two engine steps, after the last kernel of one
is enqueued and before the next step is built.

    boundary t     drops planned before t commit; raises commit as far as their copies have landed
    step_built t   its kernels read the widths committed now; steps may be built N ahead
    step_finished  all kernels of a step have run; when no step is left that was built before a
                   drop committed, the pages of the drop go back to the arena

A raise reserves the pages of all its planes and tables or none. If pages are on their way back
(drops of the same plan, copies that drain) it waits for them; if none are, it is given up. A copy
that fails lowers the desired width to the highest one that the rest still reaches. States and
legal moves of single planes are in policies/weight_page_states.py.

Source: PagedWeight: asynchronous page movement, widths commit after a plan has executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_faults import MovementFaults
from policies.weight_page_history import Event, ResidentTables
from policies.weight_page_ledger import PageLedger
from policies.weight_page_orders import PageOrders, PartCopies, PartList
from policies.weight_page_parts import BlockParts, whole_numbers
from policies.weight_page_reach import WidthParts, fitting
from policies.weight_page_states import GPU, HOST, IN_FLIGHT, NOT_ENQUEUED, RETIRING, PartStates
from policies.weight_page_widths import NO_PLAN, BlockWidths, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class MovementRules:
    """Numbers that govern raises.

    Attributes:
        tables: Resident tables: those of qmin..q ("all", a drop moves nothing) or that of q
            ("active", every move copies a table).
        timeout_steps: Steps after which a copy that has not landed, or a raise that still waits
            for pages, is given up; >= 1.
        max_failures: Failures in a row after which a block is pinned, >= 1.
    """

    tables: ResidentTables = "all"
    timeout_steps: int = 256
    max_failures: int = 3

    def __post_init__(self) -> None:
        if self.timeout_steps < 1 or self.max_failures < 1:
            raise ValueError(
                "timeout_steps and max_failures must be >= 1, not "
                f"{self.timeout_steps} and {self.max_failures}"
            )


class WeightPageTable:
    """The state machine of all weight blocks of one model.

    Attributes:
        widths: Committed and desired widths, plans, running steps.
        states: Planes and tables.
        faults: Failures, back-off and reasons.
        host_address: [n, S] int64, where the driver keeps each part; not read here.
    """

    def __init__(
        self,
        parts: BlockParts,
        bits: Ints,
        *,
        ledger: PageLedger,
        lowest: Ints | None = None,
        highest: Ints | None = None,
        rules: MovementRules | None = None,
        checksum: NDArray[np.uint32] | None = None,
        host_address: Ints | None = None,
        history: Callable[[Event], None] | None = None,
    ) -> None:
        """Reserve the pages of every block at its first width.

        Args:
            parts: Pages of each plane and table.
            bits: [n], first committed widths.
            ledger: The arena's pages, shared with the KV cache.
            lowest: [n], qmin; the parts' min_bits if None.
            highest: [n], qmax; the parts' parent_bits if None.
            rules: Time-outs and failures.
            checksum: [n, S] uint32, CRC-32 of each part's stream; None to verify nothing.
            host_address: [n, S], see the class.
            history: Told every event, for the checker of policies/weight_page_rules.py; give the
                ledger the same one.

        Raises:
            ValueError: If widths are no integers or out of range, or the weights do not fit into
                the arena.
        """
        rules = MovementRules() if rules is None else rules
        self.parts, self.rules = parts, rules
        self.widths = BlockWidths(parts, bits, lowest, highest, history)
        self.states = PartStates(parts, ledger, checksum=checksum, history=history)
        self.faults = MovementFaults(parts.num_blocks, rules.max_failures)
        self.host_address = (
            np.zeros(parts.pages.shape, np.int64) if host_address is None else host_address
        )
        self._needs = WidthParts(parts, rules.tables)
        self._waiting = np.zeros(0, np.int64)
        self._waiting_since = np.zeros(parts.num_blocks, np.int64)
        self._last_boundary = -1
        resident = self._needs.read_at(self.bits)
        if not self.states.load(np.flatnonzero(resident)):
            raise ValueError(
                f"weights need {int(parts.pages[resident].sum())} pages, the arena has "
                f"{ledger.free_pages} free"
            )
        self.states.write_start(self.bits, self.widths.lowest, self.widths.highest, rules.tables)

    @property
    def bits(self) -> Ints:
        """[n] committed widths q (not a copy)."""
        return self.widths.bits

    @property
    def desired(self) -> Ints:
        """[n] desired widths d (not a copy)."""
        return self.widths.desired

    # --- what the driver tells ---

    def open_plan(self, plan_id: int, blocks: Ints, bits: Ints, *, step: int) -> PageOrders:
        """Lead blocks to other widths.

        A block that an older plan still holds is taken over: copies that the new width needs go
        on, the others are cancelled. A width equal to the committed one cancels only.

        Args:
            plan_id: Above every earlier one, >= 0.
            blocks: [k] block ids, each once, the most urgent raise first.
            bits: [k] desired widths.
            step: Step that is built next.

        Returns:
            Copies and cancellations; widths move at the next boundary.

        Raises:
            ValueError: If the plan id is not new, a block is unknown or named twice, a width lies
                outside qmin..qmax, or either is no integer.
        """
        blocks, bits = whole_numbers("blocks", blocks), whole_numbers("bits", bits)
        self.widths.open_plan(plan_id, blocks, bits)
        target = self._refuse(blocks, bits, step)
        self.widths.plan_of[blocks] = np.where(target != self.bits[blocks], plan_id, NO_PLAN)
        self._lead(blocks, target, "newer plan", count=True)
        self._want_again(blocks)
        lacks = self._lacks(blocks).any(axis=1)
        self._waiting = np.concatenate([self._waiting, blocks[lacks]])
        self._waiting_since[blocks[lacks]] = step
        copies = self._start_waiting(step)
        self.widths.close_finished()
        return self._orders(copies=copies)

    def cancel(
        self, blocks: Ints | None = None, *, reason: str = "pressure", step: int
    ) -> PageOrders:
        """Give up raises: landed pages return at the next boundary, those on their way when ended.

        Args:
            blocks: Block ids; every block with an open raise if None.
            reason: One of policies.weight_page_faults.REASONS.
            step: Step that is built next.

        Raises:
            ValueError: If block ids are no integers.
        """
        raising = self.desired > self.bits
        chosen = np.flatnonzero(raising)
        if blocks is not None:
            named = whole_numbers("blocks", blocks)
            chosen = named[raising[named]]
        self.faults.hold_back(chosen, reason, step=step)
        self._give_up(chosen, reason)
        self.widths.close_finished()
        return self._orders()

    def copies_queued(self, blocks: Ints, parts: Ints) -> None:
        """Copies wait in the driver's queue: they cannot be late before they are enqueued."""
        self.states.started_step[blocks, parts] = NOT_ENQUEUED

    def copies_enqueued(self, blocks: Ints, parts: Ints, *, step: int) -> None:
        """Copies have left the driver's queue: their time-out counts from here."""
        self.states.started_step[blocks, parts] = step

    def copies_landed(
        self,
        blocks: Ints,
        parts: Ints,
        *,
        step: int,
        checksums: NDArray[np.uint32] | None = None,
    ) -> NDArray[np.bool_]:
        """Copies have ended well on the device; those with another checksum have failed.

        Returns:
            [c] bool: which of them are resident now; the others were wrong or unwanted.

        Raises:
            RuntimeError: If a part is not being copied.
        """
        keys = blocks * self.parts.num_parts + parts
        good = np.ones(len(keys), np.bool_)
        if checksums is not None and self.states.checksum is not None:
            good = self.states.checksum.ravel()[keys] == checksums
        drains = self.states.draining.ravel()[keys]
        self.states.ended(keys[drains], "cancelled")
        self.states.landed(keys[good & ~drains])
        self._fail(keys[~good & ~drains], "checksum", step)
        landed: NDArray[np.bool_] = good & ~drains
        return landed

    def copies_failed(
        self, blocks: Ints, parts: Ints, *, step: int, reason: str = "copy error"
    ) -> None:
        """Copies have ended without success; the device writes to their pages no more.

        Raises:
            RuntimeError: If a part is not being copied.
        """
        keys = blocks * self.parts.num_parts + parts
        drains = self.states.draining.ravel()[keys]
        self.states.ended(keys[drains], "cancelled")
        self._fail(keys[~drains], reason, step)

    def step_built(
        self, step: int, *, blocks: Ints | None = None, bits: Ints | None = None
    ) -> None:
        """The work of a step is fixed: its kernels read the widths committed now.

        Args:
            step: Above every earlier one.
            blocks: Blocks its kernels name, for the history; all if None.
            bits: Widths the kernels find in their tables, for the history; the committed if None.

        Raises:
            RuntimeError: If steps go backwards.
        """
        self.widths.step_built(step, blocks, bits)

    def step_finished(self, step: int) -> None:
        """Every kernel of a built step has run.

        Raises:
            RuntimeError: If the step is not running.
        """
        self.widths.step_finished(step)

    def boundary(self, step: int) -> PageOrders:
        """Between two steps: commit what is ready, free what nobody reads, start what waited.

        Args:
            step: The step that is built next; above every earlier boundary.

        Raises:
            RuntimeError: If boundaries go backwards.
        """
        if step <= self._last_boundary:
            raise RuntimeError(f"boundary {step} after boundary {self._last_boundary}")
        self._last_boundary = step
        self._time_out(step)
        blocks = self._commit()
        freed, freed_pages = self.states.release(self.widths.oldest_running)
        copies = self._start_waiting(step)
        self.widths.close_finished()
        self.states.ledger.state_pages()
        return self._orders(blocks=blocks, copies=copies, freed=freed, freed_pages=freed_pages)

    # --- what the driver asks ---

    def resident_copies(self) -> PartCopies:
        """All parts on the device with their pages, as copies (to fill the arena at the start)."""
        return self.states.copies_of(np.flatnonzero(self.states.state == GPU))

    def committed_copies(self, blocks: Ints) -> PartCopies:
        """Parts that kernels read at the committed widths of some blocks, with their pages."""
        return self.states.copies_of(
            self._needs.keys(blocks, self._needs.read_at(self.bits[blocks]))
        )

    @property
    def pages_returning(self) -> int:
        """Pages that will go back to the arena without a further plan."""
        leaving = (self.states.state == RETIRING) | self.states.draining
        dropping = self._needs.read_at(self.bits) & ~self._needs.read_at(self.desired)
        dropping[self.desired >= self.bits] = False
        return int(self.parts.pages[leaving | dropping].sum())

    @property
    def at_rest(self) -> bool:
        """Whether no plan is open, no copy under way and no part waits for its release."""
        state = self.states.state
        return not self.widths.open_plans and bool(np.all((state == HOST) | (state == GPU)))

    def check(self) -> None:
        """Recount what must add up.

        Raises:
            RuntimeError: If it does not.
        """
        self.states.check()
        self.widths.check()
        if np.any(self._needs.read_at(self.bits) & (self.states.state != GPU)):
            raise RuntimeError("a plane or table of a committed width is not resident")

    # --- decisions ---

    def _refuse(self, blocks: Ints, bits: Ints, step: int) -> Ints:
        """Desired widths with those of pinned blocks and of raises held back at q."""
        q = self.bits[blocks]
        pinned = self.faults.pinned[blocks] & (bits != q)
        early = (bits > q) & (step < self.faults.retry_step[blocks]) & ~pinned
        self.faults.note(blocks[pinned], "pinned")
        self.faults.note(blocks[early], "back-off")
        accepted: Ints = np.where(pinned | early, q, bits)
        return accepted

    def _lead(self, blocks: Ints, target: Ints, reason: str, *, count: bool = False) -> None:
        """Set desired widths and abandon what neither they nor the committed ones need."""
        self.desired[blocks] = target
        self._waiting = self._waiting[~np.isin(self._waiting, blocks)]
        surplus = ~(self._needs.read_at(target) | self._needs.read_at(self.bits[blocks]))
        surplus &= self.states.state[blocks] != HOST
        keys = self._needs.keys(blocks, surplus & (self.states.state[blocks] != RETIRING))
        if count:
            under_way = surplus & (self.states.state[blocks] == IN_FLIGHT)
            under_way &= ~self.states.draining[blocks]
            self.faults.note(blocks[under_way.any(axis=1)], reason)
        self.states.abandon(keys, reason)

    def _give_up(self, blocks: Ints, reason: str) -> None:
        self.widths.plan_of[blocks] = NO_PLAN
        self._lead(blocks, self.bits[blocks], reason)

    def _want_again(self, blocks: Ints) -> None:
        needed = self._needs.read_at(self.desired[blocks])
        self.states.want_again(
            self._needs.keys(blocks, needed & (self.states.state[blocks] == RETIRING))
        )

    def _lacks(self, blocks: Ints) -> NDArray[np.bool_]:
        """[k, S]: parts of the desired width for which a copy has still to start."""
        absent = (self.states.state[blocks] == HOST) | self.states.draining[blocks]
        lacks: NDArray[np.bool_] = self._needs.read_at(self.desired[blocks]) & absent
        return lacks

    def _start_waiting(self, step: int) -> PartCopies:
        """Start the raises whose pages are all free, in order; give up those without hope."""
        blocks = self._waiting
        if not len(blocks):
            return self.states.copies_of(np.zeros(0, np.int64))
        lacks = self._lacks(blocks)
        need = (self.parts.pages[blocks] * lacks).sum(axis=1)
        drains = (lacks & self.states.draining[blocks]).any(axis=1)
        fits = fitting(np.where(drains, 0, need), self.states.ledger.free_pages) & ~drains
        copies = self.states.start(self._needs.keys(blocks[fits], lacks[fits]), step=step)
        self._waiting = blocks[~fits]
        late = step - self._waiting_since[blocks] >= self.rules.timeout_steps
        hopeless = ~fits & (late | (~drains & (self.pages_returning == 0)))
        self.faults.note(blocks[hopeless & drains], "draining")
        self.faults.note(blocks[hopeless & ~drains], "no pages")
        self._settle(blocks[hopeless])
        return copies

    def _time_out(self, step: int) -> None:
        keys = self.states.late(step, self.rules.timeout_steps)
        if len(keys):
            self.states.abandon(keys, "time-out")
            self._failed(np.unique(keys // self.parts.num_parts), "time-out", step)

    def _fail(self, keys: Ints, reason: str, step: int) -> None:
        if len(keys):
            self.states.ended(keys, reason)
            self._failed(np.unique(keys // self.parts.num_parts), reason, step)

    def _failed(self, blocks: Ints, reason: str, step: int) -> None:
        self.faults.fail(blocks, reason, step=step)
        self._settle(blocks)

    def _settle(self, blocks: Ints) -> None:
        """Lower desired widths to the highest that parts here or under way still reach."""
        state = self.states.state[blocks]
        coming = (state == GPU) | ((state == IN_FLIGHT) & ~self.states.draining[blocks])
        reached = self._needs.reached(self.bits[blocks], self.desired[blocks], coming)
        self.widths.plan_of[blocks[reached == self.bits[blocks]]] = NO_PLAN
        self._lead(blocks, reached, "raise failed")
        self.widths.close_finished()

    def _commit(self) -> Ints:
        """Move committed widths; returns the blocks that moved."""
        blocks = np.flatnonzero(self.widths.plan_of != NO_PLAN)
        have = self.states.state[blocks] == GPU
        reached = self._needs.reached(self.bits[blocks], self.desired[blocks], have)
        moves = reached != self.bits[blocks]
        blocks, reached = blocks[moves], reached[moves]
        old = self.bits[blocks]
        self.widths.commit(blocks, reached)
        superseded = self._needs.keys(
            blocks, self._needs.read_at(old) & ~self._needs.read_at(reached)
        )
        self.states.retire(superseded, last_reader=self.widths.last_built)
        self.faults.succeeded(blocks[reached > old])
        moved: Ints = blocks
        return moved

    # --- books ---

    def _orders(
        self,
        *,
        blocks: Ints | None = None,
        copies: PartCopies | None = None,
        freed: PartList | None = None,
        freed_pages: int = 0,
    ) -> PageOrders:
        nothing = np.zeros(0, np.int64)
        moved = nothing if blocks is None else blocks
        return PageOrders(
            blocks=moved,
            bits=self.bits[moved],
            copies=self.states.copies_of(nothing) if copies is None else copies,
            cancels=self.states.take_cancels(),
            freed=PartList(nothing, nothing) if freed is None else freed,
            freed_pages=freed_pages,
        )
