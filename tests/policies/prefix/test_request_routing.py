"""Requests go where their first token is expected soonest, and equal servers share the load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.prefix_costs import MISTRAL_7B_ON_A100, PrefixCosts, TierSpeed
from policies.prefix.request_routing import RequestRouting, ServerState

COSTS = PrefixCosts(
    prefill=MISTRAL_7B_ON_A100,
    block_tokens=64,
    local=TierSpeed(bytes_per_s=14e9),
    remote=TierSpeed(bytes_per_s=3e9, request_s=60e-6),
    ssd=TierSpeed(bytes_per_s=3e9),
)
NOTHING = ServerState(0, 0, 0)


def routing(rule: Any, servers: int = 4) -> RequestRouting:
    return RequestRouting(
        rule, num_servers=servers, prefill=MISTRAL_7B_ON_A100, costs=COSTS, block_bytes=8 << 20
    )


def choose(policy: RequestRouting, states: list[ServerState], draw: float = 0.3) -> int:
    return policy.choose(0, session=-1, prompt_tokens=4096, draw=draw, states=states)


def test_the_server_that_has_the_prefix_gets_the_request() -> None:
    states = [NOTHING, NOTHING, ServerState(60, 60, 60), NOTHING]
    states = [s._replace(pooled_blocks=60) for s in states]
    assert choose(routing("prefix_aware"), states) == 2


def test_own_memory_is_better_than_the_network_and_the_device_better_than_both() -> None:
    near, device = ServerState(0, 60, 60), ServerState(60, 60, 60)
    far = ServerState(0, 0, 60)
    assert choose(routing("prefix_aware", 2), [far, near]) == 1
    assert choose(routing("prefix_aware", 3), [far, near, device]) == 2


def test_a_long_queue_outweighs_a_prefix() -> None:
    policy = routing("prefix_aware", 2)
    states = [NOTHING, ServerState(60, 60, 0)]
    assert choose(policy, states) == 1
    policy.assigned(1, 10.0)
    assert choose(policy, states) == 0
    policy.assigned(1, -10.0)
    assert choose(policy, states) == 1


def test_equal_servers_share_the_load_by_the_draw() -> None:
    draws = np.random.default_rng(0).random(4000)
    counts = np.bincount(
        [choose(routing("prefix_aware"), [NOTHING] * 4, float(draw)) for draw in draws]
    )
    assert counts.min() > 900


def test_a_session_stays_where_it_was() -> None:
    policy = routing("sticky")
    first = policy.choose(0, session=7, prompt_tokens=10, draw=0.9)
    again = [policy.choose(i, session=7, prompt_tokens=10, draw=0.1) for i in range(5)]
    assert again == [first] * 5
    assert policy.choose(9, session=-1, prompt_tokens=10, draw=0.1) == 0


def test_round_robin_goes_in_turn() -> None:
    policy = routing("round_robin", 3)
    chosen = [policy.choose(i, session=-1, prompt_tokens=10, draw=0.5) for i in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_wrong_rules_and_states_are_refused() -> None:
    with pytest.raises(ValueError, match="routing must be one of"):
        routing("nearest")
    with pytest.raises(ValueError, match="num_servers must be >= 1"):
        routing("random", 0)
    with pytest.raises(ValueError, match="1 states of 4 servers"):
        choose(routing("prefix_aware"), [NOTHING])
