"""``twin cache`` counts what a plain count of lists gives, to the block."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from models.hardware import find_device
from models.llm_catalog import load_llm
from policies.catalog import EVICTION
from traces.prefix_sharing import unbounded_hits
from traces.readers import read_trace
from traces.request import Trace
from twin.cache_cells import BOUND, Cell, all_cell_hits, cell_hits
from twin.cache_costs import BlockCosts, block_costs
from twin.cache_curves import CacheQuestion, best_policies, run_curves
from twin.cache_requests import CacheRequests, pack_requests
from twin.cache_workload import CacheWorkload, generated_workload, traced_workload

BLOCK_TOKENS = 16
Chain = tuple[tuple[int, ...], tuple[int, ...]]


def costs(block_tokens: int = BLOCK_TOKENS) -> BlockCosts:
    return block_costs(
        load_llm("Llama-3.1-8B"), find_device("A100-80"), mfu=0.5, block_tokens=block_tokens
    )


def scan_hits(policy: str, requests: Sequence[Chain], capacity: int) -> list[int]:
    """Hits by linear scans over a plain list of [block, depth, uses, stamp, request, H].

    A request's hits are its leading resident prompt blocks. Then its chain (its leading blocks
    that fit) is used: resident blocks root first, then missing ones come in root first, each
    behind the victims that make room, none of them of the chain. Victims: LRU, the block used
    longest ago, a chain counting from its end; FIFO, the one that came first; LFU, fewest uses,
    then used longest ago, then deepest; GDSF, least H = L + uses, then deepest, then used longest
    ago, with L the H of the last victim, for newcomers that of the request's last one.
    """
    rows: list[list[float]] = []
    clock, inflation = 0, 0.0
    hits = []

    def find(block: int) -> list[float] | None:
        return next((row for row in rows if row[0] == block), None)

    orders: dict[str, Callable[[list[float]], tuple[float, ...]]] = {
        "lru": lambda row: (row[3],),
        "fifo": lambda row: (row[3],),
        "lfu": lambda row: (row[2], row[4], -row[1]),
        "gdsf": lambda row: (row[5], -row[1], row[3]),
    }
    for number, (prompt, generated) in enumerate(requests):
        run = 0
        while run < len(prompt) and find(prompt[run]) is not None:
            run += 1
        hits.append(run)
        chain: list[int] = []
        for block in (*prompt, *generated):
            if block not in chain:
                chain.append(block)
        chain = chain[:capacity]
        for block in chain:
            row = find(block)
            if row is not None and policy != "fifo":
                clock += 1
                row[2:] = [row[2] + 1, clock, number, inflation + row[2] + 1]
        for depth, block in enumerate(chain):
            if find(block) is not None:
                continue
            if len(rows) == capacity:
                victim = min((row for row in rows if row[0] not in chain), key=orders[policy])
                inflation = victim[5]
                rows.remove(victim)
            clock += 1
            rows.append([block, depth, 1, clock, number, float("nan")])
        for row in rows:
            if row[5] != row[5]:
                row[5] = inflation + 1
        if policy == "lru":
            for block in reversed(chain):
                clock += 1
                row = find(block)
                assert row is not None
                row[3] = clock
    return hits


def random_trace(
    seed: int, *, num: int = 120, is_partial: bool = True, repeats: bool = False
) -> Trace:
    """Prompts that branch off one another's; the last block part full, some of a single block."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    fresh = 0
    for _ in range(num):
        stem: list[int] = []
        if prompts and rng.random() < 0.8:
            earlier = prompts[int(rng.integers(max(0, len(prompts) - 30), len(prompts)))]
            stem = earlier[: int(rng.integers(1, len(earlier) + 1))]
        more = int(rng.integers(0 if stem else 1, 6))
        prompt = [*stem, *range(fresh, fresh + more)]
        fresh += more
        if repeats and rng.random() < 0.3:
            prompt = [*prompt, prompt[int(rng.integers(len(prompt)))]]
        prompts.append(prompt)
    lengths = np.array([len(prompt) for prompt in prompts])
    short = rng.integers(0, BLOCK_TOKENS, num) if is_partial else np.zeros(num, dtype=np.int64)
    return Trace(
        name="random",
        source="random",
        format="test",
        arrival_s=np.cumsum(rng.exponential(1.0, num)),
        prompt_tokens=np.maximum(1, lengths * BLOCK_TOKENS - short).astype(np.int64),
        output_tokens=np.ones(num, dtype=np.int64),
        block_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        block_ids=np.array([block for prompt in prompts for block in prompt], dtype=np.int64),
        block_tokens=BLOCK_TOKENS,
    )


def chains_of(requests: CacheRequests) -> list[Chain]:
    return [(request.prompt, request.generated) for request in requests]


SCANNED = ("lru", "fifo", "lfu", "gdsf")


@pytest.mark.parametrize("policy", SCANNED)
@pytest.mark.parametrize("counts_partial", [False, True])
def test_hits_of_a_trace_are_those_of_a_scan_of_lists(policy: str, counts_partial: bool) -> None:
    for seed in range(4):
        workload = traced_workload(random_trace(seed), counts_partial=counts_partial)
        chains = chains_of(workload.requests)
        for blocks in (1, 3, 12, 40, workload.requests.num_distinct):
            found = cell_hits(workload.requests, costs(), Cell(policy, blocks))
            assert found.tolist() == scan_hits(policy, chains, blocks)


@pytest.mark.parametrize("policy", SCANNED)
def test_hits_with_generated_blocks_are_those_of_a_scan_of_lists(policy: str) -> None:
    requests = generated_workload("chat", num_requests=60).requests
    assert len(requests.generated_ids) > 0
    for blocks in (25, 120):
        found = cell_hits(requests, costs(64), Cell(policy, blocks))
        assert found.tolist() == scan_hits(policy, chains_of(requests), blocks)


@pytest.mark.parametrize("policy", SCANNED)
def test_a_block_named_twice_in_a_prompt_is_one_block(policy: str) -> None:
    for seed in range(3):
        trace = random_trace(seed, is_partial=False, repeats=True)
        offsets, ids = trace.block_offsets, trace.block_ids
        assert offsets is not None and ids is not None
        requests = CacheRequests(
            time_s=np.arange(len(trace), dtype=np.float64),
            category=np.zeros(len(trace), dtype=np.int64),
            prompt_tokens=trace.prompt_tokens,
            prompt_offsets=offsets,
            prompt_ids=ids,
            generated_offsets=np.zeros(len(trace) + 1, dtype=np.int64),
            generated_ids=np.zeros(0, dtype=np.int64),
            block_tokens=BLOCK_TOKENS,
        )
        assert any(len(set(prompt)) < len(prompt) for prompt, _ in chains_of(requests))
        for blocks in (4, 25):
            found = cell_hits(requests, costs(), Cell(policy, blocks))
            assert found.tolist() == scan_hits(policy, chains_of(requests), blocks)


def test_prompts_of_a_single_block_hit_when_the_block_is_resident() -> None:
    trace = random_trace(0, num=3, is_partial=False)
    names = np.array([7, 9, 7, 7, 9, 7], dtype=np.int64)
    single = Trace(
        name="single",
        source="single",
        format="test",
        arrival_s=np.arange(6.0),
        prompt_tokens=np.full(6, BLOCK_TOKENS),
        output_tokens=np.ones(6, dtype=np.int64),
        block_offsets=np.arange(7),
        block_ids=names,
        block_tokens=trace.block_tokens,
    )
    requests = traced_workload(single).requests
    one = cell_hits(requests, costs(), Cell("lru", 1))
    two = cell_hits(requests, costs(), Cell("lru", 2))
    assert one.tolist() == [0, 0, 0, 1, 0, 0]
    assert two.tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("policy", sorted(EVICTION))
def test_a_cache_of_all_blocks_hits_what_earlier_requests_named(policy: str) -> None:
    trace = random_trace(5)
    workload = traced_workload(trace, counts_partial=True)
    requests = workload.requests
    assert trace.block_offsets is not None and trace.block_ids is not None
    expected = unbounded_hits(trace.block_offsets, trace.block_ids)
    assert requests.unbounded_hits().tolist() == expected.tolist()
    found = cell_hits(requests, costs(), Cell(policy, requests.num_distinct))
    assert found.tolist() == expected.tolist()


def test_generated_blocks_count_among_those_that_were_there_before() -> None:
    requests = generated_workload("chat", num_requests=300).requests
    known: set[int] = set()
    expected = []
    for prompt, generated in chains_of(requests):
        run = 0
        while run < len(prompt) and prompt[run] in known:
            run += 1
        expected.append(run)
        known.update(prompt, generated)
    assert requests.unbounded_hits().tolist() == expected


@pytest.mark.parametrize("policy", sorted(EVICTION))
def test_no_policy_is_above_the_bound(policy: str) -> None:
    for requests in (
        traced_workload(random_trace(6)).requests,
        generated_workload("mixed", num_requests=200).requests,
    ):
        for share in (0.03, 0.1, 0.4):
            blocks = max(1, round(share * requests.num_distinct))
            price = costs(requests.block_tokens)
            found = cell_hits(requests, price, Cell(policy, blocks))
            assert found.sum() <= cell_hits(requests, price, Cell(BOUND, blocks)).sum()


def test_full_blocks_alone_count_unless_partial_ones_are_asked_for() -> None:
    trace = random_trace(1)
    full = traced_workload(trace).requests
    every = traced_workload(trace, counts_partial=True).requests
    assert trace.block_ids is not None
    assert full.num_references == int((trace.prompt_tokens // BLOCK_TOKENS).sum())
    assert every.num_references == len(trace.block_ids) > full.num_references
    assert every.prompt_tokens.tolist() == full.prompt_tokens.tolist()


def test_golden_cases_come_out_to_the_block() -> None:
    from traces.prefix_workloads import PrefixRequest

    path = Path(__file__).resolve().parents[1] / "golden" / "ptstore_policies.json"
    names = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "gdsf": "GDSF", BOUND: "bound"}
    for case in json.loads(path.read_text()):
        rows = [
            PrefixRequest(time_s, category, session, tuple(prompt), tuple(generated), tokens)
            for time_s, category, session, prompt, generated, tokens in case["requests"]
        ]
        requests = pack_requests(rows, block_tokens=case["block"], keeps_category=False)
        for blocks, expected in case["expected_hits"].items():
            for name, known_as in names.items():
                found = cell_hits(requests, costs(64), Cell(name, int(blocks)))
                assert found.tolist() == expected[known_as], (case["workload"], blocks, name)


def test_worker_processes_change_nothing() -> None:
    requests = generated_workload("agent", num_requests=150).requests
    cells = [Cell(name, blocks) for name in ("lru", "tree_hd", BOUND) for blocks in (100, 400)]
    here = dict(all_cell_hits(requests, costs(64), cells, jobs=1))
    there = dict(all_cell_hits(requests, costs(64), cells, jobs=2))
    assert sorted(here) == sorted(there) == sorted(cells)
    for cell in cells:
        assert here[cell].tolist() == there[cell].tolist()


def test_saved_seconds_are_the_prefill_cost_of_the_leading_tokens() -> None:
    """Costs add up along a prompt: the whole less the tail behind its cached blocks."""
    workload = traced_workload(random_trace(2))
    question = CacheQuestion(policies=("lru",), sizes=("20%",), with_bound=False, jobs=1)
    summary = run_curves(question, workload)
    price = costs().prefill
    hits = cell_hits(
        workload.requests, costs(), Cell("lru", summary["sizes"][0]["blocks"])
    ).tolist()
    lengths = workload.requests.prompt_tokens.tolist()
    cached = [min(run * BLOCK_TOKENS, tokens) for run, tokens in zip(hits, lengths, strict=True)]
    whole = sum(price.compute_s(tokens) for tokens in lengths)
    tails = sum(
        price.compute_s(tokens - known, known)
        for tokens, known in zip(lengths, cached, strict=True)
    )
    (row,) = summary["curves"]["lru"]
    assert row["hit_blocks"] == sum(hits)
    assert row["token_hit_share"] == pytest.approx(sum(cached) / sum(lengths))
    assert row["saved_s"] == pytest.approx(whole - tails)
    assert row["saved_share"] == pytest.approx(1 - tails / whole)
    depth_sum = sum(
        costs().recompute_s(depth) for run in hits for depth in range(run)
    )  # all hits are full blocks here
    assert row["saved_s"] == pytest.approx(depth_sum)


def test_prefill_takes_the_milliseconds_worked_out_for_mistral_on_an_a100() -> None:
    """Of 1k, 2k, 4k and 8k tokens, 6 ms of every forward pass included."""
    for mfu, expected_ms in (
        (0.35, (144, 288, 589, 1253)),
        (0.45, (114, 225, 460, 976)),
        (0.65, (80, 158, 320, 678)),
    ):
        price = block_costs(
            load_llm("Mistral-7B"), find_device("A100-80"), mfu=mfu, block_tokens=64
        )
        assert price.block_bytes == 64 * 131_072
        for tokens, milliseconds in zip((1024, 2048, 4096, 8192), expected_ms, strict=True):
            seconds = price.prefill.seconds(tokens) + 0.006
            assert 1000 * seconds == pytest.approx(milliseconds, abs=0.8)


def test_the_best_policies_are_those_within_a_twentieth_of_a_point() -> None:
    curves = {
        "a": [{"m": 0.5000}, {"m": 0.1}],
        "b": [{"m": 0.4996}, {"m": 0.3}],
        "c": [{"m": 0.4990}, {"m": 0.2}],
    }
    assert best_policies(curves, "m") == [["a", "b"], ["b"]]


def test_a_summary_is_json_and_the_same_each_time() -> None:
    workload: CacheWorkload = generated_workload("docqa", seed=3, num_requests=80)
    question = CacheQuestion(policies=("lru", "gdsf"), sizes=("5%", "64GiB"), jobs=1)
    first, second = (json.dumps(run_curves(question, workload)) for _ in range(2))
    assert first == second


def test_sessions_without_times_are_started_by_the_seed(data_file: Callable[[str], Path]) -> None:
    trace = read_trace(data_file("agentic-coding/traces-00.jsonl.gz"))
    assert trace.arrival_s is None
    first = traced_workload(trace, seed=1, num_requests=40)
    again = traced_workload(trace, seed=1, num_requests=40)
    other = traced_workload(trace, seed=2, num_requests=40)
    assert first.requests.time_s.tolist() == again.requests.time_s.tolist()
    assert first.requests.time_s.tolist() != other.requests.time_s.tolist()
    assert any("Poisson process" in note for note in first.notes)
