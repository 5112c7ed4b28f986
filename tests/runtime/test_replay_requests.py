"""Requests of a replay: lengths, prefixes, sessions, and what is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.streams import stream
from models.workload_settings import PoissonArrivals, SessionArrivals
from runtime.replay_arrivals import ReplayArrivals
from runtime.replay_prompts import ReplayPrompts
from runtime.replay_requests import ReplayError, ReplayLimits, replay_requests
from tests.runtime.replay_cases import agentic_file, mooncake_file, workload_of


def test_arrivals_and_lengths_are_those_of_the_workload() -> None:
    workload = workload_of(trace="azure-2023-conversation", num_requests=50)
    found = replay_requests(workload, seed=3)
    asked = workload.open_loop_requests(stream(3, "arrivals"))
    assert found.arrival_s.tolist() == asked.arrival_s.tolist()
    assert found.prompt_tokens.tolist() == asked.prompt_tokens.tolist()
    assert found.output_tokens.tolist() == asked.output_tokens.tolist()
    assert found.cut_tokens == 0


def test_what_does_not_fit_the_model_is_cut_and_counted(tmp_path: Path) -> None:
    rows = [(0.0, 600, 10, [1, 2]), (1.0, 90, 200, [3]), (2.0, 50, 20, [4])]
    workload = workload_of(trace=str(mooncake_file(tmp_path / "t.jsonl", rows)))
    found = replay_requests(workload, seed=1, limits=ReplayLimits(context_tokens=100))
    assert found.prompt_tokens.tolist() == [90, 1, 50]
    assert found.output_tokens.tolist() == [10, 99, 20]
    assert (found.cut_prompts, found.cut_outputs) == (2, 1)
    assert found.cut_tokens == (600 - 90) + (90 - 1) + (200 - 99)
    assert found.asked_prompt_tokens.tolist() == [600, 90, 50]


def test_equal_blocks_are_equal_tokens_and_nothing_else_is(tmp_path: Path) -> None:
    rows = [
        (0.0, 1100, 1, [7, 8, 9]),
        (1.0, 1300, 1, [7, 8, 10]),
        (2.0, 1100, 1, [7, 8, 9]),
        (3.0, 1024, 1, [11, 8]),
    ]
    workload = workload_of(trace=str(mooncake_file(tmp_path / "t.jsonl", rows)))
    requests = replay_requests(workload, seed=1)
    prompts = ReplayPrompts(requests, seed=5, vocabulary=300, never=(2, 7))
    texts = [prompts.of(i) for i in range(4)]
    assert [len(text) for text in texts] == [1100, 1300, 1100, 1024]
    assert texts[0] == texts[2]
    assert texts[0][:1024] == texts[1][:1024]
    assert texts[0][1024:] != texts[1][1024:1100]
    assert texts[0][:512] != texts[3][:512]
    assert texts[0][512:1024] == texts[3][512:1024]
    drawn = {token for text in texts for token in text}
    assert drawn.isdisjoint({2, 7})
    assert drawn == set(range(300)) - {2, 7}


def test_blocks_stay_whole_when_lengths_are_scaled(tmp_path: Path) -> None:
    rows = [(0.0, 1024, 40, [1, 2]), (1.0, 1536, 40, [1, 2, 3])]
    workload = workload_of(trace=str(mooncake_file(tmp_path / "t.jsonl", rows)))
    requests = replay_requests(workload, seed=1, limits=ReplayLimits(scale_tokens=0.05))
    assert requests.block_tokens == 26
    assert requests.prompt_tokens.tolist() == [52, 78]
    assert requests.output_tokens.tolist() == [2, 2]
    prompts = ReplayPrompts(requests, seed=1, vocabulary=300)
    assert prompts.of(1)[:52] == prompts.of(0)
    assert any("26 whole tokens" in note for note in requests.notes)


def test_the_same_trace_gives_the_same_prompts_in_another_process(tmp_path: Path) -> None:
    file = mooncake_file(tmp_path / "t.jsonl", [(0.0, 700, 5, [1, 2]), (1.0, 30, 5, [3])])
    code = (
        "import json, sys\n"
        "from runtime.replay_prompts import ReplayPrompts\n"
        "from runtime.replay_requests import replay_requests\n"
        "from tests.runtime.replay_cases import workload_of\n"
        "requests = replay_requests(workload_of(trace=sys.argv[1]), seed=4)\n"
        "prompts = ReplayPrompts(requests, seed=4, vocabulary=1000)\n"
        "print(json.dumps([prompts.of(0), prompts.of(1)]))\n"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code, str(file)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    requests = replay_requests(workload_of(trace=str(file)), seed=4)
    prompts = ReplayPrompts(requests, seed=4, vocabulary=1000)
    assert told[0] == told[1]
    assert json.loads(told[0]) == [list(prompts.of(0)), list(prompts.of(1))]


def test_the_next_turn_comes_its_think_time_after_the_answer(tmp_path: Path) -> None:
    turns = [
        {"t": 0.0, "in": 40, "out": 4, "hash_ids": [1, 2]},
        {"t": 5.0, "in": 60, "out": 4, "hash_ids": [1, 2, 3], "think_time": 3.0},
        {"t": 9.0, "in": 80, "out": 4, "hash_ids": [1, 2, 3, 4, 5], "think_time": 1.0},
    ]
    file = agentic_file(tmp_path / "t.jsonl", [turns, turns[:1]])
    workload = workload_of(trace=str(file), arrivals=SessionArrivals(sessions_per_s=1.0))
    requests = replay_requests(workload, seed=1)
    chain = np.flatnonzero(requests.session == requests.session[requests.follows >= 0][0])
    assert requests.follows[chain].tolist() == [-1, *chain[:-1].tolist()]
    arrivals = ReplayArrivals(requests, speed=2.0)
    first = float(requests.arrival_s[chain[0]]) / 2.0
    assert set(arrivals.take(1e9)) == {i for i in range(4) if requests.follows[i] < 0}
    assert arrivals.due_s[chain[0]] == first
    arrivals.ended(int(chain[0]), 100.0)
    assert arrivals.take(101.4) == []
    assert arrivals.next_s == 101.5  # half of three seconds at twice the speed
    assert arrivals.take(101.5) == [chain[1]]
    arrivals.ended(int(chain[1]), 102.0)
    assert arrivals.take(200.0) == [chain[2]]
    assert arrivals.due_s[chain[2]] == 102.5
    prompts = ReplayPrompts(requests, seed=1, vocabulary=300)
    texts = [prompts.of(int(i)) for i in chain]
    assert texts[1][:32] == texts[0][:32]
    assert texts[2][:48] == texts[1][:48]


def test_a_closed_loop_keeps_so_many_under_way_in_order() -> None:
    workload = workload_of(trace="azure-2023-conversation", num_requests=5)
    arrivals = ReplayArrivals(replay_requests(workload, seed=1), concurrency=2)
    assert arrivals.take(0.0) == [0, 1]
    assert arrivals.next_s is None
    arrivals.ended(1, 3.0)
    assert arrivals.take(3.0) == [2]
    arrivals.ended(0, 4.0)
    arrivals.ended(2, 4.0)
    assert arrivals.take(4.5) == [3, 4]
    assert arrivals.due_s.tolist() == [0.0, 0.0, 3.0, 4.5, 4.5]
    assert arrivals.num_left == 0


def test_a_rate_stretches_all_arrivals_alike() -> None:
    workload = workload_of(
        trace="azure-2023-conversation", num_requests=101, arrivals=PoissonArrivals(rate_per_s=3)
    )
    plain = replay_requests(workload, seed=1)
    found = replay_requests(workload, seed=1, limits=ReplayLimits(rate_per_s=20.0))
    assert found.arrival_s[-1] - found.arrival_s[0] == pytest.approx(100 / 20.0)
    ratio = found.arrival_s / plain.arrival_s
    assert ratio == pytest.approx(np.full(101, ratio[0]))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"scale_tokens": 0.0}, "--scale-tokens: must be finite and > 0, found 0.0"),
        ({"rate_per_s": float("nan")}, "--rate: must be finite and > 0"),
        ({"context_tokens": 1}, "--context: must be >= 2, found 1"),
        ({"max_requests": 0}, "--requests: must be >= 1, found 0"),
    ],
)
def test_limits_out_of_range_are_refused_by_their_option(limits: dict, message: str) -> None:
    with pytest.raises(ReplayError, match=message.replace("(", r"\(")):
        ReplayLimits(**limits)
