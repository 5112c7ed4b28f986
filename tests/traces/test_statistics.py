import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from traces.prefix_sharing import lru_hits, prefix_statistics, unbounded_hits
from traces.readers import read_trace
from traces.request import Trace
from traces.spread import pearson, spearman, spread
from traces.statistics import arrival_statistics, length_statistics, trace_statistics


def trace(
    prompts: list[int],
    outputs: list[int],
    arrival_s: list[float] | None = None,
    blocks: list[list[int]] | None = None,
    block_tokens: int = 0,
    **columns: object,
) -> Trace:
    offsets = None if blocks is None else np.cumsum([0, *(len(b) for b in blocks)])
    ids = None if blocks is None else np.array([b for row in blocks for b in row], dtype=np.int64)
    return Trace(
        name="made here",
        source="test",
        format="none",
        arrival_s=None if arrival_s is None else np.array(arrival_s, dtype=np.float64),
        prompt_tokens=np.array(prompts, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
        block_offsets=offsets,
        block_ids=ids,
        block_tokens=block_tokens,
        **columns,  # type: ignore[arg-type]
    )


def test_theta_is_the_plain_mean_of_all_slot_steps() -> None:
    found = length_statistics(np.array([100, 200, 50]), np.array([10, 50, 5]))
    steps = [p + age for p, d in ((100, 10), (200, 50), (50, 5)) for age in range(d)]
    assert found.theta_tokens == pytest.approx(np.mean(steps), rel=1e-12)
    assert found.theta_tokens == pytest.approx(192.769231, rel=1e-8)
    assert found.theta_prompt_tokens == pytest.approx((100 * 10 + 200 * 50 + 50 * 5) / 65)


def test_theta_of_identical_requests_is_theta_from_means_and_has_no_error() -> None:
    found = length_statistics(np.full(5, 100), np.full(5, 500))
    assert found.theta_tokens == 349.5
    assert found.theta_from_means_tokens == 349.5
    assert found.theta_se == 0.0
    assert found.pearson is None


def test_the_standard_error_of_theta_is_the_spread_over_repeated_samples() -> None:
    rng = np.random.default_rng(1)
    thetas, errors = [], []
    for _ in range(400):
        outputs = rng.geometric(1 / 200, 1000)
        prompts = rng.lognormal(6, 0.5, 1000).astype(int) + outputs // 2
        found = length_statistics(prompts, outputs)
        thetas.append(found.theta_tokens)
        errors.append(found.theta_se)
    assert np.mean(errors) == pytest.approx(np.std(thetas), rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=40))
@settings(max_examples=100, deadline=None)
def test_correlations_agree_with_scipy_on_columns_with_ties(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert pearson(a, b) is None
        return
    assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-12)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_unknown_values_are_left_out_of_a_spread() -> None:
    found = spread(np.array([1.0, np.nan, 3.0]))
    assert found is not None
    assert (found.num, found.mean, found.max) == (2, 2.0, 3.0)
    assert spread(np.array([np.nan])) is None


def test_arrivals_of_a_clock_are_even_in_every_window() -> None:
    found = arrival_statistics(np.arange(0.0, 401.0, 0.5))
    assert found is not None
    assert found.rate_per_s == pytest.approx(2.0)
    assert found.gap_cv == 0.0
    assert found.longest_gap_s == 0.5
    assert found.dispersion_by_window_s == {1.0: 0.0, 10.0: 0.0, 60.0: 0.0}
    assert found.peak_to_mean_rate == 1.0
    assert found.rate_by_window_per_s == (2.0,)


def test_counts_in_windows_are_those_of_whole_windows_only() -> None:
    # windows of 1 s: 3, 0, 1, 0 requests; the fifth window is not whole
    found = arrival_statistics(np.array([10.0, 10.2, 10.9, 12.5, 14.2]))
    assert found is not None
    assert found.dispersion_by_window_s == {1.0: pytest.approx(np.var([3, 0, 1, 0]) / 1.0)}
    assert found.peak_to_mean_rate == 3.0


def test_requests_at_one_instant_have_no_arrival_statistics() -> None:
    assert arrival_statistics(np.zeros(5)) is None
    assert arrival_statistics(np.zeros(1)) is None


def test_only_leading_known_blocks_are_hits() -> None:
    # request 2 knows block 9 of request 1, but not the block before it
    shared = trace([40] * 3, [1] * 3, blocks=[[1, 2, 3], [1, 2, 8, 9], [1, 7, 9]], block_tokens=10)
    assert shared.block_offsets is not None
    assert shared.block_ids is not None
    assert unbounded_hits(shared.block_offsets, shared.block_ids).tolist() == [0, 2, 1]
    found = prefix_statistics(shared)
    assert found is not None
    assert found.unbounded_hit_share == pytest.approx(30 / 120)
    assert (found.num_references, found.num_distinct) == (10, 6)
    assert found.used_once_share == pytest.approx(3 / 6)
    assert found.reuse_gap_s is None


def test_a_partly_filled_last_block_counts_for_its_tokens_only() -> None:
    found = prefix_statistics(trace([15, 15], [1, 1], blocks=[[1, 2], [1, 2]], block_tokens=10))
    assert found is not None
    assert found.unbounded_hit_share == pytest.approx(15 / 30)


def test_blocks_repeated_within_a_request_are_no_hits_of_itself() -> None:
    found = prefix_statistics(trace([20, 20], [1, 1], blocks=[[5, 5], []], block_tokens=10))
    assert found is not None
    assert found.unbounded_hit_share == 0.0


def test_the_names_of_blocks_do_not_matter() -> None:
    rows = [[0, 1, 2], [0, 1, 3], [0, 4]]
    large = [[10**12 + 7 * block for block in row] for row in rows]
    dense, sparse = (
        prefix_statistics(trace([30] * 3, [1] * 3, blocks=b, block_tokens=10))
        for b in (rows, large)
    )
    assert dense == sparse


def test_an_lru_cache_forgets_the_block_that_was_used_longest_ago() -> None:
    offsets, ids = np.array([0, 1, 2, 3, 4, 5]), np.array([0, 1, 0, 2, 1])
    # two blocks fit: 1 is evicted by 2, since 0 was used again in between
    assert lru_hits(offsets, ids, 2).tolist() == [0, 0, 1, 0, 0]
    assert lru_hits(offsets, ids, 3).tolist() == [0, 0, 1, 0, 1]


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=20),
    st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_hits_agree_with_a_cache_that_is_played_through(rows: list[list[int]], size: int) -> None:
    flat = [block for row in rows for block in row]
    if not flat:
        return
    _, ids = np.unique(flat, return_inverse=True)
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    known: list[int] = []
    unbounded, bounded, everything = [], [], set()
    for i in range(len(rows)):
        row = ids[offsets[i] : offsets[i + 1]].tolist()
        runs = []
        for cache in (everything, known):
            run = 0
            while run < len(row) and row[run] in cache:
                run += 1
            runs.append(run)
        unbounded.append(runs[0])
        bounded.append(runs[1])
        everything.update(row)
        for block in row:
            known = [b for b in known if b != block] + [block]
        known = known[-size:]
    assert unbounded_hits(offsets, ids).tolist() == unbounded
    assert lru_hits(offsets, ids, size).tolist() == bounded


def test_sessions_are_counted_by_turns_think_time_and_length() -> None:
    found = trace_statistics(
        trace(
            [1] * 4, [1] * 4, [0.0, 1.0, 5.0, 9.0],
            session_ids=np.array(["a", "b", "a", "a"], dtype=object),
            think_s=np.array([np.nan, np.nan, 2.0, 4.0]),
        )
    ).sessions  # fmt: skip
    assert found is not None
    assert found.num_sessions == 2
    assert (found.turns.mean, found.turns.max) == (2.0, 3.0)
    assert found.think_s is not None
    assert (found.think_s.num, found.think_s.mean) == (2, 3.0)
    assert found.length_s is not None
    assert found.length_s.max == 9.0


def test_an_empty_trace_has_no_statistics() -> None:
    with pytest.raises(ValueError, match="holds no requests"):
        trace_statistics(trace([], []))


def test_statistics_are_json_without_nan_and_windows_by_name() -> None:
    found = trace_statistics(trace([5, 6], [1, 2], [0.0, 3.0], measured={"ttft_s": np.ones(2)}))
    text = json.dumps(found.as_dict(), allow_nan=False)
    back = json.loads(text)
    assert back["lengths"]["theta_tokens"] == found.theta_tokens
    assert back["measured"]["ttft_s"]["mean"] == 1.0
    assert back["prefixes"] is None


# Numbers as published with the traces. Their theta counts the age from 1, ours from 0, so that
# theirs is 1 larger; their theta from means is larger by 1/2.
AZURE = "azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz"
MOONCAKE = "mooncake-conversation/conversation_trace.first-30-min.jsonl.gz"
MOONCAKE_1000 = "mooncake-arxiv-1000/mooncake_trace_1000.jsonl"
ARXIV = "lengths-arxiv-summarization/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"
VLLM = "vllm-bench-rtxpro6000-llama-3.1-8b/requests.jsonl"
DYNAMO = "dynamo-agent-qwen3-14b/pi_request_trace.jsonl.gz"


@pytest.mark.parametrize(
    ("file", "num", "prompt", "output", "pearson_r", "spearman_r", "theta", "of_prompt", "means"),
    [
        (AZURE, 19_366, 1_155, 211.1, -0.112, 0.0728, 1_227, 1_059, 1_260),
        (MOONCAKE, 5_719, 12_870, 345.7, 0.0783, 0.0661, 14_080, 13_820, 13_040),
        (MOONCAKE_1000, 1_000, 9_792, 199.1, 0.315, 0.201, 15_300, 15_050, 9_892),
        (ARXIV, 28_257, 2_588, 291.4, -0.463, -0.114, 2_421, 1_792, 2_734),
        (VLLM, 300, 857.5, 652.5, 0.157, 0.189, 1_204, 869.9, 1_184),
        (DYNAMO, 17, 3_913, 476.1, -0.114, -0.142, 4_074, 3_752, 4_151),
    ],
)
def test_lengths_and_theta_of_public_traces_are_the_published_ones(
    data_file, file, num, prompt, output, pearson_r, spearman_r, theta, of_prompt, means
) -> None:
    found = trace_statistics(read_trace(data_file(file)))
    four_digits = {"rel": 6e-4}
    assert found.num_requests == num
    assert found.lengths.prompt_tokens.mean == pytest.approx(prompt, **four_digits)
    assert found.lengths.output_tokens.mean == pytest.approx(output, **four_digits)
    assert found.lengths.pearson == pytest.approx(pearson_r, rel=5e-3)
    assert found.lengths.spearman == pytest.approx(spearman_r, rel=5e-3)
    assert found.theta_tokens + 1.0 == pytest.approx(theta, **four_digits)
    assert found.lengths.theta_prompt_tokens == pytest.approx(of_prompt, **four_digits)
    assert found.lengths.theta_from_means_tokens + 0.5 == pytest.approx(means, **four_digits)


@pytest.mark.parametrize(
    ("file", "rate", "distinct", "cv", "longest", "dispersion"),
    [
        (AZURE, 5.53, 19_366, 1.09, 4.315, {1.0: 1.39, 10.0: 3.86, 60.0: 16.1, 300.0: 56.1}),
        (MOONCAKE, 3.182, 600, 2.92, 3.001, {1.0: 7.44, 10.0: 1.95, 60.0: 2.61}),
        (MOONCAKE_1000, 5.641, 59, 4.03, 3.057, {1.0: 12.5, 10.0: 4.37}),
        (VLLM, 10.27, 300, 0.94, 0.4585, {1.0: 0.907}),
        (DYNAMO, 0.09868, 17, 0.922, 31.19, {1.0: 1.65, 10.0: 1.0}),
    ],
)
def test_arrivals_of_public_traces_are_the_published_ones(
    data_file, file, rate, distinct, cv, longest, dispersion
) -> None:
    # not compared: Mooncake at 60 and 300 s, published with a last window that includes its end
    found = trace_statistics(read_trace(data_file(file))).arrivals
    assert found is not None
    assert found.rate_per_s == pytest.approx(rate, rel=6e-4)
    assert found.distinct_times == distinct
    assert found.gap_cv == pytest.approx(cv, rel=5e-3)
    assert found.longest_gap_s == pytest.approx(longest, rel=6e-4)
    for window_s, expected in dispersion.items():
        assert found.dispersion_by_window_s[window_s] == pytest.approx(expected, rel=5e-3)


def test_azure_rates_by_five_minutes_are_the_published_ones(data_file) -> None:
    found = trace_statistics(read_trace(data_file(AZURE))).arrivals
    assert found is not None
    assert found.rate_by_window_per_s == pytest.approx(
        [4.82, 4.74, 5.19, 5.2, 6.28, 7.46, 7.43, 6.13, 5.67, 4.75, 4.32], abs=0.006
    )


@pytest.mark.parametrize(
    ("file", "share", "references", "distinct", "once", "gap_p50_s", "gap_p90_s", "lru"),
    [
        (
            MOONCAKE, 0.3472, 146_464, 96_534, 0.766, 108.0, 429.0,
            {1_000: 0.0442, 3_000: 0.0653, 10_000: 0.209, 30_000: 0.318, 100_000: 0.347},
        ),
        (
            MOONCAKE_1000, 0.3907, 19_686, 12_207, 0.855, 0.0, 76.34,
            {1_000: 0.291, 3_000: 0.308, 10_000: 0.389, 30_000: 0.391, 100_000: 0.391},
        ),
        (DYNAMO, 0.7168, 4_163, 1_183, 0.167, 14.68, 83.35, {}),
        (
            "vllm-bench-rtxpro6000-llama-3.1-8b/prefix_blocks.jsonl.gz",
            0.07588, 15_942, 14_722, 0.919, 6.061, 16.43, {},
        ),
    ],
)  # fmt: skip
def test_prefix_sharing_of_public_traces_is_the_published_one(
    data_file, file, share, references, distinct, once, gap_p50_s, gap_p90_s, lru
) -> None:
    found = trace_statistics(read_trace(data_file(file))).prefixes
    assert found is not None
    assert found.unbounded_hit_share == pytest.approx(share, rel=5e-4)
    assert (found.num_references, found.num_distinct) == (references, distinct)
    assert found.used_once_share == pytest.approx(once, abs=6e-4)
    assert found.reuse_gap_s is not None
    assert found.reuse_gap_s.p50 == pytest.approx(gap_p50_s, rel=6e-4)
    assert found.reuse_gap_s.p90 == pytest.approx(gap_p90_s, rel=6e-4)
    for size, expected in lru.items():
        assert found.lru_hit_share_by_blocks[size] == pytest.approx(expected, rel=4e-3)


def test_measured_times_of_a_public_run_are_the_published_ones(data_file) -> None:
    measured = trace_statistics(read_trace(data_file(VLLM))).measured
    assert measured["ttft_s"].mean == pytest.approx(7.097, rel=5e-4)
    assert measured["tpot_s"].p99 == pytest.approx(37.34e-3, rel=5e-4)
    assert measured["queue_s"].p50 == pytest.approx(9.335, rel=5e-4)
    assert measured["e2e_s"].max == pytest.approx(38.13, rel=5e-4)


@pytest.mark.slow
def test_agentic_sessions_share_prompts_as_published(data_file) -> None:
    parts = [read_trace(data_file(f"agentic-coding/traces-0{i}.jsonl.gz")) for i in range(3)]
    found = [trace_statistics(part) for part in parts]
    # 150 sessions, and 21 calls of sub-agents that run beside them
    assert sum(f.sessions.num_sessions for f in found if f.sessions) == 150 + 21
    shared = sum(
        f.prefixes.unbounded_hit_share * part.prompt_tokens.sum()
        for f, part in zip(found, parts, strict=True)
        if f.prefixes
    )
    assert shared / sum(p.prompt_tokens.sum() for p in parts) == pytest.approx(0.9578, abs=1e-3)
    assert all(not f.prefixes.lru_hit_share_by_blocks for f in found if f.prefixes)
    assert all("session_time_s" not in f.measured for f in found)
