"""Bad files and bad rows: one clear line, and what is left when bad rows are skipped."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from traces.errors import TraceError
from traces.readers import FORMATS, detect_format, read_trace

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = b"2023-11-16 18:15:46.6805900,374,44\n"
LATER = b"2023-11-16 18:15:50.9951690,396,109\n"
NUMBERS = b"arrival_s,prompt_tokens,output_tokens\n"


def mooncake(**changes: object) -> bytes:
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    return json.dumps({**row, **changes}).encode() + b"\n"


def vllm(**changes: object) -> bytes:
    row = {
        "request_id": "a",
        "input_toks": 10,
        "output_toks": 3,
        "arrival_time": 1e9,
        "queued_ts": 5.0,
        "scheduled_ts": 6.0,
        "first_token_ts": 7.0,
        "last_token_ts": 9.0,
    }
    return json.dumps({**row, **changes}).encode() + b"\n"


def session(**changes: object) -> bytes:
    call = {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 1.0}
    row = {"id": "s1", "block_size": 64, "hash_id_scope": "local", "requests": [call]}
    return json.dumps({**row, **changes}).encode() + b"\n"


def event(**changes: object) -> bytes:
    request = {
        "request_id": "a",
        "request_received_ms": 1_779_163_048_815,
        "input_tokens": 15,
        "output_tokens": 3,
        "ttft_ms": 5.0,
        "replay": {"trace_block_size": 16, "input_sequence_hashes": [2**63 + 1]},
    }
    row = {"event": {"event_type": "request_end", "request": {**request, **changes}}}
    return json.dumps(row).encode() + b"\n"


# File, then what the message must say; all words in this order.
WHOLE_FILE: dict[str, tuple[bytes, list[str]]] = {
    "an empty file": (b"", ["is empty"]),
    "blank lines only": (b"\n\r\n  \n", ["is empty"]),
    "a header only": (AZURE, ["has no rows"]),
    "a header without line end": (AZURE.rstrip(), ["has no rows"]),
    "a byte order mark only": (b"\xef\xbb\xbf", ["is empty"]),
    "no header": (b"1,2,3\n4,5,6\n", ["line 1", "'1,2,3'", "header"]),
    "a delimiter of another kind": (
        b"TIMESTAMP|ContextTokens|GeneratedTokens\n",
        ["fields must be separated by ',', ';' or a tab", "TIMESTAMP|ContextTokens"],
    ),
    "unknown columns": (b"a,b,c\n1,2,3\n", ["prompt tokens and output tokens", "a, b, c"]),
    "only prompts": (b"prompt_tokens,b\n1,2\n", ["no column holds the output tokens"]),
    "two candidates": (
        b"prompt_tokens,input_length,output_tokens\n1,2,3\n",
        ["several columns could be the prompt tokens", "prompt_tokens, input_length"],
    ),
    "a repeated header name": (
        b"TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n",
        ["several columns are named ContextTokens"],
    ),
    "a broken quote in the header": (b'"TIMESTAMP,ContextTokens\n', ["header cannot be read"]),
    "a header that is not UTF-8": (b"TIMESTAMP,Cont\xffxt\n1,2\n", ["header is not UTF-8"]),
    "UTF-16": ("TIMESTAMP,ContextTokens".encode("utf-16"), ["UTF-16", "save it as UTF-8"]),
    "zero bytes": (b"\x00\x01\x02\x03binary", ["binary"]),
    "a zip archive": (b"PK\x03\x04rest", ["zip archive"]),
    "a Parquet file": (b"PAR1rest", ["Parquet"]),
    "a tar archive": (b"name".ljust(257, b"0") + b"ustar\x0000", ["tar archive", "ServeGen"]),
    "a JSON array": (b'[{"timestamp": 0}]', ["JSON array", "one object per line"]),
    "a JSON document": (b'{\n "a": {\n  "b": 1\n }\n}\n', ["one JSON document", "JSON Lines"]),
    "objects of another kind": (b'{"question": "?"}\n', ["no column holds", "question"]),
    "Dynamo without a finished request": (
        b'{"event": {"event_type": "tool_end"}}\n',
        ["no event request_end"],
    ),
}


@pytest.mark.parametrize("case", WHOLE_FILE)
@pytest.mark.parametrize("skip", [False, True], ids=["strict", "skipping"])
def test_a_file_without_usable_rows_is_refused(tmp_path: Path, case: str, skip: bool) -> None:
    content, words = WHOLE_FILE[case]
    assert_refused(tmp_path, content, words, skip_bad_rows=skip)


def assert_refused(tmp_path: Path, content: bytes, words: list[str], **options: object) -> None:
    path = tmp_path / "trace.txt"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    at = 0
    for word in [str(path), *words]:
        assert word in message[at:], f"{word!r} not in {message[at:]!r}"
        at = message.index(word, at)
    assert caught.value.__cause__ is None


# File with one bad row; what the message must say; the rule it is counted under when skipped.
BAD_ROW: dict[str, tuple[bytes, list[str], str]] = {
    "not a number": (
        AZURE + GOOD + b"2023-11-16 18:15:47,many,44\n",
        ["line 3", "column ContextTokens", "'many'", "1 to 2147483647"],
        "prompt_tokens must be a whole number",
    ),
    "an empty field": (
        AZURE + GOOD + b"2023-11-16 18:15:47,,44\n",
        ["line 3", "column ContextTokens", "''"],
        "prompt_tokens must be a whole number",
    ),
    "a fraction": (
        AZURE + b"2023-11-16 18:15:47,12.5,44\n" + GOOD,
        ["line 2", "column ContextTokens", "'12.5'"],
        "prompt_tokens must be a whole number",
    ),
    "NaN": (
        AZURE + GOOD + b"2023-11-16 18:15:47,12,nan\n",
        ["line 3", "column GeneratedTokens", "'nan'"],
        "output_tokens must be a whole number",
    ),
    "infinity": (
        AZURE + GOOD + b"2023-11-16 18:15:47,inf,3\n",
        ["line 3", "'inf'"],
        "prompt_tokens must be a whole number",
    ),
    "an endless exponent": (
        AZURE + GOOD + b"2023-11-16 18:15:47,1e999,3\n",
        ["line 3", "'1e999'"],
        "prompt_tokens must be a whole number",
    ),
    "a negative length": (
        AZURE + GOOD + b"2023-11-16 18:15:47,-12,3\n",
        ["line 3", "'-12'", "1 to 2147483647"],
        "prompt_tokens must be >= 1",
    ),
    "no output": (
        AZURE + GOOD + LATER + b"2023-11-16 18:16:47,12,0\n",
        ["line 4", "column GeneratedTokens", "'0'"],
        "output_tokens must be >= 1",
    ),
    "no prompt": (
        AZURE + GOOD + b"2023-11-16 18:15:47,0,3\n",
        ["line 3", "column ContextTokens", "'0'"],
        "prompt_tokens must be >= 1",
    ),
    "a length of 2**31": (
        AZURE + GOOD + b"2023-11-16 18:15:47,2147483648,3\n",
        ["line 3", "'2147483648'", "1 to 2147483647"],
        "prompt_tokens must be <= 2147483647",
    ),
    "a length of a thousand digits": (
        AZURE + GOOD + b"2023-11-16 18:15:47," + b"9" * 1000 + b",3\n",
        ["line 3", "99..."],
        "prompt_tokens must be <= 2147483647",
    ),
    "a hexadecimal length": (
        AZURE + GOOD + b"2023-11-16 18:15:47,0x1F,3\n",
        ["line 3", "'0x1F'"],
        "prompt_tokens must be a whole number",
    ),
    "an underscore in a length": (
        AZURE + GOOD + b"2023-11-16 18:15:47,1_000,3\n",
        ["line 3", "'1_000'"],
        "prompt_tokens must be a whole number",
    ),
    "digits of another script": (
        AZURE + GOOD + "2023-11-16 18:15:47,١٢,3\n".encode(),
        ["line 3", "column ContextTokens"],
        "prompt_tokens must be a whole number",
    ),
    "a field too few": (
        AZURE + GOOD + b"2023-11-16 18:15:47,12\n" + LATER,
        ["line 3", "2 fields", "3 separated by ','"],
        "a row must have as many fields as the header",
    ),
    "a field too many": (
        AZURE + GOOD + b"2023-11-16 18:15:47,12,3,4\n",
        ["line 3", "4 fields"],
        "a row must have as many fields as the header",
    ),
    "a row with another delimiter": (
        AZURE + GOOD + b"2023-11-16 18:15:47;12;3\n",
        ["line 3", "1 field in", "3 separated by ','"],
        "a row must have as many fields as the header",
    ),
    "a torn last row": (
        AZURE + GOOD + b"2023-11-16 18:1",
        ["line 3", "1 field", "the last line has no end: the file seems cut"],
        "a row must have as many fields as the header",
    ),
    "a last row torn at a delimiter": (
        AZURE + GOOD + b"2023-11-16 18:15:47,12,",
        ["line 3", "column GeneratedTokens", "the file seems cut"],
        "output_tokens must be a whole number",
    ),
    "a quote that is not closed": (
        AZURE + GOOD + b'"2023-11-16 18:15:47,12,3\n',
        ["line 3", "quotes must be closed"],
        "quotes must be closed and lines end in LF",
    ),
    "bytes that are not UTF-8": (
        AZURE + GOOD + b"2023-11-16 18:15:47,\xff\xfe,3\n",
        ["line 3", "column ContextTokens", "\\udcff"],
        "text must be UTF-8",
    ),
    "a day that does not exist": (
        AZURE + GOOD + b"2023-02-30 18:15:47,12,3\n",
        ["line 3", "column TIMESTAMP", "'2023-02-30 18:15:47'", "no such day"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "a year beyond nanoseconds": (
        AZURE + GOOD + b"9999-01-01 00:00:00,12,3\n",
        ["line 3", "1970 to 2261"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "a zone in one row only": (
        AZURE + GOOD + b"2023-11-16 18:15:47+00:00,12,3\n",
        ["line 3", "column TIMESTAMP", "before: stamp"],
        "arrival times must all be numbers, all stamps with a zone, or all stamps without",
    ),
    "a number among stamps": (
        AZURE + GOOD + b"12.5,12,3\n",
        ["line 3", "'12.5'", "before: stamp"],
        "arrival times must all be numbers, all stamps with a zone, or all stamps without",
    ),
    "a negative time": (
        NUMBERS + b"0,1,1\n-5,1,1\n",
        ["line 3", "column arrival_s", "'-5'"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "a time that is not a number": (
        NUMBERS + b"0,1,1\nnan,1,1\n",
        ["line 3", "column arrival_s", "'nan'"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "an endless time": (
        NUMBERS + b"0,1,1\ninf,1,1\n",
        ["line 3", "column arrival_s", "'inf'"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "a decimal comma": (
        b'arrival_s;prompt_tokens;output_tokens\n0;1;1\n"0,5";1;1\n',
        ["line 3", "'0,5'"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "a repeated request id": (
        b"request_id,arrival_timestamp,prompt_size,token_size\n7,0,1,1\n8,1,1,1\n7,2,1,1\n",
        ["line 4", "column request_id", "'7'", "also in line 2"],
        "request ids must differ",
    ),
    "a missing request id": (
        b"request_id,arrival_timestamp,prompt_size,token_size\n7,0,1,1\n,1,1,1\n",
        ["line 3", "column request_id", "''"],
        "request id must be text or a whole number, not empty",
    ),
    "a failed request of BurstGPT": (
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        b"5,ChatGPT,472,18,490,Conversation log\n9,ChatGPT,472,0,472,API log\n",
        ["line 3", "column Response tokens", "'0'"],
        "output_tokens must be >= 1",
    ),
    "a negative elapsed time": (
        b"Timestamp,Session ID,Elapsed time,Request tokens,Response tokens\n"
        b"5,1,0.5,472,18\n9,1,-2,472,3\n",
        ["line 3", "column Elapsed time", "-2"],
        "Elapsed time must be >= 0",
    ),
    "a torn JSON line": (
        mooncake() + mooncake()[:-30],
        ["line 2", "the file seems cut"],
        "a line must be one JSON object",
    ),
    "broken JSON": (
        mooncake() + b'{"timestamp": }\n' + mooncake(),
        ["line 2", "a line must be one JSON object", "column 15"],
        "a line must be one JSON object",
    ),
    "a JSON line that is no object": (
        mooncake() + b"[1, 2]\n",
        ["line 2", "[1, 2]"],
        "a line must be one JSON object",
    ),
    "two objects in a line": (
        mooncake() + mooncake().rstrip() + mooncake(),
        ["line 2", "Extra data"],
        "a line must be one JSON object",
    ),
    "JSON nested without end": (
        mooncake() + b'{"a":' * 100_000 + b"\n",
        ["line 2"],
        "a line must be one JSON object",
    ),
    "JSON that is not UTF-8": (
        mooncake() + b'{"timestamp": 0, "note": "\xff", "input_length": 1}\n',
        ["line 2", "UTF-8"],
        "text must be UTF-8",
    ),
    "a key that is absent": (
        mooncake() + b'{"timestamp": 1, "output_length": 5, "hash_ids": [1]}\n',
        ["line 2", "column input_length", "no such key"],
        "prompt_tokens must be a whole number",
    ),
    "true for a length": (
        mooncake() + mooncake(input_length=True),
        ["line 2", "column input_length", "true"],
        "prompt_tokens must be a whole number",
    ),
    "null for a length": (
        mooncake() + mooncake(output_length=None),
        ["line 2", "column output_length", "null"],
        "output_tokens must be a whole number",
    ),
    "text for a length": (
        mooncake() + mooncake(output_length="5"),
        ["line 2", "column output_length", "'5'"],
        "output_tokens must be a whole number",
    ),
    "a JSON fraction": (
        mooncake() + mooncake(output_length=5.5),
        ["line 2", "column output_length", "5.5"],
        "output_tokens must be a whole number",
    ),
    "a JSON length beyond 64 bits": (
        mooncake() + mooncake(output_length=2**70),
        ["line 2", str(2**70)],
        "output_tokens must be <= 2147483647",
    ),
    "JSON's NaN": (
        mooncake() + mooncake(timestamp=float("nan")),
        ["line 2", "column timestamp", "NaN"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "null for a time": (
        mooncake() + mooncake(timestamp=None),
        ["line 2", "column timestamp", "null"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "a negative JSON time": (
        mooncake() + mooncake(timestamp=-1),
        ["line 2", "column timestamp", "-1"],
        "arrival time must be a finite number >= 0 or a date stamp",
    ),
    "block ids of two kinds in a row": (
        mooncake() + mooncake(hash_ids=[1, "2"]),
        ["line 2", "column hash_ids", '[1, "2"]'],
        "block ids must all be whole numbers of 64 bits or all be strings",
    ),
    "block ids of two kinds in a file": (
        mooncake() + mooncake(hash_ids=["1", "2"]),
        ["line 2", "column hash_ids", "before: numbers"],
        "block ids must all be whole numbers of 64 bits or all be strings",
    ),
    "a block id that is true": (
        mooncake() + mooncake(hash_ids=[True, 2]),
        ["line 2", "column hash_ids"],
        "block ids must all be whole numbers of 64 bits or all be strings",
    ),
    "a block id beyond 64 bits": (
        mooncake() + mooncake(hash_ids=[1, 2**64]),
        ["line 2", str(2**64)],
        "block ids must all be whole numbers of 64 bits or all be strings",
    ),
    "block ids that are no list": (
        mooncake() + mooncake(hash_ids=3),
        ["line 2", "column hash_ids", "found 3"],
        "hash_ids must be a list of block ids",
    ),
    "a block id too many": (
        mooncake() + mooncake(hash_ids=[1, 2, 3]),
        ["line 2", "column hash_ids", "3 block ids for 1000 prompt tokens", "needed: 1 or 2"],
        "a prompt must have one id per block of 512 tokens",
    ),
    "block ids of a prompt of whole blocks": (
        mooncake() + mooncake(input_length=1024, hash_ids=[1, 2, 3]),
        ["line 2", "3 block ids for 1024 prompt tokens", "needed: 2"],
        "a prompt must have one id per block of 512 tokens",
    ),
    "measured times out of order": (
        vllm() + vllm(request_id="b", first_token_ts=5.5),
        ["line 2", "column last_token_ts", "first_token_ts 5.5"],
        "queued_ts <= scheduled_ts <= first_token_ts <= last_token_ts",
    ),
    "a measured time that is text": (
        vllm() + vllm(request_id="b", first_token_ts="soon"),
        ["line 2", "column first_token_ts", "'soon'"],
        "first_token_ts must be a finite number or empty",
    ),
    "a repeated JSON request id": (
        vllm() + vllm(),
        ["line 2", "column request_id", "'a'", "also in line 1"],
        "request ids must differ",
    ),
    "a session without requests": (
        session() + session(id="s2", requests=None),
        ["line 2", "column requests", "null"],
        "requests must be a list of objects",
    ),
    "a repeated session": (
        session() + session(),
        ["line 2", "column id", "'s1'", "also in line 1"],
        "session ids must differ",
    ),
    "a session with another block size": (
        session() + session(id="s2", block_size=32),
        ["line 2", "column block_size", "32", "before: 64"],
        "block_size must be the same in all sessions",
    ),
    "a session without a block size": (
        session() + session(id="s2", block_size=None),
        ["line 2", "column block_size", "null"],
        "block_size must be a whole number >= 1",
    ),
    "a session with an unknown scope": (
        session() + session(id="s2", hash_id_scope="galactic"),
        ["line 2", "column hash_id_scope", "'galactic'"],
        "hash_id_scope must be local or global",
    ),
    "a bad call in a session": (
        session() + session(id="s2", requests=[{"t": 0, "in": -1, "out": 1, "hash_ids": []}]),
        ["line 2", "column requests[0].in", "-1"],
        "prompt_tokens must be >= 1",
    ),
    "a bad call of a sub-agent": (
        session()
        + session(
            id="s2",
            requests=[
                {"t": 9, "type": "subagent", "duration_ms": 5, "requests": [{"t": 0, "in": 1.5}]}
            ],
        ),
        ["line 2", "column requests[0].requests[0].in", "1.5"],
        "prompt_tokens must be a whole number",
    ),
    "a bad event of Dynamo": (
        event() + event(request_id="b", input_tokens=None),
        ["line 2", "column event.request.input_tokens", "null"],
        "prompt_tokens must be a whole number",
    ),
    "an event without a type": (
        event() + b'{"event": {}}\n',
        ["line 2", "column event.event_type", "no such key"],
        "event_type must be text",
    ),
}


@pytest.mark.parametrize("case", BAD_ROW)
def test_a_bad_row_is_named_by_file_line_column_value_and_rule(tmp_path: Path, case: str) -> None:
    content, words, rule = BAD_ROW[case]
    assert_refused(tmp_path, content, [*words[:1]])
    assert_refused(tmp_path, content, [f"rule: {rule}"])
    path = tmp_path / "trace.txt"
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("case", BAD_ROW)
def test_a_skipped_bad_row_is_counted_under_its_rule_and_the_others_stay(
    tmp_path: Path, case: str
) -> None:
    content, _, rule = BAD_ROW[case]
    path = tmp_path / "trace.txt"
    path.write_bytes(content)
    trace = read_trace(path, skip_bad_rows=True)
    assert trace.skipped == {rule: 1}
    assert any(f"1 row was left out: 1 x {rule}" in note for note in trace.notes)
    rows = [line for line in content.split(b"\n") if line.strip()]
    has_header = not content.startswith(b"{")
    assert len(trace) == len(rows) - has_header - 1


def test_bad_rows_of_several_kinds_are_counted_by_rule(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(
        NUMBERS + b"0,1,0\n1,1,1\n2,x,1\n3,1,-4\n4,1,1,1\n\n5,1,1\n" + b"6,1,1\n7,1,0\n"
    )
    trace = read_trace(path, skip_bad_rows=True)
    assert trace.skipped == {
        "output_tokens must be >= 1": 3,
        "prompt_tokens must be a whole number": 1,
        "a row must have as many fields as the header": 1,
    }
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 4.0, 5.0]


def test_when_every_row_is_bad_the_rules_are_listed(tmp_path: Path) -> None:
    words = ["no usable row is left", "2 x output_tokens must be >= 1"]
    assert_refused(tmp_path, NUMBERS + b"0,1,0\n1,1,0\n", words, skip_bad_rows=True)


def test_the_line_of_a_bad_row_is_right_deep_in_a_long_file(tmp_path: Path) -> None:
    rows = [b"%d,%d,7\n" % (i, i + 1) for i in range(700_000)]
    rows[654_321] = b"654321,0,7\n"
    path = tmp_path / "long.csv"
    path.write_bytes(NUMBERS + b"".join(rows))
    with pytest.raises(TraceError, match="line 654323, column prompt_tokens"):
        read_trace(path)
    trace = read_trace(path, skip_bad_rows=True)
    assert trace.skipped == {"prompt_tokens must be >= 1": 1}
    expected = np.delete(np.arange(700_000), 654_321)
    assert np.array_equal(trace.prompt_tokens, expected + 1)
    assert trace.arrival_s is not None
    assert np.array_equal(trace.arrival_s, expected.astype(float))


def test_the_line_of_a_bad_object_is_right_deep_in_a_long_file(tmp_path: Path) -> None:
    rows = [mooncake(timestamp=i, hash_ids=[i, i + 1]) for i in range(100_000)]
    rows[98_765] = mooncake(output_length=0)
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"".join(rows))
    with pytest.raises(TraceError, match="line 98766, column output_length"):
        read_trace(path)
    assert len(read_trace(path, skip_bad_rows=True)) == 99_999


def test_the_line_of_a_bad_row_counts_blank_lines_and_lines_within_quotes(tmp_path: Path) -> None:
    path = tmp_path / "quoted.csv"
    path.write_bytes(
        b'note,prompt_tokens,output_tokens\n\n"two\nlines",1,1\n   \nplain,2,2\n"a ""b""\nc",0,1\n'
    )
    with pytest.raises(TraceError, match="line 7, column prompt_tokens: found '0'"):
        read_trace(path)
    assert read_trace(path, skip_bad_rows=True).prompt_tokens.tolist() == [1, 2]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for use in (read_trace, detect_format):
        with pytest.raises(TraceError, match=r"nowhere\.csv: no such file"):
            use(tmp_path / "nowhere.csv")


def test_a_directory_is_named_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_bytes(AZURE)
    with pytest.raises(TraceError, match=r"is a directory, give one file \(it holds one.csv\)"):
        read_trace(tmp_path)


def test_a_folder_of_client_statistics_is_sent_to_the_generator(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-trace.csv").write_bytes(b"0,1,1,Gamma,1,1\n")
    with pytest.raises(TraceError, match="ServeGen"):
        read_trace(tmp_path)


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="not a regular file"):
        read_trace(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_read_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "closed.csv"
    path.write_bytes(AZURE + GOOD)
    path.chmod(0)
    with pytest.raises(TraceError, match="no permission"):
        read_trace(path)


def test_what_the_system_says_about_a_file_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "closed.csv"
    path.write_bytes(AZURE + GOOD)
    for error, words in [
        (PermissionError(13, "Permission denied"), "may not be read"),
        (OSError(5, "Input/output error"), "cannot be opened .*Input/output error"),
    ]:

        def refuse(*_: object, error: OSError = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            with pytest.raises(TraceError, match=words):
                read_trace(path)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(TraceError):
        read_trace("a\0b.csv")


def packed(data: bytes, kind: str) -> bytes:
    if kind == "zstd":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return bytes(sink.getvalue().to_pybytes())
    return {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}[kind](data)


def many_rows() -> bytes:
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 4000, (50_000, 2)).tolist()
    return NUMBERS + b"".join(b"%d,%d,%d\n" % (i, p, d) for i, (p, d) in enumerate(lengths))


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_packed_files_are_told_by_their_bytes_not_their_names(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(packed(many_rows(), kind))
    assert detect_format(path) == "csv"
    assert len(read_trace(path)) == 50_000


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
@pytest.mark.parametrize("skip", [False, True], ids=["strict", "skipping"])
def test_a_packed_file_that_ends_early_is_an_error(tmp_path: Path, kind: str, skip: bool) -> None:
    path = tmp_path / "trace.csv.gz"
    whole = packed(many_rows(), kind)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"seems (cut|damaged)") as caught:
        read_trace(path, skip_bad_rows=skip)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_a_packed_file_with_a_wrong_byte_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.csv.gz"
    whole = bytearray(packed(many_rows(), kind))
    for i in range(len(whole) // 2, len(whole) // 2 + 40):
        whole[i] ^= 0x5A
    path.write_bytes(bytes(whole))
    with pytest.raises(TraceError) as caught:
        read_trace(path, skip_bad_rows=True)
    assert "\n" not in str(caught.value)


def test_a_wrong_checksum_is_an_error(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(AZURE + GOOD))
    whole[-8] ^= 1
    (tmp_path / "t.gz").write_bytes(bytes(whole))
    with pytest.raises(TraceError, match=r"damaged.*CRC"):
        read_trace(tmp_path / "t.gz")


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    assert_refused(tmp_path, AZURE + GOOD, ["'azure'", *FORMATS], format="azure")


def test_a_format_of_the_other_syntax_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, AZURE + GOOD, ["mooncake-jsonl is JSON"], format="mooncake-jsonl")
    assert_refused(tmp_path, mooncake(), ["azure-csv is CSV"], format="azure-csv")


@pytest.mark.parametrize(
    ("format_name", "content"),
    [
        ("azure-csv", NUMBERS),
        ("vidur-csv", AZURE),
        ("splitwise-csv", AZURE),
        ("burstgpt-csv", AZURE),
        ("mooncake-jsonl", vllm()),
        ("qwen-jsonl", mooncake()),
        ("vllm-jsonl", mooncake()),
    ],
)
def test_a_format_that_does_not_fit_says_which_column_it_needs(
    tmp_path: Path, format_name: str, content: bytes
) -> None:
    assert_refused(tmp_path, content, [f"format {format_name} needs"], format=format_name)


@pytest.mark.parametrize("format_name", ["agentic-jsonl", "dynamo-jsonl"])
def test_a_nested_format_that_does_not_fit_says_what_the_first_line_lacks(
    tmp_path: Path, format_name: str
) -> None:
    assert_refused(tmp_path, mooncake(), ["line 1", "no such key"], format=format_name)


def test_an_unknown_column_in_the_map_lists_the_columns_found(tmp_path: Path) -> None:
    words = ["no column 'p'", "prompt tokens", "arrival_s, prompt_tokens, output_tokens"]
    assert_refused(tmp_path, NUMBERS, words, columns={"prompt": "p"})
    words = ["no column 'p'", "timestamp, input_length, output_length, hash_ids"]
    assert_refused(tmp_path, mooncake(), words, columns={"prompt": "p"})


def test_one_column_cannot_play_two_roles(tmp_path: Path) -> None:
    asked = {"prompt": "prompt_tokens", "output": "Prompt_Tokens"}
    words = ["column prompt_tokens cannot be both prompt and output"]
    assert_refused(tmp_path, NUMBERS, words, columns=asked)


def test_an_unknown_role_in_the_map_lists_the_roles(tmp_path: Path) -> None:
    words = ["no role 'prompts'", "prompt, output, arrival, request_id, session, hash_ids"]
    assert_refused(tmp_path, NUMBERS, words, columns={"prompts": "prompt_tokens"})


def test_a_column_map_with_a_format_of_its_own_columns_is_refused(tmp_path: Path) -> None:
    words = ["column map", "azure-csv has its own columns"]
    assert_refused(tmp_path, AZURE, words, columns={"prompt": "a"}, format="azure-csv")


def test_an_unknown_time_unit_or_block_size_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, NUMBERS, ["s, ms, us, ns", "'minutes'"], time_unit="minutes")
    assert_refused(tmp_path, mooncake(), ["block_tokens must be >= 1, found 0"], block_tokens=0)


def test_block_ids_asked_for_need_their_size_and_json(tmp_path: Path) -> None:
    asked = {"hash_ids": "hash_ids"}
    assert_refused(tmp_path, mooncake(), ["need block_tokens"], columns=asked)
    csv = b"prompt_tokens,output_tokens,hash_ids\n1,1,5\n"
    assert_refused(tmp_path, csv, ["JSON Lines only"], columns=asked)
