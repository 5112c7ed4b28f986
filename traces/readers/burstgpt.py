"""BurstGPT: conversations and API calls of a campus, GPT-3.5 and GPT-4.

CSV: Timestamp in seconds, Model, Request tokens, Response tokens, Total tokens, Log Type; newer
files also Session ID and Elapsed time in seconds. Failed requests have 0 response tokens.

Source:
    github.com/HPMLL/BurstGPT; arXiv 2401.17644.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traces.readers.csv_rows import CsvHeader, read_csv_columns
from traces.readers.layout import Layout, Names, Numbers, Options, RowRule, with_measured
from traces.request import Trace

FORMAT = "burstgpt-csv"


def matches(names: Names) -> bool:
    """Whether the header is one of these."""
    return names.has("Timestamp", "Request tokens", "Response tokens")


def read(header: CsvHeader, options: Options) -> Trace:
    """Read such a file; the elapsed time, where there is one, becomes ``e2e_s``."""
    names = header.names
    elapsed = names.find("Elapsed time")

    def is_not_negative(numbers: Numbers) -> NDArray[np.bool_]:
        return ~(numbers[str(elapsed)] < 0)

    layout = Layout(
        format=FORMAT,
        prompt=names.need("Request tokens", FORMAT),
        output=names.need("Response tokens", FORMAT),
        arrival=names.need("Timestamp", FORMAT),
        time_unit="s",
        session_id=names.find("Session ID"),
        numbers=(elapsed,) if elapsed else (),
        row_rules=(
            RowRule(column=elapsed, rule="Elapsed time must be >= 0", holds=is_not_negative),
        )
        if elapsed
        else (),
    )
    columns = read_csv_columns(header, layout, options)
    if elapsed is None:
        return columns.trace
    return with_measured(columns.trace, e2e_s=columns.numbers[elapsed])
