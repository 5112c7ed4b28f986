"""Rules R1-R7 of the weight page table, checked by replaying a history of events.

The events are those of policies/weight_page_history.py; the rules, with the words used for a
break of each:

    R1 width     a launch uses a width that is not the committed one
    R2 resident  a width is committed whose planes or table are not resident with a finished copy,
                 or a copy is taken as landed that never started, or with another checksum than
                 its source's
    R3 committed a plane (table) that the committed width reads is freed
    R3 live      it is freed while a kernel launched before the commit that lowered q still runs
    R4 unchanged a failure, a cancellation or a close changes q, or q moves by a closed plan
    R5 free      what is not resident is freed, or a copy ends that is not on its way: it has no
                 pages to give back
    R5 copy      what is resident, or already on its way, is copied
    R6 range     q leaves qmin..qmax
    R6 between   a commit moves q elsewhere than between its old value and the plan's d
    R7 plan, R7 pending, R7 resident   at rest: an open plan, a copy, other planes than 0..q-1
    R7 pages     weights + KV + free pages are not the arena, at any time

Where one event breaks several rules, R4, R6, R2 is the order for commits and R5, R3 for frees.

R6 is about q alone. A plan whose d lies outside qmin..qmax breaks nothing when it is stated, for d
is only where a commit may lead; the commit that leaves the range is the break. So is a copy of a
plane that no width of the range reads allowed: no commit can use it, and R7 wants it gone at rest.

What cannot happen at all is no break of a rule but a HistoryError: malformed events
(policies/weight_page_events.py), names nobody introduced, a second start under the same name, an
arena that is introduced late, and ``reraise`` of a part that does not wait for its release,
because the committed width reads it or an open plan holds it already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from policies.weight_page_events import check_event
from policies.weight_page_history import Event, HistoryError, ReplayedBlock, Violation, part_of
from policies.weight_page_sum import PageOwners


class _BrokenError(Exception):
    def __init__(self, rule: str, word: str, detail: str) -> None:
        super().__init__(detail)
        self.rule, self.word, self.detail = rule, word, detail


class HistoryChecker:
    """Replays events one by one and remembers the first broken rule.

    Events behind the first break are ignored: the state they would act on is not a legal one.
    """

    def __init__(self) -> None:
        self.violation: Violation | None = None
        self._count = 0
        self._blocks: dict[Any, ReplayedBlock] = {}
        self._running: set[Any] = set()
        self._want_by_plan: dict[Any, Mapping[Any, int]] = {}
        self._closed: set[Any] = set()
        self._pages: PageOwners | None = None

    def feed(self, event: Event) -> Violation | None:
        """Replay one event.

        Returns:
            The first violation so far, or None.

        Raises:
            HistoryError: If the event cannot belong to a history.
        """
        if self.violation is None:
            try:
                check_event(event)
                self._replay(event)
            except _BrokenError as broken:
                self.violation = Violation(broken.rule, broken.word, self._count, broken.detail)
            except HistoryError as wrong:
                raise HistoryError(f"event {self._count}: {wrong}") from None
            except KeyError as missing:
                raise HistoryError(
                    f"event {self._count}: {event['ev']}: nobody introduced {missing}"
                ) from missing
        self._count += 1
        return self.violation

    def rest(self) -> Violation | None:
        """Rule R7 at rest: call it when nothing is expected to happen any more."""
        if self.violation is None:
            try:
                self._at_rest()
            except _BrokenError as broken:
                self.violation = Violation(broken.rule, broken.word, self._count, broken.detail)
        return self.violation

    def _replay(self, event: Event) -> None:
        replay: Callable[[Event], None] = {
            "init": self._init,
            "launch": self._launch,
            "retire": self._retire,
            "plan": self._plan,
            "xfer": self._copy,
            "xfer_ok": self._landed,
            "xfer_fail": self._given_up,
            "cancel": self._given_up,
            "reraise": self._reraise,
            "commit": self._commit,
            "free": self._free,
            "close": self._close,
            "arena": self._arena,
            "kv_alloc": self._kv_pages,
            "kv_free": self._kv_pages,
            "pages": self._recount,
        }[event["ev"]]
        if event["ev"] in ("xfer_fail", "cancel", "free", "retire", "close"):
            self._widths_stay(event)
        replay(event)

    # --- blocks and kernels ---

    def _init(self, event: Event) -> None:
        if event["block"] in self._blocks:
            raise HistoryError(f"block {event['block']!r} starts twice")
        block = ReplayedBlock(event["q"], event["qmin"], event["qmax"], event.get("tables"))
        self._in_range(event["block"], block, block.q)
        block.resident = block.read_at(block.q)
        self._blocks[event["block"]] = block
        for held in event.get("pages") or ():
            self._take(held["pages"], (*part_of(held), event["block"]))

    def _launch(self, event: Event) -> None:
        if event["k"] in self._running:
            raise HistoryError(f"kernel {event['k']!r} runs already")
        for name, width in event["use"].items():
            q = self._blocks[name].q
            if width != q:
                raise _BrokenError(
                    "R1", "width", f"kernel {event['k']} uses {name} at {width}, committed is {q}"
                )
        self._running.add(event["k"])

    def _retire(self, event: Event) -> None:
        self._running.remove(event["k"])

    # --- copies ---

    def _copy(self, event: Event) -> None:
        block, part = self._blocks[event["block"]], part_of(event)
        if part in block.resident or part in block.copying:
            state = "resident" if part in block.resident else "being copied"
            raise _BrokenError("R5", "copy", f"{_name(event)} is {state} and copied again")
        block.copying[part] = event.get("checksum")
        self._take(event.get("pages") or (), (*part, event["block"]))

    def _landed(self, event: Event) -> None:
        block, part = self._blocks[event["block"]], part_of(event)
        if part in block.resident:
            raise _BrokenError("R5", "copy", f"a copy of the resident {_name(event)} landed")
        if part not in block.copying:
            raise _BrokenError(
                "R2", "resident", f"{_name(event)} landed, no copy of it had started"
            )
        expected, found = block.copying[part], event.get("checksum")
        if expected is not None and found is not None and expected != found:
            raise _BrokenError(
                "R2", "resident", f"{_name(event)} landed with checksum {found}, not {expected}"
            )
        del block.copying[part]
        block.resident.add(part)
        block.wanted.add(part)

    def _given_up(self, event: Event) -> None:
        block = self._blocks[event["block"]]
        whole = event["ev"] == "cancel" and "plane" not in event and "table" not in event
        for part in list(block.copying) if whole else [part_of(event)]:
            if part in block.resident:
                raise _BrokenError("R5", "copy", f"a copy of the resident {_name(event)} ended")
            if part not in block.copying:
                raise _BrokenError(
                    "R5", "free", f"a copy of {_name(event)} ended, none was started"
                )
            del block.copying[part]
            self._give((*part, event["block"]), event.get("pages"))

    def _reraise(self, event: Event) -> None:
        block, part = self._blocks[event["block"]], part_of(event)
        if part not in block.resident:
            raise _BrokenError("R2", "resident", f"{_name(event)} is gone, it must be copied")
        if not block.may_wait(part):
            raise HistoryError(f"reraise: {_name(event)} does not wait for its release")
        block.wanted.add(part)

    # --- plans ---

    def _plan(self, event: Event) -> None:
        if event["plan"] in self._want_by_plan or event["plan"] in self._closed:
            raise HistoryError(f"plan {event['plan']!r} opens twice")
        for block in [self._blocks[name] for name in event["want"]]:
            block.wanted.clear()
        self._want_by_plan[event["plan"]] = dict(event["want"])

    def _commit(self, event: Event) -> None:
        want = self._want_by_plan.get(event["plan"], {})
        for name, width in event["set"].items():
            block = self._blocks[name]
            if width != block.q:
                self._may_move(event["plan"], name, block, width, want.get(name, block.q))
        for name, width in event["set"].items():
            self._blocks[name].commit(width, self._running)

    def _may_move(
        self, plan: Any, name: Any, block: ReplayedBlock, width: int, desired: int
    ) -> None:
        if plan in self._closed:
            raise _BrokenError(
                "R4", "unchanged", f"plan {plan} is closed and moves {name} to {width}"
            )
        self._in_range(name, block, width)
        if not min(block.q, desired) <= width <= max(block.q, desired):
            raise _BrokenError(
                "R6", "between", f"{name} moves from {block.q} to {width}, the plan says {desired}"
            )
        missing = block.read_at(width) - block.resident
        if missing:
            kind, number = min(missing)
            raise _BrokenError(
                "R2", "resident", f"{name} is raised to {width} without {kind} {number}"
            )

    def _close(self, event: Event) -> None:
        for name in self._want_by_plan.pop(event["plan"]):
            self._blocks[name].wanted.clear()
        self._closed.add(event["plan"])

    def _free(self, event: Event) -> None:
        block, part = self._blocks[event["block"]], part_of(event)
        if part not in block.resident:
            raise _BrokenError("R5", "free", f"{_name(event)} is not resident and freed")
        if part in block.read_at(block.q):
            raise _BrokenError("R3", "committed", f"{_name(event)} is freed, committed {block.q}")
        running = block.readers.get(part, set()) & self._running
        if running:
            raise _BrokenError(
                "R3",
                "live",
                f"{_name(event)} is freed while kernels {sorted(running, key=str)} run",
            )
        block.resident.remove(part)
        block.readers.pop(part, None)
        block.wanted.discard(part)
        self._give((*part, event["block"]), event.get("pages"))

    # --- laws ---

    def _widths_stay(self, event: Event) -> None:
        stated = dict(event.get("set", {}))
        if "q" in event and "block" in event:
            stated[event["block"]] = event["q"]
        for name, width in stated.items():
            if width != self._blocks[name].q:
                raise _BrokenError("R4", "unchanged", f"{event['ev']} sets {name} to {width}")

    def _in_range(self, name: Any, block: ReplayedBlock, width: int) -> None:
        if not block.lowest <= width <= block.highest:
            raise _BrokenError(
                "R6", "range", f"{name} at {width}, allowed {block.lowest}..{block.highest}"
            )

    def _at_rest(self) -> None:
        for plan in self._want_by_plan:
            raise _BrokenError("R7", "plan", f"plan {plan} is open at rest")
        for name, block in self._blocks.items():
            for kind, number in block.copying:
                raise _BrokenError("R7", "pending", f"{name} {kind} {number} is still copied")
            odd = block.resident ^ block.read_at(block.q)
            if odd:
                kind, number = min(odd)
                have = "resident" if (kind, number) in block.resident else "missing"
                raise _BrokenError(
                    "R7", "resident", f"{name} at {block.q} bits with {kind} {number} {have}"
                )

    # --- pages ---

    def _arena(self, event: Event) -> None:
        if self._pages is not None or self._blocks:
            raise HistoryError("arena: must come once and before the first init")
        self._pages = PageOwners(event["pages"])

    def _kv_pages(self, event: Event) -> None:
        if self._pages is not None:
            move = self._pages.take if event["ev"] == "kv_alloc" else self._pages.give
            self._page_law(move(event["pages"], "kv"))

    def _recount(self, event: Event) -> None:
        pages = self._pages
        if pages is None:  # sums alone can be compared with the size the event states
            pages = PageOwners(event["arena"])
            pages.take(range(event["weights"]), "weights")
            pages.take(range(event["weights"], event["weights"] + event["kv"]), "kv")
        self._page_law(pages.recount(event["weights"], event["kv"], event["free"]))

    def _take(self, pages: Iterable[int], owner: tuple[Any, ...]) -> None:
        if self._pages is not None:
            self._page_law(self._pages.take(list(pages), owner))

    def _give(self, owner: tuple[Any, ...], stated: list[int] | None) -> None:
        if self._pages is not None:
            self._page_law(self._pages.give_all(owner, stated))

    @staticmethod
    def _page_law(wrong: str | None) -> None:
        if wrong is not None:
            raise _BrokenError("R7", "pages", wrong)


def _name(event: Event) -> str:
    return f"{event['block']} {' '.join(str(word) for word in part_of(event))}"


def check_history(events: Iterable[Event], *, at_rest: bool = True) -> Violation | None:
    """The first broken rule of a history, or None if it is legal.

    Args:
        events: In the order in which they happened; see the module text.
        at_rest: Whether nothing happens after the last event (checks R7 there).

    Raises:
        HistoryError: If the events do not form a history.

    Source:
        Rules R1-R7 of the weight page table of PagedWeight.
    """
    checker = HistoryChecker()
    for event in events:
        if checker.feed(event) is not None:
            return checker.violation
    return checker.rest() if at_rest else None
