"""Pages in motion under any schedule of faults: rules, bits, pages; broken movers are caught."""

import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.orders import BitWidths, PrecisionOrders
from policies.weight_page_rules import HistoryChecker
from policies.weight_page_states import GPU, IN_FLIGHT, RETIRING
from policies.weight_page_table import MovementRules
from runtime.page_arena import PageArena
from runtime.page_faulty_device import FaultRates, FaultyDevice
from runtime.page_layout import BlockShape, CanonicalLayout
from runtime.page_movement import PageMover
from runtime.page_parent import HostParent

PAGE_BYTES = 1024
SHAPES = (BlockShape(24, 70, 2), BlockShape(17, 400))


@dataclass
class Block:
    planes: np.ndarray
    tables: dict


def random_block(shape, chance):
    words = -(-shape.columns // 32)
    planes = chance.integers(0, 1 << 32, (8, shape.rows, words), dtype=np.uint32)
    tables = {q: chance.normal(size=(shape.rows, 1 << q)).astype(np.float16) for q in range(2, 9)}
    return Block(planes, tables)


def parent_of(num_blocks, chance):
    shapes = [SHAPES[block % 2] for block in range(num_blocks)]
    blocks = [random_block(shape, chance) for shape in shapes]
    parent = HostParent(shapes, CanonicalLayout(), page_bytes=PAGE_BYTES)
    parent.store_all(blocks)
    return parent, blocks


def pages_at(parent, bits, tables="all"):
    """Pages of blocks with all tables up to their width (or that one), counted by hand."""
    total = 0
    for block, q in enumerate(bits):
        shape = parent.shapes[block]
        plane = -(-(4 * shape.rows * -(-shape.columns // 32)) // PAGE_BYTES)
        total += q * plane + sum(
            -(-shape.rows * 2 * 2**b // PAGE_BYTES)
            for b in range(2 if tables == "all" else q, q + 1)
        )
    return total


def orders(plan_id, bits_by_block, now):
    items = sorted(bits_by_block.items())
    drops = [(block, bits) for block, bits in items if bits <= now[block]]
    raises = [(block, bits) for block, bits in items if bits > now[block]]

    def widths(pairs):
        return BitWidths(
            np.array([block for block, _ in pairs], np.int64),
            np.array([bits for _, bits in pairs], np.int64),
        )

    return PrecisionOrders(plan_id, widths(drops), widths(raises))


def in_pages(values):
    """The bytes of an array, row by row, padded with zeros to whole pages."""
    raw = np.frombuffer(values.tobytes(), np.uint8)
    padded = np.zeros((-(-len(raw) // PAGE_BYTES), PAGE_BYTES), np.uint8)
    padded.reshape(-1)[: len(raw)] = raw
    return padded


class Kernels:
    """What kernels of a step see: widths and page lists as they were when it was built."""

    def __init__(self, engine):
        tables = engine.mover.tables
        self.bits = tables.bits.copy()
        self.pages = np.concatenate(
            [
                pages
                for block, bits in enumerate(self.bits.tolist())
                for pages in (
                    *(tables.plane_list(block, plane) for plane in range(bits)),
                    tables.table_list(block, bits),
                )
            ]
        )
        self.right = np.concatenate(
            [
                pages
                for block, bits in enumerate(self.bits.tolist())
                for pages in (*engine.plane_pages[block][:bits], engine.table_pages[block][bits])
            ]
        )

    def read_the_parents_bits(self, arena):
        """Whether planes 0..q-1 and the table of q are the parent's, bit for bit."""
        return np.array_equal(arena.buffer.array[self.pages], self.right)


class Engine:
    """A driver with KV blocks of garbage, kernels that read at any time, and a checker."""

    def __init__(self, seed, num_blocks, spare_pages, rates, rules, bits, mover=PageMover):
        chance = np.random.default_rng(seed)
        self.parent, self.blocks = parent_of(num_blocks, chance)
        self.plane_pages = [[in_pages(plane) for plane in block.planes] for block in self.blocks]
        self.table_pages = [
            {bits: in_pages(table) for bits, table in block.tables.items()} for block in self.blocks
        ]
        self.history = []
        self.checker = HistoryChecker()
        num_pages = pages_at(self.parent, bits, rules.tables) + spare_pages
        self.arena = PageArena(num_pages, page_bytes=PAGE_BYTES, history=self.record)
        self.device = FaultyDevice(self.arena, chance, rates)
        self.chance = chance
        self.mover = mover(
            self.parent,
            self.arena,
            self.device,
            np.array(bits),
            rules=rules,
            job_bytes=4 * PAGE_BYTES,
            history=self.record,
        )
        self.kv = []
        self.running = {}
        self.step = self.plans = 0

    def record(self, event):
        self.history.append(event)
        self.checker.feed(event)

    def plan(self, bits_by_block):
        self.plans += 1
        self.mover.plan(
            orders(self.plans, bits_by_block, self.mover.table.bits), step=self.step + 1
        )

    def next_step(self):
        self.device.tick()
        self.step += 1
        self.mover.boundary(self.step)
        kernels = Kernels(self)
        self.mover.step_built(self.step)
        self.running[self.step] = kernels
        still = {step for step, _ in self.mover._fences}
        self.running = {step: seen for step, seen in self.running.items() if step in still}

    def take_kv(self, num_blocks, block_bytes):
        pages = self.arena.take_kv(num_blocks, block_bytes)
        if pages is not None:
            shape = (*pages.shape, PAGE_BYTES)
            self.arena.buffer.array[pages] = self.chance.integers(0, 256, shape, dtype=np.uint8)
            self.kv.append((pages, zlib.crc32(self.arena.buffer.array[pages].tobytes())))
        return pages

    def give_kv(self, place):
        pages, _ = self.kv.pop(place)
        self.arena.give_kv(pages)

    def check(self, recount=True):
        assert self.checker.violation is None, self.checker.violation.detail
        if recount:
            self.mover.table.check()
        use = self.arena.use()
        assert use.weight_pages + use.kv_pages + use.free_pages == use.num_pages
        now = Kernels(self)
        assert np.array_equal(now.bits, self.mover.table.bits)
        for seen in [now, *self.running.values()]:
            assert seen.read_the_parents_bits(self.arena)
        for pages, checksum in self.kv:
            assert zlib.crc32(self.arena.buffer.array[pages].tobytes()) == checksum

    def come_to_rest(self, max_steps=600, recount=True):
        for _ in range(max_steps):
            self.next_step()
            if self.mover.at_rest:
                break
        self.check(recount)
        assert self.checker.rest() is None, self.checker.violation.detail
        assert self.mover.at_rest
        table = self.mover.table
        held = pages_at(self.parent, table.bits.tolist(), table.rules.tables)
        assert self.arena.use().weight_pages == held
        while self.kv:
            self.give_kv(0)
        assert self.arena.use().free_pages == self.arena.num_pages - held


RULES = MovementRules(timeout_steps=6, max_failures=3)
CALM = FaultRates()
BITS = [4, 3, 2, 6]


def engine(rates=CALM, *, spare=200, rules=RULES, bits=BITS, seed=0, mover=PageMover):
    return Engine(seed, len(bits), spare, rates, rules, bits, mover)


class Movement(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32 - 1),
        bits=st.lists(st.integers(2, 8), min_size=2, max_size=4),
        spare=st.sampled_from([2, 6, 20, 100]),
        delay=st.integers(1, 5),
        fence=st.integers(1, 4),
        slots=st.integers(1, 4),
        faults=st.sampled_from([(0, 0, 0), (0.3, 0, 0), (0, 0.3, 0), (0, 0, 0.3), (0.2, 0.2, 0.2)]),
        tables=st.sampled_from(["all", "all", "active"]),
    )
    def start(self, seed, bits, spare, delay, fence, slots, faults, tables):
        fails, corrupts, loses = faults
        rates = FaultRates(
            fails=fails,
            corrupts=corrupts,
            loses=loses,
            delay_ticks=delay,
            fence_ticks=fence,
            slots=slots,
        )
        rules = MovementRules(timeout_steps=6, max_failures=3, tables=tables)
        self.engine = Engine(seed, len(bits), spare, rates, rules, bits)

    @rule(data=st.data())
    def plan(self, data):
        blocks = st.integers(0, len(self.engine.blocks) - 1)
        self.engine.plan(data.draw(st.dictionaries(blocks, st.integers(2, 8), min_size=1)))

    @rule()
    def step(self):
        self.engine.next_step()

    @rule(count=st.integers(2, 8))
    def steps(self, count):
        for _ in range(count):
            self.engine.next_step()
            self.engine.check()

    @rule()
    def time_passes(self):
        self.engine.device.tick()

    @rule()
    def pressure(self):
        self.engine.mover.cancel_raises(step=self.engine.step + 1)

    @rule(blocks=st.integers(1, 9), size=st.sampled_from([100, 1024, 3000]))
    def kv_grows(self, blocks, size):
        before = self.engine.arena.use()
        pages = self.engine.take_kv(blocks, size)
        need = blocks * -(-size // PAGE_BYTES)
        assert (pages is None) == (need > before.free_pages)
        taken = 0 if pages is None else need
        assert self.engine.arena.use().kv_pages == before.kv_pages + taken

    @precondition(lambda self: self.engine.kv)
    @rule(data=st.data())
    def kv_shrinks(self, data):
        self.engine.give_kv(data.draw(st.integers(0, len(self.engine.kv) - 1)))

    @rule()
    def unpin(self):
        table = self.engine.mover.table
        table.faults.unpin(np.flatnonzero(table.faults.pinned))

    @invariant()
    def holds(self):
        self.engine.check()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.come_to_rest()


TestMovement = Movement.TestCase
TestMovement.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# --- what must happen, one by one ---


def run(driver, steps):
    for _ in range(steps):
        driver.next_step()
        driver.check()


def test_a_drop_moves_no_bytes_and_frees_its_pages():
    driver = engine()
    driver.plan({0: 2, 3: 3})
    run(driver, 3)
    report = driver.mover.report()
    assert driver.mover.tables.bits.tolist() == [2, 3, 2, 3]
    assert (report.moved_bytes, report.jobs) == (0, 0)
    freed = pages_at(driver.parent, [4, 3, 2, 6]) - pages_at(driver.parent, [2, 3, 2, 3])
    assert report.freed_bytes == freed * PAGE_BYTES
    assert sum(driver.device.fates.values()) == 0
    driver.come_to_rest()


def test_a_raise_moves_exactly_its_planes_and_tables():
    driver = engine()
    driver.plan({1: 5})
    run(driver, 4)
    shape = SHAPES[1]
    planes = 2 * 4 * shape.rows * -(-shape.columns // 32)
    tables = shape.rows * 2 * (2**4 + 2**5)
    assert driver.mover.report().moved_bytes == planes + tables
    assert driver.mover.tables.bits[1] == 5
    driver.come_to_rest()


def test_neighbouring_planes_are_gathered_into_one_copy():
    chance = np.random.default_rng(1)
    parent, _ = parent_of(4, chance)
    arena = PageArena(400, page_bytes=PAGE_BYTES)
    device = FaultyDevice(arena, chance, FaultRates(slots=64))
    mover = PageMover(parent, arena, device, np.array(BITS), job_bytes=1 << 20)
    mover.plan(orders(1, {0: 8, 1: 8}, mover.table.bits), step=1)
    assert mover.report().jobs == 1
    (copy,) = device._copies
    assert len(copy.job.parts) == 2 * (4 + 5)
    assert np.count_nonzero(np.diff(copy.job.host_pages) != 1) == 1  # one run for each block


def test_a_failed_copy_leaves_the_width_and_holds_the_block_back():
    driver = engine(FaultRates(fails=1.0))
    driver.plan({1: 4})
    run(driver, 1)
    report = driver.mover.report()
    assert driver.mover.table.bits[1] == 3
    assert report.blocks_by_reason == {"copy error": 1}
    assert report.moved_bytes == 0
    assert report.wasted_bytes > 0
    assert report.errors == ("copy 0: the link reported an error",)
    driver.plan({1: 4})
    assert driver.mover.report().blocks_by_reason["back-off"] == 1
    run(driver, 1)
    driver.plan({1: 4})  # 2**1 steps after the failure
    run(driver, 1)
    assert driver.mover.report().blocks_by_reason["copy error"] == 2
    driver.come_to_rest()


def test_three_corrupt_copies_pin_the_block():
    driver = engine(FaultRates(corrupts=1.0))
    for _ in range(3):
        driver.plan({1: 4})
        run(driver, 10)
    report = driver.mover.report()
    assert report.blocks_by_reason == {"checksum": 3}
    assert report.pinned == (1,)
    driver.plan({1: 4, 0: 2})
    run(driver, 3)
    assert driver.mover.tables.bits.tolist() == [2, 3, 2, 6]
    assert driver.mover.report().blocks_by_reason["pinned"] == 1
    driver.come_to_rest()


def test_a_lost_copy_times_out_and_its_pages_come_back():
    driver = engine(FaultRates(loses=1.0))
    driver.plan({1: 4})
    run(driver, RULES.timeout_steps)
    assert driver.mover.report().blocks_by_reason == {}
    run(driver, 4)
    assert driver.mover.report().blocks_by_reason == {"time-out": 1}
    driver.come_to_rest()
    assert "xfer_fail" in {event["ev"] for event in driver.history}


def test_memory_pressure_cancels_raises_and_drops_go_on():
    driver = engine(FaultRates(delay_ticks=5), rules=MovementRules(timeout_steps=50))
    driver.plan({0: 2, 1: 8, 2: 8})
    driver.mover.cancel_raises(step=1)
    run(driver, 8)
    assert driver.mover.tables.bits.tolist() == [2, 3, 2, 6]
    assert driver.mover.report().blocks_by_reason == {"pressure": 2}
    driver.come_to_rest()


def test_a_raise_waits_for_the_pages_of_its_own_plans_drops():
    driver = engine(FaultRates(fence_ticks=3), spare=0)
    driver.plan({3: 2, 0: 5})
    run(driver, 12)
    assert driver.mover.tables.bits.tolist() == [5, 3, 2, 2]
    assert "no pages" not in driver.mover.report().blocks_by_reason


def test_a_raise_without_room_is_given_up_whole():
    driver = engine(spare=1)
    driver.plan({0: 8})
    report = driver.mover.report()
    assert report.blocks_by_reason == {"no pages": 1}
    assert report.arena.free_pages == 1
    assert driver.mover.at_rest
    driver.come_to_rest()


# --- movers broken on purpose: each must be caught by the rules or by the bits ---


class FreesAtOnce(PageMover):
    def boundary(self, step):
        self.table.widths._running.clear()
        return super().boundary(step)

    def _poll_fences(self):
        self._fences = []


class CommitsBeforeLanding(PageMover):
    def boundary(self, step):
        states = self.table.states
        under_way = np.flatnonzero((states.state == IN_FLIGHT) & ~states.draining)
        states.state.ravel()[under_way] = GPU
        try:
            return super().boundary(step)
        finally:
            states.state.ravel()[under_way] = IN_FLIGHT


class ShowsDesiredWidths(PageMover):
    def step_built(self, step, *, blocks=None):
        self.tables.bits[:] = self.table.desired
        super().step_built(step, blocks=blocks)


class IgnoresChecksums(PageMover):
    def _report_end(self, end, step):
        super()._report_end(type(end)(end.job, end.error, None), step)


class CopiesAgainWhatIsThere(PageMover):
    def plan(self, orders, *, step):
        self.table._want_again = lambda blocks: None
        retiring = self.table.states.state == RETIRING
        self.table.states.state[retiring] = 0
        super().plan(orders, step=step)


class ForgetsThePages(PageMover):
    def _carry_out(self, orders, step):
        if len(orders.cancels):
            self._arena.ledger.take(1, "weights")
        super()._carry_out(orders, step)


class GivesPagesBackWhileCopiesDrain(PageMover):
    def _cancel(self, cancels, step):
        states = self.table.states
        if len(cancels):
            keys = cancels.blocks * self._parent.parts.num_parts + cancels.parts
            self._under_way = {}
            self._queue.clear()
            states.ended(keys, "cancelled")

    def _report_end(self, end, step):
        if end.job.job_id in self._under_way:
            super()._report_end(end, step)


class CommitsBeyondThePlan(PageMover):
    def boundary(self, step):
        self.table.desired[self.table.desired < self.table.bits] -= 1
        return super().boundary(step)


class MovesOnFailure(PageMover):
    def _report_end(self, end, step):
        if end.error is not None:
            blocks = np.unique(end.job.blocks)
            self.table.widths.commit(blocks, self.table.desired[blocks])
        super()._report_end(end, step)


class DropsWhatFailed(PageMover):
    def _report_end(self, end, step):
        widths, block = self.table.widths, end.job.blocks[:1]
        plan = widths.plan_of[block].copy()
        super()._report_end(end, step)
        gone = plan[0] not in widths.open_plans and widths.plan_of[block[0]] == -1
        if end.error is not None and gone and plan[0] != -1 and widths.bits[block[0]] > 2:
            widths.plan_of[block] = plan
            widths.commit(block, widths.bits[block] - 1)


class NeverCloses(PageMover):
    def boundary(self, step):
        self.table.widths.close_finished = lambda: None
        return super().boundary(step)


BROKEN = [
    FreesAtOnce,
    CommitsBeforeLanding,
    ShowsDesiredWidths,
    IgnoresChecksums,
    CopiesAgainWhatIsThere,
    ForgetsThePages,
    GivesPagesBackWhileCopiesDrain,
    CommitsBeyondThePlan,
    MovesOnFailure,
    DropsWhatFailed,
    NeverCloses,
]


def trouble(mover, seed, recount=True):
    """Words of the first break under a busy, faulty schedule; None if all is well."""
    rates = FaultRates(fails=0.15, corrupts=0.15, loses=0.1, delay_ticks=4, fence_ticks=4)
    driver = engine(rates, spare=60, seed=seed, mover=mover, rules=MovementRules(timeout_steps=6))
    chance = np.random.default_rng(seed)
    try:
        for _ in range(40):
            chosen = np.flatnonzero(chance.random(4) < 0.5)
            if len(chosen) and chance.random() < 0.5:
                driver.plan({int(block): int(chance.integers(2, 9)) for block in chosen})
            if chance.random() < 0.4:
                driver.take_kv(int(chance.integers(1, 12)), 1500)
            if driver.kv and chance.random() < 0.3:
                driver.give_kv(0)
            driver.next_step()
            driver.check(recount)
        table = driver.mover.table
        table.faults.unpin(np.flatnonzero(table.faults.pinned))
        driver.come_to_rest(100, recount)
    except Exception as error:
        violation = driver.checker.violation
        return str(violation) if violation else type(error).__name__
    return None


@pytest.mark.parametrize("mover", BROKEN)
def test_a_mover_broken_on_purpose_is_caught(mover):
    assert any(trouble(mover, seed) for seed in range(6))


def test_the_unbroken_mover_is_not_caught_by_the_same_schedules():
    assert [trouble(PageMover, seed) for seed in range(6)] == [None] * 6


RULE_OF_BROKEN = {
    FreesAtOnce: "R3 live",
    CommitsBeforeLanding: "R2 resident",
    ShowsDesiredWidths: "R1 width",
    CopiesAgainWhatIsThere: "R5 copy",
    CommitsBeyondThePlan: "R6 between",
    DropsWhatFailed: "R4 unchanged",
    MovesOnFailure: "R2 resident",
    ForgetsThePages: "R7 pages",
    NeverCloses: "R7 plan",
}


@pytest.mark.parametrize("mover", RULE_OF_BROKEN)
def test_the_checker_names_the_rule_that_a_broken_mover_breaks(mover):
    assert RULE_OF_BROKEN[mover] in {trouble(mover, seed, recount=False) for seed in range(6)}
