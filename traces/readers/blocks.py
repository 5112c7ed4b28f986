"""Ids of prompt blocks: one kind, dense, as many as the prompt has blocks."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from traces.readers.rules import BadRow, shown

_KIND_RULE = "block ids must all be whole numbers of 64 bits or all be strings"


class BlockIds:
    """Turns block ids as written, numbers or strings, into int64 with equal ids kept equal.

    Attributes:
        column: Name in the file.
        kind: What the ids are, None before the first.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self.kind: Literal["number", "string"] | None = None
        self._id_by_name: dict[str, int] = {}
        self._has_negative = False
        self._has_large = False

    def from_list(self, values: object) -> NDArray[np.int64]:
        """The ids of one prompt, [num_blocks].

        Raises:
            BadRow: If they are not a list of ids of one kind, the kind of the rows before.
        """
        if not isinstance(values, list):
            raise BadRow(self.column, shown(values), f"{self.column} must be a list of block ids")
        types = set(map(type, values))
        if not types:
            return np.empty(0, dtype=np.int64)
        if types == {str} and self.kind != "number":
            self.kind = "string"
            names = self._id_by_name
            return np.array([names.setdefault(v, len(names)) for v in values], dtype=np.int64)
        if types == {int} and self.kind != "string":
            ids = self._whole(values)
            self.kind = "number"
            return ids
        expected = f"before: {self.kind}s" if self.kind else ""
        raise BadRow(self.column, shown(values), _KIND_RULE, expected)

    def from_array(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Numeric ids of many prompts themselves, or None where they need a closer look."""
        if self.kind == "string" or (len(ids) and int(ids.min()) < 0):
            return None
        if len(ids):
            self.kind = "number"
        return ids

    def _whole(self, values: list[int]) -> NDArray[np.int64]:
        # 64-bit hashes come signed or unsigned; within one file they must not be mixed, since
        # -1 and 2**64 - 1 have the same bits.
        low, high = min(values), max(values)
        has_negative = self._has_negative or low < 0
        has_large = self._has_large or high >= 2**63
        if low < -(2**63) or high >= 2**64 or (has_negative and has_large):
            raise BadRow(self.column, shown(low if low < 0 else high), _KIND_RULE)
        self._has_negative, self._has_large = has_negative, has_large
        if high >= 2**63:
            return np.array(values, dtype=np.uint64).view(np.int64)
        return np.array(values, dtype=np.int64)


def is_consistent(
    num_blocks: NDArray[np.int64], prompt_tokens: NDArray[np.int64], block_tokens: int
) -> NDArray[np.bool_]:
    """Whether each prompt has its full blocks, with or without the partly filled last one, [n]."""
    full = prompt_tokens // block_tokens
    missing = num_blocks - full
    is_right: NDArray[np.bool_] = (missing == 0) | (
        (missing == 1) & (prompt_tokens % block_tokens != 0)
    )
    return is_right


def last_block_note(
    num_blocks: NDArray[np.int64], prompt_tokens: NDArray[np.int64], block_tokens: int
) -> str | None:
    """Says whether the partly filled last block has an id; None where no prompt has one."""
    partly = prompt_tokens % block_tokens != 0
    if not bool(partly.any()):
        return None
    with_id = (num_blocks > prompt_tokens // block_tokens)[partly]
    if bool(with_id.all()):
        return "the partly filled last block of a prompt has an id"
    if not bool(with_id.any()):
        return "the partly filled last block of a prompt has no id"
    return f"the partly filled last block has an id in {int(with_id.sum())} of {len(with_id)} rows"


def dense(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same ids renumbered 0, 1, ... in order of size, [total]."""
    if len(ids) == 0:
        return ids
    low, high = int(ids.min()), int(ids.max())
    if high - low < 4 * len(ids) + 1024:
        # Mostly they are numbered already: counting takes a tenth of the time of sorting.
        shifted = ids - low
        is_used = np.zeros(high - low + 1, dtype=np.bool_)
        is_used[shifted] = True
        rank = np.cumsum(is_used) - 1
        counted: NDArray[np.int64] = rank[shifted].astype(np.int64, copy=False)
        return counted
    _, inverse = np.unique(ids, return_inverse=True)
    return inverse.astype(np.int64, copy=False)


def take(
    offsets: NDArray[np.int64], values: NDArray[np.int64], index: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows ``index`` of ragged rows: new offsets [len(index) + 1] and their values."""
    counts = np.diff(offsets)[index]
    taken = np.zeros(len(index) + 1, dtype=np.int64)
    np.cumsum(counts, out=taken[1:])
    source = np.repeat(offsets[index] - taken[:-1], counts) + np.arange(taken[-1])
    return taken, values[source]
