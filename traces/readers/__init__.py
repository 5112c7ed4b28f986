"""Readers of request traces: every file format becomes a ``Trace``.

One file per family of formats; what they share (bytes, rules of fields, times, block ids, CSV and
JSON rows) stands beside them. Nothing here makes requests up: generators live a level above.
"""

from traces.readers.agentic import count_sessions, start_sessions
from traces.readers.catalog import FORMATS, detect_format, read_trace

__all__ = ["FORMATS", "count_sessions", "detect_format", "read_trace", "start_sessions"]
