"""Agentic coding sessions: one session per line, its model calls with think times.

JSON Lines, one object per session: id, block_size, hash_id_scope ("local": block ids mean
something within the session only; "global": everywhere), requests. A call has t (s since the
session began), in and out (tokens), hash_ids (full blocks of the prompt), think_time (s before
the call), api_time (s in the call), ttft (s, streamed calls). An entry of type "subagent" holds the
calls of a sub-agent in ``requests``, their t counted from the sub-agent's start; its own t is when
it ended and duration_ms how long it took.

There are no absolute times: ``start_sessions`` gives them.

Source:
    github.com/callanjfox/kv-cache-tester (traces).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.readers.assembly import NO_TIMES, Assembly
from traces.readers.blocks import BlockIds, take
from traces.readers.files import chunks
from traces.readers.json_rows import JsonHead, json_collector, json_objects
from traces.readers.layout import Layout, Names, Options
from traces.readers.rows import Batch
from traces.readers.rules import BadRow, BadRows, Missing, number_in_json, optional_number, shown
from traces.request import Trace

FORMAT = "agentic-jsonl"
SUBAGENT = " > "
NO_OUTPUT = "a call without output is no request of a trace (cancelled or failed at the source)"

_LAYOUT = Layout(
    format=FORMAT,
    prompt="in",
    output="out",
    request_id="request id",
    session_id="id",
    block_ids="hash_ids",
    numbers=("start", "think_time", "api_time", "ttft"),
)


_NOTES = (
    "sessions have no absolute times: start them by an arrival process",
    "measured times are those of a remote service, network included",
)


def count_sessions(trace: Trace) -> int:
    """How many sessions ``start_sessions`` wants start times for; sub-agents are not counted.

    Raises:
        TraceError: If the trace has no sessions.
    """
    if trace.session_ids is None:
        raise TraceError(f"{trace.source}: has no sessions")
    return len({str(name).split(SUBAGENT)[0] for name in trace.session_ids})


@dataclass(frozen=True, slots=True)
class _Call:
    """A call found in a session.

    Attributes:
        where: Its place in the line, for messages.
        session_id: Session, or session > sub-agent.
        start_s: Seconds since the (outermost) session began, NaN where unknown.
        is_first: Whether it opens its session or sub-agent.
        fields: The object.
    """

    where: str
    session_id: str
    start_s: float
    is_first: bool
    fields: Mapping[str, Any]


def matches(names: Names) -> bool:
    """Whether the keys are a session's."""
    return names.has("requests", "block_size") or names.has("requests", "hash_id_scope")


def read(head: JsonHead, options: Options) -> Trace:
    """Read such a file.

    Calls that gave no output are left out and counted: the time they took is added to the think
    time of the next call. ``think_s`` is NaN for the first call of a session or sub-agent.
    Measured are ``e2e_s`` (api_time), ``ttft_s`` and ``session_time_s``, the call's start in
    seconds since its session began.
    """
    bad_rows = BadRows(head.path, skip=options.skip_bad_rows)
    sessions = _Sessions(bad_rows, options)
    batches = [
        batch
        for line, session in json_objects(chunks(head.path), bad_rows)
        if (batch := sessions.batch(line, session)) is not None
    ]
    if sessions.num_without_output:
        bad_rows.counts[NO_OUTPUT] = sessions.num_without_output
    layout = replace(_LAYOUT, block_tokens=sessions.block_tokens, notes=_NOTES)
    assembly = Assembly(head.path, layout, options, bad_rows, None)
    for batch in batches:
        assembly.add(batch)
    columns = assembly.columns()
    numbers = columns.numbers
    return replace(
        columns.trace,
        think_s=numbers["think_time"],
        measured={
            "ttft_s": numbers["ttft"],
            "e2e_s": numbers["api_time"],
            "session_time_s": numbers["start"],
        },
    )


def start_sessions(trace: Trace, session_start_s: NDArray[np.float64]) -> Trace:
    """The trace with arrival times, once each session is told when it starts.

    Within a session, and between it and its sub-agents, calls keep the distances they had at the
    source: think times and the service's own times.

    Args:
        trace: Of agentic sessions, with ``measured["session_time_s"]``.
        session_start_s: [num_sessions] seconds, >= 0, one for each session in the order in which
            they first appear; sub-agents start with their session.

    Returns:
        The same requests sorted by arrival, the first at 0.

    Raises:
        TraceError: If the trace has no sessions of this kind or another number of them.
    """
    offset_s = trace.measured.get("session_time_s")
    if offset_s is None or trace.session_ids is None or bool(np.isnan(offset_s).any()):
        raise TraceError(f"{trace.source}: not all calls have a time within their session")
    roots = [str(name).split(SUBAGENT)[0] for name in trace.session_ids]
    index_by_root = {root: i for i, root in enumerate(dict.fromkeys(roots))}
    if len(session_start_s) != len(index_by_root):
        raise TraceError(
            f"{trace.source}: has {len(index_by_root)} sessions, "
            f"but {len(session_start_s)} start times were given"
        )
    if not bool(np.isfinite(session_start_s).all()):
        raise TraceError(f"{trace.source}: session start times must be finite numbers")
    arrival_s = session_start_s[[index_by_root[root] for root in roots]] + offset_s
    order = np.argsort(arrival_s, kind="stable").astype(np.int64)
    return replace(_ordered(trace, order), arrival_s=arrival_s[order] - arrival_s.min())


def _ordered(trace: Trace, order: NDArray[np.int64]) -> Trace:
    offsets, block_ids = trace.block_offsets, trace.block_ids
    if offsets is not None and block_ids is not None:
        offsets, block_ids = take(offsets, block_ids, order)
    return replace(
        trace,
        prompt_tokens=trace.prompt_tokens[order],
        output_tokens=trace.output_tokens[order],
        request_ids=None if trace.request_ids is None else trace.request_ids[order],
        session_ids=None if trace.session_ids is None else trace.session_ids[order],
        think_s=None if trace.think_s is None else trace.think_s[order],
        block_offsets=offsets,
        block_ids=block_ids,
        measured={name: values[order] for name, values in trace.measured.items()},
        notes=tuple(note for note in trace.notes if note not in (_NOTES[0], NO_TIMES)),
    )


class _Sessions:
    """Takes sessions apart into calls; keeps what must agree between them."""

    def __init__(self, bad_rows: BadRows, options: Options) -> None:
        self.bad_rows = bad_rows
        self.given_block_tokens = options.block_tokens
        self.block_tokens = options.block_tokens or 0
        self.num_without_output = 0
        self._blocks = BlockIds("hash_ids")
        self._collector = json_collector(_LAYOUT, None, self._blocks)
        self._num_ids = 0
        self._line_by_session: dict[str, int] = {}

    def batch(self, line: int, session: Mapping[str, Any]) -> Batch | None:
        """The calls of one session; None where the session as a whole is bad."""
        try:
            name = self._name(line, session)
            self._agree_on_blocks(session)
            scope = session.get("hash_id_scope", "local")
            if scope not in ("local", "global"):
                raise BadRow("hash_id_scope", shown(scope), "hash_id_scope must be local or global")
            requests = _list_of_objects(session, "requests", "requests")
        except BadRow as bad:
            self.bad_rows.add(line, bad)
            return None
        calls = self._calls(line, name, "requests", requests, 0.0)
        carried_s: dict[str, float] = {}
        for k, call in enumerate(calls):
            self._add(line, f"{name}:{k}", call, carried_s)
        batch = self._collector.batch()
        if scope == "local" and batch.block_ids is not None and len(batch.block_ids):
            unique, inverse = np.unique(batch.block_ids, return_inverse=True)
            batch.block_ids = inverse.astype(np.int64) + self._num_ids
            self._num_ids += len(unique)
        return batch

    def _name(self, line: int, session: Mapping[str, Any]) -> str:
        name = session.get("id", Missing.KEY)
        if not isinstance(name, str) or not name.strip() or SUBAGENT in name:
            raise BadRow("id", shown(name), "a session must have an id, text that is not empty")
        first = self._line_by_session.setdefault(name, line)
        if first != line:
            raise BadRow("id", shown(name), "session ids must differ", f"also in line {first}")
        return name

    def _agree_on_blocks(self, session: Mapping[str, Any]) -> None:
        size = session.get("block_size", Missing.KEY)
        if self.given_block_tokens is not None:
            return
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BadRow("block_size", shown(size), "block_size must be a whole number >= 1")
        if self.block_tokens not in (0, size):
            rule = "block_size must be the same in all sessions"
            raise BadRow("block_size", shown(size), rule, f"before: {self.block_tokens}")
        self.block_tokens = size

    def _calls(
        self, line: int, session: str, where: str, requests: list[Any], begin_s: float
    ) -> Iterator[_Call]:
        """The calls of a session or sub-agent begun at ``begin_s``, and of its sub-agents."""
        is_first = True
        for k, entry in enumerate(requests):
            place = f"{where}[{k}]"
            try:
                moment = _number(entry, "t", place)
                if entry.get("type") != "subagent":
                    yield _Call(place, session, begin_s + moment, is_first, entry)
                    is_first = False
                    continue
                took_s = _number(entry, "duration_ms", place) / 1e3
                start_s = begin_s + moment - (0.0 if math.isnan(took_s) else took_s)
                nested = _list_of_objects(entry, "requests", f"{place}.requests")
                agent = f"{session}{SUBAGENT}{entry.get('agent_id', k)}"
            except BadRow as bad:
                self.bad_rows.add(line, bad)
                continue
            yield from self._calls(line, agent, f"{place}.requests", nested, start_s)

    def _add(self, line: int, name: str, call: _Call, carried_s: dict[str, float]) -> None:
        """Keep one call; a call without output leaves its time to the next of its session."""
        fields = call.fields
        think, took = fields.get("think_time"), fields.get("api_time")
        before_s = carried_s.pop(call.session_id, None)
        if number_in_json(fields.get("out")) == 0:
            self.num_without_output += 1
            carried_s[call.session_id] = (before_s or 0.0) + _plain(think) + _plain(took)
            if call.is_first:
                carried_s[call.session_id] = math.nan
            return
        if call.is_first:
            think = None
        elif before_s is not None:
            think = None if think is None or math.isnan(before_s) else _plain(think) + before_s
        start = None if math.isnan(call.start_s) else call.start_s
        values = [
            *(fields.get(key, Missing.KEY) for key in ("in", "out")),
            None,
            name,
            call.session_id,
            fields.get("hash_ids", Missing.KEY),
            start,
            think,
            took,
            fields.get("ttft"),
        ]
        try:
            self._collector.add(line, values)
        except BadRow as bad:
            bad.column = f"{call.where}.{bad.column}"
            self.bad_rows.add(line, bad)


def _plain(value: object) -> float:
    """The number, or 0.0 where there is none that counts."""
    number = number_in_json(value)
    return float(number) if number is not None and math.isfinite(number) else 0.0


def _number(entry: Mapping[str, Any], key: str, place: str) -> float:
    value = entry.get(key)
    return optional_number(number_in_json(value), value, f"{place}.{key}")


def _list_of_objects(entry: Mapping[str, Any], key: str, place: str) -> list[Any]:
    value = entry.get(key, Missing.KEY)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRow(place, shown(value), "requests must be a list of objects")
    return value
