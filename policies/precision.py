"""How many bits each weight block holds while the KV cache grows and shrinks.

Told the state of the weight page table and of the memory at a step boundary, the policy answers
with drops and raises:

    free pages less forecast  < low                      shrink to the target, drops only
                              > high for calm_steps      restore to the target, by plan interval
                              between                    exchange at equal bytes, by plan interval
    a KV allocation failed                               emergency: drops only, at once

Drops move no data, so shrinking is immediate. Raises copy; they are limited to what the link
carries in a plan interval.

Source: PagedWeight (memory targets from KV pressure, restored later, commits at safe boundaries).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from policies import precision_moves as moves
from policies.catalog import precision_planner
from policies.orders import BitWidths, PrecisionDecision, PrecisionOrders
from policies.precision_moves import Movable
from policies.precision_plan import Engine, compiled_loops, threshold_cut
from policies.precision_problem import held_bytes, problem
from policies.precision_state import PrecisionSettings, PrecisionState, check_state, level_of_bits
from policies.precision_tables import BlockTables, Ints

Reason = Literal["shrink", "emergency", "restore", "exchange"]

_NO_WIDTHS = BitWidths(np.zeros(0, np.int64), np.zeros(0, np.int64))
_NO_ORDERS = PrecisionOrders(0, _NO_WIDTHS, _NO_WIDTHS)
_NOTHING = PrecisionDecision(_NO_ORDERS, "none")


class PrecisionPolicy:
    """Watermarks, forecast, hysteresis and exchange around one planner of the catalog.

    A block that is being raised counts as held at its desired width: a drop of it cancels what the
    new width does not need, and it is raised no further before its copies have landed.
    """

    def __init__(
        self,
        tables: BlockTables,
        *,
        arena_pages: int,
        page_bytes: int,
        settings: PrecisionSettings | None = None,
        engine: Engine = "auto",
    ) -> None:
        """Start with plans due after one interval.

        Args:
            tables: Bytes, in whole pages, and damage of the blocks.
            arena_pages: Pages shared by weights and KV.
            page_bytes: Bytes of a page.
            settings: Watermarks, rhythm and signals.
            engine: Of the planner; both give the same orders.

        Raises:
            ValueError: If the bytes of a block are no whole pages, or the planner is unknown.
        """
        odd = tables.bytes_ % page_bytes != 0
        if odd.any():
            block, level = (int(entry[0]) for entry in np.nonzero(odd))
            raise ValueError(
                f"bytes_ of block {block} at {tables.bits[level]} bits must be whole pages of "
                f"{page_bytes} bytes, found {tables.bytes_[block, level]}"
            )
        if arena_pages < 1:
            raise ValueError(f"arena_pages must be >= 1, found {arena_pages}")
        self.tables = tables
        self.arena_pages = arena_pages
        self.page_bytes = page_bytes
        self.settings = settings if settings is not None else PrecisionSettings()
        self._planner = precision_planner(self.settings.planner, engine)
        self._engine: Engine = engine
        self._loops = compiled_loops(engine)
        self._last_plan_id = 0
        self._due = self.settings.plan_interval_s
        self._calm_since: int | None = None
        self._is_restoring = False

    def decide(self, state: PrecisionState, *, now: float) -> PrecisionDecision:
        """Orders for the boundary before the next step.

        Args:
            state: As the last boundary left it.
            now: Seconds since the start of the run.

        Raises:
            ValueError: If an array has the wrong length or a width is unknown.
        """
        held = self._held(state)
        margin = self._spare_pages(state, held) - state.forecast_pages
        self._watch(margin, state.step)
        if margin < self._pages(self.settings.low_share):
            self._is_restoring = False
            return self._shrink(self._movable(state, held), margin, "shrink")
        if not self.settings.use_movement or now < self._due:
            return _NOTHING
        self._due = now + self.settings.plan_interval_s
        link_bytes = self._link_bytes() - state.copying_bytes
        if link_bytes <= 0:
            return _NOTHING
        movable = self._movable(state, held)
        return self._restore(movable, margin, link_bytes, state.step) or self._exchange(
            movable, link_bytes
        )

    def on_allocation_failed(
        self, state: PrecisionState, pages_needed: int, *, now: float
    ) -> PrecisionDecision:
        """Drops at once, because the KV cache asked for pages that are not there.

        Where ``pages_short`` is above 0 even the floors leave too little: preempt requests. Where
        nothing is ordered and nothing is short, pages are on their way back: try again in the next
        step.

        Args:
            state: As it is now; may be told between boundaries.
            pages_needed: Pages of the failed allocation.
            now: Seconds since the start of the run.

        Raises:
            ValueError: As ``decide``.
        """
        held = self._held(state)
        spare = self._spare_pages(state, held)
        margin = spare - max(state.forecast_pages, pages_needed)
        self._watch(margin, state.step)
        if margin >= self._pages(self.settings.low_share):
            return _NOTHING
        self._is_restoring = False
        decision = self._shrink(self._movable(state, held), margin, "emergency")
        freed = 0
        if decision.bytes_ is not None:
            freed = (held_bytes(self.tables, held) - decision.bytes_) // self.page_bytes
        return replace(
            decision, reason="emergency", pages_short=max(0, pages_needed - spare - freed)
        )

    def next_wakeup(self) -> float | None:
        """When the next plan with copies is due, in seconds; None if nothing is ever copied."""
        return self._due if self.settings.use_movement else None

    def _held(self, state: PrecisionState) -> Ints:
        check_state(state, self.tables.num_blocks)
        return level_of_bits(self.tables, state.desired_bits, "desired_bits")

    def _movable(self, state: PrecisionState, held: Ints) -> Movable:
        tables, settings = self.tables, self.settings
        committed = level_of_bits(tables, state.bits, "bits")
        widths = np.asarray(tables.bits, dtype=np.int64)
        floor = np.zeros(len(held), dtype=np.int64)
        multiplier = np.ones(len(held))
        if settings.use_routing:
            floor = np.minimum(np.searchsorted(widths, state.hot_floor_bits), tables.top_level)
            multiplier = multiplier * state.mass_multiplier
        if settings.use_prompt:
            multiplier = multiplier * state.prompt_multiplier
        pinned = np.asarray(state.pinned, dtype=np.bool_)
        return Movable(
            held=held,
            floor=floor,
            may_fall=~pinned,
            may_rise=~pinned & (held <= committed) & (state.retry_step <= state.step),
            multiplier=multiplier,
        )

    def _spare_pages(self, state: PrecisionState, held: Ints) -> int:
        """Pages neither KV nor weights hold, once all open plans are carried out."""
        weights = held_bytes(self.tables, held) // self.page_bytes
        return self.arena_pages - state.kv_pages - weights

    def _pages(self, share: float) -> int:
        return math.ceil(share * self.arena_pages)

    def _link_bytes(self) -> int:
        s = self.settings
        return int(s.link_share * s.link_bytes_per_s * s.plan_interval_s)

    def _watch(self, margin: int, step: int) -> None:
        """Since when the memory has been above the high mark."""
        if margin <= self._pages(self.settings.high_share):
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = step

    def _restore(
        self, movable: Movable, margin: int, link_bytes: int, step: int
    ) -> PrecisionDecision | None:
        """Raises into pages that have long been free; None where there is nothing to restore."""
        calm = self._calm_since is not None and step - self._calm_since >= self.settings.calm_steps
        extra = (margin - self._pages(self.settings.target_share)) * self.page_bytes
        self._is_restoring = (self._is_restoring or calm) and extra > 0
        if not self._is_restoring:
            return None
        level = moves.raises(self._planner, self.tables, movable, min(extra, link_bytes))
        self._is_restoring = bool((level != movable.held).any())
        return self._decision(movable, level, "restore", 0) if self._is_restoring else None

    def _exchange(self, movable: Movable, link_bytes: int) -> PrecisionDecision:
        """Raises paid for by drops."""
        level = moves.exchanges(
            self._planner,
            self.tables,
            movable,
            margin=self.settings.exchange_margin,
            link_bytes=link_bytes,
            engine=self._engine,
        )
        return self._decision(movable, level, "exchange", 0)

    def _shrink(self, movable: Movable, margin: int, reason: Reason) -> PrecisionDecision:
        """The least harmful drops that lead the margin back to the target."""
        low, target = (
            self._pages(share) for share in (self.settings.low_share, self.settings.target_share)
        )
        held = held_bytes(self.tables, movable.held)
        level, bytes_short = moves.drops(
            self._planner, self.tables, movable, held - (target - margin) * self.page_bytes
        )
        lacks_to_target = -(-bytes_short // self.page_bytes)
        return self._decision(movable, level, reason, max(0, lacks_to_target - (target - low)))

    def _decision(
        self, movable: Movable, level: Ints, reason: Reason, pages_short: int
    ) -> PrecisionDecision:
        if (level == movable.held).all():
            return PrecisionDecision(_NO_ORDERS, reason if pages_short else "none", pages_short)
        self._last_plan_id += 1
        orders = moves.orders(self.tables, movable, level, self._last_plan_id)
        bytes_ = held_bytes(self.tables, level)
        damage, bound = self._damage_and_bound(movable, level, bytes_)
        gap = damage / bound - 1.0 if bound > 0.0 else (0.0 if damage <= 0.0 else math.inf)
        return PrecisionDecision(orders, reason, pages_short, bytes_, damage, bound, gap)

    def _damage_and_bound(self, movable: Movable, level: Ints, bytes_: int) -> tuple[float, float]:
        """Damage of the levels, and the linear bound of as many bytes, were copies free."""
        free_to_rise = movable.may_rise | (level > movable.held)
        asked = problem(
            self.tables,
            bytes_,
            np.minimum(movable.lowest, level),
            np.where(free_to_rise, self.tables.top_level, np.maximum(movable.held, level)),
            movable.multiplier,
        )
        cut = threshold_cut(self._loops, asked)
        damage = asked.total(level)
        return damage, min(damage, max(0.0, asked.total(cut.level) - cut.price * cut.room))
