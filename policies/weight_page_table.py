"""The weight page table: when the committed width of a block may move, and what must be copied.

The driver (simulated or real) tells what happened and at which step; the table answers with
orders. Widths move in ``boundary`` only: between two engine steps, after the last kernel of one
is enqueued and before the next step is built.

    boundary t     drops planned before t commit; raises commit as far as their copies have landed
    step_built t   its kernels read the widths committed now; steps may be built N ahead
    step_finished  all kernels of a step have run; when no step is left that was built before a
                   drop committed, the pages of the drop go back to the arena

Which raises start, wait or are given up is decided in policies/weight_page_moves.py; states and
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
from policies.weight_page_moves import WidthMoves
from policies.weight_page_orders import PageOrders, PartCopies, PartList
from policies.weight_page_parts import BlockParts, whole_numbers
from policies.weight_page_states import GPU, HOST, NOT_ENQUEUED, RETIRING, PartStates
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
        self._moves = WidthMoves(
            parts,
            self.widths,
            self.states,
            self.faults,
            tables=rules.tables,
            timeout_steps=rules.timeout_steps,
        )
        self._last_boundary = -1
        self._settled = False
        resident = self._moves.needs.read_at(self.bits)
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
        self._settled = False
        self.widths.open_plan(plan_id, blocks, bits)
        target = self._moves.refuse(blocks, bits, step)
        self.widths.plan_of[blocks] = np.where(target != self.bits[blocks], plan_id, NO_PLAN)
        self._moves.lead(blocks, target, "newer plan", count=True)
        self._want_again(blocks)
        self._moves.wait(blocks, step)
        copies = self._moves.start_waiting(step)
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
        self._settled = False
        raising = self.desired > self.bits
        chosen = np.flatnonzero(raising)
        if blocks is not None:
            named = whole_numbers("blocks", blocks)
            chosen = named[raising[named]]
        self.faults.hold_back(chosen, reason, step=step)
        self._moves.give_up(chosen, reason)
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
        self._moves.fail(keys[~good & ~drains], "checksum", step)
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
        self._moves.fail(keys[~drains], reason, step)

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
        if self._settled:  # at rest, and told no plan since: nothing can have become ready
            self.states.ledger.state_pages()
            return self._orders()
        self._moves.time_out(step)
        blocks = self._moves.commit()
        freed, freed_pages = self.states.release(self.widths.oldest_running)
        copies = self._moves.start_waiting(step)
        self.widths.close_finished()
        self.states.ledger.state_pages()
        self._settled = self.at_rest
        return self._orders(blocks=blocks, copies=copies, freed=freed, freed_pages=freed_pages)

    # --- what the driver asks ---

    def resident_copies(self) -> PartCopies:
        """All parts on the device with their pages, as copies (to fill the arena at the start)."""
        return self.states.copies_of(np.flatnonzero(self.states.state == GPU))

    def committed_copies(self, blocks: Ints) -> PartCopies:
        """Parts that kernels read at the committed widths of some blocks, with their pages."""
        return self.states.copies_of(
            self._moves.needs.keys(blocks, self._moves.needs.read_at(self.bits[blocks]))
        )

    @property
    def pages_returning(self) -> int:
        """Pages that will go back to the arena without a further plan."""
        return self._moves.pages_returning

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
        if np.any(self._moves.needs.read_at(self.bits) & (self.states.state != GPU)):
            raise RuntimeError("a plane or table of a committed width is not resident")

    # --- books ---

    def _want_again(self, blocks: Ints) -> None:
        needed = self._moves.needs.read_at(self.desired[blocks])
        self.states.want_again(
            self._moves.needs.keys(blocks, needed & (self.states.state[blocks] == RETIRING))
        )

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
