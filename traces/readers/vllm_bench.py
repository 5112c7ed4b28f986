"""Requests of a benchmark of vLLM with measured times, and their prompt blocks.

JSON Lines: request_id, input_toks, output_toks, arrival_time (wall clock, s), and queued_ts,
scheduled_ts, first_token_ts, last_token_ts (another clock, s; only their differences mean
anything). The variant with prompt blocks has i, input_toks, output_toks, arrival_time_ns, hash_ids
of blocks of 16 tokens.

Source:
    github.com/casys-kaist/LLMServingSim (bench/).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.readers.json_rows import JsonHead, read_json_columns
from traces.readers.layout import Layout, Names, Numbers, Options, RowRule, with_measured
from traces.request import Trace

FORMAT = "vllm-jsonl"
BLOCK_TOKENS = 16
STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


def matches(names: Names) -> bool:
    """Whether the keys are those of one of the variants."""
    has_time = names.has("arrival_time") or names.has("arrival_time_ns")
    return names.has("input_toks", "output_toks") and has_time


def read(head: JsonHead, options: Options) -> Trace:
    """Read such a file.

    Measured are, from the moment a request was queued: ``ttft_s`` to the first token, ``queue_s``
    to its being scheduled, ``e2e_s`` to the last token; and ``tpot_s``, last minus first token
    time over (output tokens - 1).
    """
    names = head.names
    in_ns = names.find("arrival_time_ns")
    arrival = in_ns or names.find("arrival_time")
    if arrival is None:
        raise TraceError(f"{head.path}: format {FORMAT} needs arrival_time or arrival_time_ns")
    stamps = tuple(key for key in map(names.find, STAMPS) if key is not None)
    is_measured = len(stamps) == len(STAMPS)
    blocks = names.find("hash_ids")
    layout = Layout(
        format=FORMAT,
        prompt=names.need("input_toks", FORMAT),
        output=names.need("output_toks", FORMAT),
        arrival=arrival,
        time_unit="ns" if in_ns else "s",
        request_id=names.find("request_id") or names.find("i"),
        block_ids=blocks,
        block_tokens=(options.block_tokens or BLOCK_TOKENS) if blocks else 0,
        numbers=stamps if is_measured else (),
        row_rules=(_in_order(stamps),) if is_measured else (),
    )
    columns = read_json_columns(head, layout, options)
    if not is_measured:
        return columns.trace
    queued, scheduled, first, last = (columns.numbers[key] for key in stamps)
    gaps = columns.trace.output_tokens - 1
    tpot_s = np.full(len(gaps), np.nan)
    np.divide(last - first, gaps, out=tpot_s, where=gaps > 0)
    return with_measured(
        columns.noting("measured times count from the moment of queueing").trace,
        ttft_s=first - queued,
        tpot_s=tpot_s,
        queue_s=scheduled - queued,
        e2e_s=last - queued,
    )


def _in_order(stamps: tuple[str, ...]) -> RowRule:
    def holds(numbers: Numbers) -> NDArray[np.bool_]:
        keep = np.ones(len(numbers[stamps[0]]), dtype=np.bool_)
        for earlier, later in pairwise(stamps):
            keep &= ~(numbers[later] < numbers[earlier])
        return keep

    return RowRule(column=stamps[-1], rule=" <= ".join(stamps), holds=holds)
