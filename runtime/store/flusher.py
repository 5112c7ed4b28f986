"""Writes blocks to SSD behind the readers' backs."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.store.deadline import Deadline
from runtime.store.node_memory import Room
from runtime.store.node_state import NodeState

WRITE_S = 20.0
MOST_BLOCKS = 64


class Flusher:
    """Brings batches of blocks from memory to SSD."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def write(self, keys: Sequence[bytes]) -> None:
        """Write the blocks that are still in memory and not on SSD; counts what failed."""
        state = self._state
        if state.ssd is None:
            return
        with state.lock:
            rooms = self._rooms(keys)
            wanted = [room.info.key for room in rooms]
            orders = state.policy.reserve_ssd(wanted, now=state.now())
            victims = [v.key for v in orders.victims if isinstance(v.key, bytes)]
            for key in victims:
                state.gone(key, "ssd")
            state.counters.add("blocks_evicted_from_ssd", len(victims))
            state.counters.add("flushes_without_room", len(wanted) - orders.admitted)
            rooms = rooms[: orders.admitted]
            pinned = [room.info.key for room in rooms]
            state.leases.pin(pinned)
        durable = 0
        try:
            if victims:
                state.ssd.remove(victims)
            if rooms:
                blocks = [(room.info, state.memory.view(room)) for room in rooms]
                durable = state.ssd.write(blocks, Deadline.after(WRITE_S))
        finally:
            with state.lock:
                now = state.now()
                state.policy.flushed(pinned[:durable], now=now)
                state.policy.flush_failed(pinned[durable:], now=now)
                state.counters.add("blocks_flushed", durable)
                state.counters.add("flushes_failed", len(pinned) - durable)
                state.leases.unpin(pinned)
                state.hold([room.info for room in rooms[:durable]], "ssd", is_owned=True)

    def _rooms(self, keys: Sequence[bytes]) -> list[Room]:
        state = self._state
        found = []
        for key in dict.fromkeys(keys):
            room = state.memory.get(key)
            if room is not None and not state.policy.on_ssd(key):
                found.append(room)
        return found
