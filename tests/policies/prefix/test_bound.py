"""Belady's bound against exhaustive search and against every policy."""

from itertools import chain, combinations, product

import numpy as np
import pytest

from policies.catalog import EVICTION
from policies.prefix.bound import bound_hits
from policies.prefix.cache import PrefixCache

Path = tuple[int, ...]
Request = tuple[tuple[Path, ...], tuple[Path, ...]]

TREE: list[Path] = [path for n in (1, 2, 3) for path in product(range(2), repeat=n)]


def chain_to(path: Path) -> tuple[Path, ...]:
    return tuple(path[: n + 1] for n in range(len(path)))


def random_requests(seed: int) -> tuple[list[Request], int]:
    """Up to six requests in a binary tree of depth three, some with a generated block."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(int(rng.integers(2, 7))):
        blocks = chain_to(TREE[int(rng.integers(len(TREE)))])
        prompt = len(blocks) - int(len(blocks) > 1 and rng.random() < 0.3)
        requests.append((blocks[:prompt], blocks[prompt:]))
    return requests, int(rng.integers(0, 5))


def most_hits(requests: list[Request], capacity: int) -> int:
    """The best total over every choice of what to keep after every request."""
    best: dict[frozenset[Path], int] = {frozenset(): 0}
    for prompt, generated in requests:
        after: dict[frozenset[Path], int] = {}
        for kept, total in best.items():
            hits = 0
            while hits < len(prompt) and prompt[hits] in kept:
                hits += 1
            there = sorted(kept | {*prompt, *generated})
            choices = chain.from_iterable(
                combinations(there, n) for n in range(min(capacity, len(there)) + 1)
            )
            for choice in choices:
                key = frozenset(choice)
                after[key] = max(after.get(key, 0), total + hits)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(150))
def test_the_bound_is_what_exhaustive_search_finds(seed: int) -> None:
    requests, capacity = random_requests(seed)
    assert sum(bound_hits(requests, capacity)) == most_hits(requests, capacity)


@pytest.mark.parametrize("name", EVICTION)
def test_no_policy_beats_the_bound(name: str) -> None:
    rng = np.random.default_rng(11)
    requests: list[Request] = []
    for _ in range(300):
        depth = int(rng.integers(1, 7))
        path = tuple(int(x) for x in rng.integers(0, 3, size=depth))
        blocks = chain_to(path)
        cut = max(1, len(blocks) - int(rng.integers(0, 2)))
        requests.append((blocks[:cut], blocks[cut:]))
    for capacity in (5, 20, 80):
        cache = PrefixCache(EVICTION[name](capacity), capacity)
        hits = sum(
            cache.request(prompt, generated, now=float(i)).hits
            for i, (prompt, generated) in enumerate(requests)
        )
        assert 0 < hits <= sum(bound_hits(requests, capacity))


def test_without_room_nothing_is_hit_and_with_room_for_all_every_repetition_is() -> None:
    a, b = chain_to((0, 0, 0)), chain_to((0, 1))
    requests: list[Request] = [(a, ()), (b, ()), (a, ()), (b, ())]
    assert bound_hits(requests, 0) == [0, 0, 0, 0]
    assert bound_hits(requests, 4) == [0, 1, 3, 2]


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be >= 0 blocks, found -1"):
        bound_hits([], -1)
