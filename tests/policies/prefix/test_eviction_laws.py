"""Laws that every eviction policy of the catalog keeps, on trees of chains."""

from collections import OrderedDict, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import EVICTION, eviction_policy
from policies.prefix.cache import PrefixCache
from policies.prefix.eviction.base import Block, EvictionPolicy, Key

Path = tuple[int, ...]

every_policy = pytest.mark.parametrize("name", EVICTION)


@dataclass
class Watched:
    """A policy whose every answer is checked against what must be resident."""

    inner: EvictionPolicy
    parents: dict[Key, Key | None] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def keeps_prefixes_whole(self) -> bool:
        return self.inner.keeps_prefixes_whole

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        self.inner.begin_request(chain, now=now, category=category)

    def access(self, key: Key, *, now: float) -> None:
        self.inner.access(key, now=now)

    def insert(self, block: Block, *, now: float) -> None:
        self.inner.insert(block, now=now)
        self.parents[block.key] = block.parent
        self.agrees()

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        self.inner.end_request(chain, now=now)
        self.agrees()

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        victim = self.inner.evict(pinned, now=now)
        self.calls.append(("evict", victim))
        if victim is None:
            behind = set(self.parents.values()) if self.keeps_prefixes_whole else set()
            assert all(key in pinned for key in self.parents if key not in behind)
        else:
            assert victim not in pinned
            del self.parents[victim]  # a KeyError here: it was not resident
            if self.keeps_prefixes_whole:
                assert victim not in self.parents.values()
        self.agrees()
        return victim

    def remove(self, key: Key) -> None:
        self.inner.remove(key)
        del self.parents[key]
        self.agrees()

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        self.inner.reprice(key, cost_s, now=now)
        self.agrees()

    def agrees(self) -> None:
        assert len(self.inner) == len(self.parents)

    def __contains__(self, key: Key) -> bool:
        return key in self.inner

    def __len__(self) -> int:
        return len(self.inner)


@dataclass(frozen=True)
class Step:
    """One request, and what happens around it."""

    path: Path
    generated: int
    block_bytes: int
    wait_s: float
    lease: int  # leading blocks of the prompt held during the next requests
    lose: int  # resident block lost afterwards, counted from the root of the prompt; 0: none
    cost_s: float  # new price of the prompt's first block; 0: as it was


steps = st.lists(
    st.builds(
        Step,
        path=st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple),
        generated=st.integers(0, 2),
        block_bytes=st.integers(1, 4),
        wait_s=st.sampled_from([0.0, 0.3, 20.0]),
        lease=st.sampled_from([0, 0, 0, 1, 3]),
        lose=st.sampled_from([0, 0, 0, 1, 2, 3]),
        cost_s=st.sampled_from([0.0, 0.0, 1e-6, 5.0]),
    ),
    max_size=40,
)


def chain_to(path: Path) -> tuple[Path, ...]:
    return tuple(path[: n + 1] for n in range(len(path)))


def drive(policy: Watched, capacity_bytes: int, run: Sequence[Step]) -> PrefixCache:
    """Serve the steps, leases and losses among them, and check the cache after each."""
    cache = PrefixCache(policy, capacity_bytes)
    leases: deque[tuple[Path, ...]] = deque()
    now = 0.0
    for step in run:
        now += step.wait_s
        prompt = chain_to(step.path)
        generated = chain_to((*step.path, *[7] * step.generated))[len(prompt) :]
        outcome = cache.request(
            prompt,
            generated,
            now=now,
            block_bytes=step.block_bytes,
            cost_of_depth=lambda depth: 1.0 + 0.01 * depth,
        )
        assert cache.used_bytes <= capacity_bytes
        assert len(cache) == len(policy)
        assert not {*outcome.evicted} & {*prompt[: cache.leading(prompt)], *leases_of(leases)}
        resident = prompt[: cache.leading(prompt)]
        if step.cost_s and resident:
            policy.reprice(resident[0], step.cost_s, now=now)
        if 0 < step.lose <= len(resident) and resident[step.lose - 1] not in leases_of(leases):
            cache.drop(resident[step.lose - 1])
        held = prompt[: cache.leading(prompt)][: step.lease]
        cache.pin(held)
        leases.append(held)
        if len(leases) > 2:
            cache.unpin(leases.popleft())
    while leases:
        cache.unpin(leases.popleft())
    return cache


def leases_of(leases: Sequence[tuple[Path, ...]]) -> set[Path]:
    return {key for lease in leases for key in lease}


@every_policy
@settings(max_examples=40, deadline=None)
@given(run=steps, capacity_bytes=st.integers(1, 60))
def test_victims_are_resident_unpinned_and_all_there_is(
    name: str, run: list[Step], capacity_bytes: int
) -> None:
    policy = Watched(eviction_policy(name, capacity_bytes))
    drive(policy, capacity_bytes, run)
    resident = dict(policy.parents)
    assert all(key in policy for key in resident)
    given_up = []
    while (victim := policy.evict((), now=1e6)) is not None:
        given_up.append(victim)
    assert sorted(given_up) == sorted(resident)
    assert not any(key in policy for key in resident)
    assert policy.evict((), now=1e6) is None


@every_policy
@settings(max_examples=15, deadline=None)
@given(run=steps, capacity_bytes=st.integers(1, 60))
def test_the_same_calls_give_the_same_victims(
    name: str, run: list[Step], capacity_bytes: int
) -> None:
    first, second = (Watched(eviction_policy(name, capacity_bytes)) for _ in range(2))
    drive(first, capacity_bytes, run)
    drive(second, capacity_bytes, run)
    assert first.calls == second.calls


@every_policy
@settings(max_examples=15, deadline=None)
@given(run=steps, keep=st.integers(0, 5))
def test_whatever_is_pinned_stays_and_may_go_once_it_is_not(
    name: str, run: list[Step], keep: int
) -> None:
    policy = Watched(eviction_policy(name, 60))
    drive(policy, 60, run)
    pinned = set(sorted(policy.parents)[:: keep + 1])
    while policy.evict(pinned, now=1e6) is not None:
        pass
    assert pinned <= set(policy.parents)
    if not policy.keeps_prefixes_whole:
        assert set(policy.parents) == pinned
    while policy.evict((), now=1e6) is not None:
        pass
    assert not policy.parents


@every_policy
def test_blocks_of_a_request_that_is_not_over_may_go_if_nothing_else_can(name: str) -> None:
    policy = Watched(eviction_policy(name, 10))
    policy.begin_request("abc", now=0.0)
    for depth, key in enumerate("abc"):
        policy.insert(Block(key, "abc"[depth - 1] if depth else None, depth, 1, 1.0), now=0.0)
    assert policy.evict("ab", now=0.0) == "c"
    assert policy.evict("ab", now=0.0) is None
    policy.end_request("ab", now=0.0)
    assert {policy.evict((), now=1.0), policy.evict((), now=1.0)} == {"a", "b"}


@every_policy
def test_calls_about_absent_and_present_blocks_are_told_apart(name: str) -> None:
    policy = eviction_policy(name, 10)
    policy.begin_request((1,), now=0.0)
    for call in (
        lambda: policy.access(1, now=0.0),
        lambda: policy.remove(1),
        lambda: policy.reprice(1, 2.0, now=0.0),
    ):
        with pytest.raises(KeyError):
            call()
    policy.insert(Block(1, None, 0, 1, 1.0), now=0.0)
    with pytest.raises(ValueError, match="resident"):
        policy.insert(Block(1, None, 0, 1, 1.0), now=0.0)
    policy.end_request((1,), now=0.0)
    policy.remove(1)
    assert 1 not in policy
    assert len(policy) == 0
    assert policy.evict((), now=1.0) is None


@every_policy
def test_keys_that_python_takes_for_false_are_keys_like_others(name: str) -> None:
    cache = PrefixCache(Watched(eviction_policy(name, 2)), 2)
    for i, chain in enumerate([(0, b""), ("x", 0.5), (0, b"")]):
        assert cache.request(chain, now=float(i)).stored == 2


def elements(thing: object, seen: set[int] | None = None) -> Iterator[int]:
    """Sizes of all containers that can be reached from an object."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type(None), np.ndarray)):
        return
    seen.add(id(thing))
    if isinstance(thing, (dict, OrderedDict)):
        yield len(thing)
        for value in thing.values():
            yield from elements(value, seen)
    elif isinstance(thing, (list, tuple, set, deque)):
        yield len(thing) if not isinstance(thing, tuple) else 0
        for value in thing:
            yield from elements(value, seen)
    else:
        for attribute in dir(thing):
            if attribute.startswith("_") and not attribute.startswith("__"):
                value = getattr(thing, attribute)
                if not callable(value):
                    yield from elements(value, seen)


MOST_ELEMENTS_PER_BLOCK = 40
MOST_ELEMENTS = 20_000  # whatever the capacity: tables of a learning policy


@every_policy
def test_what_a_policy_remembers_is_bounded_by_its_capacity(name: str) -> None:
    capacity = 200
    policy = eviction_policy(name, capacity)
    cache = PrefixCache(policy, capacity)
    rng = np.random.default_rng(5)
    sizes = []
    for i in range(4000):
        root = int(rng.zipf(1.3)) % 500
        tail = i if rng.random() < 0.5 else int(rng.integers(50))
        cache.request([(root,), (root, 1), (root, 1, tail), (root, 1, tail, 2)], now=0.1 * i)
        if i in (1999, 3999):
            sizes.append(sum(elements(policy)))
    assert sizes[1] <= MOST_ELEMENTS_PER_BLOCK * capacity + MOST_ELEMENTS
    assert sizes[1] <= 1.25 * sizes[0] + 100


def one_each(policy: EvictionPolicy, blocks: Sequence[Block]) -> None:
    for i, block in enumerate(blocks):
        policy.begin_request((block.key,), now=float(i))
        policy.insert(block, now=float(i))
        policy.end_request((block.key,), now=float(i))


def all_victims(policy: EvictionPolicy) -> list[Key]:
    victims = []
    while (victim := policy.evict((), now=100.0)) is not None:
        victims.append(victim)
    return victims


priced = pytest.mark.parametrize("name", ["gdsf", "gdsf_pos", "tree_gdsf"])


@priced
def test_gdsf_gives_up_the_least_cost_per_byte_times_uses(name: str) -> None:
    policy = eviction_policy(name, 1000)
    one_each(
        policy,
        [
            Block("dear", None, 0, 10, 40.0),  # 4.0 a byte
            Block("big", None, 0, 100, 100.0),  # 1.0
            Block("small", None, 0, 1, 2.0),  # 2.0
            Block("often", None, 0, 10, 10.0),  # 1.0, used three times: 3.0
        ],
    )
    for _ in range(2):
        policy.begin_request(("often",), now=50.0)
        policy.access("often", now=50.0)
        policy.end_request(("often",), now=50.0)
    assert all_victims(policy) == ["big", "small", "often", "dear"]


@priced
def test_a_new_price_moves_a_block_up_and_down(name: str) -> None:
    policy = eviction_policy(name, 1000)
    one_each(policy, [Block(key, None, 0, 1, cost) for key, cost in [("a", 1.0), ("b", 2.0)]])
    policy.reprice("a", 3.0, now=10.0)
    policy.insert(Block("c", None, 0, 1, 9.0), now=10.0)
    policy.end_request(("c",), now=10.0)
    policy.reprice("c", 0.5, now=10.0)
    assert all_victims(policy) == ["c", "b", "a"]


@priced
def test_a_favourite_that_is_not_used_again_is_overtaken(name: str) -> None:
    """H = L + F C / S: L grows by one a round of newcomers, so 5 uses last 4 rounds."""
    policy = eviction_policy(name, 2)
    cache = PrefixCache(policy, 2)
    for _ in range(5):
        cache.request(("favourite",), now=0.0)
    stayed = 0
    while "favourite" in cache and stayed < 20:
        cache.request((stayed,), now=1.0 + stayed)
        stayed += 1
    assert stayed == 6  # one fills the memory, four raise L to 4, the next meets H = 5
