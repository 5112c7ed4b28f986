"""Request tables of the simulators Vidur and splitwise-sim.

Vidur, CSV: num_prefill_tokens, num_decode_tokens, and arrived_at in seconds; its data sets of
lengths have no arrival times (num_total_tokens and pd_ratio instead).
splitwise-sim, CSV: request_id, arrival_timestamp in seconds, prompt_size, token_size, and columns
left aside here.

Source:
    github.com/microsoft/vidur (data/processed_traces); github.com/Mutinifni/splitwise-sim (traces).
"""

from __future__ import annotations

from traces.readers.csv_rows import CsvHeader, read_csv_columns
from traces.readers.layout import Layout, Names, Options
from traces.request import Trace

VIDUR = "vidur-csv"
SPLITWISE = "splitwise-csv"


def matches_vidur(names: Names) -> bool:
    """Whether the header is Vidur's."""
    return names.has("num_prefill_tokens", "num_decode_tokens")


def matches_splitwise(names: Names) -> bool:
    """Whether the header is splitwise-sim's."""
    return names.has("arrival_timestamp", "prompt_size", "token_size")


def read_vidur(header: CsvHeader, options: Options) -> Trace:
    """Read a file of Vidur, with or without arrival times."""
    names = header.names
    layout = Layout(
        format=VIDUR,
        prompt=names.need("num_prefill_tokens", VIDUR),
        output=names.need("num_decode_tokens", VIDUR),
        arrival=names.find("arrived_at"),
        time_unit="s",
    )
    return read_csv_columns(header, layout, options).trace


def read_splitwise(header: CsvHeader, options: Options) -> Trace:
    """Read a file of splitwise-sim."""
    names = header.names
    layout = Layout(
        format=SPLITWISE,
        prompt=names.need("prompt_size", SPLITWISE),
        output=names.need("token_size", SPLITWISE),
        arrival=names.need("arrival_timestamp", SPLITWISE),
        time_unit="s",
        request_id=names.find("request_id"),
    )
    return read_csv_columns(header, layout, options).trace
