"""Answers of the server as a client may believe them: nothing that it then would trip over.

All raise ``FrameError`` for what can be no answer to the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.store import messages
from runtime.store.arena import SharedArena
from runtime.store.link import Offered, Reserved, SlotOfBlock
from runtime.store.wire import FrameError


def count_of(reply: messages.Count, arena: SharedArena, *, most: int) -> int:
    """A count of at most so many."""
    if reply.count > most:
        raise FrameError(f"{reply.count} of {most}")
    return reply.count


def offered(reply: messages.Offer, arena: SharedArena, *, most: int) -> Offered:
    """Blocks that lie within the memory; whether they are those asked for is not looked at."""
    if len(reply.blocks) > most or (reply.blocks and not reply.lease_id):
        raise FrameError(f"{len(reply.blocks)} blocks of {most}, lease {reply.lease_id}")
    blocks = [SlotOfBlock(*block) for block in reply.blocks]
    for block in blocks:
        _check_slot(block.slot, arena)
        if not 0 < block.info.length <= arena.slot_bytes:
            raise FrameError(f"a block of {block.info.length} bytes in {arena.slot_bytes}")
    return Offered(reply.lease_id, blocks, arena)


def reserved(
    reply: messages.Room, arena: SharedArena, *, first: int, lengths: Sequence[int]
) -> Reserved:
    """Room within the memory, each slot once, for blocks of the chain from ``first`` on."""
    skipped = reply.start - first
    if skipped < 0 or skipped + len(reply.slots) > len(lengths):
        raise FrameError(f"{len(reply.slots)} slots from {skipped} on for {len(lengths)} blocks")
    if len(set(reply.slots)) < len(reply.slots) or (reply.slots and not reply.reservation_id):
        raise FrameError("slots that are no room")
    for slot, length in zip(reply.slots, lengths[skipped:], strict=False):
        _check_slot(slot, arena)
        if length > arena.slot_bytes:
            raise FrameError(f"a slot of {arena.slot_bytes} bytes for a block of {length}")
    return Reserved(reply.reservation_id, reply.start, reply.slots, reply.reason, arena)


def stats_of(reply: messages.Text, arena: SharedArena) -> Mapping[str, Any]:
    """Gauges and counters."""
    try:
        stats = json.loads(reply.text)
    except (ValueError, RecursionError):
        stats = None
    if not isinstance(stats, dict):
        raise FrameError("statistics that are no JSON object")
    return stats


def _check_slot(slot: int, arena: SharedArena) -> None:
    if not 0 <= slot < arena.num_slots:
        raise FrameError(f"slot {slot} of {arena.num_slots}")
