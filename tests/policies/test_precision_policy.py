"""The precision policy: watermarks, restore, exchange, emergencies, blocks that may not move."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.streams import stream
from policies.orders import PrecisionDecision
from policies.precision import PrecisionPolicy
from policies.precision_plan import HullPlanner
from policies.precision_problem import held_bytes
from policies.precision_state import PrecisionSettings, PrecisionState
from policies.precision_tables import BlockTables, block_tables

PAGE = 1024
BITS = np.array([2, 3, 4, 6, 8])
SETTINGS = PrecisionSettings(plan_interval_s=1.0, link_bytes_per_s=2e6, link_share=0.5)


def some_tables(blocks: int = 40, seed: int = 0) -> BlockTables:
    """Ten pages a bit; damage falls by about four a bit, of very unequal size."""
    rng = stream(seed, "policy tables")
    scale = rng.lognormal(0.0, 1.5, blocks)[:, None]
    steps = scale * 4.0 ** -BITS[None, :] * rng.lognormal(0.0, 0.3, (blocks, 5))
    damage = steps[:, ::-1].cumsum(axis=1)[:, ::-1]
    return block_tables(np.tile(10 * PAGE * BITS, (blocks, 1)), damage, BITS)


def state_at(bits: np.ndarray, *, spare: int, arena: int = 4000, **changes: Any) -> PrecisionState:
    """A state at rest with ``spare`` pages that neither KV nor weights hold."""
    n = len(bits)
    return replace(
        PrecisionState(
            step=0,
            bits=bits,
            desired_bits=bits,
            hot_floor_bits=np.full(n, 2),
            pinned=np.zeros(n, dtype=bool),
            retry_step=np.zeros(n, dtype=np.int64),
            mass_multiplier=np.ones(n),
            prompt_multiplier=np.ones(n),
            kv_pages=arena - 10 * int(bits.sum()) - spare,
            forecast_pages=0,
            copying_bytes=0,
        ),
        **changes,
    )


def policy_of(tables: BlockTables, arena: int = 4000, **changes: Any) -> PrecisionPolicy:
    settings = replace(SETTINGS, **changes)
    return PrecisionPolicy(tables, arena_pages=arena, page_bytes=PAGE, settings=settings)


def after(bits: np.ndarray, decision: PrecisionDecision) -> np.ndarray:
    """Widths once the orders are carried out."""
    done = bits.copy()
    for blocks, widths in (decision.orders.drops, decision.orders.raises):
        done[blocks] = widths
    return done


def is_idle(decision: PrecisionDecision) -> bool:
    orders = decision.orders
    return orders.plan_id == len(orders.drops.blocks) == len(orders.raises.blocks) == 0


FOURS = np.full(40, 4)


def test_nothing_is_ordered_between_the_watermarks_before_a_plan_is_due():
    policy = policy_of(some_tables())
    for spare in (120, 300, 560):  # low is 120 pages, high 560
        assert is_idle(policy.decide(state_at(FOURS, spare=spare), now=0.5))


def test_memory_below_the_low_mark_is_brought_to_the_target_by_the_least_harmful_drops():
    tables = some_tables()
    decision = policy_of(tables).decide(state_at(FOURS, spare=119), now=0.0)
    assert decision.reason == "shrink"
    assert len(decision.orders.raises.blocks) == 0
    target_bytes = (1600 - (320 - 119)) * PAGE
    best = HullPlanner().plan(tables, target_bytes, cap_level=np.full(40, 2))
    bits = after(FOURS, decision)
    assert bits.tolist() == best.bits.tolist()
    assert decision.bytes_ == best.bytes_ <= target_bytes
    assert decision.damage == pytest.approx(best.damage)
    assert decision.lp_bound <= decision.damage
    assert decision.gap == pytest.approx(decision.damage / decision.lp_bound - 1)


def test_the_forecast_counts_as_taken():
    policy = policy_of(some_tables())
    assert is_idle(policy.decide(state_at(FOURS, spare=400, forecast_pages=280), now=0.0))
    decision = policy.decide(state_at(FOURS, spare=400, forecast_pages=281), now=0.0)
    assert decision.reason == "shrink"
    freed = 10 * int((FOURS - after(FOURS, decision)).sum())
    assert 320 <= 400 - 281 + freed < 320 + 20


def test_pages_that_open_drops_will_give_back_are_not_asked_for_again():
    policy = policy_of(some_tables())
    first = policy.decide(state_at(FOURS, spare=0), now=0.0)
    waiting = state_at(FOURS, spare=0, desired_bits=after(FOURS, first))
    assert is_idle(policy.decide(waiting, now=0.01))


def test_widths_are_restored_only_after_calm_steps_that_are_told_not_counted():
    policy = policy_of(some_tables(), exchange_margin=1e9)
    spare, now = 700, 1.0
    for _ in range(100):  # as many calls as it likes within one step
        assert is_idle(policy.decide(state_at(FOURS, spare=spare, step=5), now=now))
        now += 1.0
    assert is_idle(policy.decide(state_at(FOURS, spare=spare, step=36), now=now))
    decision = policy.decide(state_at(FOURS, spare=spare, step=37), now=now + 1.0)
    assert decision.reason == "restore"
    assert len(decision.orders.drops.blocks) == 0


def test_one_step_at_the_high_mark_starts_the_calm_anew():
    policy = policy_of(some_tables(), exchange_margin=1e9)
    policy.decide(state_at(FOURS, spare=700, step=0), now=0.0)
    policy.decide(state_at(FOURS, spare=560, step=20), now=0.1)
    assert is_idle(policy.decide(state_at(FOURS, spare=700, step=40), now=1.0))
    assert is_idle(policy.decide(state_at(FOURS, spare=700, step=71), now=2.0))
    assert policy.decide(state_at(FOURS, spare=700, step=72), now=3.0).reason == "restore"


def restored(spare: int = 900, **changes: Any) -> tuple[BlockTables, PrecisionDecision]:
    tables = some_tables()
    policy = policy_of(tables, **changes)
    policy.decide(state_at(FOURS, spare=spare, step=0), now=0.0)
    return tables, policy.decide(state_at(FOURS, spare=spare, step=32), now=1.0)


def test_restoring_leads_to_the_target_when_the_link_allows():
    _, decision = restored(link_bytes_per_s=1e12)
    taken = 10 * int((after(FOURS, decision) - FOURS).sum())
    assert 900 - 320 - 20 < taken <= 900 - 320


def test_restoring_copies_no_more_than_the_link_carries_best_first():
    tables, decision = restored(link_bytes_per_s=4e5)  # 200,000 bytes a plan, 195 pages
    blocks, bits = decision.orders.raises
    level, held = np.searchsorted(BITS, bits), np.full(len(blocks), 2)
    copied = tables.bytes_[blocks, level] - tables.bytes_[blocks, held]
    assert 200_000 - 20 * PAGE < copied.sum() <= 200_000
    saved = tables.damage[blocks, held] - tables.damage[blocks, level]
    assert (np.diff(saved / copied) <= 0).all()
    best = HullPlanner().plan(
        tables,
        held_bytes(tables, np.full(40, 2)) + 200_000,
        floor_level=np.full(40, 2),
    )
    assert after(FOURS, decision).tolist() == best.bits.tolist()


def test_copies_under_way_use_up_the_link():
    policy = policy_of(some_tables())
    busy = {"copying_bytes": 1_000_000}
    policy.decide(state_at(FOURS, spare=900), now=0.0)
    assert is_idle(policy.decide(state_at(FOURS, spare=900, step=40, **busy), now=1.0))
    assert not is_idle(policy.decide(state_at(FOURS, spare=900, step=41), now=2.0))


def test_plans_with_copies_come_an_interval_apart_and_say_when_the_next_is_due():
    policy = policy_of(some_tables())
    assert policy.next_wakeup() == 1.0
    policy.decide(state_at(FOURS, spare=900), now=0.0)
    assert policy.next_wakeup() == 1.0
    assert policy.decide(state_at(FOURS, spare=900, step=32), now=1.25).orders.plan_id == 1
    assert policy.next_wakeup() == 2.25
    assert is_idle(policy.decide(state_at(FOURS, spare=900, step=33), now=2.0))
    assert policy.decide(state_at(FOURS, spare=900, step=34), now=2.25).orders.plan_id == 2


def swap_tables(gain: float) -> BlockTables:
    """Block 0 would save ``gain`` per width; block 1 would lose 1 per width."""
    return block_tables([[2 * PAGE, 3 * PAGE]] * 2, [[gain + 1, 1.0], [2.0, 1.0]], [2, 3])


@pytest.mark.parametrize(
    ("gain", "eta", "swaps"),
    [(1.3, 0.25, True), (1.2, 0.25, False), (1.2, 0.1, True), (1.6, 0.5, True), (1.4, 0.5, False)],
)
def test_widths_are_exchanged_only_if_the_gain_exceeds_the_loss_by_the_margin(gain, eta, swaps):
    policy = policy_of(swap_tables(gain), arena=100, exchange_margin=eta)
    bits = np.array([2, 3])
    state = state_at(bits, spare=10, arena=100, kv_pages=85)
    decision = policy.decide(state, now=1.0)
    assert (decision.reason == "exchange") is swaps
    assert after(bits, decision).tolist() == ([3, 2] if swaps else [2, 3])
    if swaps:
        assert decision.gap == 0.0
        assert is_idle(
            policy.decide(state_at(np.array([3, 2]), spare=10, arena=100, kv_pages=85), now=2.0)
        )


@pytest.mark.parametrize("link_bytes_per_s", [1e12, 3e5])
def test_an_exchange_keeps_the_bytes_and_the_link_limit_and_lowers_the_damage(link_bytes_per_s):
    tables = some_tables()
    policy = policy_of(tables, link_bytes_per_s=link_bytes_per_s)
    decision = policy.decide(state_at(FOURS, spare=300), now=1.0)
    assert decision.reason == "exchange"
    _blocks, bits = decision.orders.raises
    copied = int(10 * PAGE * (bits - 4).sum())
    assert 0 < copied <= 0.5 * link_bytes_per_s
    assert decision.bytes_ <= 1600 * PAGE
    assert decision.bytes_ == 10 * PAGE * int(after(FOURS, decision).sum())
    assert decision.damage < tables.damage[:, 2].sum()


def test_more_margin_moves_fewer_bytes_and_costs_more_damage():
    """Drifting masses at a fixed budget: direction and size of the trade."""
    blocks, ticks = 600, 12
    tables = some_tables(blocks, seed=4)
    moved, damage = {}, {}
    for eta in (0.0, 0.1, 0.25, 0.5, 1.0):
        rng = stream(9, "drift")
        log_mass = np.zeros(blocks)
        policy = PrecisionPolicy(
            tables,
            arena_pages=60_000,
            page_bytes=PAGE,
            settings=replace(SETTINGS, exchange_margin=eta, link_bytes_per_s=1e12),
        )
        bits = HullPlanner().plan(tables, blocks * 35 * PAGE).bits
        copied = harm = 0.0
        for tick in range(ticks):
            log_mass = 0.9 * log_mass + 0.3 * rng.standard_normal(blocks)
            mass = np.exp(log_mass)
            state = state_at(bits, spare=6000, arena=60_000, mass_multiplier=mass)
            decision = policy.decide(state, now=1.0 + tick)
            raised, widths = decision.orders.raises
            copied += 10 * PAGE * float((widths - bits[raised]).sum())
            bits = after(bits, decision)
            harm += float(tables.damage[np.arange(blocks), np.searchsorted(BITS, bits)] @ mass)
        moved[eta], damage[eta] = copied, harm
    etas = sorted(moved)
    assert all(moved[a] > 1.1 * moved[b] for a, b in itertools.pairwise(etas))
    assert all(damage[a] <= damage[b] for a, b in itertools.pairwise(etas))
    assert moved[0.5] < 0.6 * moved[0.0]
    assert damage[0.5] < 1.03 * damage[0.0]


def test_a_failed_allocation_is_answered_by_drops_at_once():
    policy = policy_of(some_tables())
    decision = policy.on_allocation_failed(state_at(FOURS, spare=5), 64, now=0.01)
    assert decision.reason == "emergency"
    assert len(decision.orders.raises.blocks) == 0
    freed = 10 * int((FOURS - after(FOURS, decision)).sum())
    assert 5 + freed - 64 >= 320
    assert decision.pages_short == 0


def test_with_every_block_at_its_floor_the_missing_pages_are_named_so_that_requests_yield():
    twos = np.full(40, 2)
    policy = policy_of(some_tables())
    decision = policy.on_allocation_failed(state_at(twos, spare=5), 64, now=0.0)
    assert is_idle(decision)
    assert (decision.reason, decision.pages_short) == ("emergency", 59)
    starved = policy.decide(state_at(twos, spare=100), now=0.0)
    assert (starved.reason, starved.pages_short, is_idle(starved)) == ("shrink", 20, True)


def test_an_emergency_drops_what_it_can_and_names_the_rest():
    bits = np.where(np.arange(40) < 2, 3, 2)
    policy = policy_of(some_tables())
    decision = policy.on_allocation_failed(state_at(bits, spare=5), 64, now=0.0)
    assert after(bits, decision).tolist() == [2] * 40
    assert decision.pages_short == 64 - 5 - 20


def test_a_failed_allocation_while_pages_are_on_their_way_back_drops_nothing():
    policy = policy_of(some_tables())
    coming = state_at(FOURS, spare=0, desired_bits=np.full(40, 2))  # 800 pages to come
    decision = policy.on_allocation_failed(coming, 64, now=0.0)
    assert (is_idle(decision), decision.pages_short) == (True, 0)


def test_pinned_blocks_keep_their_width():
    pinned = np.arange(40) % 2 == 0
    policy = policy_of(some_tables())
    shrunk = policy.on_allocation_failed(state_at(FOURS, spare=0, pinned=pinned), 3000, now=0.0)
    assert after(FOURS, shrunk).tolist() == np.where(pinned, 4, 2).tolist()
    policy.decide(state_at(FOURS, spare=2000, pinned=pinned), now=0.0)
    grown = policy.decide(state_at(FOURS, spare=2000, step=40, pinned=pinned), now=1.0)
    assert grown.reason == "restore"
    assert (after(FOURS, grown)[pinned] == 4).all()


def test_blocks_in_back_off_are_not_raised_before_their_step_but_may_be_dropped():
    later = np.full(40, 50)
    policy = policy_of(some_tables(), exchange_margin=1e9)
    policy.decide(state_at(FOURS, spare=900, retry_step=later), now=0.0)
    assert is_idle(policy.decide(state_at(FOURS, spare=900, step=49, retry_step=later), now=1.0))
    # nothing could be restored, so the memory has to be calm for the next attempt as well
    raised = policy.decide(state_at(FOURS, spare=900, step=50, retry_step=later), now=2.0)
    assert raised.reason == "restore"
    dropped = policy.decide(state_at(FOURS, spare=0, retry_step=later), now=2.5)
    assert len(dropped.orders.drops.blocks) > 0


def test_a_block_being_raised_is_raised_no_further_and_may_be_called_back():
    desired = np.where(np.arange(40) < 20, 6, 4)
    policy = policy_of(some_tables(), exchange_margin=1e9)
    spare = {"spare": 2000 - 400}
    policy.decide(state_at(FOURS, desired_bits=desired, **spare), now=0.0)
    grown = policy.decide(state_at(FOURS, desired_bits=desired, step=40, **spare), now=1.0)
    assert grown.reason == "restore"
    assert (grown.orders.raises.blocks >= 20).all()
    short = policy.decide(state_at(FOURS, spare=400, desired_bits=desired), now=1.5)
    assert short.reason == "shrink"  # 400 pages are promised to raises
    assert (after(desired, short) <= desired).all()


def test_hot_blocks_are_not_dropped_below_their_floor():
    hot = np.where(np.arange(40) % 4 == 0, 4, 2)
    decision = policy_of(some_tables()).on_allocation_failed(
        state_at(FOURS, spare=0, hot_floor_bits=hot), 4000, now=0.0
    )
    assert after(FOURS, decision).tolist() == np.where(hot == 4, 4, 2).tolist()


def test_a_floor_between_two_widths_means_the_wider_one():
    decision = policy_of(some_tables()).on_allocation_failed(
        state_at(np.full(40, 8), spare=0, hot_floor_bits=np.full(40, 5)), 4000, now=0.0
    )
    assert after(FOURS, decision).tolist() == [6] * 40


def test_a_block_below_its_floor_is_raised_before_all_others():
    tables = some_tables()
    dull = int(np.argmin(tables.damage[:, 0]))
    hot = np.full(40, 2)
    hot[dull] = 4
    twos = np.full(40, 2)
    for spare, reason in ((900, "restore"), (300, "exchange")):
        bits = twos.copy()
        bits[(dull + 1) % 40] = 8  # what an exchange may pay with
        policy = policy_of(tables, link_bytes_per_s=2 * 20 * PAGE)  # 20 pages a plan
        policy.decide(state_at(bits, spare=spare, hot_floor_bits=hot), now=0.0)
        decision = policy.decide(state_at(bits, spare=spare, step=32, hot_floor_bits=hot), now=1.0)
        assert decision.reason == reason
        assert decision.orders.raises.blocks.tolist() == [dull]
        assert decision.orders.raises.bits.tolist() == [4]


def test_each_signal_can_be_switched_off():
    tables = some_tables()
    loud = np.where(np.arange(40) < 20, 16.0, 1 / 16)
    hot = np.where(np.arange(40) < 5, 4, 2)

    def shrunk(told: dict[str, Any], **flags: bool) -> list[int]:
        policy = policy_of(tables, **flags)
        return after(FOURS, policy.decide(state_at(FOURS, spare=0, **told), now=0.0)).tolist()

    plain = shrunk({})
    for told, flag in (
        ({"mass_multiplier": loud}, "use_routing"),
        ({"hot_floor_bits": np.full(40, 3)}, "use_routing"),
        ({"prompt_multiplier": loud}, "use_prompt"),
    ):
        assert shrunk(told) != plain
        assert shrunk(told, **{flag: False}) == plain
    both = {"mass_multiplier": loud, "prompt_multiplier": 1 / loud, "hot_floor_bits": hot}
    assert shrunk(both, use_routing=False) == shrunk({"prompt_multiplier": 1 / loud})
    assert shrunk(both, use_prompt=False) == shrunk(
        {"mass_multiplier": loud, "hot_floor_bits": hot}
    )


def test_without_movement_widths_only_fall():
    policy = policy_of(some_tables(), use_movement=False)
    assert policy.next_wakeup() is None
    for step in (0, 40, 80):
        assert is_idle(policy.decide(state_at(FOURS, spare=2000, step=step), now=1.0 + step))
    assert policy.decide(state_at(FOURS, spare=0), now=90.0).reason == "shrink"


@pytest.mark.parametrize("planner", ["hull", "greedy", "uniform", "uniform_remainder"])
@pytest.mark.parametrize("engine", ["compiled", "numpy"])
def test_every_planner_of_the_catalog_serves_the_policy(planner, engine):
    tables = some_tables()
    settings = replace(SETTINGS, planner=planner)
    policy = PrecisionPolicy(
        tables, arena_pages=4000, page_bytes=PAGE, settings=settings, engine=engine
    )
    shrunk = policy.decide(state_at(FOURS, spare=0), now=0.0)
    bits = after(FOURS, shrunk)
    assert (bits <= 4).all()
    assert 10 * int((FOURS - bits).sum()) >= 320
    policy.decide(state_at(bits, spare=1200), now=0.5)
    grown = policy.decide(state_at(bits, spare=1200, step=32), now=1.0)
    assert (after(bits, grown) >= bits).all()
    assert grown.lp_bound is None or grown.lp_bound <= grown.damage


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": np.full(40, 5)}, r"bits of block 0 must be one of \[2, 3, 4, 6, 8\], found 5"),
        ({"desired_bits": np.full(40, 9)}, "desired_bits of block 0 must be one of"),
        ({"pinned": np.zeros(39, dtype=bool)}, r"pinned must have 40 entries, found shape \[39\]"),
        ({"kv_pages": -1}, "kv_pages must be >= 0, found -1"),
        ({"mass_multiplier": np.full(40, np.nan)}, "multiplier of block 0 must be finite"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused_by_field(change, said):
    with pytest.raises(ValueError, match=said):
        policy_of(some_tables()).decide(replace(state_at(FOURS, spare=0), **change), now=0.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"low_share": 0.1}, "low_share < target_share < high_share .* found 0.1, 0.08, 0.14"),
        ({"low_share": 0.08}, "low_share < target_share < high_share"),
        ({"target_share": 0.14}, "low_share < target_share < high_share"),
        (dict.fromkeys(("low_share", "target_share", "high_share"), 0.1), "found 0.1, 0.1, 0.1"),
        ({"high_share": 1.01}, r"must hold within \[0, 1\]"),
        ({"exchange_margin": -0.1}, "exchange_margin must be finite and >= 0"),
        ({"plan_interval_s": 0.0}, "plan_interval_s must be > 0"),
        ({"link_share": 1.5}, "link_share must be within"),
        ({"planner": "magic"}, "precision must be one of hull"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(change, said):
    with pytest.raises(ValueError, match=said):
        policy_of(some_tables(), **change)


def test_bytes_that_are_no_whole_pages_are_refused():
    with pytest.raises(ValueError, match="block 0 at 3 bits must be whole pages of 1024 bytes"):
        policy_of(block_tables([[1024, 1500]], [[1.0, 0.0]], [2, 3]))
