"""The weight page table, told events one by one, without a device."""

import numpy as np
import pytest

from policies.weight_page_ledger import PageLedger
from policies.weight_page_parts import BlockParts
from policies.weight_page_rules import check_history
from policies.weight_page_states import GPU, HOST, IN_FLIGHT, RETIRING
from policies.weight_page_table import MovementRules, WeightPageTable

PLANE_PAGES = np.array([2, 1, 3])
TABLE_PAGES = np.array([[1, 1, 1, 1, 2, 3, 5]] * 3)  # widths 2..8


class Driver:
    """A table with its history; a plane or table is named as the checker names it."""

    def __init__(self, bits=(4, 3, 6), free=60, **more):
        self.history = []
        self.parts = BlockParts.of(PLANE_PAGES, TABLE_PAGES, parent_bits=8, min_bits=2)
        held = sum(
            q * PLANE_PAGES[block] + TABLE_PAGES[block, : q - 1].sum()
            for block, q in enumerate(bits)
        )
        self.ledger = PageLedger(int(held) + free, history=self.history.append)
        self.table = WeightPageTable(
            self.parts,
            np.array(bits),
            ledger=self.ledger,
            history=self.history.append,
            **more,
        )

    def plan(self, number, bits_by_block, step=1):
        blocks, bits = zip(*bits_by_block.items(), strict=True)
        return self.table.open_plan(number, np.array(blocks), np.array(bits), step=step)

    def landed(self, block, *names, step=1, **more):
        parts = np.array([self.parts.number(name) for name in names])
        return self.table.copies_landed(np.full(len(parts), block), parts, step=step, **more)

    def failed(self, block, *names, step=1):
        parts = np.array([self.parts.number(name) for name in names])
        self.table.copies_failed(np.full(len(parts), block), parts, step=step)

    def state(self, block, name):
        return self.table.states.state[block, self.parts.number(name)]

    def legal(self):
        self.table.check()
        violation = check_history(self.history, at_rest=self.table.at_rest)
        return violation is None


def names(driver, copies):
    return [
        (int(block), driver.parts.name(int(part)))
        for block, part in zip(copies.blocks, copies.parts, strict=True)
    ]


def plane(number):
    return ("plane", number)


def table(bits):
    return ("table", bits)


def test_a_raise_asks_for_its_planes_and_tables_with_as_many_pages_as_they_need():
    driver = Driver()
    orders = driver.plan(1, {0: 6})
    assert names(driver, orders.copies) == [
        (0, plane(4)),
        (0, plane(5)),
        (0, table(5)),
        (0, table(6)),
    ]
    assert np.diff(orders.copies.first).tolist() == [2, 2, 1, 2]
    assert len(set(orders.copies.pages.tolist())) == 7
    assert driver.ledger.free_pages == 60 - 7


def test_a_drop_commits_at_the_first_boundary_and_asks_for_nothing():
    driver = Driver()
    orders = driver.plan(1, {0: 2, 2: 5})
    assert len(orders.copies) == len(orders.cancels) == 0
    assert driver.table.bits.tolist() == [4, 3, 6]
    orders = driver.table.boundary(1)
    assert (orders.blocks.tolist(), orders.bits.tolist()) == ([0, 2], [2, 5])
    assert orders.freed_pages == 2 * 2 + 2 + 3 + 2
    assert driver.legal()


def test_a_raise_commits_at_the_first_boundary_after_all_of_it_has_landed():
    driver = Driver()
    driver.plan(1, {1: 4})
    assert len(driver.table.boundary(1).blocks) == 0
    driver.landed(1, plane(3))
    assert len(driver.table.boundary(2).blocks) == 0  # its table is still under way
    driver.landed(1, table(4))
    assert driver.table.bits[1] == 3
    assert driver.table.boundary(3).bits.tolist() == [4]
    assert driver.table.at_rest
    assert driver.legal()


def test_blocks_of_one_plan_commit_singly_as_they_land():
    driver = Driver()
    driver.plan(1, {0: 5, 1: 4})
    driver.landed(1, plane(3), table(4))
    assert driver.table.boundary(1).blocks.tolist() == [1]
    assert driver.table.widths.open_plans == [1]
    driver.landed(0, plane(4), table(5))
    assert driver.table.boundary(2).blocks.tolist() == [0]
    assert driver.table.widths.open_plans == []
    assert driver.legal()


def test_a_partial_raise_commits_to_the_highest_contiguous_plane():
    driver = Driver()
    driver.plan(1, {0: 7})
    driver.landed(0, plane(4), plane(6), table(5), table(6), table(7))
    driver.failed(0, plane(5))
    assert driver.table.desired[0] == 5
    assert driver.table.boundary(1).bits.tolist() == [5]
    assert driver.state(0, plane(6)) == HOST
    assert driver.table.at_rest
    assert driver.legal()


def test_pages_of_a_drop_wait_for_the_steps_built_before_it_committed():
    driver = Driver()
    for step in (1, 2, 3):  # three steps ahead
        driver.table.step_built(step)
    driver.plan(1, {0: 3})
    driver.table.boundary(4)
    driver.table.step_built(4)
    driver.table.step_finished(1)
    driver.table.step_finished(3)
    assert driver.table.boundary(5).freed_pages == 0
    assert driver.state(0, plane(3)) == RETIRING
    driver.table.step_finished(2)
    assert driver.table.boundary(6).freed_pages == 3
    driver.table.step_finished(4)
    assert driver.legal()


def test_a_retiring_plane_is_wanted_again_without_a_copy():
    driver = Driver()
    driver.table.step_built(1)
    driver.plan(1, {0: 3})
    driver.table.boundary(2)
    orders = driver.plan(2, {0: 5}, step=3)
    assert names(driver, orders.copies) == [(0, plane(4)), (0, table(5))]
    assert driver.table.boundary(3).bits.tolist() == [4]
    assert "reraise" in {event["ev"] for event in driver.history}
    driver.failed(0, plane(4), table(5), step=3)
    driver.table.step_finished(1)
    driver.table.boundary(4)
    assert driver.table.at_rest
    assert driver.table.bits[0] == 4
    assert driver.legal()


def test_a_plane_wanted_again_and_given_up_again_still_waits_for_its_first_readers():
    driver = Driver()
    driver.table.step_built(1)
    driver.plan(1, {0: 3})
    driver.table.boundary(2)
    driver.table.step_built(2)
    driver.plan(2, {0: 4}, step=3)
    driver.plan(3, {0: 3}, step=3)
    assert driver.state(0, plane(3)) == RETIRING
    driver.table.step_finished(2)
    assert driver.table.boundary(3).freed_pages == 0  # step 1 reads plane 3
    driver.table.step_finished(1)
    assert driver.table.boundary(4).freed_pages == 3
    assert driver.legal()


def test_a_newer_plan_keeps_the_copies_it_needs_and_cancels_the_others():
    driver = Driver()
    driver.plan(1, {0: 6, 1: 4})
    orders = driver.plan(2, {0: 5}, step=1)
    assert len(orders.copies) == 0
    assert names(driver, orders.cancels) == [(0, plane(5)), (0, table(6))]
    assert driver.table.widths.open_plans == [1, 2]  # block 1 is still plan 1's
    free = driver.ledger.free_pages
    assert not driver.landed(0, plane(5)).any()  # too late: unwanted
    driver.failed(0, table(6))
    assert driver.ledger.free_pages == free + 4
    assert driver.table.faults.failures.tolist() == [0, 0, 0]
    driver.landed(0, plane(4), table(5))
    driver.landed(1, plane(3), table(4))
    assert driver.table.boundary(2).blocks.tolist() == [0, 1]
    assert driver.legal()


def test_pages_of_a_cancelled_copy_return_only_when_the_device_has_let_go_of_them():
    driver = Driver()
    driver.plan(1, {1: 4})
    driver.table.cancel(step=1)
    driver.table.boundary(1)
    assert driver.ledger.free_pages == 60 - 2
    assert not driver.table.at_rest
    driver.failed(1, plane(3), table(4))
    assert driver.ledger.free_pages == 60
    assert driver.table.at_rest
    assert driver.legal()


def test_a_raise_whose_plane_drains_waits_for_it_and_copies_it_anew():
    driver = Driver()
    driver.plan(1, {1: 4})
    driver.plan(2, {1: 3})
    assert len(driver.plan(3, {1: 4}).copies) == 0
    driver.landed(1, plane(3), table(4))
    orders = driver.table.boundary(1)
    assert names(driver, orders.copies) == [(1, plane(3)), (1, table(4))]
    driver.landed(1, plane(3), table(4))
    assert driver.table.boundary(2).bits.tolist() == [4]
    assert driver.legal()


def test_a_drop_overtakes_a_raise_of_the_same_block():
    driver = Driver()
    driver.plan(1, {0: 6})
    driver.landed(0, plane(4), table(5))
    driver.plan(2, {0: 3})
    orders = driver.table.boundary(1)
    assert orders.bits.tolist() == [3]
    assert orders.freed_pages == 3 + 3  # plane 4 and table 5, plane 3 and table 4
    driver.failed(0, plane(5), table(6))
    driver.table.boundary(2)
    assert driver.table.at_rest
    assert driver.legal()


def test_failures_double_the_back_off_and_the_third_pins():
    driver = Driver(rules=MovementRules(max_failures=3))
    step = 1
    for failure in (1, 2, 3):
        driver.plan(failure, {1: 4}, step=step)
        assert driver.state(1, plane(3)) == IN_FLIGHT
        driver.failed(1, plane(3), table(4), step=step)
        assert driver.table.faults.retry_step[1] == step + 2**failure
        step += 2**failure
    assert driver.table.faults.pinned.tolist() == [False, True, False]
    driver.plan(4, {1: 4, 0: 5}, step=100)
    assert driver.state(1, plane(3)) == HOST
    driver.plan(5, {1: 2}, step=100)
    driver.landed(0, plane(4), table(5))
    driver.table.boundary(100)
    assert driver.table.bits.tolist() == [5, 3, 6]
    driver.table.faults.unpin(np.array([1]))
    driver.plan(6, {1: 2}, step=101)
    driver.table.boundary(101)
    assert driver.table.bits.tolist() == [5, 2, 6]
    assert driver.legal()


def test_a_raise_that_commits_clears_the_record():
    driver = Driver()
    driver.plan(1, {1: 4})
    driver.failed(1, plane(3), table(4))
    driver.plan(2, {1: 4}, step=9)
    driver.landed(1, plane(3), table(4))
    driver.table.boundary(9)
    assert driver.table.faults.failures[1] == 0
    assert driver.table.faults.counts["copy error"] == 1


def test_a_wrong_checksum_is_a_failure():
    sums = np.arange(45, dtype=np.uint32).reshape(3, 15)
    driver = Driver(checksum=sums)
    driver.plan(1, {1: 4})
    right = sums[1, [3, 10]]
    landed = driver.landed(1, plane(3), table(4), checksums=right ^ np.array([0, 1], np.uint32))
    assert landed.tolist() == [True, False]
    driver.table.boundary(1)
    assert driver.table.bits[1] == 3
    assert driver.table.faults.counts["checksum"] == 1
    assert driver.table.at_rest
    assert driver.legal()


def test_a_copy_times_out_after_so_many_steps_from_its_enqueueing():
    driver = Driver(rules=MovementRules(timeout_steps=4))
    orders = driver.plan(1, {1: 4}, step=1)
    driver.table.copies_queued(orders.copies.blocks, orders.copies.parts)
    assert len(driver.table.boundary(50).cancels) == 0
    driver.table.copies_enqueued(orders.copies.blocks, orders.copies.parts, step=50)
    assert len(driver.table.boundary(53).cancels) == 0
    assert names(driver, driver.table.boundary(54).cancels) == [(1, plane(3)), (1, table(4))]
    assert driver.table.faults.counts["time-out"] == 1
    driver.failed(1, plane(3), table(4))
    assert driver.legal()


def test_a_raise_takes_all_its_pages_or_none():
    driver = Driver(free=4)
    orders = driver.plan(1, {0: 6, 1: 4})  # 7 pages and 2
    assert names(driver, orders.copies) == [(1, plane(3)), (1, table(4))]
    assert driver.ledger.free_pages == 2
    assert driver.table.faults.counts["no pages"] == 1
    assert driver.table.desired[0] == 4
    assert driver.legal()


def test_a_raise_waits_for_pages_that_drops_give_back_and_no_longer_than_the_time_out():
    driver = Driver(free=0, rules=MovementRules(timeout_steps=5))
    driver.table.step_built(0)
    assert len(driver.plan(1, {2: 5, 0: 5}).copies) == 0  # 5 pages to come, 3 needed
    driver.table.boundary(1)
    driver.table.step_finished(0)
    orders = driver.table.boundary(2)
    assert (orders.freed_pages, len(orders.copies)) == (5, 2)
    assert driver.ledger.free_pages == 2
    driver.landed(0, plane(4), table(5))
    driver.table.step_built(3)
    driver.plan(2, {2: 4, 1: 8}, step=4)
    driver.table.boundary(4)
    driver.table.boundary(9)
    assert driver.table.faults.counts["no pages"] == 1
    driver.table.step_finished(3)
    driver.table.boundary(10)
    assert driver.table.bits.tolist() == [5, 3, 4]
    assert driver.legal()


def test_the_most_urgent_raise_gets_the_pages():
    driver = Driver(free=3)
    orders = driver.plan(1, {0: 5, 1: 4})
    assert names(driver, orders.copies) == [(0, plane(4)), (0, table(5))]


def test_with_the_active_table_only_a_drop_copies_a_table_first():
    driver = Driver(rules=MovementRules(tables="active"))
    orders = driver.plan(1, {0: 3})
    assert names(driver, orders.copies) == [(0, table(3))]
    assert len(driver.table.boundary(1).blocks) == 0
    driver.landed(0, table(3))
    orders = driver.table.boundary(2)
    assert (orders.bits.tolist(), orders.freed_pages) == ([3], 2 + 1)
    assert driver.table.at_rest
    assert driver.legal()


def test_pages_returning_counts_what_is_on_its_way_back():
    driver = Driver()
    driver.table.step_built(0)
    driver.plan(1, {0: 3, 1: 4})
    assert driver.table.pages_returning == 3
    driver.table.boundary(1)
    assert driver.table.pages_returning == 3
    driver.table.cancel(step=2)
    assert driver.table.pages_returning == 5
    driver.failed(1, plane(3), table(4))
    driver.table.step_finished(0)
    driver.table.boundary(2)
    assert driver.table.pages_returning == 0


@pytest.mark.parametrize(
    ("number", "blocks", "bits", "message"),
    [
        (0, [0], [3], "plan_id must be above 0, not 0"),
        (1, [0, 0], [3, 3], "names a block twice"),
        (1, [3], [3], "outside 0..2"),
        (1, [1], [9], r"leads block 1 to 9 bits, allowed 2\.\.8"),
        (1, [1], [1], r"leads block 1 to 1 bits, allowed 2\.\.8"),
        (1, [1], [3, 4], "must be equal lists"),
    ],
)
def test_plans_that_make_no_sense_are_refused_whole(number, blocks, bits, message):
    driver = Driver()
    driver.plan(0, {0: 4})
    with pytest.raises(ValueError, match=message):
        driver.table.open_plan(number, np.array(blocks), np.array(bits), step=1)
    assert driver.table.at_rest
    assert driver.legal()


def test_events_at_the_wrong_moment_are_refused():
    driver = Driver()
    with pytest.raises(RuntimeError, match="block 0 plane 3 cannot be landed: it is on the device"):
        driver.landed(0, plane(3))
    with pytest.raises(RuntimeError, match="block 0 plane 5 cannot be ended: it is on the host"):
        driver.failed(0, plane(5))
    with pytest.raises(RuntimeError, match="step 4 is not running"):
        driver.table.step_finished(4)
    driver.table.step_built(4)
    with pytest.raises(RuntimeError, match="step 4 is built after step 4"):
        driver.table.step_built(4)
    driver.table.boundary(5)
    with pytest.raises(RuntimeError, match="boundary 5 after boundary 5"):
        driver.table.boundary(5)


def test_weights_that_do_not_fit_are_refused_with_both_sizes():
    with pytest.raises(ValueError, match="weights need 40 pages, the arena has 39 free"):
        Driver(free=-1)


@pytest.mark.parametrize("bits", [(1, 3, 3), (9, 3, 3)])
def test_widths_out_of_range_are_refused(bits):
    with pytest.raises(ValueError, match=f"block 0: need 2 <= qmin 2 <= bits {bits[0]}"):
        WeightPageTable(
            BlockParts.of(PLANE_PAGES, TABLE_PAGES, parent_bits=8, min_bits=2),
            np.array(bits),
            ledger=PageLedger(99),
        )


@pytest.mark.parametrize("name", ["bits", "lowest", "highest"])
def test_widths_that_are_no_integers_are_refused_and_not_cut_off(name):
    widths = {"bits": [4, 4, 4], "lowest": [2, 2, 2], "highest": [8, 8, 8]}
    widths[name] = [3.7, 4.0, 4.0]
    with pytest.raises(ValueError, match=f"{name} must be integers, not float64 like 3.7"):
        WeightPageTable(
            BlockParts.of(PLANE_PAGES, TABLE_PAGES, parent_bits=8, min_bits=2),
            np.array(widths["bits"]),
            ledger=PageLedger(99),
            lowest=np.array(widths["lowest"]),
            highest=np.array(widths["highest"]),
        )


def test_plans_and_cancellations_of_fractions_are_refused():
    driver = Driver()
    with pytest.raises(ValueError, match=r"bits must be integers, not float64 like 5\.5"):
        driver.table.open_plan(0, np.array([0]), np.array([5.5]), step=1)
    with pytest.raises(ValueError, match=r"blocks must be integers, not float64 like 0\.5"):
        driver.table.open_plan(0, np.array([0.5]), np.array([5]), step=1)
    with pytest.raises(ValueError, match="blocks must be integers, not bool"):
        driver.table.cancel(np.array([True, False, False]), step=1)
    driver.plan(0, {0: 5})  # none of these has taken the number
    nothing = np.array([])
    driver.table.open_plan(1, nothing, nothing, step=1)
    assert driver.table.check() is None


def test_pages_that_are_no_integers_are_refused():
    with pytest.raises(ValueError, match=r"plane_pages must be integers, not float64 like 1\.5"):
        BlockParts.of(np.array([1.5]), TABLE_PAGES[:1], parent_bits=8, min_bits=2)
    with pytest.raises(ValueError, match="table_pages must be integers, not float64"):
        BlockParts.of(np.array([1]), TABLE_PAGES[:1] / 2, parent_bits=8, min_bits=2)


def test_twelve_thousand_blocks_move_at_once():
    n = 12_288
    parts = BlockParts.of(
        np.full(n, 4), np.tile([1, 1, 1, 1, 2, 3, 6], (n, 1)), parent_bits=8, min_bits=2
    )
    ledger = PageLedger(n * 40)
    pages = WeightPageTable(parts, np.full(n, 4), ledger=ledger)
    bits = np.where(np.arange(n) % 2, 3, 5)
    orders = pages.open_plan(1, np.arange(n), bits, step=1)
    pages.copies_landed(orders.copies.blocks, orders.copies.parts, step=1)
    pages.boundary(1)
    assert np.array_equal(pages.bits, bits)
    assert ledger.held_pages("weights") == n // 2 * (3 * 4 + 2) + n // 2 * (5 * 4 + 4)
    assert np.count_nonzero(pages.states.state == GPU) == n // 2 * (3 + 2) + n // 2 * (5 + 4)
    pages.check()
