"""Arrival times: units, stamps, order, and what is said about them."""

import json
from pathlib import Path

import numpy as np
import pytest

from traces.readers import read_trace
from traces.readers.times import unit_of_name
from traces.request import Trace


def read(tmp_path: Path, column: str, *values: str, **options: object) -> Trace:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{value},{i + 1},1\n" for i, value in enumerate(values))
    path.write_text(f"{column},prompt_tokens,output_tokens\n{rows}")
    return read_trace(path, **options)  # type: ignore[arg-type]


def arrivals(trace: Trace) -> list[float]:
    assert trace.arrival_s is not None
    return trace.arrival_s.tolist()


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("arrival_s", ["1", "2.5"], [0.0, 1.5]),
        ("arrival_ms", ["1", "2.5"], [0.0, 0.0015]),
        ("time (us)", ["1", "2.5"], [0.0, 1.5e-6]),
        ("arrival time [ns]", ["1", "3"], [0.0, 2e-9]),
        ("timestamp", ["0", "90"], [0.0, 90.0]),
        ("ts", ["1e3", "2E3"], [0.0, 1000.0]),
    ],
)
def test_relative_times_are_in_the_unit_of_the_name_or_in_seconds(
    tmp_path: Path, column: str, values: list[str], expected: list[float]
) -> None:
    trace = read(tmp_path, column, *values)
    assert arrivals(trace) == pytest.approx(expected, abs=1e-15)
    unit = unit_of_name(column)
    said = f"is read in {unit}, by its name" if unit else "is read in seconds; give time_unit"
    assert any(said in note for note in trace.notes)


@pytest.mark.parametrize(("unit", "digits"), [("s", 0), ("ms", 3), ("us", 6), ("ns", 9)])
def test_whole_numbers_since_1970_tell_their_unit_by_their_size(
    tmp_path: Path, unit: str, digits: int
) -> None:
    start = 1_779_163_048 * 10**digits
    trace = read(tmp_path, "timestamp", str(start), str(start + 1), str(start + 7))
    assert arrivals(trace) == [0.0, 1 / 10**digits, 7 / 10**digits]
    assert any(f"is read as {unit} since 1970, by its size" in note for note in trace.notes)


def test_fractions_of_seconds_since_1970_are_seconds(tmp_path: Path) -> None:
    trace = read(tmp_path, "timestamp", "1777142838.25", "1777142839.5")
    assert arrivals(trace) == [0.0, 1.25]


def test_the_unit_asked_for_wins(tmp_path: Path) -> None:
    trace = read(tmp_path, "arrival_s", "1000", "3000", time_unit="ms")
    assert arrivals(trace) == [0.0, 2.0]
    assert any("is read in ms, as asked" in note for note in trace.notes)


def test_the_unit_asked_for_wins_over_a_known_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": t, "input_length": 1, "output_length": 1} for t in (0, 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert arrivals(read_trace(path)) == [0.0, 0.004]
    assert arrivals(read_trace(path, time_unit="s")) == [0.0, 4.0]


def test_a_unit_for_stamps_is_ignored_and_said(tmp_path: Path) -> None:
    trace = read(tmp_path, "time", "2024-05-10 00:00:00", "2024-05-10 00:00:01", time_unit="ms")
    assert arrivals(trace) == [0.0, 1.0]
    assert any("time_unit was ignored" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("early", "late", "gap_s"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.010930+00:00", 0.001),
        ("2024-05-10T00:00:00Z", "2024-05-10T00:00:00.5Z", 0.5),
        ("2024-05-10 00:00:00+02:00", "2024-05-10 00:00:00+00:00", 7200.0),
        ("2024-05-10 00:00:00 +0200", "2024-05-10 00:00:00 -0130", 12_600.0),
        ("2024-02-28 23:59:59", "2024-03-01 00:00:00", 86_401.0),
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.6805901", 1e-7),
        ("2023-11-16 18:15:46.123456789", "2023-11-16 18:15:46.1234567899", 0.0),
        ("2023-11-16", "2023-11-17", 86_400.0),
        ("2023-11-16 18:15", "2023-11-16 18:16", 60.0),
    ],
)
def test_date_stamps_of_many_spellings_are_read_exactly(
    tmp_path: Path, early: str, late: str, gap_s: float
) -> None:
    assert arrivals(read(tmp_path, "TIMESTAMP", early, late)) == [0.0, gap_s]


def test_nanoseconds_since_1970_keep_every_digit(tmp_path: Path) -> None:
    start = 1_779_163_048_123_456_789
    trace = read(tmp_path, "arrival_ns", str(start), str(start + 1), str(start + 10**9))
    assert arrivals(trace) == [0.0, 1e-9, 1.0]


def test_unsorted_rows_are_sorted_and_equal_times_keep_their_order(tmp_path: Path) -> None:
    trace = read(tmp_path, "arrival_s", "5", "3", "5", "3", "4")
    assert arrivals(trace) == [0.0, 0.0, 1.0, 2.0, 2.0]
    assert trace.prompt_tokens.tolist() == [2, 4, 5, 1, 3]
    assert any(
        "not in order of arrival (2 came before their predecessor): sorted" in note
        for note in trace.notes
    )


def test_a_late_start_is_moved_to_zero_and_said(tmp_path: Path) -> None:
    trace = read(tmp_path, "arrival_s", "100.5", "101")
    assert arrivals(trace) == [0.0, 0.5]
    assert any("at 100.5 s in the file, is taken as time 0" in note for note in trace.notes)


def test_ticks_are_said_only_where_most_times_are_shared(tmp_path: Path) -> None:
    shared = read(tmp_path, "arrival_s", *(str(i // 4 * 3) for i in range(40)))
    assert any("10 distinct times for 40 requests, typically 3 s apart" in n for n in shared.notes)
    single = read(tmp_path, "arrival_s", *(str(i) for i in range(40)))
    assert not any("ticks" in note for note in single.notes)
    all_equal = read(tmp_path, "arrival_s", *(["7"] * 40))
    assert any("1 distinct times" in note for note in all_equal.notes)


def test_whole_and_fractional_times_may_be_mixed(tmp_path: Path) -> None:
    assert arrivals(read(tmp_path, "arrival_s", "1", "1.5", "2")) == [0.0, 0.5, 1.0]


def test_a_file_without_times_says_so_and_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n9,1\n3,1\n")
    trace = read_trace(path)
    assert trace.arrival_s is None
    assert trace.prompt_tokens.tolist() == [9, 3]
    assert "the file has no arrival times" in trace.notes


def test_a_number_in_quotes_is_no_time_in_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": "12", "prompt_tokens": 1, "output_tokens": 1}\n')
    with pytest.raises(ValueError, match="line 1, column time: found '12'"):
        read_trace(path)


def test_no_unit_is_read_into_names_that_only_end_alike() -> None:
    assert unit_of_name("tokens") is None
    assert unit_of_name("status") is None
    assert unit_of_name("arrivals") is None
    assert unit_of_name("Arrival.MS") == "ms"


def test_times_are_never_negative_whatever_the_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    values = rng.integers(0, 10**6, 500)
    trace = read(tmp_path, "arrival_us", *map(str, values))
    assert arrivals(trace) == ((np.sort(values) - values.min()) / 1e6).tolist()
