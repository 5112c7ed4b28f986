"""What one node keeps: accounts never go wrong, whatever is stored, read, lost and taken over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.prefix_costs import MISTRAL_7B_ON_A100, PrefixCosts, TierSpeed
from policies.catalog import EVICTION
from policies.prefix.eviction.base import EvictionPolicy, Key
from policies.prefix.eviction.fifo import Fifo
from policies.prefix.store_log import LoggedStore, ReplayedStore
from policies.prefix.store_orders import NewBlock
from policies.prefix.store_policy import StorePolicy
from policies.prefix.store_settings import StoreSettings
from traces.decisions import DecisionLog

COSTS = PrefixCosts(
    prefill=MISTRAL_7B_ON_A100,
    block_tokens=64,
    local=TierSpeed(bytes_per_s=14e9),
    remote=TierSpeed(bytes_per_s=12e9),
    ssd=TierSpeed(bytes_per_s=3e9),
)
MIB = 1 << 20


def policy_of(**changes: Any) -> StorePolicy:
    given_settings = {"memory_bytes": 10, "eviction": "lru"} | changes
    return StorePolicy(StoreSettings(**given_settings), COSTS)


def chain(name: str, length: int, **changes: Any) -> list[NewBlock]:
    keys = [f"{name}{i}" for i in range(length)]
    return [
        NewBlock(**({"key": k, "parent": p, "depth": i, "size_bytes": 1} | changes))
        for i, (k, p) in enumerate(zip(keys, [None, *keys], strict=False))
    ]


def store(policy: StorePolicy, blocks: list[NewBlock], now: float) -> tuple[list[str], list[Any]]:
    orders = policy.reserve(blocks, pinned={b.key: None for b in blocks}, now=now)
    stored = [str(b.key) for b in blocks[: orders.admitted]]
    policy.commit(stored, now=now)
    return stored, [v.key for v in orders.victims]


def test_a_reserved_block_takes_room_but_is_not_there() -> None:
    policy = policy_of()
    orders = policy.reserve(chain("a", 3), pinned=(), now=0.0)
    assert orders.admitted == 3
    assert policy.memory_used_bytes == 3
    assert policy.in_memory("a0") is None
    assert policy.is_reserved("a0")
    policy.commit(["a0", "a1"], now=1.0)
    policy.cancel(["a2"], now=1.0)
    assert policy.in_memory("a1") == "owned"
    assert policy.memory_used_bytes == 2


def test_only_leading_blocks_are_admitted_when_room_ends() -> None:
    policy = policy_of()
    orders = policy.reserve(chain("a", 12), pinned=(), now=0.0)
    assert (orders.admitted, orders.refusal) == (10, "full")
    policy.commit([f"a{i}" for i in range(10)], now=0.0)
    pins = [f"a{i}" for i in range(10)]
    refused = policy.reserve(chain("b", 1), pinned=pins, now=1.0)
    assert (refused.admitted, refused.victims, refused.refusal) == (0, (), "full")


def test_the_parent_of_a_block_on_its_way_is_not_given_up() -> None:
    policy = policy_of(memory_bytes=3)
    store(policy, chain("a", 2), 0.0)
    blocks = chain("a", 3)[2:]
    policy.reserve(blocks, pinned=(), now=1.0)
    orders = policy.reserve(chain("b", 3), pinned=(), now=2.0)
    assert "a1" not in [v.key for v in orders.victims]


def test_a_victim_with_no_other_copy_is_said_to_be_lost() -> None:
    policy = policy_of(memory_bytes=2, ssd_bytes=10)
    store(policy, chain("a", 2), 0.0)
    policy.reserve_ssd(["a0"], now=0.5)
    policy.flushed(["a0"], now=0.6)
    orders = policy.reserve(chain("b", 2), pinned=(), now=1.0)
    assert {v.key: v.is_lost for v in orders.victims} == {"a0": False, "a1": True}


def test_replicas_are_refused_where_there_are_to_be_none() -> None:
    policy = policy_of(replicas="none")
    orders = policy.reserve(chain("a", 2, is_owned=False), pinned=(), now=0.0)
    assert (orders.admitted, orders.refusal) == (0, "rule")


def test_a_static_share_is_never_exceeded_by_replicas() -> None:
    policy = policy_of(replicas="static", replica_share=0.3)
    stored, victims = store(policy, chain("r", 5, is_owned=False), 0.0)
    assert len(stored) == 3  # the chain is pinned, so its own blocks cannot make room
    stored, victims = store(policy, chain("s", 3, is_owned=False), 1.0)
    assert len(stored) == 3
    assert sorted(victims) == ["r0", "r1", "r2"]
    assert len(store(policy, chain("o", 9), 2.0)[0]) == 7


def test_with_a_soft_share_replicas_use_free_room_and_go_first() -> None:
    policy = policy_of(replicas="soft", replica_share=0.3)
    assert len(store(policy, chain("r", 8, is_owned=False), 0.0)[0]) == 8
    stored, victims = store(policy, chain("o", 7), 1.0)
    assert len(stored) == 7
    assert all(v.startswith("r") for v in victims)
    assert len(victims) == 5
    _, victims = store(policy, chain("p", 1), 2.0)  # replicas hold their share: owned ones go
    assert victims[0].startswith("o")


def test_in_one_ranking_the_cheapest_copy_to_lose_goes_first() -> None:
    policy = policy_of(
        memory_bytes=3 * 8 * MIB, eviction="gdsf", replicas="unified", num_nodes=4, ssd_bytes=0
    )
    for name, is_owned in (("own", True), ("rep", False)):
        store(policy, chain(name, 1, size_bytes=8 * MIB, is_owned=is_owned), 0.0)
    store(policy, chain("new", 1, size_bytes=8 * MIB), 1.0)
    _, victims = store(policy, chain("two", 1, size_bytes=8 * MIB), 2.0)
    assert victims == ["rep0"]


def test_a_copy_elsewhere_makes_this_one_cheaper() -> None:
    policy = policy_of(memory_bytes=2 * 8 * MIB, eviction="gdsf", num_nodes=2)
    store(policy, chain("a", 1, size_bytes=8 * MIB), 0.0)
    store(policy, chain("b", 1, size_bytes=8 * MIB), 0.0)
    policy.set_elsewhere("b0", True, now=1.0)
    _, victims = store(policy, chain("c", 1, size_bytes=8 * MIB), 2.0)
    assert victims == ["b0"]


def test_a_tenant_stays_within_its_quota_and_cannot_push_others_out() -> None:
    policy = policy_of(quota_bytes={"t": 4})
    store(policy, chain("a", 6), 0.0)
    stored, victims = store(policy, chain("x", 6, tenant="t"), 1.0)
    assert (len(stored), victims) == (4, [])
    refused = policy.reserve(chain("x", 6, tenant="t")[4:], pinned=[*stored], now=2.0)
    assert refused.refusal == "quota"
    _, victims = store(policy, chain("y", 2, tenant="t"), 3.0)
    assert all(v.startswith("x") for v in victims)


def test_others_leave_a_tenant_what_its_quota_entitles_it_to() -> None:
    policy = policy_of(quota_bytes={"t": 4})
    store(policy, chain("x", 4, tenant="t"), 0.0)
    store(policy, chain("a", 6), 1.0)
    _, victims = store(policy, chain("b", 5), 2.0)
    assert all(v.startswith("a") for v in victims)


def test_a_full_memory_refuses_rather_than_evicts_below_an_entitlement() -> None:
    policy = policy_of(quota_bytes={"t": 4, "u": 2})
    store(policy, chain("x", 4, tenant="t"), 0.0)
    store(policy, chain("a", 4), 1.0)
    store(policy, chain("y", 1, tenant="u"), 2.0)
    assert store(policy, chain("b", 1), 3.0) == (["b0"], [])  # what nobody uses may be lent
    pins = ["a0", "a1", "a2", "a3", "b0"]
    refused = policy.reserve(chain("c", 1), pinned=pins, now=4.0)
    assert (refused.admitted, refused.victims, refused.refusal) == (0, (), "full")
    refused = policy.reserve(chain("z", 1, tenant="u"), pinned=[*pins, "y0"], now=5.0)
    assert (refused.admitted, refused.victims, refused.refusal) == (0, (), "full")
    _, victims = store(policy, chain("z", 1, tenant="u"), 6.0)  # the loan is given back
    assert victims[0].startswith(("a", "b"))


def test_replicas_within_their_share_give_way_to_nobody() -> None:
    policy = policy_of(replicas="soft", replica_share=0.3)
    store(policy, chain("r", 3, is_owned=False), 0.0)
    owned, _ = store(policy, chain("o", 7), 1.0)
    refused = policy.reserve(chain("p", 1), pinned=owned, now=2.0)
    assert (refused.admitted, refused.victims, refused.refusal) == (0, (), "full")
    _, victims = store(policy, chain("p", 1), 3.0)
    assert victims[0].startswith("o")


class _Listening(Fifo):
    """First in, first out; counts the requests it hears of."""

    requests = 0

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        self.requests += 1
        super().begin_request(chain, now=now, category=category)


def test_a_request_walks_only_the_areas_it_concerns() -> None:
    made: list[_Listening] = []

    def build(name: str, capacity_bytes: int) -> EvictionPolicy:
        made.append(_Listening(capacity_bytes))
        return made[-1]

    quotas = {f"t{i}": 10 for i in range(200)}
    policy = StorePolicy(StoreSettings(memory_bytes=3000, quota_bytes=quotas), COSTS, build)
    store(policy, chain("x", 3, tenant="t7"), 0.0)
    policy.read(["x0", "x1", "y0"], now=1.0)  # of everybody, and t7 whose blocks are read
    policy.read(["z0"], now=2.0, tenant="t9")  # of everybody, and t9 who asks
    policy.read(["z0"], now=3.0, tenant="unknown")
    assert sorted(one.requests for one in made if one.requests) == [1, 1, 3]
    assert made[0].requests == 3


def test_a_block_is_flushed_once_when_it_is_read_again() -> None:
    policy = policy_of(ssd_bytes=10, flush="on_reuse")
    blocks = chain("a", 2)
    policy.reserve(blocks, pinned=(), now=0.0)
    assert policy.commit(["a0", "a1"], now=0.0).flush == ()
    assert policy.read(["a0", "a1", "a2"], now=1.0).flush == ("a0", "a1")
    policy.reserve_ssd(["a0", "a1"], now=1.0)
    assert policy.read(["a0", "a1"], now=2.0).flush == ()
    policy.flush_failed(["a0", "a1"], now=3.0)
    assert policy.ssd_used_bytes == 0
    assert policy.read(["a0"], now=4.0).flush == ("a0",)


def test_replicas_are_not_flushed_until_this_node_owns_them() -> None:
    policy = policy_of(ssd_bytes=10, num_nodes=2)
    blocks = chain("a", 1, is_owned=False)
    policy.reserve(blocks, pinned=(), now=0.0)
    assert policy.commit(["a0"], now=0.0).flush == ()
    assert policy.own(["a0"], now=1.0).flush == ("a0",)
    assert policy.in_memory("a0") == "owned"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_bytes": 0}, "memory_bytes must be > 0"),
        ({"ssd_bytes": -1}, "ssd_bytes must be >= 0"),
        ({"replicas": "some"}, "replicas must be one of unified, none, soft, static"),
        ({"flush": "soon"}, "flush must be one of"),
        ({"replica_share": 1.0}, "replica_share must be within"),
        ({"quota_bytes": {"t": 10}}, "leave nothing of memory_bytes"),
        ({"eviction": "random"}, "eviction must be one of"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        policy_of(**changes)
    assert "\n" not in str(error.value)


_STEP = st.tuples(
    st.sampled_from(["put", "read", "lost", "ssd", "own", "elsewhere", "cancel"]),
    st.integers(0, 5),
    st.integers(1, 6),
    st.booleans(),
    st.integers(1, 3),
)


@given(
    st.lists(_STEP, max_size=60),
    st.sampled_from(sorted(EVICTION)),
    st.sampled_from(["unified", "none", "soft", "static"]),
)
@settings(deadline=None, max_examples=80)
def test_accounts_are_exact_and_a_replay_gives_the_same_victims(
    steps: list[tuple[str, int, int, bool, int]], eviction: str, replicas: Any
) -> None:
    log = DecisionLog(max_calls=10_000)
    policy = LoggedStore(
        StoreSettings(
            memory_bytes=12,
            ssd_bytes=8,
            eviction=eviction,
            replicas=replicas,
            num_nodes=2,
            quota_bytes={"t": 3},
        ),
        COSTS,
        log,
    )
    sizes: dict[str, int] = {}
    for now, (kind, name, length, is_owned, size) in enumerate(steps):
        keys = [f"{name}-{i}" for i in range(length)]
        here = 0
        while here < length and policy.in_memory(keys[here]):
            here += 1
        if kind in ("put", "cancel"):
            end = here
            while end < length and not policy.in_memory(keys[end]):
                end += 1
            blocks = [
                NewBlock(
                    keys[i],
                    keys[i - 1] if i else None,
                    i,
                    size,
                    is_owned,
                    "t" if name == 0 else None,
                )
                for i in range(here, end)
            ]
            orders = policy.reserve(blocks, pinned=dict.fromkeys(keys), now=now)
            assert not {v.key for v in orders.victims} & set(keys)
            for victim in orders.victims:
                del sizes[str(victim.key)]
            admitted = keys[here : here + orders.admitted]
            if kind == "cancel":
                policy.cancel(admitted, now=now)
            else:
                policy.commit(admitted, now=now)
                sizes |= dict.fromkeys(admitted, size)
        elif kind == "read":
            policy.read(keys, now=now, tenant="t" if name == 0 else None)
        elif kind == "lost":
            policy.lost(keys[-1], "memory", now=now)
            sizes.pop(keys[-1], None)
        elif kind == "ssd":
            wanted = [key for key in keys if key in sizes and not policy.on_ssd(key)]
            orders = policy.reserve_ssd(wanted, now=now)
            policy.flushed(wanted[: orders.admitted], now=now)
        elif kind == "own":
            policy.own(keys, now=now)
        else:
            policy.set_elsewhere(keys[0], is_owned, now=now)
        assert policy.memory_used_bytes == sum(sizes.values()) <= 12
        assert policy.memory_used_bytes == sum(area.used_bytes for area in policy._areas)
        assert all(policy.in_memory(key) for key in sizes)
        assert policy.ssd_used_bytes <= 8
    fresh = ReplayedStore(log.policies["prefix"])
    for call in log.decisions:
        assert fresh.repeat(call.call, call.args, now=call.now) == call.orders
