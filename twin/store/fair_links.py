"""Links that transfers share: what moves over several at once, and how fast.

A transfer holds a path of links for as long as it lasts. Rates are max-min fair: the most crowded
link divides its capacity evenly among the transfers that nothing else slows down, and so on until
every transfer has a rate. Rates change only when a transfer starts or ends, so simulated time
passes in as many steps as there are starts and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import simpy


class Link:
    """One direction of a wire, a bus or a disk.

    Attributes:
        name: For reports.
        bytes_per_s: Capacity.
        carried_bytes: Of transfers so far.
        busy_s: Seconds with at least one transfer on it.
    """

    __slots__ = ("busy_s", "bytes_per_s", "carried_bytes", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"{name}: bytes_per_s must be > 0, found {bytes_per_s!r}")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.carried_bytes = 0.0
        self.busy_s = 0.0

    def utilization(self, duration_s: float) -> float:
        """Carried bytes over what the link could have carried; 0.0 for no time."""
        return self.carried_bytes / (self.bytes_per_s * duration_s) if duration_s > 0 else 0.0


class _Flow:
    __slots__ = ("done", "path", "rate", "remaining")

    def __init__(self, path: tuple[Link, ...], remaining: float, done: simpy.Event) -> None:
        self.path, self.remaining, self.done = path, remaining, done
        self.rate = 0.0


class FairLinks:
    """All transfers under way in one simulated cluster."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._flows: list[_Flow] = []
        self._since = 0.0
        self._version = 0

    def transfer(self, path: Sequence[Link], size_bytes: float) -> simpy.Event:
        """Start a transfer; the event comes when its last byte has arrived.

        Args:
            path: Links it holds at the same time, at least one, each once.
            size_bytes: >= 0; nothing to move is done at once.
        """
        done = self._env.event()
        if size_bytes <= 0:
            done.succeed()
            return done
        self._advance()
        flow = _Flow(tuple(path), float(size_bytes), done)
        self._flows.append(flow)
        self._share()
        return done

    @property
    def num_transfers(self) -> int:
        """Transfers under way."""
        return len(self._flows)

    def _advance(self) -> None:
        """Move what has moved since the last change, at the rates that held."""
        elapsed = self._env.now - self._since
        self._since = self._env.now
        if elapsed <= 0:
            return
        busy: dict[int, Link] = {}
        for flow in self._flows:
            moved = min(flow.remaining, flow.rate * elapsed)
            flow.remaining -= moved
            for link in flow.path:
                link.carried_bytes += moved
                busy[id(link)] = link
        for link in busy.values():
            link.busy_s += elapsed

    def _share(self) -> None:
        """Max-min fair rates by progressive filling, then the next end on the calendar."""
        self._version += 1
        if not self._flows:
            return
        max_min_rates(self._flows)
        wait_s = min(flow.remaining / flow.rate for flow in self._flows)
        timer = self._env.timeout(wait_s, value=self._version)
        assert timer.callbacks is not None
        timer.callbacks.append(self._on_end)

    def _on_end(self, timer: Any) -> None:
        if timer.value != self._version:
            return  # rates have changed since; a newer timer is on the calendar
        self._advance()
        # of the flow that set the timer rounding may leave less than a nanosecond's worth
        ended = [flow for flow in self._flows if flow.remaining <= flow.rate * 1e-9]
        self._flows = [flow for flow in self._flows if flow.remaining > flow.rate * 1e-9]
        for flow in ended:
            for link in flow.path:
                link.carried_bytes += flow.remaining
            flow.done.succeed()
        self._share()


def max_min_rates(flows: Sequence[Any]) -> None:
    """Set the max-min fair ``rate`` of flows with a ``path`` of links.

    Source:
        Progressive filling: Bertsekas and Gallager, "Data Networks", 2nd ed., 6.5.2.
    """
    if len(flows) == 1:
        flows[0].rate = min(link.bytes_per_s for link in flows[0].path)
        return
    room: dict[int, float] = {}
    members: dict[int, list[Any]] = {}
    for flow in flows:
        flow.rate = 0.0
        for link in flow.path:
            room.setdefault(id(link), link.bytes_per_s)
            members.setdefault(id(link), []).append(flow)
    open_on = {key: len(on_link) for key, on_link in members.items()}
    while open_on:
        tightest = min(open_on, key=lambda key: room[key] / open_on[key])
        rate = room[tightest] / open_on[tightest]
        for flow in members[tightest]:
            if flow.rate > 0.0:
                continue
            flow.rate = rate
            for link in flow.path:
                key = id(link)
                room[key] = max(0.0, room[key] - rate)
                open_on[key] -= 1
        open_on = {key: left for key, left in open_on.items() if left > 0}
