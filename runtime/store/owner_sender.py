"""Sends blocks to the nodes that own them; the writer does not wait for the network.

Until the owner has them the writer's node holds them pinned. If the owner does not take them, the
writer's node keeps those it can and answers for them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.node_memory import Room
from runtime.store.node_state import NodeState

SEND_S = 3.0
SLOWEST_BYTES_PER_S = 50e6  # an owner that takes less has the blocks left with their writer
SendRegion = Callable[[str, Sequence[BlockInfo], Sequence[memoryview], Deadline], int]


@dataclass(frozen=True, slots=True)
class RegionToSend:
    """Blocks of one region, root first, and their owner."""

    owner: str
    rooms: tuple[Room, ...]


class OwnerSender:
    """Works off regions that belong elsewhere."""

    def __init__(
        self, state: NodeState, send: SendRegion, flush: Callable[[Sequence[bytes]], None]
    ) -> None:
        """Set the sender up.

        Args:
            state: Of the node.
            send: Sends a region; how many leading blocks the owner has stored.
            flush: Queues blocks to be written to SSD.
        """
        self._state, self._send, self._flush = state, send, flush

    def work(self, regions: Sequence[RegionToSend]) -> None:
        """Send regions one after the other."""
        for region in regions:
            self._work(region)

    def _work(self, region: RegionToSend) -> None:
        state = self._state
        stored = 0
        try:
            if region.owner in state.weights:
                infos = [room.info for room in region.rooms]
                views = [state.memory.view(room) for room in region.rooms]
                seconds = SEND_S + sum(view.nbytes for view in views) / SLOWEST_BYTES_PER_S
                stored = self._send(region.owner, infos, views, Deadline.after(seconds))
        finally:
            self._settle(region, stored)

    def _settle(self, region: RegionToSend, stored: int) -> None:
        state = self._state
        with state.lock:
            now = state.now()
            state.counters.add("blocks_sent_to_owner", stored)
            kept = [room for room in region.rooms if room.is_kept]
            state.leases.unpin(room.info.key for room in kept)
            state.memory.cancel([r for r in region.rooms if not r.is_kept], now=now)
            for room in region.rooms[:stored]:
                state.policy.set_elsewhere(room.info.key, True, now=now)
            mine = [room for room in region.rooms[stored:] if room.is_kept]
            state.counters.add("blocks_owner_did_not_take", len(region.rooms) - stored)
            flush = take_over(state, [room.info.key for room in mine])
            state.tell()
        if flush:
            self._flush(flush)


def take_over(state: NodeState, keys: Sequence[bytes]) -> list[bytes]:
    """This node answers for blocks it holds copies of; the keys to be written to SSD.

    Under the node's lock.
    """
    rooms = (state.memory.get(key) for key in keys)
    held = [room for room in rooms if room is not None and not room.is_owned]
    flush = state.policy.own([room.info.key for room in held], now=state.now()).flush
    for room in held:
        state.memory.own(room.info.key)
    if held:
        state.hold([room.info for room in held], "memory", is_owned=True)  # and prices them
        state.counters.add("blocks_taken_over", len(held))
    return [key for key in flush if isinstance(key, bytes)]
