"""Request trace of NVIDIA Dynamo: one event per line.

JSON Lines: timestamp (ms), event with event_type. The event ``request_end`` tells of one finished
request: request_id, request_received_ms, input_tokens, output_tokens, measured times in ms and, in
``replay``, a hash per prompt block. Events of tools are left aside.

Source:
    github.com/ai-dynamo/dynamo (schema dynamo.request.trace.v1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.readers.assembly import Assembly, Columns
from traces.readers.blocks import BlockIds
from traces.readers.files import chunks
from traces.readers.json_rows import JsonHead, json_collector, json_objects
from traces.readers.layout import Layout, Options
from traces.readers.rows import RowCollector
from traces.readers.rules import BadRow, BadRows, Missing, shown
from traces.readers.times import TimeColumn
from traces.request import Trace

FORMAT = "dynamo-jsonl"
REQUEST_END = "request_end"
BATCH_ROWS = 4096

_ARRIVAL = "event.request.request_received_ms"
_BLOCKS = "event.request.replay.input_sequence_hashes"
_BLOCK_SIZE = "event.request.replay.trace_block_size"
_MEASURED_MS = {
    "ttft_s": "event.request.ttft_ms",
    "tpot_s": "event.request.avg_itl_ms",
    "queue_s": "event.request.prefill_wait_time_ms",
    "e2e_s": "event.request.total_time_ms",
}


def matches(first: Mapping[str, Any]) -> bool:
    """Whether the object is such an event."""
    event = first.get("event")
    return isinstance(event, dict) and "event_type" in event


def read(head: JsonHead, options: Options) -> Trace:
    """Read such a file.

    ``think_s`` is the time since the end of the last request of the same session, tools included;
    NaN where that had not ended. ``tpot_s`` is the average gap between tokens.
    """
    bad_rows = BadRows(head.path, skip=options.skip_bad_rows)
    times = TimeColumn(_ARRIVAL)
    events = _Events(bad_rows, times, options)
    batches = []
    for line, row in json_objects(chunks(head.path), bad_rows):
        events.add(line, row)
        if events.collector is not None and len(events.collector) == BATCH_ROWS:
            batches.append(events.collector.batch())
    if events.collector is None:
        raise TraceError(f"{head.path}: has no event {REQUEST_END}: no request had finished")
    batches.append(events.collector.batch())
    layout = replace(events.layout, block_tokens=events.block_tokens, notes=events.notes())
    assembly = Assembly(head.path, layout, options, bad_rows, times)
    for batch in batches:
        assembly.add(batch)
    return _with_times(assembly.columns())


class _Events:
    """Picks the finished requests; all must have blocks if the first has them."""

    def __init__(self, bad_rows: BadRows, times: TimeColumn, options: Options) -> None:
        self.bad_rows = bad_rows
        self.times = times
        self.given_block_tokens = options.block_tokens
        self.block_tokens = options.block_tokens or 0
        self.collector: RowCollector | None = None
        self.layout = _layout(has_blocks=False)
        self.num_others: dict[str, int] = {}

    def add(self, line: int, row: Mapping[str, Any]) -> None:
        """Take one event."""
        try:
            kind = _at(row, "event.event_type")
            if not isinstance(kind, str):
                raise BadRow("event.event_type", shown(kind), "event_type must be text")
            if kind != REQUEST_END:
                self.num_others[kind] = self.num_others.get(kind, 0) + 1
                return
            collector = self.collector or self._expect(_at(row, _BLOCKS) is not Missing.KEY)
            if self.layout.block_ids is not None:
                self._agree_on_blocks(_at(row, _BLOCK_SIZE))
            columns = self.layout.columns
            collector.add(line, [None if c is None else _at(row, c) for c in columns])
        except BadRow as bad:
            self.bad_rows.add(line, bad)

    def notes(self) -> tuple[str, ...]:
        """How many events were left aside."""
        others = ", ".join(f"{count} {kind}" for kind, count in sorted(self.num_others.items()))
        return (f"events that are no finished request were left aside: {others}",) if others else ()

    def _expect(self, has_blocks: bool) -> RowCollector:
        self.layout = _layout(has_blocks=has_blocks)
        blocks = BlockIds(_BLOCKS) if has_blocks else None
        self.collector = json_collector(self.layout, self.times, blocks)
        return self.collector

    def _agree_on_blocks(self, size: object) -> None:
        if self.given_block_tokens is not None:
            return
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BadRow(_BLOCK_SIZE, shown(size), "trace_block_size must be a whole number >= 1")
        if self.block_tokens not in (0, size):
            rule = "trace_block_size must be the same for all requests"
            raise BadRow(_BLOCK_SIZE, shown(size), rule, f"before: {self.block_tokens}")
        self.block_tokens = size


def _layout(*, has_blocks: bool) -> Layout:
    return Layout(
        format=FORMAT,
        prompt="event.request.input_tokens",
        output="event.request.output_tokens",
        arrival=_ARRIVAL,
        time_unit="ms",
        request_id="event.request.request_id",
        session_id="event.agent_context.session_id",
        block_ids=_BLOCKS if has_blocks else None,
        numbers=tuple(_MEASURED_MS.values()),
    )


def _at(row: Mapping[str, Any], path: str) -> object:
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return Missing.KEY
        value = value[key]
    return value


def _with_times(columns: Columns) -> Trace:
    measured = {name: columns.numbers[key] / 1e3 for name, key in _MEASURED_MS.items()}
    trace = replace(columns.trace, measured=measured)
    if trace.session_ids is None or trace.arrival_s is None:
        return trace
    return replace(trace, think_s=_think_s(trace.session_ids, trace.arrival_s, measured["e2e_s"]))


def _think_s(
    session_ids: NDArray[np.object_], arrival_s: NDArray[np.float64], e2e_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds since the last end in the same session; NaN before the first and while one runs."""
    end_by_session: dict[str, float] = {}
    think_s = np.full(len(arrival_s), np.nan)
    for i, session in enumerate(session_ids):
        if session is None:
            continue
        since = arrival_s[i] - end_by_session.get(session, np.inf)
        think_s[i] = since if np.isfinite(since) and since >= 0 else np.nan
        end = arrival_s[i] + (e2e_s[i] if np.isfinite(e2e_s[i]) else 0.0)
        end_by_session[session] = max(end, end_by_session.get(session, end))
    return think_s
