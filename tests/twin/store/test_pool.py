"""The pool's states: what the directory says is what the policies hold, through any history."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.prefix_costs import PrefillCost, PrefixCosts, TierSpeed
from policies.prefix.owners import Rendezvous
from policies.prefix.store_settings import StoreSettings
from traces.prefix_workloads import PrefixRequest
from twin.store.load_sources import load_sources
from twin.store.pool import new_pool
from twin.store.pool_cost import PoolRule, pool_cost

BLOCK = 1_000
NODES = ("a", "b", "c")


def _costs(remote=12e6, local=20e6, ssd=3e6, request_s=0.0):
    """A block: 50 us to copy, 83 us over the network, 333 us from SSD, about 1 ms to compute."""
    return PrefixCosts(
        prefill=PrefillCost(
            parameters=1e6,
            layers=1,
            heads=1,
            head_dim=100,
            weight_bytes=1.0,
            flops_per_s=2e10,
            mfu=1.0,
            memory_bytes_per_s=1e12,
        ),
        block_tokens=10,
        local=TierSpeed(bytes_per_s=local),
        remote=TierSpeed(bytes_per_s=remote, request_s=request_s),
        ssd=TierSpeed(bytes_per_s=ssd),
    )


def _pool(memory_blocks=8, ssd_blocks=0, may_recompute=True, **rules):
    settings_ = StoreSettings(
        memory_bytes=memory_blocks * BLOCK,
        ssd_bytes=ssd_blocks * BLOCK,
        **({"eviction": "lru", "num_nodes": 3} | rules),
    )
    return new_pool(
        NODES, settings_, _costs(), Rendezvous(), block_bytes=BLOCK, may_recompute=may_recompute
    )


def _store(pool, writer, chain, now=0.0):
    room = pool.reserve_region(writer, chain, now=now)
    if room is not None:
        for_ssd = pool.commit(room, now=now)
        pool.flushed(room.node, pool.reserve_flush(room.node, for_ssd, now=now), now=now)
    return room


def test_a_region_goes_whole_to_the_owner_of_its_first_block():
    pool = _pool()
    room = _store(pool, "a", (1, 2, 3))
    owner = Rendezvous().owners(first=1, anchor=1, writer="a", weights=dict.fromkeys(NODES, 1.0))[0]
    assert room.node == owner
    assert [block.key for block in room.blocks] == [1, 2, 3]
    assert pool.leading((1, 2, 3, 4)) == 3
    assert pool.reserve_region("b", (1, 2, 3), now=0.0) is None


def test_only_what_is_behind_the_stored_prefix_is_stored():
    pool = _pool()
    _store(pool, "a", (1, 2))
    room = _store(pool, "b", (1, 2, 5, 6))
    assert [block.key for block in room.blocks] == [5, 6]
    assert room.region == 5
    assert [block.depth for block in room.blocks] == [2, 3]
    assert room.blocks[0].parent == 2


def test_of_two_writers_of_the_same_blocks_the_second_one_is_turned_away():
    pool = _pool()
    room = pool.reserve_region("a", (1, 2), now=0.0)
    assert pool.reserve_region("b", (1, 2), now=0.0) is None
    assert pool.counts.busy == 2
    assert pool.leading((1, 2)) == 0  # nothing is visible before it is committed
    pool.commit(room, now=1.0)
    assert pool.leading((1, 2)) == 2


def test_copies_are_kept_where_the_rule_says_so():
    for rule, kept in (("none", 0), ("soft", 2), ("unified", 2)):
        pool = _pool(replicas=rule)
        owner = _store(pool, "a", (1, 2)).node
        other = next(node for node in NODES if node != owner)
        room = pool.reserve_copies(other, (1, 2), (0, 1), now=1.0)
        assert (0 if room is None else len(room.blocks)) == kept
        if room is not None:
            pool.commit(room, now=1.0)
            assert {c.node for c in pool.directory.copies(1)} == {owner, other}
            assert pool.policies[other].in_memory(1) == "replica"


def test_a_read_of_blocks_behind_a_gpus_own_brings_only_those():
    pool = _pool(may_recompute=False)
    owner = _store(pool, "a", (1, 2, 3, 4)).node
    other = next(node for node in NODES if node != owner)
    found = load_sources(pool, other, (1, 2, 3, 4), own=3)
    assert (found.first, found.until, found.tiers) == (3, 4, ("remote",))
    assert found.remote == {owner: (1, 0)}
    assert found.remote_positions == (3,)
    assert found.behind(3) == {"memory": 0, "replica": 0, "remote": 1, "ssd": 0}
    assert found.behind(4)["remote"] == 0
    assert load_sources(pool, owner, (1, 2, 3, 4), own=0).tiers == ("memory",) * 4
    assert load_sources(pool, owner, (1, 2, 3, 4), own=4).num_blocks == 0


def test_blocks_behind_a_gpus_own_are_priced_at_their_depth():
    """Deep blocks cost more to compute, so they are fetched where shallow ones are computed."""
    pool = _pool()
    pool.costs = _costs(remote=0.98e6)  # a block comes in 1.07 ms, takes 1 ms and more to compute
    chain = tuple(range(1, 9))
    owner = _store(pool, "a", chain).node
    other = next(node for node in NODES if node != owner)
    fetch_s = BLOCK / 0.98e6 + BLOCK / 20e6
    for own in range(8):
        deep = sum(pool.costs.recompute_s(depth) for depth in range(own, 8))
        plan = pool.plan(other, chain, own)
        assert plan.recompute_s == pytest.approx(deep)
        worth = [
            sum(pool.costs.recompute_s(d) for d in range(own, cut)) - (cut - own) * fetch_s
            for cut in range(own, 9)
        ]
        assert plan.wanted == max(range(len(worth)), key=lambda i: (round(worth[i], 12), i))


@settings(max_examples=40, deadline=None)
@given(
    history=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=40
    ),
    rule=st.sampled_from(["none", "soft", "static", "unified"]),
    memory=st.integers(3, 12),
    ssd=st.sampled_from([0, 6]),
    eviction=st.sampled_from(["lru", "gdsf", "tree_hd"]),
)
def test_the_directory_is_what_the_policies_hold(history, rule, memory, ssd, eviction):
    pool = _pool(memory, ssd, replicas=rule, eviction=eviction)
    everything = set()
    for now, (node, document, length) in enumerate(history):
        chain = tuple(100 * document + i for i in range(1, length + 1))
        everything |= set(chain)
        name = NODES[node]
        found = load_sources(pool, name, chain, own=0)
        pool.read((name, *found.remote), chain, now=float(now))
        for room in (
            pool.reserve_reread(name, chain, found.ssd_positions, now=float(now)),
            pool.reserve_copies(name, chain, found.remote_positions, now=float(now)),
        ):
            if room is not None:
                pool.commit(room, now=float(now))
        _store(pool, name, chain, now=float(now))
    for name, policy in pool.policies.items():
        assert policy.memory_used_bytes <= memory * BLOCK
        assert policy.ssd_used_bytes <= ssd * BLOCK
        for key in everything:
            tiers = {c.tier: c for c in pool.directory.copies(key) if c.node == name}
            how = policy.in_memory(key)
            assert ("memory" in tiers) == (how is not None)
            assert ("ssd" in tiers) == policy.on_ssd(key)
            if how is not None:
                assert tiers["memory"].is_owned == (how == "owned")
    assert len(pool.directory) == sum(
        any(p.in_memory(key) or p.on_ssd(key) for p in pool.policies.values()) for key in everything
    )
    pool.directory.check()


def _request(time_s, prompt):
    return PrefixRequest(time_s, 0, -1, tuple(prompt), (), 10 * len(prompt) + 1)


def test_seconds_of_a_pool_are_those_of_its_blocks():
    """One document read thrice on one node, then once on the other: counted by hand."""
    requests = [_request(float(t), (1, 2, 3)) for t in range(4)]
    costs = _costs(request_s=0.002)
    owner = Rendezvous().owners(
        first=1, anchor=1, writer="", weights={"node-000": 1.0, "node-001": 1.0}
    )[0]
    home = int(owner[-1])
    found = pool_cost(
        requests,
        [home, home, home, 1 - home],
        num_nodes=2,
        node_blocks=10,
        ssd_blocks=0,
        rule=PoolRule(replicas="none"),
        costs=costs,
        block_bytes=BLOCK,
        eviction="lru",
    )
    compute_s = sum(costs.recompute_s(depth) for depth in range(3))
    copy_s, net_s = BLOCK / 20e6, BLOCK / 12e6
    assert found.compute_s == pytest.approx(compute_s / 4)
    # the request over the network costs 2 ms, less than the 3 ms of computing three blocks
    assert found.fetch_s == pytest.approx((9 * copy_s + 3 * net_s + 0.002) / 4)
    assert (found.local, found.remote, found.ssd, found.computed) == (0.5, 0.25, 0.0, 0.25)
    assert found.total_s == found.fetch_s + found.compute_s


def test_what_memory_gave_up_comes_from_ssd_where_there_is_one():
    requests = [_request(float(t), (10 * (t % 3) + 1, 10 * (t % 3) + 2)) for t in range(9)]
    found = {
        ssd_blocks: pool_cost(
            requests,
            [0] * 9,
            num_nodes=1,
            node_blocks=2,
            ssd_blocks=ssd_blocks,
            rule=PoolRule(replicas="none"),
            costs=_costs(),
            block_bytes=BLOCK,
            eviction="lru",
        )
        for ssd_blocks in (0, 100)
    }
    assert found[0].computed == 1.0
    assert found[100].ssd == pytest.approx(6 / 9)
    assert found[100].computed == pytest.approx(3 / 9)
