"""What each routing policy prefers, by hand."""

import numpy as np
import pytest

from models.streams import stream
from policies.routing import LeastTokenLoad, PowerOfTwo, RandomSlot, RoundRobin, RoutingPolicy


def workers(
    policy: RoutingPolicy, prompts: list[int], free: list[int], loads: list[int]
) -> list[int]:
    order = policy.assign(
        np.array(prompts), free_slots=np.array(free), token_loads=np.array(loads), now=0.0
    )
    return order.workers.tolist()


def test_least_token_load_places_the_longest_prompt_first_on_the_lightest_worker() -> None:
    # 900 -> worker 1 (0), then 500 -> worker 2 (600 < 900), then 100 -> worker 1 (900 < 1000)
    assert workers(LeastTokenLoad(), [100, 500, 900], [9, 9, 9], [1000, 0, 600]) == [1, 2, 1]


def test_least_token_load_breaks_ties_by_request_then_by_worker() -> None:
    assert workers(LeastTokenLoad(), [50, 50, 50], [9, 9, 9], [0, 0, 0]) == [0, 1, 2]


def test_least_token_load_passes_over_full_workers() -> None:
    assert workers(LeastTokenLoad(), [10, 20], [0, 1, 5], [0, 30, 500]) == [2, 1]


def test_round_robin_goes_on_where_the_last_batch_ended_and_passes_over_full_workers() -> None:
    policy = RoundRobin()
    assert workers(policy, [1, 1], [5, 5, 5], [0, 0, 0]) == [0, 1]
    assert workers(policy, [1, 1, 1], [5, 0, 5], [0, 0, 0]) == [2, 0, 2]
    assert workers(policy, [1], [5, 5, 5], [0, 0, 0]) == [0]


def test_power_of_two_never_takes_the_heaviest_of_three_when_all_have_room() -> None:
    policy = PowerOfTwo(stream(3, "routing"))
    chosen = [workers(policy, [1], [9, 9, 9], [10, 20, 1000])[0] for _ in range(400)]
    # Of three pairs, two hold worker 0 and one is {1, 2}: shares 2/3, 1/3, 0.
    assert 2 not in chosen
    assert chosen.count(0) / 400 == pytest.approx(2 / 3, abs=4 * np.sqrt(2 / 9 / 400))


def test_power_of_two_counts_what_it_has_just_placed() -> None:
    policy = PowerOfTwo(stream(3, "routing"))
    assert sorted(workers(policy, [100, 100], [9, 9], [0, 0])) == [0, 1]


def test_random_takes_every_free_slot_equally_often() -> None:
    policy = RandomSlot(stream(3, "routing"))
    chosen = np.array([workers(policy, [5], [1, 3, 0], [0, 0, 0])[0] for _ in range(2000)])
    assert set(chosen.tolist()) == {0, 1}
    assert (chosen == 0).mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 2000))
