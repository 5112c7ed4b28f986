"""The events of a weight page history, as the state machine writes and the checker reads them.

An event is a mapping with the key ``ev``; ``plane`` may be ``table`` (a width) where it stands.

    init      block, q, qmin, qmax [, tables "all" | "active"] [, pages [{plane|table, pages}]]
    launch    k, use {block: width}        a kernel is launched and reads blocks at these widths
    retire    k                            that kernel has finished
    plan      plan, want {block: d}        a plan opens with desired widths
    xfer      block, plane [, pages] [, checksum]   a copy from the host starts
    xfer_ok   block, plane [, checksum]    it landed
    xfer_fail block, plane [, reason]      it failed: the plane is on the host again
    cancel    block [, plane]              it was given up (without plane: all copies of the block)
    reraise   block, plane                 a plane that waits for its release stays after all
    commit    plan, set {block: width}     committed widths move, at a step boundary
    free      block, plane [, pages]       the plane leaves the device, its pages are free
    close     plan                         all of its blocks are committed or given up
    arena     pages                        before the first init: page ids are followed
    kv_alloc, kv_free  pages               pages taken and given back by the KV cache
    pages     weights, kv, free [, arena]  a recount of the arena

``xfer_fail``, ``cancel``, ``free``, ``retire`` and ``close`` may state the widths they leave
behind (``q`` of their block, or ``set``): rule R4 says that these are the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Event = Mapping[str, Any]
Part = tuple[Literal["plane", "table"], int]
ResidentTables = Literal["active", "all"]


class HistoryError(ValueError):
    """The events do not form a history.

    A key is missing or malformed, a name was never introduced, or an event cannot happen.
    """


@dataclass(frozen=True, slots=True)
class Violation:
    """The first broken rule of a history.

    Attributes:
        rule: "R1" to "R7".
        word: Which half of the rule, see policies/weight_page_rules.py.
        index: Position of the event, from 0; the number of events if found at rest.
        detail: One sentence with block, plane and numbers.
    """

    rule: str
    word: str
    index: int
    detail: str

    def __str__(self) -> str:
        return f"{self.rule} {self.word}"


def part_of(event: Event) -> Part:
    """The plane or table an event names.

    Raises:
        KeyError: If it names neither.
    """
    return ("plane", event["plane"]) if "plane" in event else ("table", event["table"])


def parts_read(bits: int, lowest: int, tables: ResidentTables | None) -> set[Part]:
    """Planes and tables a block needs at a width; ``tables`` None: only planes are followed."""
    parts: set[Part] = {("plane", plane) for plane in range(bits)}
    if tables == "all":
        parts |= {("table", width) for width in range(lowest, bits + 1)}
    elif tables == "active":
        parts.add(("table", bits))
    return parts


@dataclass(slots=True)
class ReplayedBlock:
    """One block as the history has left it.

    Attributes:
        q: Committed width.
        lowest: qmin.
        highest: qmax.
        tables: Which tables are followed.
        resident: Planes and tables whose copies have landed and that are not freed.
        copying: Copies on their way, with the checksum of their source (None: not stated).
        readers: For a resident part the committed width does not read: the kernels that were
            running when the commit that lowered q was made.
        wanted: Resident parts that have landed, or were wanted again, since a plan of this block
            was opened or closed: they are held for its width and do not wait for their release.
    """

    q: int
    lowest: int
    highest: int
    tables: ResidentTables | None
    resident: set[Part] = field(default_factory=set)
    copying: dict[Part, int | None] = field(default_factory=dict)
    readers: dict[Part, set[Any]] = field(default_factory=dict)
    wanted: set[Part] = field(default_factory=set)

    def read_at(self, bits: int) -> set[Part]:
        """Planes and tables that must be resident at a width."""
        return parts_read(bits, self.lowest, self.tables)

    def may_wait(self, part: Part) -> bool:
        """Whether a resident part may be one that waits for its release."""
        return part not in self.read_at(self.q) and part not in self.wanted

    def commit(self, bits: int, running: set[Any]) -> None:
        """Move q; what only the old width reads waits for the kernels running now."""
        for part in self.read_at(self.q) - self.read_at(bits):
            self.readers[part] = set(running)
            self.wanted.discard(part)
        for part in self.read_at(bits):
            self.readers.pop(part, None)
        self.q = bits
