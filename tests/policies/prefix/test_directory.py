import hashlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix.directory import Copy, Directory, Held, Holding
from policies.prefix.owners import rendezvous_order

NODES = ("a", "b", "c", "d")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 1.0}
node = st.sampled_from(NODES)
key = st.integers(0, 4)
tier = st.sampled_from(["memory", "ssd"])
held = st.builds(Held, st.integers(0, 7), st.integers(0, 3), st.integers(0, 3), st.just(64))
adds = st.tuples(st.just("add"), node, st.integers(1, 3), key, held, tier, st.booleans())
discards = st.tuples(st.just("discard"), node, st.integers(1, 3), key, tier)
forgets = st.tuples(st.just("forget"), node)
histories = st.lists(adds | adds | adds | discards | forgets, max_size=60) | st.lists(
    adds | adds | adds | discards, min_size=20, max_size=60
)


class Naive:
    """A list of all that is true, searched from end to end."""

    def __init__(self) -> None:
        self.copies: list[tuple[str, Any, Held, str, bool]] = []
        self.newest: dict[str, int] = {}

    def hear(self, name: str, incarnation: int) -> bool:
        if incarnation < self.newest.get(name, 0):
            return False
        if incarnation > self.newest.get(name, 0):
            self.copies = [c for c in self.copies if c[0] != name]
        self.newest[name] = incarnation
        return True

    def do(self, step: tuple[Any, ...]) -> bool | None:
        match step:
            case ("add", name, incarnation, k, where, on, owned):
                if not self.hear(name, incarnation):
                    return False
                self.copies = [c for c in self.copies if (c[0], c[1], c[3]) != (name, k, on)]
                self.copies.append((name, k, where, on, owned))
                return True
            case ("discard", name, incarnation, k, on):
                if not self.hear(name, incarnation):
                    return False
                before = len(self.copies)
                self.copies = [c for c in self.copies if (c[0], c[1], c[3]) != (name, k, on)]
                return len(self.copies) < before
            case ("forget", name):
                self.copies = [c for c in self.copies if c[0] != name]
        return None


def do(directory: Directory, step: tuple[Any, ...]) -> bool | None:
    match step:
        case ("add", name, incarnation, k, where, on, owned):
            return directory.add(name, incarnation, k, where, tier=on, is_owned=owned)
        case ("discard", name, incarnation, k, on):
            return directory.discard(name, incarnation, k, tier=on)
        case ("forget", name):
            directory.forget_node(name)
    return None


@given(histories)
def test_any_history_leaves_what_a_plain_list_would_say(history: list[tuple[Any, ...]]) -> None:
    directory, naive = Directory(), Naive()
    for step in history:
        assert do(directory, step) == naive.do(step)
        directory.check()
    for k in range(8):
        of_key = [c for c in naive.copies if c[1] == k]
        ranked = sorted(of_key, key=lambda c: (c[3], not c[4], c[0]))
        assert directory.copies(k) == tuple(Copy(c[0], c[3], c[4]) for c in ranked)
        assert directory.held(k) == (ranked[0][2] if ranked else None)
        assert all(directory.held_at(k, c[0], c[3]) == c[2] for c in of_key)
        assert (k in directory) == bool(of_key)
    for name in NODES:
        mine = [Holding(c[1], c[2], c[3], c[4]) for c in naive.copies if c[0] == name]
        assert Counter(directory.holdings(name)) == Counter(mine)
    assert len(directory) == len(dict.fromkeys(c[1] for c in naive.copies))
    assert directory.nodes() == tuple(sorted(dict.fromkeys(c[0] for c in naive.copies)))


@given(histories, st.lists(st.integers(0, 9), max_size=10))
def test_the_leading_keys_are_counted_up_to_the_first_that_nobody_holds(
    history: list[tuple[Any, ...]], chain: list[int]
) -> None:
    directory = Directory()
    for step in history:
        do(directory, step)
    count = 0
    while count < len(chain) and directory.copies(chain[count]):
        count += 1
    assert directory.leading(chain) == count


def prompts(seed: int, count: int) -> list[tuple[int, ...]]:
    digest = hashlib.sha256(bytes([seed])).digest() * count
    return [tuple(b % 2 for b in digest[7 * i : 7 * i + 6]) for i in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_the_leading_count_is_the_longest_common_prefix_with_any_stored_prompt(seed: int) -> None:
    directory = Directory()
    stored: list[tuple[int, ...]] = []
    for i, prompt in enumerate(prompts(seed, 12)):
        chain = [hashlib.sha256(bytes(prompt[: n + 1])).digest() for n in range(len(prompt))]
        common = max(
            (next((n for n in range(6) if p[n] != prompt[n]), 6) for p in stored), default=0
        )
        assert directory.leading(chain) == common
        for depth in range(common, 6):
            where = Held(chain[common], depth - common, depth, 64)
            directory.add(NODES[i % 4], 1, chain[depth], where, tier="memory", is_owned=True)
        stored.append(prompt)


def test_words_of_an_older_incarnation_are_ignored_and_a_newer_one_forgets_all_before() -> None:
    directory = Directory()
    where = Held(1, 0, 0, 64)
    assert directory.add("a", 5, 1, where, tier="memory", is_owned=True)
    assert not directory.add("a", 4, 2, where, tier="memory", is_owned=True)
    assert not directory.discard("a", 4, 1, tier="memory")
    assert directory.leading([1, 2]) == 1
    assert directory.add("a", 6, 2, where, tier="ssd", is_owned=True)
    assert directory.copies(1) == ()
    directory.forget_node("a")
    assert directory.incarnation("a") == 6
    assert not directory.add("a", 5, 1, where, tier="memory", is_owned=True)
    assert len(directory) == 0


def test_a_block_leaves_only_when_both_tiers_gave_it_up() -> None:
    directory = Directory()
    for where in ("memory", "ssd"):
        directory.add("a", 1, 1, Held(1, 0, 0, 64), tier=where, is_owned=True)
    assert directory.discard("a", 1, 1, tier="memory")
    assert directory.copies(1) == (Copy("a", "ssd", True),)
    assert not directory.discard("a", 1, 1, tier="memory")
    assert directory.discard("a", 1, 1, tier="ssd")
    assert directory.leading([1]) == 0


@settings(max_examples=60)
@given(histories, node, st.randoms(use_true_random=False))
def test_promotions_are_the_same_on_every_node_and_what_the_rule_says(
    history: list[tuple[Any, ...]], dead: str, random: Any
) -> None:
    first = Directory()
    for step in history:
        do(first, step)
    facts = [(name, h) for name in NODES for h in first.holdings(name)]
    random.shuffle(facts)
    second = Directory()
    for name, h in facts:
        second.add(name, 1, h.key, h.held, tier=h.tier, is_owned=h.is_owned)
    live = {name: weight for name, weight in WEIGHTS.items() if name != dead}
    found = first.promotions(dead, live)
    assert second.promotions(dead, dict(reversed(live.items()))) == found
    assert list(found) == sorted(found)

    heirs = {k: name for name, ks in found.items() for k in ks}
    assert sum(map(len, found.values())) == len(heirs)
    for k in range(8):
        copies = first.copies(k)
        owned = [h.held.region for h in first.holdings(dead) if h.key == k and h.is_owned]
        others = [c for c in copies if c.node != dead]
        if not owned or not others or any(c.is_owned for c in others):
            assert k not in heirs
        else:
            order = rendezvous_order(owned[0], live)
            assert heirs[k] == min((c.node for c in others), key=order.index)


def test_a_region_with_copies_on_one_node_is_promoted_whole_and_in_order() -> None:
    directory = Directory()
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(6)]
    for i in (3, 0, 5, 1, 4, 2):
        where = Held(keys[0], i, i, 64)
        directory.add("a", 1, keys[i], where, tier="memory", is_owned=True)
        for name in ("b", "c"):
            directory.add(name, 1, keys[i], where, tier="memory", is_owned=False)
    heir = rendezvous_order(keys[0], {"b": 1.0, "c": 1.0})[0]
    assert directory.promotions("a", {"b": 1.0, "c": 1.0, "d": 1.0}) == {heir: tuple(keys)}
    assert directory.promotions("a", {"d": 1.0}) == {}
    assert directory.promotions("gone", {"b": 1.0}) == {}
    directory.forget_node("a")
    assert directory.leading(keys) == 6


def test_holdings_can_be_walked_while_the_directory_changes() -> None:
    directory = Directory()
    for k in range(4):
        directory.add("a", 1, k, Held(0, k, k, 64), tier="memory", is_owned=True)
    for h in directory.holdings("a"):
        directory.discard("a", 1, h.key, tier="memory")
    assert len(directory) == 0
