"""The precision policy drives the weight page table: the rules hold and the KV cache gets pages."""

from collections.abc import Iterator

import numpy as np
import pytest

from models.streams import stream
from policies.orders import PrecisionDecision
from policies.precision import PrecisionPolicy
from policies.precision_state import PrecisionSettings, PrecisionState
from policies.precision_tables import block_tables
from policies.weight_page_ledger import PageLedger
from policies.weight_page_parts import BlockParts
from policies.weight_page_rules import check_history
from policies.weight_page_table import WeightPageTable

BLOCKS, PAGE, ARENA, QMIN, QMAX = 30, 1024, 900, 2, 6
PLANE_PAGES = 4
WIDTHS = np.arange(QMIN, QMAX + 1)
# table of width q: one page up to 4 bits, 2 and 4 above
TABLE_PAGES = np.array([1, 1, 1, 2, 4])


class Engine:
    """Steps that never wait: copies land two steps after they start, some fail."""

    def __init__(self, seed: int) -> None:
        self.rng = stream(seed, "engine")
        self.history: list[dict] = []
        self.ledger = PageLedger(ARENA, history=self.history.append)
        parts = BlockParts.of(
            np.full(BLOCKS, PLANE_PAGES),
            np.tile(TABLE_PAGES, (BLOCKS, 1)),
            parent_bits=QMAX,
            min_bits=QMIN,
        )
        self.table = WeightPageTable(
            parts, np.full(BLOCKS, 4), ledger=self.ledger, history=self.history.append
        )
        held = PAGE * (PLANE_PAGES * WIDTHS + np.cumsum(TABLE_PAGES))
        damage = self.rng.lognormal(0, 1, BLOCKS)[:, None] * 4.0**-WIDTHS
        self.policy = PrecisionPolicy(
            block_tables(np.tile(held, (BLOCKS, 1)), damage, WIDTHS),
            arena_pages=ARENA,
            page_bytes=PAGE,
            settings=PrecisionSettings(
                plan_interval_s=0.1, link_bytes_per_s=1e7, calm_steps=4, exchange_margin=0.1
            ),
        )
        self.kv: list[np.ndarray] = []
        self.copies: list[tuple[int, int, int]] = []
        self.decisions: list[PrecisionDecision] = []
        self.preempted = 0

    def run(self, wanted_kv: Iterator[int]) -> None:
        for step, wanted in enumerate(wanted_kv):
            self._start(self.table.boundary(step), step)
            self._resize_kv(wanted, step)
            self._carry_out(self.policy.decide(self._state(step), now=0.05 * step), step)
            self.table.step_built(step)
            self.table.step_finished(step)
            self._land(step)
            self.table.check()
            self.ledger.check()

    def _resize_kv(self, wanted: int, step: int) -> None:
        while len(self.kv) > wanted:
            self.ledger.give(self.kv.pop(), "kv")
        while len(self.kv) < wanted:
            page = self.ledger.take(1, "kv")
            if page is not None:
                self.kv.append(page)
                continue
            missing = wanted - len(self.kv)
            decision = self.policy.on_allocation_failed(self._state(step), missing, now=0.05 * step)
            self._carry_out(decision, step)
            self.preempted += decision.pages_short
            return  # again in the next step

    def _carry_out(self, decision: PrecisionDecision, step: int) -> None:
        self.decisions.append(decision)
        if decision.orders.plan_id == 0:
            return
        blocks, bits = (
            np.concatenate(pair)
            for pair in zip(decision.orders.drops, decision.orders.raises, strict=True)
        )
        self._start(self.table.open_plan(decision.orders.plan_id, blocks, bits, step=step), step)

    def _start(self, orders, step: int) -> None:
        for block, part in zip(orders.copies.blocks, orders.copies.parts, strict=True):
            self.copies.append((step + 2, int(block), int(part)))

    def _land(self, step: int) -> None:
        for _, block, part in [copy for copy in self.copies if copy[0] <= step]:
            failed = self.rng.random() < 0.03
            tell = self.table.copies_failed if failed else self.table.copies_landed
            tell(np.array([block]), np.array([part]), step=step)
        self.copies = [copy for copy in self.copies if copy[0] > step]

    def _state(self, step: int) -> PrecisionState:
        n = np.arange(BLOCKS)
        drift = 1.0 + 0.9 * np.sin(n + step / 40)
        return PrecisionState(
            step=step,
            bits=self.table.bits,
            desired_bits=self.table.desired,
            hot_floor_bits=np.where(n % 10 == 0, 3, 2),
            pinned=self.table.faults.pinned,
            retry_step=self.table.faults.retry_step,
            mass_multiplier=drift,
            prompt_multiplier=np.ones(BLOCKS),
            kv_pages=self.ledger.held_pages("kv"),
            forecast_pages=10,
            copying_bytes=PAGE * PLANE_PAGES * len(self.copies),
        )


@pytest.mark.parametrize("seed", range(4))
def test_a_breathing_kv_cache_gets_its_pages_and_every_rule_of_the_page_table_holds(seed):
    engine = Engine(seed)
    rng = stream(seed, "demand")
    demand = (
        int(300 - 250 * np.cos(step / 30) + rng.integers(0, 20)) if step < 300 else 10
        for step in range(400)
    )
    engine.run(demand)
    violation = check_history(engine.history, at_rest=False)
    assert violation is None, violation
    reasons = {decision.reason for decision in engine.decisions}
    assert {"shrink", "restore", "exchange"} <= reasons
    assert (engine.table.bits >= np.where(np.arange(BLOCKS) % 10 == 0, 3, 2)).all()
    assert engine.preempted == 0  # floors leave more than the cache ever wants
    # the cache is small again: widths are back up, to where the target leaves off
    free = ARENA - engine.ledger.held_pages("weights") - engine.ledger.held_pages("kv")
    assert free <= 0.14 * ARENA + 20 + 10 or engine.table.faults.pinned.any()


def test_a_cache_that_outgrows_the_floors_is_told_how_many_pages_to_give_up():
    engine = Engine(7)
    engine.run(iter([50] * 10 + [800] * 10))
    assert engine.preempted > 0
    assert engine.decisions[-1].pages_short > 0
    assert (engine.table.bits == np.where(np.arange(BLOCKS) % 10 == 0, 3, 2)).all()
    assert check_history(engine.history, at_rest=False) is None
