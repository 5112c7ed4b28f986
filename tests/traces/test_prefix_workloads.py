"""Workloads for prefix stores: trees of blocks, likeness to the sampled cases, traces as chains."""

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from traces.errors import TraceError
from traces.prefix_workloads import (
    WORKLOADS,
    PrefixWorkload,
    agent,
    docqa,
    from_trace,
    prefix_workload,
)
from traces.readers import read_trace
from traces.request import Trace

CASES = Path(__file__).resolve().parents[1] / "golden" / "ptstore_policies.json"


@functools.cache
def draw(name: str, seed: int = 11) -> PrefixWorkload:
    return prefix_workload(name, np.random.default_rng(seed))


def infinite_hit_share(workload: PrefixWorkload) -> float:
    seen: set[int] = set()
    hits = total = 0
    for request in workload.requests:
        fresh = [i for i, block in enumerate(request.prompt) if block not in seen]
        hits += fresh[0] if fresh else len(request.prompt)
        total += len(request.prompt)
        seen.update(request.prompt, request.generated)
    return hits / total


def trace_of(prompts: list[list[int]], block_tokens: int = 4, extra: int = 0) -> Trace:
    lengths = np.array([len(p) for p in prompts], dtype=np.int64)
    return Trace(
        name="t",
        source="t.jsonl",
        format="mooncake-jsonl",
        arrival_s=np.arange(len(prompts), dtype=np.float64),
        prompt_tokens=lengths * block_tokens + extra,
        output_tokens=np.ones(len(prompts), dtype=np.int64),
        block_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        block_ids=np.array([b for p in prompts for b in p], dtype=np.int64),
        block_tokens=block_tokens,
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_prompt_is_a_chain_from_a_root_and_output_stands_behind_it(name: str) -> None:
    workload = draw(name)
    parent = workload.parent.tolist()
    times = [r.time_s for r in workload.requests]
    assert times == sorted(times)
    for request in workload.requests:
        chain = request.prompt + request.generated
        assert [parent[block] for block in chain] == [0, *chain[:-1]][: len(chain)]
        assert len(request.prompt) == request.prompt_tokens // workload.block_tokens


@pytest.mark.parametrize("name", WORKLOADS)
def test_blocks_are_numbered_in_order_of_first_use(name: str) -> None:
    workload = draw(name)
    first = list(dict.fromkeys(b for r in workload.requests for b in r.prompt + r.generated))
    assert first == list(range(1, workload.num_blocks + 1))
    assert (workload.parent[1:] < np.arange(1, workload.num_blocks + 1)).all()


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_names_one_workload_and_another_seed_another(name: str) -> None:
    again = prefix_workload(name, np.random.default_rng(11))
    assert again.requests == draw(name, 11).requests
    assert again.requests != draw(name, 101).requests


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("seed", [11, 101])
def test_sizes_and_ideal_hit_rates_are_those_of_the_published_method(name: str, seed: int) -> None:
    workload = draw(name, seed)
    blocks = sum(len(r.prompt) for r in workload.requests)
    # The method gives 116 k to 439 k blocks and 0.88 to 0.95; seeds scatter by a tenth around it.
    assert 0.9 * 116_000 < blocks < 1.1 * 439_000
    assert 0.87 < infinite_hit_share(workload) < 0.97


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_window_looks_like_the_sampled_cases(name: str) -> None:
    samples = [c for c in json.loads(CASES.read_text()) if c["workload"] == name]
    sampled = [r for case in samples for r in case["requests"]]
    drawn = []
    for seed in (11, 101, 102):
        for case in samples:
            begin = case["requests"][0][0]
            later = [r for r in draw(name, seed).requests if r.time_s >= begin]
            drawn += later[: len(case["requests"])]

    def near(mine: float, theirs: float, share: float) -> bool:
        return abs(mine - theirs) <= share * theirs

    prompt = np.mean([len(r[3]) for r in sampled])
    generated = np.mean([len(r[4]) for r in sampled])
    assert near(float(np.mean([len(r.prompt) for r in drawn])), float(prompt), 0.4)
    assert near(float(np.mean([len(r.generated) for r in drawn])), float(generated), 0.25)
    for category in range(4):
        share = np.mean([r[1] == category for r in sampled])
        assert abs(np.mean([r.category == category for r in drawn]) - share) < 0.1


def test_agents_branch_so_that_some_blocks_behind_the_system_prompt_have_two_children() -> None:
    workload = agent(np.random.default_rng(5))
    children = np.bincount(workload.parent[1:], minlength=workload.num_blocks + 1)
    assert (children[1:] >= 2).sum() > 5


def test_a_quarter_of_the_questions_on_a_known_document_was_asked_before() -> None:
    workload = docqa(np.random.default_rng(5))
    asked: set[tuple[int, ...]] = set()
    again = sum(r.prompt in asked or bool(asked.add(r.prompt)) for r in workload.requests)
    # Questions that end in the same block look alike by blocks alone, hence the upper end.
    assert 0.2 < again / len(workload.requests) < 0.7


def test_scale_makes_more_of_everything_at_the_same_rate() -> None:
    rng = np.random.default_rng(5)
    small, large = docqa(rng, scale=0.1), docqa(rng, scale=0.2)
    assert (len(small.requests), len(large.requests)) == (600, 1200)
    assert small.requests[-1].time_s < 180.0 < large.requests[-1].time_s
    with pytest.raises(ValueError, match="scale"):
        docqa(rng, scale=0.0)


def test_an_unknown_workload_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="workload must be one of docqa, chat, agent, mixed"):
        draw("video")


def test_a_trace_gives_parents_in_the_order_of_its_prompts() -> None:
    workload = from_trace(trace_of([[7, 8, 9], [7, 8, 5], [2]]))
    assert [r.prompt for r in workload.requests] == [(1, 2, 3), (1, 2, 4), (5,)]
    assert workload.parent.tolist() == [0, 0, 1, 2, 2, 0]
    assert workload.depth().tolist() == [-1, 0, 1, 2, 2, 0]


def test_an_id_behind_another_parent_is_another_block() -> None:
    workload = from_trace(trace_of([[1, 9], [2, 9]]))
    assert [r.prompt for r in workload.requests] == [(1, 2), (3, 4)]


def test_a_partly_filled_last_block_is_no_block() -> None:
    trace = trace_of([[1, 2, 3]], extra=-1)
    assert [len(r.prompt) for r in from_trace(trace).requests] == [2]


def test_coarser_blocks_hold_whole_runs_of_the_trace_s_blocks() -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2]]
    workload = from_trace(trace_of(prompts), block_tokens=8)
    assert [r.prompt for r in workload.requests] == [(1, 2), (1, 3), (1,)]
    with pytest.raises(ValueError, match="multiple of the trace's 4, found 6"):
        from_trace(trace_of(prompts), block_tokens=6)


def test_a_trace_without_blocks_is_refused() -> None:
    trace = trace_of([[1]])
    bare = Trace(
        name="t",
        source="t.csv",
        format="azure-csv",
        arrival_s=trace.arrival_s,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
    )
    with pytest.raises(TraceError, match=r"t\.csv: has no ids of prompt blocks"):
        from_trace(bare)


def test_the_mooncake_sample_keeps_its_known_ideal_hit_share(
    data_file: Callable[[str], Path],
) -> None:
    path = data_file("mooncake-conversation/conversation_trace.first-30-min.jsonl.gz")
    workload = from_trace(read_trace(path))
    assert infinite_hit_share(workload) == pytest.approx(0.36, abs=0.03)  # one hour: 0.38


def test_sessions_without_times_are_started_by_chance_and_keep_their_calls(
    data_file: Callable[[str], Path],
) -> None:
    trace = read_trace(data_file("agentic-coding/traces-01.jsonl.gz"))
    with pytest.raises(ValueError, match="give rng"):
        from_trace(trace)
    workload = from_trace(trace, np.random.default_rng(1), block_tokens=512)
    times = [r.time_s for r in workload.requests]
    assert times == sorted(times) and times[0] == 0.0
    calls_by_session = Counter(r.session for r in workload.requests)
    names = [str(name) for name in trace.session_ids] if trace.session_ids is not None else []
    assert sorted(calls_by_session.values()) == sorted(Counter(names).values())
