"""Agentic sessions: sub-agents, think times, block ids, and starting them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces.errors import TraceError
from traces.readers import read_trace, start_sessions
from traces.request import Trace


def call(t: float, ids: list[Any], **changes: Any) -> dict[str, Any]:
    fields = {
        "t": t,
        "type": "n",
        "in": 64 * len(ids) + 1,
        "out": 5,
        "hash_ids": ids,
        "think_time": 2.0,
        "api_time": 1.0,
    }
    return {**fields, **changes}


def session(name: str, *requests: dict[str, Any], scope: str = "local") -> dict[str, Any]:
    return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": list(requests)}


def read(tmp_path: Path, *sessions: dict[str, Any]) -> Trace:
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sessions))
    return read_trace(path)


def blocks(trace: Trace) -> list[tuple[int, ...]]:
    return [request.prefix_block_ids for request in trace.requests()]


def test_local_block_ids_of_two_sessions_are_never_the_same_block(tmp_path: Path) -> None:
    trace = read(
        tmp_path, session("a", call(0, [1, 2]), call(3, [1, 2, 9])), session("b", call(0, [1, 2]))
    )
    first, second, other = blocks(trace)
    assert second[:2] == first
    assert not set(other) & set(first + second)
    assert sorted({*first, *second, *other}) == list(range(5))


def test_global_block_ids_are_shared_between_sessions(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        session("a", call(0, [1, 2]), scope="global"),
        session("b", call(0, [1, 3]), scope="global"),
    )
    first, second = blocks(trace)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_string_block_ids_are_local_to_a_session_too(tmp_path: Path) -> None:
    trace = read(tmp_path, session("a", call(0, ["x", "y"])), session("b", call(0, ["x"])))
    first, second = blocks(trace)
    assert len({*first, *second}) == 3


def test_a_sub_agent_is_a_session_of_its_own_begun_when_its_end_says(tmp_path: Path) -> None:
    agent = {
        "t": 30.0,
        "type": "subagent",
        "agent_id": "helper",
        "duration_ms": 20_000,
        "requests": [call(0.0, [7]), call(4.0, [7, 8])],
    }
    trace = read(tmp_path, session("a", call(0, [1]), agent, call(31.0, [1])))
    assert trace.session_ids is not None
    assert trace.session_ids.tolist() == ["a", "a > helper", "a > helper", "a"]
    assert trace.measured["session_time_s"].tolist() == [0.0, 10.0, 14.0, 31.0]
    assert trace.think_s == pytest.approx([np.nan, np.nan, 2.0, 2.0], nan_ok=True)
    assert trace.request_ids is not None
    assert len(set(trace.request_ids)) == 4


def test_a_call_without_output_gives_its_time_to_the_next_call(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        session(
            "a",
            call(0, [1]),
            call(3, [1], out=0, think_time=2.0, api_time=10.0),
            call(16, [1], think_time=3.0),
        ),
    )
    assert len(trace) == 2
    assert sum(trace.skipped.values()) == 1
    assert trace.think_s == pytest.approx([np.nan, 15.0], nan_ok=True)
    assert any("without output" in note for note in trace.notes)


def test_after_a_first_call_without_output_the_next_has_no_think_time(tmp_path: Path) -> None:
    trace = read(tmp_path, session("a", call(0, [1], out=0), call(3, [1]), call(6, [1])))
    assert trace.think_s == pytest.approx([np.nan, 2.0], nan_ok=True)


def test_absent_times_are_unknown_not_zero(tmp_path: Path) -> None:
    second = call(3, [1], ttft=0.5)
    del second["think_time"], second["api_time"]
    trace = read(tmp_path, session("a", call(0, [1]), second))
    assert trace.think_s is not None
    assert bool(np.isnan(trace.think_s[1]))
    assert trace.measured["e2e_s"] == pytest.approx([1.0, np.nan], nan_ok=True)
    assert trace.measured["ttft_s"] == pytest.approx([np.nan, 0.5], nan_ok=True)


def test_sessions_start_where_they_are_told_and_interleave(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        session("a", call(0, [1]), call(10, [1, 2])),
        session("b", call(0, [5]), call(4, [5, 6])),
    )
    started = start_sessions(trace, np.array([100.0, 103.0]))
    assert started.arrival_s is not None
    assert started.arrival_s.tolist() == [0.0, 3.0, 7.0, 10.0]
    assert started.session_ids is not None
    assert started.session_ids.tolist() == ["a", "b", "b", "a"]
    before, after = blocks(trace), blocks(started)
    assert after == [before[0], before[2], before[3], before[1]]
    assert not any("no absolute times" in note for note in started.notes)


def test_sub_agents_start_with_their_session(tmp_path: Path) -> None:
    agent = {"t": 5, "type": "subagent", "duration_ms": 1_000, "requests": [call(0.5, [7])]}
    trace = read(tmp_path, session("a", call(0, [1]), agent), session("b", call(0, [1])))
    started = start_sessions(trace, np.array([10.0, 0.0]))
    assert started.arrival_s is not None
    assert started.arrival_s.tolist() == [0.0, 10.0, 14.5]


@pytest.mark.parametrize("starts", [[0.0, float("nan")], [0.0, float("inf")]])
def test_start_times_have_to_be_finite(tmp_path: Path, starts: list[float]) -> None:
    trace = read(tmp_path, session("a", call(0, [1])), session("b", call(0, [1])))
    with pytest.raises(TraceError, match="finite"):
        start_sessions(trace, np.array(starts))


def test_only_sessions_can_be_started(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n9,1\n")
    with pytest.raises(TraceError, match="not all calls have a time within their session"):
        start_sessions(read_trace(path), np.zeros(1))
