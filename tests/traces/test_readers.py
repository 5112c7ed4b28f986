"""Real traces against the statistics published with them, and the way in."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from traces.errors import TraceError
from traces.readers import FORMATS, detect_format, read_trace, start_sessions
from traces.request import Trace

DataFile = Callable[[str], Path]

AZURE = "azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz"
ARXIV_LENGTHS = (
    "lengths-arxiv-summarization/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"
)
MOONCAKE = "mooncake-conversation/conversation_trace.first-30-min.jsonl.gz"
MOONCAKE_1000 = "mooncake-arxiv-1000/mooncake_trace_1000.jsonl"
VLLM = "vllm-bench-rtxpro6000-llama-3.1-8b/requests.jsonl"
VLLM_BLOCKS = "vllm-bench-rtxpro6000-llama-3.1-8b/prefix_blocks.jsonl.gz"
DYNAMO = "dynamo-agent-qwen3-14b/pi_request_trace.jsonl.gz"
AGENTIC = [f"agentic-coding/traces-0{i}.jsonl.gz" for i in range(3)]

# Published with each: format, requests, mean prompt, mean output, theta with ages from 1, seconds.
PUBLISHED = [
    (AZURE, "azure-csv", 19_366, 1_155, 211.1, 1_227, 3_502.0),
    (ARXIV_LENGTHS, "vidur-csv", 28_257, 2_588, 291.4, 2_421, None),
    (MOONCAKE, "mooncake-jsonl", 5_719, 12_870, 345.7, 14_080, 1_797.0),
    (MOONCAKE_1000, "mooncake-jsonl", 1_000, 9_792, 199.1, 15_300, 177.098),
    (VLLM, "vllm-jsonl", 300, 857.5, 652.5, 1_204, 29.1212),
    (VLLM_BLOCKS, "vllm-jsonl", 300, 857.5, 652.5, 1_204, 29.137),
    (DYNAMO, "dynamo-jsonl", 17, 3_913, 476.1, 4_074, 162.147),
]
# Tokens per block, references, distinct blocks, share of prompt tokens an unbounded cache finds.
PUBLISHED_BLOCKS = [
    (MOONCAKE, 512, 146_464, 96_534, 0.3472),
    (MOONCAKE_1000, 512, 19_686, 12_207, 0.3907),
    (VLLM_BLOCKS, 16, 15_942, 14_722, 0.07588),
    (DYNAMO, 16, 4_163, 1_183, 0.7168),
]


def theta_tokens(*traces: Trace) -> float:
    """E[sum over ages 0..D-1 of (P + age)] / E[D]."""
    p = np.concatenate([t.prompt_tokens for t in traces]).astype(np.float64)
    d = np.concatenate([t.output_tokens for t in traces]).astype(np.float64)
    return float((d * p + d * (d - 1) / 2).sum() / d.sum())


def four_digits(value: float) -> float:
    """Tolerance of a number printed with four digits."""
    return 0.5 * 10 ** (np.floor(np.log10(abs(value))) - 3)


def cached_tokens(trace: Trace) -> int:
    """Prompt tokens that a cache without bound, empty at the start, would find."""
    assert trace.block_offsets is not None
    assert trace.block_ids is not None
    known: set[int] = set()
    found = 0
    for i in range(len(trace)):
        ids = trace.block_ids[trace.block_offsets[i] : trace.block_offsets[i + 1]].tolist()
        hits = next((k for k, b in enumerate(ids) if b not in known), len(ids))
        found += min(hits * trace.block_tokens, int(trace.prompt_tokens[i]))
        known.update(ids)
    return found


@pytest.mark.parametrize(
    ("file", "format_name", "count", "prompt", "output", "theta", "seconds"),
    PUBLISHED,
    ids=[row[0].split("/")[1] for row in PUBLISHED],
)
def test_a_real_trace_has_its_published_statistics(
    data_file: DataFile,
    file: str,
    format_name: str,
    count: int,
    prompt: float,
    output: float,
    theta: float,
    seconds: float | None,
) -> None:
    path = data_file(file)
    trace = read_trace(path)
    assert detect_format(path) == trace.format == format_name
    assert len(trace) == count
    assert trace.prompt_tokens.mean() == pytest.approx(prompt, abs=four_digits(prompt))
    assert trace.output_tokens.mean() == pytest.approx(output, abs=four_digits(output))
    assert theta_tokens(trace) + 1 == pytest.approx(theta, abs=four_digits(theta))
    assert trace.skipped == {}
    assert trace.source == str(path)
    if seconds is None:
        assert trace.arrival_s is None
    else:
        assert trace.arrival_s is not None
        assert trace.arrival_s[0] == 0.0
        assert bool((np.diff(trace.arrival_s) >= 0).all())
        assert trace.duration_s == pytest.approx(seconds, abs=four_digits(seconds))


@pytest.mark.parametrize(
    ("file", "block_tokens", "references", "distinct", "hit_rate"),
    PUBLISHED_BLOCKS,
    ids=[row[0].split("/")[1] for row in PUBLISHED_BLOCKS],
)
def test_prompt_blocks_give_the_published_hit_rate(
    data_file: DataFile,
    file: str,
    block_tokens: int,
    references: int,
    distinct: int,
    hit_rate: float,
) -> None:
    trace = read_trace(data_file(file))
    assert trace.block_tokens == block_tokens
    assert trace.block_ids is not None
    assert len(trace.block_ids) == references
    assert np.array_equal(np.unique(trace.block_ids), np.arange(distinct))
    rate = cached_tokens(trace) / int(trace.prompt_tokens.sum())
    assert rate == pytest.approx(hit_rate, abs=four_digits(hit_rate))


def test_coarse_ticks_of_a_real_trace_are_said(data_file: DataFile) -> None:
    notes = " ".join(read_trace(data_file(MOONCAKE)).notes)
    assert "600 distinct times for 5719 requests, typically 3 s apart" in notes
    assert not any("ticks" in note for note in read_trace(data_file(AZURE)).notes)


def test_stamps_of_azure_keep_their_hundred_nanoseconds(data_file: DataFile) -> None:
    arrival_s = read_trace(data_file(AZURE)).arrival_s
    assert arrival_s is not None
    # 18:15:46.6805900, 18:15:50.9951690, 18:15:51.2224670
    assert arrival_s[1:3] == pytest.approx([4.3145790, 4.5418770], abs=1e-12)
    assert len(np.unique(arrival_s)) == 19_366


def test_measured_times_of_vllm_are_the_published_ones(data_file: DataFile) -> None:
    measured = read_trace(data_file(VLLM)).measured
    published_ms = {"ttft_s": 7_097, "tpot_s": 32.46, "queue_s": 6_975, "e2e_s": 28_200}
    assert set(measured) == set(published_ms)
    for name, mean_ms in published_ms.items():
        assert float(measured[name].mean()) * 1e3 == pytest.approx(
            mean_ms, abs=four_digits(mean_ms)
        )
    assert float(np.median(measured["ttft_s"])) == pytest.approx(9.443, abs=5e-4)


def test_measured_times_of_dynamo_are_the_published_ones(data_file: DataFile) -> None:
    trace = read_trace(data_file(DYNAMO))
    published_ms = {"ttft_s": 535.1, "tpot_s": 27.8, "queue_s": 220.8, "e2e_s": 13_620}
    for name, mean_ms in published_ms.items():
        mean = float(trace.measured[name].mean()) * 1e3
        assert mean == pytest.approx(mean_ms, abs=four_digits(mean_ms))
    assert trace.session_ids is not None
    assert len(set(trace.session_ids)) == 5
    assert any("20 tool_end, 2 tool_error, 22 tool_start" in note for note in trace.notes)


def test_dynamo_think_time_runs_from_the_end_of_the_last_request_of_the_session(
    data_file: DataFile,
) -> None:
    trace = read_trace(data_file(DYNAMO))
    assert trace.think_s is not None
    assert trace.session_ids is not None
    own = [i for i, s in enumerate(trace.session_ids) if s.startswith("pi-qwen")]
    # received at ...080006 ms for 22503.473 ms, the next at ...102526 ms
    assert np.isnan(trace.think_s[own[0]])
    assert trace.think_s[own[1]] == pytest.approx(0.016527, abs=1e-6)


def test_agentic_sessions_have_their_published_statistics(data_file: DataFile) -> None:
    traces = [read_trace(data_file(file)) for file in AGENTIC]
    without_output = sum(sum(trace.skipped.values()) for trace in traces)
    count = sum(map(len, traces))
    assert without_output == 5
    assert count + without_output == 9_795
    outputs = sum(int(trace.output_tokens.sum()) for trace in traces)
    assert outputs / (count + without_output) == pytest.approx(430.4, abs=0.05)
    assert theta_tokens(*traces) + 1 == pytest.approx(115_300, abs=50)
    names = {
        name
        for trace in traces
        for name in (trace.session_ids if trace.session_ids is not None else ())
    }
    assert len({name for name in names if " > " not in name}) == 150
    assert len({name for name in names if " > " in name}) == 21
    # Published with the first call of each session and sub-agent counted as 0 s.
    think = np.concatenate([t.think_s for t in traces if t.think_s is not None])
    assert float(np.nansum(think)) / (9_795 - 50) == pytest.approx(157.3, abs=0.1)
    ttft = np.concatenate([trace.measured["ttft_s"] for trace in traces])
    # Published with the five calls without output, which are among the slowest.
    assert float(np.nanmedian(ttft)) == pytest.approx(2.29, abs=0.015)
    for trace in traces:
        assert trace.arrival_s is None
        assert trace.block_tokens == 64
    hits = sum(map(cached_tokens, traces))
    prompts = sum(int(trace.prompt_tokens.sum()) for trace in traces)
    assert hits / prompts == pytest.approx(0.9578, abs=5e-4)


def test_started_agentic_sessions_keep_their_inner_distances(data_file: DataFile) -> None:
    trace = read_trace(data_file(AGENTIC[2]))
    starts = np.linspace(0.0, 3_600.0, 50)[::-1]
    started = start_sessions(trace, starts)
    assert started.arrival_s is not None
    assert trace.session_ids is not None
    assert started.session_ids is not None
    assert started.arrival_s[0] == 0.0
    assert bool((np.diff(started.arrival_s) >= 0).all())
    assert int(started.prompt_tokens.sum()) == int(trace.prompt_tokens.sum())
    assert cached_tokens(started) == cached_tokens(trace)
    first, last = trace.session_ids[0], trace.session_ids[-1]
    moments = started.arrival_s[started.session_ids == first]
    assert moments - moments[0] == pytest.approx(
        np.sort(trace.measured["session_time_s"][trace.session_ids == first]), abs=1e-9
    )
    assert moments[0] - started.arrival_s[started.session_ids == last][0] == pytest.approx(3_600.0)


def test_starting_another_number_of_sessions_is_refused(data_file: DataFile) -> None:
    trace = read_trace(data_file(AGENTIC[2]))
    with pytest.raises(TraceError, match="has 50 sessions, but 2 start times"):
        start_sessions(trace, np.zeros(2))


@pytest.mark.parametrize(
    "file",
    [
        "splitwise-perf-a100/perf_model.a100.csv",
        "vllm-bench-rtxpro6000-llama-3.1-8b/timeseries.csv",
        "vllm-bench-rtxpro6000-llama-3.1-8b/meta.json",
        "vllm-bench-rtxpro6000-llama-3.1-8b/config.json",
        "dialogs-tau-airline/gpt-4o-airline.jsonl.gz",
        "moe-olmoe/olmoe-expert_counts-c4.json.gz",
        "moe-qwen3-30b-a3b/coactivation_qwen3-30b-a3b.json.gz",
        "prompts-gsm8k-test/test.jsonl.gz",
        "qa-xquad-en/xquad.en.json.gz",
        "servegen-m-small/m-small-trace.tar.gz",
        "text-state-union/state_union.zip",
        "text-tinyshakespeare/input.txt.gz",
    ],
)
def test_real_files_that_are_no_request_traces_are_refused(data_file: DataFile, file: str) -> None:
    path = data_file(file)
    for use in (read_trace, detect_format):
        with pytest.raises(TraceError) as caught:
            use(path)
        message = str(caught.value)
        assert str(path) in message
        assert "\n" not in message


def test_a_table_of_measured_times_is_named_as_such(data_file: DataFile) -> None:
    with pytest.raises(TraceError, match="a table of measured times, not of requests"):
        read_trace(data_file("splitwise-perf-a100/perf_model.a100.csv"))


def test_client_statistics_are_sent_to_the_generator(data_file: DataFile) -> None:
    archive = data_file("servegen-m-small/m-small-trace.tar.gz")
    for path in (archive, archive.parent):
        with pytest.raises(TraceError, match=r"ServeGen.*generator"):
            read_trace(path)


def test_every_format_has_a_name_and_a_line() -> None:
    assert {"azure-csv", "mooncake-jsonl", "vidur-csv", "burstgpt-csv", "csv", "jsonl"} < set(
        FORMATS
    )
    for description in FORMATS.values():
        assert "\n" not in description
        assert description
