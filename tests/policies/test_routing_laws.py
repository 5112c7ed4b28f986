"""Laws that every routing policy of the catalog obeys, whatever it prefers."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.streams import stream
from policies.catalog import ROUTING, routing_policy
from policies.routing import RoutingPolicy

Ints = NDArray[np.int64]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Ints, Ints, Ints]:
    """Prompts, free slots, loads; anything from an empty batch to one that fills every slot."""
    free = draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    room = sum(free)
    num = draw(st.sampled_from([0, room // 2, room]))
    prompts = draw(st.lists(st.integers(0, 50), min_size=num, max_size=num))
    loads = draw(st.lists(st.integers(0, 100), min_size=len(free), max_size=len(free)))
    return np.array(prompts, dtype=np.int64), np.array(free), np.array(loads)


def assign(policy: RoutingPolicy, batch: tuple[Ints, Ints, Ints]) -> list[int]:
    prompts, free, loads = batch
    order = policy.assign(prompts, free_slots=free, token_loads=loads, now=0.0)
    assert order.workers.dtype == np.int64
    return order.workers.tolist()


@pytest.mark.parametrize("name", ROUTING)
class TestEveryRoutingPolicy:
    @settings(max_examples=150, deadline=None)
    @given(batch=batches())
    def test_gives_each_request_one_worker_and_no_worker_more_than_it_has_room_for(
        self, name: str, batch: tuple[Ints, Ints, Ints]
    ) -> None:
        prompts, free, _ = batch
        workers = assign(routing_policy(name, stream(1, name)), batch)
        assert len(workers) == len(prompts)
        used = np.bincount(np.array(workers, dtype=np.int64), minlength=len(free))
        assert len(used) == len(free)
        assert (used <= free).all()

    @settings(max_examples=60, deadline=None)
    @given(calls=st.lists(batches(), min_size=1, max_size=4))
    def test_gives_the_same_answers_again_from_the_same_seed(
        self, name: str, calls: list[tuple[Ints, Ints, Ints]]
    ) -> None:
        def answers() -> Iterator[list[int]]:
            policy = routing_policy(name, stream(7, "routing"))
            for batch in calls:
                yield assign(policy, batch)

        assert list(answers()) == list(answers())

    @settings(max_examples=60, deadline=None)
    @given(batch=batches())
    def test_leaves_what_it_is_told_unchanged(
        self, name: str, batch: tuple[Ints, Ints, Ints]
    ) -> None:
        before = [array.copy() for array in batch]
        assign(routing_policy(name, stream(1, name)), batch)
        for now, then in zip(batch, before, strict=True):
            assert now.tolist() == then.tolist()

    def test_refuses_more_requests_than_free_slots(self, name: str) -> None:
        policy = routing_policy(name, stream(1, name))
        with pytest.raises(ValueError, match="3 requests, but only 2 free slots"):
            assign(policy, (np.array([1, 2, 3]), np.array([1, 0, 1]), np.array([0, 0, 0])))

    def test_fills_every_slot_when_there_are_as_many_requests(self, name: str) -> None:
        free = np.array([3, 0, 1, 4])
        policy = routing_policy(name, stream(1, name))
        workers = assign(policy, (np.arange(8), free, np.array([5, 1, 9, 2])))
        assert np.bincount(workers, minlength=4).tolist() == free.tolist()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"routing must be one of random, .*found 'fastest'"):
        routing_policy("fastest", stream(1, "routing"))
