"""Every format: a trace written in it is read back, whatever the file's outer shape."""

import csv
import gzip
import io
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traces.readers import arrow_json, csv_rows, detect_format, read_trace
from traces.readers.rules import LARGEST_TOKENS
from traces.request import Trace

WITHIN_TMP_PATH = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True)
class Rows:
    """A trace as plain lists: microseconds, lengths, one list of block ids each."""

    time_us: list[int]
    prompts: list[int]
    outputs: list[int]
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    def blocks(self, block_tokens: int, *, with_last: bool) -> list[list[int]]:
        rng = np.random.default_rng(self.seed)
        rounded = [p + (block_tokens - 1) * with_last for p in self.prompts]
        return [rng.integers(0, 2**40, n // block_tokens).tolist() for n in rounded]


@st.composite
def rows(draw: st.DrawFn, *, longest: int = 50_000) -> Rows:
    n = draw(st.integers(1, 12))
    times = st.integers(0, 10**13) | st.sampled_from([0, 1, 5_000_000])
    prompts = st.integers(1, 60) | st.integers(1, longest)
    outputs = st.integers(1, 60) | st.integers(1, LARGEST_TOKENS)
    return Rows(
        time_us=draw(st.lists(times, min_size=n, max_size=n)),
        prompts=draw(st.lists(prompts, min_size=n, max_size=n)),
        outputs=draw(st.lists(outputs, min_size=n, max_size=n)),
        seed=draw(st.integers(0, 99)),
    )


def stamp(time_us: int, zone: str = "") -> str:
    moment = np.datetime64("2024-05-10T00:00:00", "us") + np.timedelta64(time_us, "us")
    text = str(moment).replace("T", " ")
    # pandas, which wrote the public files, leaves zero fractions away
    return (text[:-7] if text.endswith(".000000") else text) + zone


def seconds(time_us: int) -> str:
    return f"{time_us // 10**6}.{time_us % 10**6:06d}"


Table = tuple[list[str], list[list[str]]]


def azure_2023(r: Rows) -> Table:
    header = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    return header, [
        [stamp(t) + "0" * ("." in stamp(t)), str(p), str(d)]
        for t, p, d in zip(r.time_us, r.prompts, r.outputs, strict=True)
    ]


def azure_2024(r: Rows) -> Table:
    header, table = azure_2023(r)
    return header, [[stamp(t, "+00:00"), *row[1:]] for t, row in zip(r.time_us, table, strict=True)]


def azure_in_another_zone(r: Rows) -> Table:
    header, table = azure_2023(r)
    zones = ["+05:30", "-0800", "Z", "+00", " UTC"]
    shift_us = [19_800 * 10**6, -28_800 * 10**6, 0, 0, 0]
    return header, [
        [stamp(t + shift_us[i % 5], zones[i % 5]), *row[1:]]
        for i, (t, row) in enumerate(zip(r.time_us, table, strict=True))
    ]


def vidur(r: Rows) -> Table:
    header = ["arrived_at", "num_prefill_tokens", "num_decode_tokens"]
    return header, [
        [seconds(t), str(p), str(d)]
        for t, p, d in zip(r.time_us, r.prompts, r.outputs, strict=True)
    ]


def vidur_lengths(r: Rows) -> Table:
    header = ["num_prefill_tokens", "num_decode_tokens", "num_total_tokens", "pd_ratio"]
    return header, [
        [str(p), str(d), str(p + d), repr(p / d)] for p, d in zip(r.prompts, r.outputs, strict=True)
    ]


def splitwise(r: Rows) -> Table:
    header = (
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
    )
    return header.split(","), [
        [str(i), "2", "0", seconds(t), "1", str(p), str(d)]
        for i, (t, p, d) in enumerate(zip(r.time_us, r.prompts, r.outputs, strict=True))
    ]


def burstgpt(r: Rows) -> Table:
    header = ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"]
    return header, [
        [seconds(t), "GPT-4", str(p), str(d), str(p + d), "API log"]
        for t, p, d in zip(r.time_us, r.prompts, r.outputs, strict=True)
    ]


def plain_csv(r: Rows) -> Table:
    return ["arrival_us", "isl", "osl"], [
        [str(t), str(p), str(d)] for t, p, d in zip(r.time_us, r.prompts, r.outputs, strict=True)
    ]


CSV: dict[str, tuple[str, Callable[[Rows], Table]]] = {
    "Azure 2023": ("azure-csv", azure_2023),
    "Azure 2024": ("azure-csv", azure_2024),
    "Azure in many zones": ("azure-csv", azure_in_another_zone),
    "Vidur": ("vidur-csv", vidur),
    "Vidur's lengths": ("vidur-csv", vidur_lengths),
    "splitwise-sim": ("splitwise-csv", splitwise),
    "BurstGPT": ("burstgpt-csv", burstgpt),
    "plain CSV": ("csv", plain_csv),
}


def mooncake(r: Rows) -> list[dict[str, Any]]:
    zipped = zip(r.time_us, r.prompts, r.outputs, r.blocks(512, with_last=True), strict=True)
    return [
        {"timestamp": t / 1000, "input_length": p, "output_length": d, "hash_ids": ids}
        for t, p, d, ids in zipped
    ]


def qwen(r: Rows) -> list[dict[str, Any]]:
    zipped = zip(r.time_us, r.prompts, r.outputs, r.blocks(16, with_last=True), strict=True)
    return [
        {
            "chat_id": i,
            "parent_chat_id": -1,
            "timestamp": t / 1e6,
            "input_length": p,
            "output_length": d,
            "type": "text",
            "turn": 1,
            "hash_ids": ids,
        }
        for i, (t, p, d, ids) in enumerate(zipped)
    ]


def vllm(r: Rows) -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"bench-{i}",
            "input_toks": p,
            "output_toks": d,
            "arrival_time": 1_777_142_838 + t / 1e6,
            "queued_ts": 4.0,
            "scheduled_ts": 4.5,
            "first_token_ts": 5.0,
            "last_token_ts": 5.0 + (d - 1) / 4,
        }
        for i, (t, p, d) in enumerate(zip(r.time_us, r.prompts, r.outputs, strict=True))
    ]


def vllm_blocks(r: Rows) -> list[dict[str, Any]]:
    zipped = zip(r.time_us, r.prompts, r.outputs, r.blocks(16, with_last=False), strict=True)
    return [
        {
            "i": i,
            "input_toks": p,
            "output_toks": d,
            "arrival_time_ns": t * 1000,
            "hash_ids": ids,
        }
        for i, (t, p, d, ids) in enumerate(zipped)
    ]


def dynamo(r: Rows) -> list[dict[str, Any]]:
    zipped = zip(r.time_us, r.prompts, r.outputs, r.blocks(16, with_last=True), strict=True)
    ended = [
        {
            "timestamp": i,
            "event": {
                "event_type": "request_end",
                "agent_context": {"session_id": f"s{i % 3}"},
                "request": {
                    "request_id": f"r{i}",
                    "request_received_ms": t / 1000,
                    "input_tokens": p,
                    "output_tokens": d,
                    "ttft_ms": 12.5,
                    "replay": {
                        "trace_block_size": 16,
                        "input_sequence_hashes": [2**64 - 1 - b for b in ids],
                    },
                },
            },
        }
        for i, (t, p, d, ids) in enumerate(zipped)
    ]
    return [{"timestamp": 0, "event": {"event_type": "tool_start"}}, *ended]


def agentic(r: Rows) -> list[dict[str, Any]]:
    zipped = zip(r.time_us, r.prompts, r.outputs, r.blocks(64, with_last=False), strict=True)
    return [
        {
            "id": f"trace_{i}",
            "block_size": 64,
            "hash_id_scope": "global",
            "requests": [{"t": t / 1e6, "type": "n", "in": p, "out": d, "hash_ids": ids}],
        }
        for i, (t, p, d, ids) in enumerate(zipped)
    ]


def plain_jsonl(r: Rows) -> list[dict[str, Any]]:
    return [
        {"prompt_tokens": p, "output_tokens": d, "time": stamp(t, "Z")}
        for t, p, d in zip(r.time_us, r.prompts, r.outputs, strict=True)
    ]


Jsonl = tuple[str, Callable[[Rows], list[dict[str, Any]]], int, bool]
# Format, writer, tokens per block, whether the partly filled last block has an id.
JSONL: dict[str, Jsonl] = {
    "Mooncake": ("mooncake-jsonl", mooncake, 512, True),
    "Qwen-Bailian": ("qwen-jsonl", qwen, 16, True),
    "vLLM, measured": ("vllm-jsonl", vllm, 0, False),
    "vLLM, blocks": ("vllm-jsonl", vllm_blocks, 16, False),
    "Dynamo": ("dynamo-jsonl", dynamo, 16, True),
    "agentic": ("agentic-jsonl", agentic, 64, False),
    "plain JSON Lines": ("jsonl", plain_jsonl, 0, False),
}


def csv_bytes(
    table: Table,
    *,
    delimiter: str = ",",
    line_end: str = "\n",
    quoting: Any = csv.QUOTE_MINIMAL,
    blank_after: int | None = None,
) -> bytes:
    header, body = table
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator=line_end, quoting=quoting)
    for i, row in enumerate([header, *body]):
        writer.writerow(row)
        if i == blank_after:
            buffer.write(line_end)
    return buffer.getvalue().encode()


def jsonl_bytes(objects: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in objects).encode()


def expected_order(r: Rows, has_times: bool) -> list[int]:
    return sorted(range(len(r)), key=r.time_us.__getitem__) if has_times else list(range(len(r)))


def assert_read_back(trace: Trace, r: Rows, *, has_times: bool, resolution_s: float) -> None:
    order = expected_order(r, has_times)
    assert trace.prompt_tokens.tolist() == [r.prompts[i] for i in order]
    assert trace.output_tokens.tolist() == [r.outputs[i] for i in order]
    assert trace.skipped == {}
    assert (trace.arrival_s is not None) == has_times
    if trace.arrival_s is not None:
        expected = [(r.time_us[i] - min(r.time_us)) / 1e6 for i in order]
        assert trace.arrival_s == pytest.approx(expected, rel=1e-12, abs=resolution_s)
        assert trace.arrival_s[0] == 0.0
        assert any("sorted" in note for note in trace.notes) == (order != list(range(len(r))))


@pytest.mark.parametrize("case", CSV)
@given(r=rows(), data=st.data())
@WITHIN_TMP_PATH
def test_csv_written_in_any_shape_is_read_back(
    tmp_path: Path, case: str, r: Rows, data: st.DataObject
) -> None:
    format_name, write = CSV[case]
    header, body = write(r)
    columns = data.draw(st.permutations(range(len(header))))
    change = data.draw(st.sampled_from([str, str.upper, str.lower, str.swapcase]))
    table = [change(header[c]) for c in columns], [[row[c] for c in columns] for row in body]
    content = csv_bytes(
        table,
        delimiter=data.draw(st.sampled_from([",", ";", "\t"])),
        line_end=data.draw(st.sampled_from(["\n", "\r\n"])),
        quoting=data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])),
        blank_after=data.draw(st.none() | st.integers(0, len(body))),
    )
    if data.draw(st.booleans()):
        content = b"\xef\xbb\xbf" + content
    if data.draw(st.booleans()):
        content = content.rstrip(b"\r\n")
    path = tmp_path / "trace.dat"
    path.write_bytes(gzip.compress(content, 1) if data.draw(st.booleans()) else content)
    assert detect_format(path) == format_name
    trace = read_trace(path)
    assert trace.format == format_name
    has_times = case != "Vidur's lengths"
    # Seconds with six decimals, stamps and whole microseconds are exact up to rounding.
    assert_read_back(trace, r, has_times=has_times, resolution_s=2e-9)


@pytest.mark.parametrize("case", JSONL)
@given(r=rows(), data=st.data())
@WITHIN_TMP_PATH
def test_json_lines_are_read_back_with_their_blocks(
    tmp_path: Path, case: str, r: Rows, data: st.DataObject
) -> None:
    format_name, write, block_tokens, with_last = JSONL[case]
    objects = write(r)
    if data.draw(st.booleans()):
        objects = [dict(reversed(row.items())) for row in objects]
    content = jsonl_bytes(objects)
    if data.draw(st.booleans()):
        content = b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n\r\n").rstrip()
    path = tmp_path / "trace.dat"
    path.write_bytes(content)
    assert detect_format(path) == format_name
    trace = read_trace(path)
    has_times = case != "agentic"
    # A wall clock in seconds has a quarter of a microsecond left in 64 bits.
    resolution_s = 1e-6 if case == "vLLM, measured" else 2e-9
    assert_read_back(trace, r, has_times=has_times, resolution_s=resolution_s)
    assert trace.block_tokens == block_tokens
    if block_tokens:
        blocks = r.blocks(block_tokens, with_last=with_last)
        assert_same_sharing(trace, [blocks[i] for i in expected_order(r, has_times)])


def assert_same_sharing(trace: Trace, blocks: list[list[int]]) -> None:
    """The ids are dense, as many per row, and equal exactly where the written ones are."""
    assert trace.block_ids is not None
    assert trace.block_offsets is not None
    assert np.diff(trace.block_offsets).tolist() == [len(ids) for ids in blocks]
    written = list(itertools.chain.from_iterable(blocks))
    pairs = set(zip(written, trace.block_ids.tolist(), strict=True))
    assert len(pairs) == len(set(written))
    assert sorted(dense for _, dense in pairs) == list(range(len(pairs)))


@pytest.mark.parametrize("case", [*CSV, *JSONL])
@given(r=rows(), data=st.data())
@WITHIN_TMP_PATH
def test_reading_by_arrow_and_row_by_row_give_the_same_trace(
    tmp_path: Path, case: str, r: Rows, data: st.DataObject
) -> None:
    content = csv_bytes(CSV[case][1](r)) if case in CSV else jsonl_bytes(JSONL[case][1](r))
    if case in CSV and data.draw(st.booleans()):
        header, _, body = content.partition(b"\n")
        comma = data.draw(st.sampled_from([b", ", b" ,", b".0,", b".,"]))
        content = header + b"\n" + body.replace(b",", comma)
    lines = content.split(b"\n")
    # Any one byte may be changed; then both have to refuse the row, or both to take it.
    line = data.draw(st.integers(1 if case in CSV else 0, len(lines) - 1))
    if lines[line] and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(lines[line]) - 1))
        new = data.draw(st.sampled_from(b'0-.xe ",;:[{\xff\t+'))
        lines[line] = lines[line][:at] + bytes([new]) + lines[line][at + 1 :]
    path = tmp_path / "trace.dat"
    path.write_bytes(b"\n".join(lines))
    by_arrow = outcome(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_rows, "batch_by_arrow", lambda *_: None)
        patch.setattr(arrow_json.ArrowJson, "batch", lambda *_: None)
        row_by_row = outcome(path)
    assert by_arrow == row_by_row


def outcome(path: Path) -> object:
    """Everything a reader says about a file, comparable."""
    try:
        trace = read_trace(path, skip_bad_rows=True)
    except ValueError as error:
        return str(error)
    columns = {
        "arrival_s": trace.arrival_s,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        "request_ids": trace.request_ids,
        "session_ids": trace.session_ids,
        "think_s": trace.think_s,
        "block_offsets": trace.block_offsets,
        "block_ids": trace.block_ids,
        **trace.measured,
    }
    values = {name: None if c is None else repr(c.tolist()) for name, c in columns.items()}
    return values, trace.format, trace.skipped, trace.notes


@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        ("12.0", 12),
        ("12.", 12),
        ("1e3", 1000),
        ("+7", 7),
        (" 7 ", 7),
        ("007", 7),
        ("2147483647", 2**31 - 1),
    ],
)
def test_a_length_may_be_any_spelling_of_a_whole_number(
    tmp_path: Path, written: str, tokens: int
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"prompt_tokens,output_tokens\n5,5\n{written},{written}\n")
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == trace.output_tokens.tolist() == [5, tokens]


def test_quoted_fields_may_hold_delimiters_quotes_and_line_ends_across_chunks(
    tmp_path: Path,
) -> None:
    note = 'a, "b"\nc;' * 2_000
    table = (
        ["note", "prompt_tokens", "output_tokens"],
        [[note, str(i), "3"] for i in range(1, 1_001)],
    )
    path = tmp_path / "quoted.csv"
    path.write_bytes(csv_bytes(table))
    assert path.stat().st_size > 4 * 2**22
    assert read_trace(path).prompt_tokens.tolist() == list(range(1, 1_001))


def test_string_block_ids_become_dense_numbers(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 5}
    path.write_bytes(
        jsonl_bytes([{**row, "hash_ids": ["x", "y"]}, {**row, "hash_ids": ["x", "z"]}])
    )
    ids = read_trace(path).block_ids
    assert ids is not None
    assert ids[0] == ids[2]
    assert sorted(set(ids.tolist())) == [0, 1, 2]


def test_block_ids_stay_with_their_rows_when_rows_are_sorted_and_skipped(tmp_path: Path) -> None:
    row = {"input_length": 1024, "output_length": 5}
    objects = [
        {**row, "timestamp": 30, "hash_ids": [7, 8]},
        {**row, "timestamp": 20, "hash_ids": [7]},
        {**row, "timestamp": 10, "hash_ids": [7, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(jsonl_bytes(objects))
    trace = read_trace(path, skip_bad_rows=True)
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 0.02]
    assert [r.prefix_block_ids for r in trace.requests()] == [(0, 2), (0, 1)]
    assert trace.skipped == {"a prompt must have one id per block of 512 tokens": 1}


def test_blocks_of_another_size_are_read_when_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(
        jsonl_bytes([{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2]}])
    )
    assert read_trace(path, block_tokens=64).block_tokens == 64


def test_mooncake_without_block_ids_has_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(jsonl_bytes([{"timestamp": 0, "input_length": 100, "output_length": 1}]))
    trace = read_trace(path, block_tokens=64)
    assert trace.block_ids is None
    assert trace.block_tokens == 0
    assert "block_tokens was ignored: the file has no prompt blocks" in trace.notes


def test_burstgpt_sessions_and_elapsed_times_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n5,12,1.5,GPT-4,10,3,13,Conversation log\n6,,,GPT-4,11,4,15,API log\n"
    )
    trace = read_trace(path)
    assert trace.format == "burstgpt-csv"
    assert trace.name == "BurstGPT"
    assert [request.session_id for request in trace.requests()] == ["12", None]
    assert trace.measured["e2e_s"] == pytest.approx([1.5, np.nan], nan_ok=True)


def test_qwen_conversations_are_named_by_their_first_chat(tmp_path: Path) -> None:
    chats = [(1, -1), (2, -1), (3, 1), (4, 3), (9, 8)]
    objects = [
        {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": i * 0.5,
            "input_length": 20,
            "output_length": 2,
            "hash_ids": [0, i],
        }
        for i, (chat, parent) in enumerate(chats)
    ]
    path = tmp_path / "qwen.jsonl"
    path.write_bytes(jsonl_bytes(objects))
    trace = read_trace(path)
    assert trace.session_ids is not None
    assert trace.session_ids.tolist() == ["1", "2", "1", "1", "8"]
    assert trace.duration_s == 2.0


def test_measured_times_of_one_token_have_no_time_per_token(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_bytes(jsonl_bytes(vllm(Rows([0, 1], [5, 6], [1, 9], 0))))
    measured = read_trace(path).measured
    assert measured["tpot_s"] == pytest.approx([np.nan, 0.25], nan_ok=True)
    assert measured["ttft_s"].tolist() == [1.0, 1.0]
    assert measured["queue_s"].tolist() == [0.5, 0.5]
    assert measured["e2e_s"].tolist() == [1.0, 3.0]


def test_the_products_own_columns_are_read_with_think_and_measured_times(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(
        jsonl_bytes(
            [
                {"arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 2, "session_id": "a"},
                {
                    "arrival_s": 2.5,
                    "prompt_tokens": 6,
                    "output_tokens": 3,
                    "session_id": "a",
                    "think_s": 1.25,
                    "ttft_s": 0.5,
                },
            ]
        )
    )
    trace = read_trace(path)
    assert trace.think_s == pytest.approx([np.nan, 1.25], nan_ok=True)
    assert set(trace.measured) == {"ttft_s"}
    assert trace.measured["ttft_s"] == pytest.approx([np.nan, 0.5], nan_ok=True)
    assert trace.session_ids is not None
    assert trace.session_ids.tolist() == ["a", "a"]


def test_a_column_map_is_followed_and_the_rest_guessed_and_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("when,a,b,output_tokens\n5,1,10,3\n7,2,20,4\n")
    trace = read_trace(path, columns={"prompt": "B", "arrival": "when"}, time_unit="ms")
    assert trace.prompt_tokens.tolist() == [10, 20]
    assert trace.output_tokens.tolist() == [3, 4]
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 0.002]
    assert (
        "columns taken: b as prompt tokens, when as arrival time, output_tokens as output tokens"
        in trace.notes
    )
    assert "guessed by name: output_tokens" in trace.notes


def test_a_column_map_overrides_a_known_family(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,Extra\n2023-11-16 18:15:46,1,2,30\n")
    trace = read_trace(path, columns={"prompt": "Extra", "output": "GeneratedTokens"})
    assert trace.format == "csv"
    assert trace.prompt_tokens.tolist() == [30]


def test_block_ids_of_plain_json_need_their_size(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_bytes(
        jsonl_bytes([{"prompt_tokens": 40, "output_tokens": 1, "hash_ids": [5, 6, 7]}])
    )
    assert any("hash_ids was ignored" in note for note in read_trace(path).notes)
    assert read_trace(path, block_tokens=16).block_tokens == 16


def test_request_ids_and_the_name_without_endings_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.v2.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl_bytes(vllm(Rows([9, 4], [5, 6], [1, 9], 0)))))
    trace = read_trace(str(path))
    assert trace.name == "run.v2"
    assert trace.request_ids is not None
    assert trace.request_ids.tolist() == ["bench-1", "bench-0"]
