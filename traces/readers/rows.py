"""Rows on their way from a file to a trace: checked one by one, kept as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.readers.blocks import BlockIds
from traces.readers.layout import Layout
from traces.readers.rules import Missing, identifier, optional_number, tokens
from traces.readers.times import Raw, TimeColumn


@dataclass(slots=True, kw_only=True)
class Batch:
    """Some rows of a file that are right each by itself.

    Attributes:
        lines: [n] int64, their line numbers.
        prompt_tokens, output_tokens: [n] int64.
        arrival: [n] raw times, None without times.
        request_ids: n unique names, or None.
        session_ids: n names or Nones, or None.
        num_blocks: [n] int64 block ids of each row, None without blocks.
        block_ids: [num_blocks.sum()] int64.
        numbers: Column -> [n] float64.
    """

    lines: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    arrival: Raw | None = None
    request_ids: list[str] | None = None
    session_ids: list[str | None] | None = None
    num_blocks: NDArray[np.int64] | None = None
    block_ids: NDArray[np.int64] | None = None
    numbers: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lines)


class RowCollector:
    """Checks rows one at a time and packs them into batches.

    Args:
        layout: The columns.
        times: Reader of the arrival column, None without one.
        blocks: Reader of the block ids, None without them.
        number: What a value of the file means as a number: ``number_in_text`` or
            ``number_in_json``.
        moment: What a value means as a raw time: ``times.from_text`` or ``times.from_json``.
    """

    def __init__(
        self,
        layout: Layout,
        times: TimeColumn | None,
        blocks: BlockIds | None,
        *,
        number: Callable[[Any], int | float | None],
        moment: Callable[[Any], int | float] | None,
    ) -> None:
        self.layout = layout
        self._number = number
        self._moment = moment if times is not None else None
        self._blocks = blocks
        self._clear()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: int, values: Sequence[object]) -> None:
        """Check one row and keep it; ``values`` stand in the order of ``layout.columns``.

        Raises:
            BadRow: If a value breaks a rule; then nothing of the row is kept.
        """
        layout, number = self.layout, self._number
        prompt, output, arrival, request_id, session_id, block_ids, *rest = values
        prompts = tokens(number(prompt), prompt, layout.prompt, "prompt_tokens")
        outputs = tokens(number(output), output, layout.output, "output_tokens")
        name = session = None
        if layout.request_id is not None:
            name = identifier(request_id, layout.request_id, "request id")
        if layout.session_id is not None and not _is_blank(session_id):
            session = identifier(session_id, layout.session_id, "session id")
        further = [
            optional_number(number(value), value, column)
            for value, column in zip(rest, layout.numbers, strict=True)
        ]
        ids = self._blocks.from_list(block_ids) if self._blocks is not None else None
        moment = self._moment(arrival) if self._moment is not None else 0
        self._lines.append(line)
        self._prompts.append(prompts)
        self._outputs.append(outputs)
        self._moments.append(moment)
        self._names.append(name)
        self._sessions.append(session)
        self._numbers.append(further)
        if ids is not None:
            self._ids.append(ids)

    def batch(self) -> Batch:
        """The rows since the last batch."""
        layout, numbers = self.layout, np.array(self._numbers, dtype=np.float64)
        batch = Batch(
            lines=np.array(self._lines, dtype=np.int64),
            prompt_tokens=np.array(self._prompts, dtype=np.int64),
            output_tokens=np.array(self._outputs, dtype=np.int64),
            arrival=_raw(self._moments) if self._moment is not None else None,
            request_ids=[str(name) for name in self._names] if layout.request_id else None,
            session_ids=self._sessions if layout.session_id else None,
            numbers={
                column: numbers.reshape(len(self), len(layout.numbers))[:, i].copy()
                for i, column in enumerate(layout.numbers)
            },
        )
        if self._blocks is not None:
            batch.num_blocks = np.array([len(ids) for ids in self._ids], dtype=np.int64)
            batch.block_ids = np.concatenate([np.empty(0, dtype=np.int64), *self._ids])
        self._clear()
        return batch

    def _clear(self) -> None:
        self._lines: list[int] = []
        self._prompts: list[int] = []
        self._outputs: list[int] = []
        self._moments: list[int | float] = []
        self._names: list[str | None] = []
        self._sessions: list[str | None] = []
        self._numbers: list[list[float]] = []
        self._ids: list[NDArray[np.int64]] = []


def _is_blank(value: object) -> bool:
    return value is None or value is Missing.KEY or (isinstance(value, str) and not value.strip())


def _raw(moments: list[int | float]) -> Raw:
    if all(type(moment) is int for moment in moments):
        return np.array(moments, dtype=np.int64)
    return np.array(moments, dtype=np.float64)
