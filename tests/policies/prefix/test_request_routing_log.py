"""Servers that come and go, and routing that repeats from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from policies.prefix.request_routing import RequestRouting, RoutingRule, ServerState
from policies.prefix.request_routing_log import LoggedRequestRouting, ReplayedRequestRouting
from tests.policies.prefix.test_request_routing import COSTS, NOTHING, choose, routing
from traces.decisions import CompactDecisionLog
from traces.errors import TraceError
from twin.replay import replay_log


@pytest.mark.parametrize("rule", get_args(RoutingRule))
def test_a_lost_server_gets_nothing_until_it_returns(rule: Any) -> None:
    policy = routing(rule, 3)
    draws = np.random.default_rng(1).random(300).tolist()

    def servers() -> set[int]:
        return {
            policy.choose(at, session=at, prompt_tokens=100, draw=draw, states=[NOTHING] * 3)
            for at, draw in enumerate(draws)
        }

    assert servers() == {0, 1, 2}
    policy.lost(1)
    assert servers() == {0, 2}
    policy.returned(1)
    policy.returned(1)
    if rule != "sticky":  # whose sessions have moved and stay
        assert servers() == {0, 1, 2}
    for server in range(3):
        policy.lost(server)
    with pytest.raises(ValueError, match="all servers are lost"):
        servers()


def test_what_waited_at_a_lost_server_waits_there_no_more() -> None:
    policy = routing("prefix_aware", 2)
    policy.assigned(1, 100.0)
    policy.lost(1)
    policy.returned(1)
    assert choose(policy, [NOTHING, ServerState(60, 60, 0)]) == 1


def test_only_the_sessions_seen_last_are_remembered() -> None:
    policy = RequestRouting(
        "sticky", num_servers=4, prefill=COSTS.prefill, costs=COSTS, block_bytes=1, max_sessions=2
    )

    def at(session: int, draw: float) -> int:
        return policy.choose(0, session=session, prompt_tokens=1, draw=draw)

    assert [at(1, 0.1), at(2, 0.4), at(1, 0.9), at(3, 0.6)] == [0, 1, 0, 2]
    assert at(1, 0.9) == 0, "seen since"
    assert at(2, 0.9) == 3, "forgotten"


def test_slower_computing_makes_a_far_prefix_worth_its_way() -> None:
    policy = routing("prefix_aware", 2)
    states = [ServerState(0, 0, 60), ServerState(1, 1, 1)]
    fast = policy.expected_s(1, 4096, states) - policy.expected_s(0, 4096, states)
    policy.measured(10.0)
    slow = policy.expected_s(1, 4096, states) - policy.expected_s(0, 4096, states)
    assert slow > 9 * fast > 0
    with pytest.raises(ValueError, match="slowdown"):
        policy.measured(0.0)


def logged_run(rule: Any, path: Path) -> list[int]:
    """Random calls of every kind, and what was chosen."""
    log = CompactDecisionLog(max_calls=10_000)
    policy = LoggedRequestRouting(routing(rule, 3), log)
    rng = np.random.default_rng(7)
    chosen: list[int] = []
    owed: list[tuple[int, float]] = []
    for at in range(400):
        now = at / 10
        states = [ServerState(0, *sorted(rng.integers(0, 60, 2).tolist())) for _ in range(3)]
        server = policy.choose(
            at,
            session=int(rng.integers(-1, 20)),
            prompt_tokens=4096,
            draw=float(rng.random()),
            states=states if policy.policy.needs_states else [],
            now=now,
        )
        chosen.append(server)
        owed.append((server, float(rng.random())))
        policy.assigned(*owed[-1], now=now)
        if len(owed) > 5:
            server, seconds = owed.pop(0)
            policy.assigned(server, -seconds, now=now)
        if at % 50 == 20:
            policy.lost(at % 3, now=now)
        if at % 50 == 40:
            policy.returned((at - 20) % 3, now=now)
            policy.measured(1.0 + at / 100, now=now)
    path.write_bytes(log.to_bytes())
    return chosen


@pytest.mark.parametrize("rule", get_args(RoutingRule))
def test_a_log_replays_through_a_fresh_policy(rule: Any, tmp_path: Path) -> None:
    chosen = logged_run(rule, tmp_path / "decisions.jsonl.gz")
    assert set(chosen) == {0, 1, 2}
    found = replay_log(tmp_path / "decisions.jsonl.gz")
    assert found.difference is None and found.num_calls > 1000


def test_a_choice_that_the_policy_would_not_make_is_found(tmp_path: Path) -> None:
    import gzip
    import json

    path = tmp_path / "decisions.jsonl.gz"
    logged_run("prefix_aware", path)
    lines = gzip.decompress(path.read_bytes()).splitlines()
    place = next(i for i, line in enumerate(lines[1:], 1) if json.loads(line)["n"] == 200)
    while json.loads(lines[place])["call"] != "choose":
        place += 1
    changed = json.loads(lines[place])
    changed["orders"] = (changed["orders"] + 1) % 3
    lines[place] = json.dumps(changed).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = replay_log(path)
    assert found.difference is not None and found.difference.n == changed["n"]


@pytest.mark.parametrize(
    ("call", "args", "said"),
    [
        ("moved", {}, "no call 'moved'"),
        ("lost", {"server": 3}, "within 0..2"),
        ("lost", {"server": True}, "of type int"),
        ("assigned", {"server": 0, "seconds": 1}, "of type float"),
        ("measured", {"slowdown": -1.0}, "slowdown"),
    ],
)
def test_damaged_calls_are_refused_in_words(call: str, args: dict[str, Any], said: str) -> None:
    log = CompactDecisionLog()
    LoggedRequestRouting(routing("random", 3), log)
    replayed = ReplayedRequestRouting(log.policies["request_routing"])
    with pytest.raises(ValueError, match=said):
        replayed.repeat(call, args, now=0.0)


def test_a_damaged_recipe_is_said(tmp_path: Path) -> None:
    log = CompactDecisionLog()
    LoggedRequestRouting(routing("random", 3), log).lost(0, now=0.0)
    log.policies["request_routing"]["name"] = "nearest"
    (tmp_path / "d.jsonl.gz").write_bytes(log.to_bytes())
    with pytest.raises(TraceError, match="routing must be one of"):
        replay_log(tmp_path / "d.jsonl.gz")
