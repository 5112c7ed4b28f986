"""Batches of rows put together: checked across rows, sorted by arrival, made a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.readers.blocks import dense, is_consistent, last_block_note, take
from traces.readers.files import trace_name
from traces.readers.layout import Layout, Options
from traces.readers.rows import Batch
from traces.readers.rules import BadRow, BadRows, shown
from traces.readers.times import Raw, TimeColumn, seconds_from_start, tick_note
from traces.request import Trace

NO_TIMES = "the file has no arrival times"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """All rows of a file, sorted by arrival; what a family still makes a trace of.

    Attributes:
        trace: The trace so far: without measured times, think times.
        numbers: Number column -> [n] float64, sorted alike.
    """

    trace: Trace
    numbers: Mapping[str, NDArray[np.float64]]

    def noting(self, *notes: str) -> Columns:
        """The same with more notes."""
        trace = replace(self.trace, notes=(*self.trace.notes, *notes))
        return Columns(trace=trace, numbers=self.numbers)


class Assembly:
    """Takes batches, checks what only shows across rows or columns, and puts them together.

    Args:
        path: The file.
        layout: Its columns.
        options: What the caller asked for.
        bad_rows: Where rows go that break a rule.
        times: The reader of arrival times, None without them.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        options: Options,
        bad_rows: BadRows,
        times: TimeColumn | None,
    ) -> None:
        self.path = path
        self.layout = layout
        self.options = options
        self.bad_rows = bad_rows
        self.times = times
        self._batches: list[Batch] = []
        self._line_by_id: dict[str, int] = {}

    def add(self, batch: Batch) -> None:
        """Keep a batch, without the rows that break a rule across columns or rows.

        Raises:
            TraceError: If there are such rows and they are not to be skipped.
        """
        keep = self._kept_by_rules(batch)
        keep &= self._kept_by_blocks(batch)
        keep &= self._kept_by_name(batch, keep)
        self._batches.append(batch if bool(keep.all()) else _selected(batch, keep))

    def columns(self) -> Columns:
        """Everything added so far, in order of arrival.

        Raises:
            TraceError: If no row is left.
        """
        if not any(len(batch) for batch in self._batches):
            raise TraceError(f"{self.path}: {self._why_empty()}")
        notes = list(self.layout.notes)
        order, arrival_s = self._order(notes)
        offsets, block_ids = self._blocks(order, notes)
        notes += self._skip_notes()
        trace = Trace(
            name=trace_name(self.path),
            source=str(self.path),
            format=self.layout.format,
            arrival_s=arrival_s,
            prompt_tokens=self._joined([b.prompt_tokens for b in self._batches])[order],
            output_tokens=self._joined([b.output_tokens for b in self._batches])[order],
            request_ids=_names([b.request_ids for b in self._batches], order),
            session_ids=_names([b.session_ids for b in self._batches], order),
            block_offsets=offsets,
            block_ids=block_ids,
            block_tokens=self.layout.block_tokens if block_ids is not None else 0,
            skipped=dict(self.bad_rows.counts),
            notes=tuple(notes),
        )
        numbers = {
            column: np.concatenate([b.numbers[column] for b in self._batches])[order]
            for column in self.layout.numbers
        }
        return Columns(trace=trace, numbers=numbers)

    def _kept_by_rules(self, batch: Batch) -> NDArray[np.bool_]:
        keep = np.ones(len(batch), dtype=np.bool_)
        for rule in self.layout.row_rules:
            holds = rule.holds(batch.numbers)
            for i in np.flatnonzero(keep & ~holds):
                values = {c: float(batch.numbers[c][i]) for c in self.layout.numbers}
                found = ", ".join(f"{c} {v:.12g}" for c, v in values.items() if v == v)
                self.bad_rows.add(int(batch.lines[i]), BadRow(rule.column, found, rule.rule))
            keep &= holds
        return keep

    def _kept_by_blocks(self, batch: Batch) -> NDArray[np.bool_]:
        if batch.num_blocks is None:
            return np.ones(len(batch), dtype=np.bool_)
        size = self.layout.block_tokens
        keep = is_consistent(batch.num_blocks, batch.prompt_tokens, size)
        for i in np.flatnonzero(~keep):
            prompt = int(batch.prompt_tokens[i])
            full, all_blocks = prompt // size, -(-prompt // size)
            needed = f"{full}" if full == all_blocks else f"{full} or {all_blocks}"
            bad = BadRow(
                str(self.layout.block_ids),
                f"{int(batch.num_blocks[i])} block ids for {prompt} prompt tokens",
                f"a prompt must have one id per block of {size} tokens",
                f"needed: {needed}; give block_tokens if the blocks have another size",
            )
            self.bad_rows.add(int(batch.lines[i]), bad)
        return keep

    def _kept_by_name(self, batch: Batch, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
        keep = np.ones(len(batch), dtype=np.bool_)
        if batch.request_ids is None:
            return keep
        known = self._line_by_id
        fresh = dict(zip(batch.request_ids, batch.lines.tolist(), strict=True))
        if len(fresh) == len(batch) and bool(kept.all()) and known.keys().isdisjoint(fresh):
            known.update(fresh)
            return keep
        for i in np.flatnonzero(kept):
            name, line = batch.request_ids[i], int(batch.lines[i])
            if name not in known:
                known[name] = line
                continue
            keep[i] = False
            rule, hint = "request ids must differ", f"also in line {known[name]}"
            self.bad_rows.add(line, BadRow(str(self.layout.request_id), shown(name), rule, hint))
        return keep

    def _order(self, notes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        num_rows = sum(len(batch) for batch in self._batches)
        as_read = np.arange(num_rows, dtype=np.int64)
        if self.times is None:
            notes.append(NO_TIMES)
            return as_read, None
        parts = [batch.arrival for batch in self._batches if batch.arrival is not None]
        seconds, said = seconds_from_start(
            _joined_raw(parts),
            self.times,
            given=self.options.time_unit,
            known=self.layout.time_unit,
        )
        notes += said
        late = int(np.count_nonzero(np.diff(seconds) < 0))
        order = as_read
        if late:
            order = np.argsort(seconds, kind="stable").astype(np.int64)
            notes.append(
                f"rows were not in order of arrival ({late} came before their predecessor): sorted"
            )
        arrival_s = seconds[order]
        ticks = tick_note(arrival_s)
        notes += [ticks] if ticks else []
        return order, arrival_s

    def _blocks(
        self, order: NDArray[np.int64], notes: list[str]
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
        if self.layout.block_ids is None:
            if self.options.block_tokens is not None:
                notes.append("block_tokens was ignored: the file has no prompt blocks")
            return None, None
        counts = self._joined([b.num_blocks for b in self._batches])
        prompts = self._joined([b.prompt_tokens for b in self._batches])
        note = last_block_note(counts, prompts, self.layout.block_tokens)
        notes += [note] if note else []
        ids = dense(self._joined([b.block_ids for b in self._batches]))
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        if bool((order[1:] > order[:-1]).all()):
            return offsets, ids
        return take(offsets, ids, order)

    def _skip_notes(self) -> list[str]:
        counts = self.bad_rows.counts
        if not counts:
            return []
        rules = "; ".join(f"{count} x {rule}" for rule, count in counts.items())
        number = sum(counts.values())
        were = "row was" if number == 1 else "rows were"
        return [f"{number} {were} left out: {rules}"]

    def _why_empty(self) -> str:
        counts = self.bad_rows.counts
        if not counts:
            return "has no rows, only a header or blank lines: nothing to read"
        rules = "; ".join(f"{count} x {rule}" for rule, count in counts.items())
        return f"no usable row is left, all were skipped: {rules}"

    @staticmethod
    def _joined(
        parts: list[NDArray[np.int64] | None] | list[NDArray[np.int64]],
    ) -> NDArray[np.int64]:
        return np.concatenate([part for part in parts if part is not None])


def _joined_raw(parts: list[Raw]) -> Raw:
    if all(part.dtype == np.int64 for part in parts):
        whole: NDArray[np.int64] = np.concatenate(parts)
        return whole
    numbers: NDArray[np.float64] = np.concatenate([part.astype(np.float64) for part in parts])
    return numbers


def _names(
    parts: list[list[str] | None] | list[list[str | None] | None], order: NDArray[np.int64]
) -> NDArray[np.object_] | None:
    names = [name for part in parts if part is not None for name in part]
    if not names or not any(name is not None for name in names):
        return None
    return np.array(names, dtype=np.object_)[order]


def _selected(batch: Batch, keep: NDArray[np.bool_]) -> Batch:
    index = np.flatnonzero(keep)
    selected = Batch(
        lines=batch.lines[index],
        prompt_tokens=batch.prompt_tokens[index],
        output_tokens=batch.output_tokens[index],
        arrival=None if batch.arrival is None else batch.arrival[index],
        numbers={column: values[index] for column, values in batch.numbers.items()},
    )
    if batch.request_ids is not None:
        selected.request_ids = [batch.request_ids[i] for i in index]
    if batch.session_ids is not None:
        selected.session_ids = [batch.session_ids[i] for i in index]
    if batch.num_blocks is not None and batch.block_ids is not None:
        offsets = np.concatenate([[0], np.cumsum(batch.num_blocks)])
        taken, selected.block_ids = take(offsets, batch.block_ids, index)
        selected.num_blocks = np.diff(taken)
    return selected
