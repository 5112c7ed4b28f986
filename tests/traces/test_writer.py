import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.readers import read_trace
from traces.request import Trace
from traces.writer import write_trace


def full_trace() -> Trace:
    return Trace(
        name="t",
        source="test",
        format="none",
        arrival_s=np.array([0.0, 0.1 + 0.2, 1e-9 + 5.0]),
        prompt_tokens=np.array([32, 2, 16]),
        output_tokens=np.array([7, 1, 9]),
        request_ids=np.array(["a", 'b "quoted", comma', "c"], dtype=object),
        session_ids=np.array(["s1", "s2", "s1"], dtype=object),
        think_s=np.array([np.nan, 2.5, np.nan]),
        block_offsets=np.array([0, 2, 2, 3]),
        block_ids=np.array([0, 1, 0]),
        block_tokens=16,
        measured={"ttft_s": np.array([0.5, np.nan, 0.25])},
    )


@pytest.mark.parametrize("ending", ["csv", "jsonl", "csv.gz", "jsonl.gz"])
def test_what_is_written_is_read_back_exactly(tmp_path: Path, ending: str) -> None:
    before = full_trace()
    path = tmp_path / f"out.{ending}"
    write_trace(before, path)
    after = read_trace(path)
    assert after.arrival_s is not None
    assert before.arrival_s is not None
    assert after.arrival_s.tolist() == before.arrival_s.tolist()
    assert after.prompt_tokens.tolist() == [32, 2, 16]
    assert after.output_tokens.tolist() == [7, 1, 9]
    assert after.request_ids is not None
    assert after.request_ids.tolist() == ["a", 'b "quoted", comma', "c"]
    assert after.session_ids is not None
    assert after.session_ids.tolist() == ["s1", "s2", "s1"]
    assert list(tmp_path.iterdir()) == [path]


def test_prompt_blocks_come_back_from_json_lines(tmp_path: Path) -> None:
    remarks = write_trace(full_trace(), tmp_path / "t.jsonl")
    assert "16 tokens per block" in remarks[0]
    after = read_trace(tmp_path / "t.jsonl", block_tokens=16)
    assert after.block_offsets is not None
    assert after.block_ids is not None
    assert after.block_offsets.tolist() == [0, 2, 2, 3]
    assert after.block_ids[0] == after.block_ids[2] != after.block_ids[1]


def test_csv_says_that_it_loses_prompt_blocks(tmp_path: Path) -> None:
    assert "no place for prompt blocks" in write_trace(full_trace(), tmp_path / "t.csv")[0]


def test_unknown_values_are_left_empty(tmp_path: Path) -> None:
    write_trace(full_trace(), tmp_path / "t.csv")
    header, first, *_ = (tmp_path / "t.csv").read_text().splitlines()
    assert header == "arrival_s,prompt_tokens,output_tokens,request_id,session_id,think_s,ttft_s"
    assert first == "0.0,32,7,a,s1,,0.5"


def test_a_packed_file_holds_the_same_text_and_no_time(tmp_path: Path) -> None:
    for name in ("a.csv", "a.csv.gz", "b.csv.gz"):
        write_trace(full_trace(), tmp_path / name)
    assert (
        gzip.decompress((tmp_path / "a.csv.gz").read_bytes()) == (tmp_path / "a.csv").read_bytes()
    )
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.integers(1, 10**6), st.integers(1, 10**6)),
        min_size=1, max_size=50,
    )
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_any_arrivals_and_lengths_survive_a_round_trip(
    tmp_path_factory, rows: list[tuple[float, int, int]]
) -> None:
    times = np.sort([row[0] for row in rows])
    trace = Trace(
        name="t", source="test", format="none",
        arrival_s=times - times[0],
        prompt_tokens=np.array([row[1] for row in rows]),
        output_tokens=np.array([row[2] for row in rows]),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("round") / "t.csv"
    write_trace(trace, path)
    after = read_trace(path)
    assert after.arrival_s is not None
    assert trace.arrival_s is not None
    assert after.arrival_s.tolist() == trace.arrival_s.tolist()
    assert after.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert after.output_tokens.tolist() == trace.output_tokens.tolist()


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t.xlsx: the name must end in .csv, .jsonl"):
        write_trace(full_trace(), tmp_path / "t.xlsx")


def test_a_folder_that_is_absent_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t.csv: cannot be written \(No such file"):
        write_trace(full_trace(), tmp_path / "absent" / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "t.csv"
    target.write_text("mine")
    with pytest.raises(TraceError, match=r"t\.csv: exists already; choose another name"):
        write_trace(full_trace(), target)
    assert target.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [target]


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="File name too long"):
        write_trace(full_trace(), tmp_path / ("x" * 300 + ".csv"))
    assert list(tmp_path.iterdir()) == []
