import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from policies.catalog import OWNERS, owner_rule
from policies.prefix.owners import OwnerRule, Rendezvous, rendezvous_order

keys = st.binary(min_size=32, max_size=32) | st.integers(0, 2**64 - 1)
names = st.text(min_size=1, max_size=6)
clusters = st.dictionaries(names, st.floats(0.01, 100.0), min_size=1, max_size=8)


def numbered(n: int) -> list[bytes]:
    return [hashlib.sha256(bytes([i & 255, i >> 8])).digest() for i in range(n)]


@given(keys, clusters)
def test_a_removed_node_leaves_the_order_of_the_others_alone(
    key: bytes | int, weights: dict[str, float]
) -> None:
    order = rendezvous_order(key, weights)
    assert sorted(order) == sorted(weights)
    for gone in weights:
        left = {node: weight for node, weight in weights.items() if node != gone}
        assert rendezvous_order(key, left) == tuple(node for node in order if node != gone)


@given(keys, clusters, st.data())
def test_a_node_that_gains_weight_takes_keys_and_gives_none(
    key: bytes | int, weights: dict[str, float], data: st.DataObject
) -> None:
    grown = data.draw(st.sampled_from(sorted(weights)))
    before = rendezvous_order(key, weights)
    after = rendezvous_order(key, {**weights, grown: weights[grown] * 2})
    assert after.index(grown) <= before.index(grown)
    assert [n for n in after if n != grown] == [n for n in before if n != grown]


@given(keys, clusters)
def test_the_order_of_the_table_does_not_matter(
    key: bytes | int, weights: dict[str, float]
) -> None:
    turned = dict(reversed(weights.items()))
    assert rendezvous_order(key, turned) == rendezvous_order(key, weights)


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [2, 1, 1, 1], [0.5, 4, 1.25], [1, 9]])
def test_shares_of_owned_keys_are_proportional_to_the_weights(weights: list[float]) -> None:
    table = {f"node{i}": float(weight) for i, weight in enumerate(weights)}
    owned = dict.fromkeys(table, 0)
    for key in numbered(8000):
        owned[rendezvous_order(key, table)[0]] += 1
    expected = [8000 * weight / sum(table.values()) for weight in table.values()]
    assert chisquare(list(owned.values()), expected).pvalue > 1e-4


def test_the_second_choices_of_one_owner_are_spread_by_weight() -> None:
    table = {"a": 3.0, "b": 1.0, "c": 2.0}
    seconds = {"b": 0, "c": 0}
    for key in numbered(6000):
        order = rendezvous_order(key, table)
        if order[0] == "a":
            seconds[order[1]] += 1
    total = sum(seconds.values())
    assert chisquare(list(seconds.values()), [total / 3, total * 2 / 3]).pvalue > 1e-4


def test_a_node_of_weight_zero_owns_nothing() -> None:
    assert rendezvous_order(b"k" * 32, {"a": 0.0, "b": 1.0}) == ("b",)
    assert rendezvous_order(b"k" * 32, {}) == ()


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused_by_name(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of node b must be finite and >= 0"):
        rendezvous_order(b"k" * 32, {"a": 1.0, "b": weight})


def test_a_numbered_key_has_to_fit_eight_bytes() -> None:
    assert rendezvous_order(258, {"a": 1.0, "b": 2.0}) == rendezvous_order(
        bytes([0, 0, 0, 0, 0, 0, 1, 2]), {"a": 1.0, "b": 2.0}
    )
    with pytest.raises(ValueError, match=r"in 0\.\.2\^64-1, found -1"):
        rendezvous_order(-1, {"a": 1.0})


def test_the_best_possible_draw_still_has_a_finite_score(monkeypatch: pytest.MonkeyPatch) -> None:
    class BestDraw:
        def digest(self) -> bytes:
            return b"\xff" * 32

    monkeypatch.setattr(hashlib, "sha256", lambda data: BestDraw())
    assert rendezvous_order(b"k", {"b": 1.0, "a": 1.0, "c": 2.0}) == ("c", "a", "b")


@pytest.mark.parametrize("name", OWNERS)
@given(
    first=keys, anchor=keys, weights=clusters, writer=names, count=st.integers(1, 9), data=st.data()
)
def test_every_rule_names_different_live_nodes_as_many_as_there_are(
    name: str,
    first: bytes | int,
    anchor: bytes | int,
    weights: dict[str, float],
    writer: str,
    count: int,
    data: st.DataObject,
) -> None:
    writer = data.draw(st.sampled_from([writer, *sorted(weights)]))
    rule: OwnerRule = owner_rule(name)

    def ask(n: int) -> tuple[str, ...]:
        return rule.owners(first=first, anchor=anchor, writer=writer, weights=weights, count=n)

    found = ask(count)
    assert len(found) == min(count, len(weights)) == len(dict.fromkeys(found))
    assert all(node in weights for node in found)
    assert ask(count + 1)[: len(found)] == found


def test_the_rules_look_at_the_region_the_writer_and_the_anchor() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    told = {"first": 1, "anchor": 2, "writer": "c", "weights": weights, "count": 4}
    first, anchor = rendezvous_order(1, weights), rendezvous_order(2, weights)
    assert first != anchor
    assert owner_rule("rendezvous").owners(**told) == first
    assert owner_rule("anchor").owners(**told) == anchor
    assert owner_rule("writer").owners(**told) == ("c", *(n for n in first if n != "c"))
    assert owner_rule("writer").owners(**{**told, "writer": "gone"}) == first


def test_unknown_rules_and_no_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="owner must be one of rendezvous, writer, anchor"):
        owner_rule("hash")
    with pytest.raises(ValueError, match="count must be >= 1, found 0"):
        Rendezvous().owners(first=1, anchor=1, writer="a", weights={"a": 1.0}, count=0)
