"""One memory of prefix blocks: what counts as a hit, what is kept, what pins hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix.cache import Outcome, PrefixCache
from policies.prefix.eviction.lru import Lru
from policies.prefix.eviction.tree_lru import TreeLru

Path = tuple[int, ...]


def lru(capacity_bytes: int) -> PrefixCache:
    return PrefixCache(Lru(capacity_bytes), capacity_bytes)


def test_a_hit_is_a_leading_resident_block_of_the_prompt() -> None:
    cache = lru(10)
    assert cache.request("abc", "d", now=0.0) == Outcome(hits=0, stored=4, evicted=())
    assert cache.request("abcde", now=1.0) == Outcome(hits=4, stored=1, evicted=())
    cache.drop("b")
    assert cache.leading("abcde") == 1
    assert cache.request("abcde", now=2.0) == Outcome(hits=1, stored=1, evicted=())


def test_generated_blocks_are_stored_but_are_no_hits() -> None:
    cache = lru(10)
    cache.request("ab", "c", now=0.0)
    assert cache.request("ab", "c", now=1.0).hits == 2


def test_of_a_chain_that_does_not_fit_the_leading_blocks_are_kept() -> None:
    cache = lru(3)
    cache.request("xyz", now=0.0)
    outcome = cache.request("abcde", now=1.0)
    assert outcome.stored == 3
    assert cache.leading("abcde") == 3
    assert sorted(map(str, outcome.evicted)) == ["x", "y", "z"]


def test_the_tail_of_the_chain_used_longest_ago_goes_first() -> None:
    cache = lru(5)
    cache.request("abc", now=0.0)
    cache.request("pq", now=1.0)
    assert cache.request("x", now=2.0).evicted == ("c",)
    assert cache.request("yz", now=3.0).evicted == ("b", "a")


def test_pinned_blocks_stay_and_what_finds_no_room_is_not_stored() -> None:
    cache = lru(3)
    cache.request("ab", now=0.0)
    cache.pin("ab")
    cache.pin("a")
    assert cache.request("xyz", now=1.0).stored == 1
    assert cache.leading("ab") == 2
    cache.unpin("ab")
    assert cache.request("pqr", now=2.0).stored == 2
    assert cache.leading("ab") == 1
    cache.unpin("a")
    assert cache.request("pqr", now=3.0).stored == 1
    with pytest.raises(KeyError):
        cache.unpin("a")


def test_pinning_what_is_absent_pins_nothing() -> None:
    cache = lru(2)
    cache.request("ab", now=0.0)
    with pytest.raises(KeyError):
        cache.pin("abc")
    assert cache.request("xy", now=1.0).stored == 2


def test_bytes_of_blocks_of_several_sizes_are_kept_apart() -> None:
    cache = lru(10)
    cache.request("ab", now=0.0, block_bytes=4)
    assert cache.used_bytes == 8
    assert cache.request("xyz", now=1.0, block_bytes=2).evicted == ("b",)
    assert cache.used_bytes == 10
    assert cache.request("n", now=2.0, block_bytes=11).stored == 0
    assert len(cache) == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lru(-1), "capacity_bytes must be >= 0, found -1"),
        (lambda: lru(3).request("a", now=0.0, block_bytes=0), "block_bytes must be > 0, found 0"),
    ],
)
def test_impossible_sizes_are_refused(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_policy_that_holds_blocks_already_is_refused() -> None:
    policy = Lru(4)
    PrefixCache(policy, 4).request("ab", now=0.0)
    with pytest.raises(ValueError, match="the policy must be empty, found 2 blocks in it"):
        PrefixCache(policy, 4)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(paths, max_size=40), capacity=st.integers(1, 25))
def test_recency_from_the_tail_is_recency_of_the_leaves(
    requests: list[Path], capacity: int
) -> None:
    tail_first = PrefixCache(Lru(capacity), capacity)
    leaves = PrefixCache(TreeLru(capacity), capacity)
    for i, path in enumerate(requests):
        blocks = tuple(path[: n + 1] for n in range(len(path)))
        expected = tail_first.request(blocks, now=float(i))
        assert leaves.request(blocks, now=float(i)) == expected
