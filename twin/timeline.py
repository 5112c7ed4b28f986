"""Stage intervals as a Perfetto / Chrome trace: open ``trace.json`` at ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from twin.stages import StageInterval

COLOURS = {
    "attention": "thread_state_running",
    "ffn": "rail_response",
    "transfer": "rail_idle",
}


def timeline_json(intervals: Sequence[StageInterval], name: str) -> bytes:
    """The intervals in the Chrome trace event format, microseconds, one thread a lane."""
    lanes = sorted({one.lane for one in intervals}, key=_lane_order)
    thread_by_lane = {lane: at for at, lane in enumerate(lanes, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}
    ]
    for lane, thread in thread_by_lane.items():
        events.append(
            {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": lane}}
        )
        events.append(
            {
                "ph": "M",
                "pid": 1,
                "tid": thread,
                "name": "thread_sort_index",
                "args": {"sort_index": thread},
            }
        )
    events.extend(_event(one, thread_by_lane[one.lane]) for one in intervals)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()


def _event(one: StageInterval, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "name": f"{one.stage} {one.microbatch}",
        "cat": one.stage,
        "cname": COLOURS.get(one.stage, "generic_work"),
        "ts": 1e6 * one.start_s,
        "dur": 1e6 * (one.end_s - one.start_s),
        "args": {"microbatch": one.microbatch},
    }


def _lane_order(lane: str) -> tuple[int, int]:
    """Attention workers by number, then the way to the FFN, the FFN and the way back."""
    name, _, number = lane.partition(" ")
    if name == "attention" and number.isdigit():
        return 0, int(number)
    return {"link to ffn": 1, "ffn": 2}.get(lane, 3), 0
