import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.prefix_costs import MISTRAL_7B_ON_A100, PrefillCost, PrefixCosts, TierSpeed
from policies.catalog import owner_rule
from policies.prefix.directory import Directory, Held
from policies.prefix.load_plan import LoadPlan, Way, plan_load
from policies.prefix.owners import rendezvous_order
from policies.prefix.put_plan import plan_put

BLOCK = 8  # bytes
NODES = ("a", "b", "c")


def prefill(flops_per_s: float) -> PrefillCost:
    """1 token: 2 flops, and 4 more per token before it."""
    return PrefillCost(
        parameters=1, layers=1, heads=1, head_dim=1, weight_bytes=1, flops_per_s=flops_per_s,
        mfu=1.0, memory_bytes_per_s=1e9,
    )  # fmt: skip


speeds = st.builds(
    TierSpeed,
    bytes_per_s=st.sampled_from([4.0, 8.0, 40.0, 400.0]),
    request_s=st.sampled_from([0.0, 0.1, 2.0]),
)
prices = st.builds(
    PrefixCosts,
    prefill=st.builds(prefill, st.sampled_from([0.5, 2.0, 8.0, 32.0])),
    block_tokens=st.integers(1, 2),
    local=speeds,
    remote=speeds,
    ssd=speeds,
    lookup_s=st.sampled_from([0.0, 0.5]),
)
queues = st.dictionaries(st.sampled_from(NODES), st.sampled_from([0.0, 0.5, 3.0]))
tiers = st.sampled_from(["memory", "ssd"])
copies = st.dictionaries(st.tuples(st.sampled_from(NODES), tiers), st.booleans(), max_size=4)


def filled(blocks: Sequence[dict[tuple[str, str], bool]], region_blocks: int = 2) -> Directory:
    """Block i held as told: {(node, tier): is it owned}; regions of so many blocks."""
    directory = Directory()
    for i, places in enumerate(blocks):
        held = Held(i - i % region_blocks, i % region_blocks, i, BLOCK)
        for (node, tier), is_owned in places.items():
            directory.add(node, 1, i, held, tier=tier, is_owned=is_owned)
    return directory


def seconds(ways: Sequence[tuple[str, str]], costs: PrefixCosts, queue: dict[str, float]) -> float:
    """The written time model, for one choice of (node, tier) per block, loading on node a."""
    asked: dict[str, list[int]] = {}
    own_ssd = 0
    for node, tier in ways:
        if node != "a":
            asked.setdefault(node, [0, 0])[tier == "ssd"] += BLOCK
        elif tier == "ssd":
            own_ssd += BLOCK

    def one(speed: TierSpeed, size: int) -> float:
        return speed.request_s + size / speed.bytes_per_s if size else 0.0

    requests = [
        queue.get(node, 0.0) + one(costs.remote, mem + ssd) + one(costs.ssd, ssd)
        for node, (mem, ssd) in asked.items()
    ]
    total = one(costs.local, BLOCK * len(ways)) + one(costs.ssd, own_ssd)
    return costs.lookup_s + total + max(requests, default=0.0)


def computed(first: int, end: int, costs: PrefixCosts) -> float:
    b, flops = costs.block_tokens, costs.prefill.flops_per_s
    return sum((2 * b + 4 * (b * i * b + b * b / 2)) / flops for i in range(first, end))


def exhaustive(
    blocks: Sequence[dict[tuple[str, str], bool]], costs: PrefixCosts, queue: dict[str, float]
) -> float:
    """The least seconds over all cuts and all choices of places."""
    leading = next((i for i, places in enumerate(blocks) if not places), len(blocks))
    return min(
        seconds(ways, costs, queue) + computed(cut, leading, costs)
        for cut in range(leading + 1)
        for ways in itertools.product(*(list(places) for places in blocks[:cut]))
    )


def places(plan: LoadPlan) -> list[tuple[str, str]]:
    return [(w.node, "ssd" if w.source in ("ssd", "remote_ssd") else "memory") for w in plan.ways]


one_place = st.sampled_from([*itertools.product(NODES, ["memory", "ssd"])]).map(
    lambda place: {place: True}
)
some_memories = st.lists(st.sampled_from(NODES[1:]), min_size=1, max_size=2, unique=True)


@settings(max_examples=150)
@given(st.lists(one_place, max_size=7), prices, queues)
def test_with_one_place_per_block_the_cut_is_the_best_of_all(
    blocks: list[dict[tuple[str, str], bool]], costs: PrefixCosts, queue: dict[str, float]
) -> None:
    plan = plan_load(range(len(blocks)), filled(blocks), local="a", costs=costs, load_of=queue)
    assert plan.expected_s == pytest.approx(exhaustive(blocks, costs, queue), rel=1e-9)
    assert plan.recompute_s == pytest.approx(computed(0, len(blocks), costs), rel=1e-9)


@settings(max_examples=100)
@given(some_memories, st.integers(0, 7), prices, queues)
def test_equal_holders_of_a_whole_prefix_share_it_in_the_best_way(
    holders: list[str], length: int, costs: PrefixCosts, queue: dict[str, float]
) -> None:
    blocks = [{(node, "memory"): node == holders[0] for node in holders}] * length
    plan = plan_load(range(length), filled(blocks), local="a", costs=costs, load_of=queue)
    assert plan.expected_s == pytest.approx(exhaustive(blocks, costs, queue), rel=1e-9)


@settings(max_examples=150)
@given(st.lists(copies, max_size=5), prices, queues)
def test_any_plan_takes_what_it_says_and_never_more_than_computing_everything(
    blocks: list[dict[tuple[str, str], bool]], costs: PrefixCosts, queue: dict[str, float]
) -> None:
    plan = plan_load(range(len(blocks)), filled(blocks), local="a", costs=costs, load_of=queue)
    leading = next((i for i, held in enumerate(blocks) if not held), len(blocks))
    assert plan.leading == leading
    assert all(place in held for place, held in zip(places(plan), blocks, strict=False))
    taken = seconds(places(plan), costs, queue) + computed(plan.wanted, leading, costs)
    assert plan.expected_s == pytest.approx(taken, rel=1e-9)
    assert plan.expected_s <= costs.lookup_s + plan.recompute_s + 1e-9
    assert plan.expected_s >= exhaustive(blocks, costs, queue) - 1e-9


def test_over_random_clusters_nearly_every_plan_is_the_best_of_all() -> None:
    chance = np.random.default_rng(5)

    def speed() -> TierSpeed:
        rate, start = chance.choice([4.0, 8.0, 40.0, 400.0]), chance.choice([0.0, 0.1, 2.0])
        return TierSpeed(bytes_per_s=float(rate), request_s=float(start))

    ratios = []
    for _ in range(400):
        costs = PrefixCosts(
            prefill=prefill(float(chance.choice([0.5, 2.0, 8.0, 32.0]))),
            block_tokens=int(chance.integers(1, 3)),
            local=speed(),
            remote=speed(),
            ssd=speed(),
        )
        queue = {node: float(chance.choice([0.0, 0.5, 3.0])) for node in NODES}
        blocks = [
            {
                (NODES[chance.integers(3)], ("memory", "ssd")[chance.integers(2)]): True
                for _ in range(chance.integers(1, 5))
            }
            for _ in range(chance.integers(1, 7))
        ]
        plan = plan_load(range(len(blocks)), filled(blocks), local="a", costs=costs, load_of=queue)
        ratios.append(plan.expected_s / exhaustive(blocks, costs, queue))
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.97
    assert np.mean(ratios) < 1.005
    assert max(ratios) < 1.5


@given(st.lists(copies, max_size=10), st.sets(st.sampled_from(NODES)))
def test_the_common_prefix_ends_at_the_first_block_that_no_live_node_holds(
    blocks: list[dict[tuple[str, str], bool]], live: set[str]
) -> None:
    plan = plan_load(range(len(blocks)), filled(blocks), local="a", costs=None, live=live)
    asked = live | {"a"}
    alive = [any(node in asked for node, _ in held) for held in blocks]
    assert plan.leading == plan.wanted == [*alive, False].index(False)
    assert all(way.node in asked for way in plan.ways)
    assert math.isnan(plan.expected_s)
    assert math.isnan(plan.recompute_s)


@given(
    st.lists(copies, max_size=12), st.integers(1, 5), st.none() | prices, st.booleans(), st.data()
)
def test_segments_copy_what_a_copy_byte_by_byte_would(
    blocks: list[dict[tuple[str, str], bool]],
    region_blocks: int,
    costs: PrefixCosts | None,
    is_scattered: bool,
    data: st.DataObject,
) -> None:
    content = [bytes([i] * BLOCK) for i in range(len(blocks))]
    order = list(range(len(blocks)))
    if is_scattered:
        order = data.draw(st.permutations(order))
    directory = Directory()
    regions: dict[int, bytes] = {}
    for place, i in enumerate(order):
        region, index = divmod(place, region_blocks)
        regions[region] = regions.get(region, b"") + content[i]
        for (node, tier), is_owned in blocks[i].items():
            held = Held(region, index, i, BLOCK)
            directory.add(node, 1, i, held, tier=tier, is_owned=is_owned)
    plan = plan_load(range(len(blocks)), directory, local="a", costs=costs)
    destination = bytearray(b"\xff" * BLOCK * plan.wanted)
    requests = [plan.local, plan.ssd, *plan.remote.values()]
    for segments in requests:
        for s in segments:
            assert destination[s.dst : s.dst + s.length] == b"\xff" * s.length
            destination[s.dst : s.dst + s.length] = regions[s.region][s.src : s.src + s.length]
        for s, after in itertools.pairwise(segments):
            joins = (s.region, s.src + s.length, s.dst + s.length)
            assert joins != (after.region, after.src, after.dst), "not merged"
    assert destination == b"".join(content[: plan.wanted])
    for node, segments in plan.remote.items():
        assert sum(s.length for s in segments) == BLOCK * len(plan.blocks_of(node))
    assert list(plan.remote) == sorted(plan.remote)


def test_own_memory_comes_first_then_other_memory_then_the_own_ssd_without_costs() -> None:
    blocks = [
        {("a", "memory"): True, ("b", "memory"): True},
        {("a", "memory"): False, ("a", "ssd"): True},
        {("b", "memory"): False, ("c", "memory"): True, ("a", "ssd"): True},
        {("a", "ssd"): True, ("b", "ssd"): True},
        {("c", "ssd"): False, ("b", "ssd"): True},
    ]
    plan = plan_load(range(5), filled(blocks), local="a", costs=None)
    assert plan.source == ("memory", "replica", "remote", "ssd", "remote_ssd")
    assert [way.node for way in plan.ways] == ["a", "a", "c", "a", "b"]
    assert plan.blocks_of("c") == (2,)
    assert plan.blocks_of("a") == ()


def test_a_busy_owner_leaves_a_block_to_a_replica() -> None:
    blocks = [{("b", "memory"): True, ("c", "memory"): False}] * 4
    for costs in (None, fast(1e3)):
        busy = plan_load(
            range(4), filled(blocks), local="a", costs=costs, load_of={"b": 9.0, "c": 1.0}
        )
        assert list(busy.remote) == ["c"]


def fast(remote_bytes_per_s: float, device_flops_per_s: float = 0.01) -> PrefixCosts:
    return PrefixCosts(
        prefill=prefill(device_flops_per_s),
        block_tokens=1,
        local=TierSpeed(bytes_per_s=1e6),
        remote=TierSpeed(bytes_per_s=remote_bytes_per_s),
        ssd=TierSpeed(bytes_per_s=1e3),
    )


def test_blocks_that_two_nodes_could_give_are_shared_in_runs() -> None:
    blocks = [{("b", "memory"): True, ("c", "memory"): False}] * 8
    plan = plan_load(range(8), filled(blocks, 8), local="a", costs=fast(1e3))
    assert plan.remote == {
        "b": ((0, 0, 0, 4 * BLOCK),),
        "c": ((0, 4 * BLOCK, 4 * BLOCK, 4 * BLOCK),),
    }


def test_blocks_that_only_the_owner_has_push_the_others_to_its_replicas() -> None:
    both, one = {("b", "memory"): True, ("c", "memory"): False}, {("b", "memory"): True}
    plan = plan_load(range(6), filled([both] * 3 + [one] * 3), local="a", costs=fast(1e3))
    assert [way.node for way in plan.ways] == ["c", "c", "c", "b", "b", "b"]


@pytest.mark.parametrize("remote_start_s", [0.0, 1.5, 30.0])
def test_a_dear_first_request_is_paid_where_many_blocks_share_it(remote_start_s: float) -> None:
    costs = replace(
        fast(BLOCK * 10.0),
        remote=TierSpeed(bytes_per_s=BLOCK * 10.0, request_s=remote_start_s),
        ssd=TierSpeed(bytes_per_s=BLOCK),
    )
    blocks = [{("a", "ssd"): True, ("b", "memory"): True}] * 8
    plan = plan_load(range(8), filled(blocks), local="a", costs=costs)
    assert plan.source == (("ssd",) * 8 if remote_start_s > 7.2 else ("remote",) * 8)
    assert plan.expected_s == pytest.approx(exhaustive(blocks, costs, {}), rel=1e-9)


def test_what_hides_behind_a_longer_request_is_free_and_what_would_wait_is_read_from_ssd() -> None:
    costs = replace(fast(BLOCK), ssd=TierSpeed(bytes_per_s=2.0 * BLOCK))
    hidden, queued = ("c", "memory"), ("b", "memory")
    blocks = [{("d", "memory"): True}] * 4
    blocks += [{hidden: True, ("a", "ssd"): True}] * 2 + [{queued: True, ("a", "ssd"): True}]
    plan = plan_load(range(7), filled(blocks), local="a", costs=costs, load_of={"b": 99.0})
    assert [way.node for way in plan.ways] == ["d"] * 4 + ["c"] * 2 + ["a"]
    assert plan.expected_s == pytest.approx(exhaustive(blocks, costs, {"b": 99.0}), rel=1e-9)


def test_a_slow_network_cuts_where_computing_is_cheaper() -> None:
    blocks = [{("a", "memory"): True}] * 3 + [{("b", "memory"): True}] * 3
    plan = plan_load(range(6), filled(blocks), local="a", costs=fast(1.0, 100.0))
    assert (plan.leading, plan.wanted) == (6, 3)
    assert plan.remote == {}
    nothing = plan_load(range(6), filled(blocks[3:]), local="a", costs=fast(1.0, 100.0))
    assert (nothing.leading, nothing.wanted, nothing.ways) == (3, 0, ())
    assert nothing.expected_s == nothing.recompute_s


def test_copies_in_different_regions_are_read_where_each_of_them_lies() -> None:
    directory = Directory()
    directory.add("b", 1, 5, Held(3, 2, 0, BLOCK), tier="memory", is_owned=False)
    directory.add("c", 1, 5, Held(5, 0, 0, BLOCK), tier="memory", is_owned=True)
    live_b = plan_load([5], directory, local="a", costs=None, live={"b": 1})
    assert live_b.remote == {"b": ((3, 2 * BLOCK, 0, BLOCK),)}
    assert plan_load([5], directory, local="a", costs=None).ways == (
        Way("c", "remote", Held(5, 0, 0, BLOCK)),
    )


def test_a_put_is_the_region_behind_what_is_stored_and_goes_to_the_rules_owners() -> None:
    weights = dict.fromkeys("abcdef", 1.0)
    assert rendezvous_order(0, weights)[:2] != rendezvous_order(2, weights)[:2]
    directory = filled([{("a", "memory"): True}, {("b", "memory"): True}])
    for name in ("rendezvous", "writer", "anchor"):
        plan = plan_put(
            range(5), directory, block_bytes=BLOCK, rule=owner_rule(name), writer="c",
            weights=weights, count=2,
        )  # fmt: skip
        by_key = {"rendezvous": 2, "anchor": 0, "writer": 2}[name]
        order = rendezvous_order(by_key, weights)
        if name == "writer":
            order = ("c", *(n for n in order if n != "c"))
        assert plan == (2, 2, order[:2], 3 * BLOCK)
        assert plan.owner == order[0]


def test_a_put_counts_only_live_copies_and_stores_again_what_lies_behind_a_hole() -> None:
    directory = filled([{("a", "memory"): True}, {("b", "memory"): True}, {("a", "ssd"): True}])
    told = {
        "block_bytes": BLOCK, "rule": owner_rule("rendezvous"), "writer": "a",
        "weights": {"a": 1.0},
    }  # fmt: skip
    assert plan_put(range(3), directory, **told) == (3, None, (), 0)
    assert plan_put(range(3), directory, **told).owner is None
    assert plan_put(range(3), directory, **told, live=["a"]) == (1, 1, ("a",), 2 * BLOCK)
    assert plan_put([], directory, **told, live=[]) == (0, None, (), 0)
    with pytest.raises(ValueError, match="block_bytes must be >= 1, found 0"):
        plan_put(range(3), directory, **{**told, "block_bytes": 0})


def test_the_end_of_a_chain_is_as_dear_to_compute_alone_as_within_its_chain() -> None:
    """A load may begin behind blocks that the engine holds: attention over them costs the same."""
    slow = PrefixCosts(
        prefill=MISTRAL_7B_ON_A100,
        block_tokens=64,
        local=TierSpeed(bytes_per_s=14e9),
        remote=TierSpeed(bytes_per_s=12e9),
        ssd=TierSpeed(bytes_per_s=3e9),
    )
    keys = [bytes([i]) * 32 for i in range(200)]
    directory = Directory()
    for depth, key in enumerate(keys):
        held = Held(keys[0], depth, depth, 8 << 20)
        directory.add("far", 1, key, held, tier="memory", is_owned=True)
    whole = plan_load(keys, directory, local="here", costs=slow)
    behind = plan_load(keys[150:], directory, local="here", costs=slow, first=150)
    before = plan_load(keys[:150], directory, local="here", costs=slow)
    assert behind.recompute_s == pytest.approx(whole.recompute_s - before.recompute_s)
    alone = plan_load(keys[150:], directory, local="here", costs=slow)
    assert alone.recompute_s < behind.recompute_s
