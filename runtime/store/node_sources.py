"""Where each block of a load is to come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.prefix_costs import PrefixCosts
from policies.prefix.directory import Copy
from policies.prefix.load_plan import LoadPlan, plan_load
from runtime.store.blocks import BlockInfo
from runtime.store.node_memory import Room
from runtime.store.node_state import NodeState

Place = Literal["memory", "coming", "ssd", "remote"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where one block comes from.

    Attributes:
        info: The block; of blocks elsewhere only what the directory knows (no checksum).
        place: ``coming``: another load is bringing it into memory.
        node: For ``remote``: from whom.
        room: For ``memory``: where.
    """

    info: BlockInfo
    place: Place
    node: str = ""
    room: Room | None = None


def choose_sources(state: NodeState, keys: Sequence[bytes], tenant: bytes = b"") -> list[Source]:
    """Sources of the leading blocks that are worth loading; under the node's lock.

    Args:
        state: Of the node.
        keys: The whole chain.
        tenant: Whose they are.

    Returns:
        One source per block, root first; blocks behind them are not stored, or cheaper computed.
    """
    if state.config.costs is None:
        copies = [_best_copy(state, key) for key in keys[: state.leading(keys)]]
    else:
        copies = _planned_copies(state, keys, state.config.costs)
    sources: list[Source] = []
    seen: dict[bytes, None] = {}
    for depth, copy in enumerate(copies):
        source = None if copy is None else _source(state, keys, depth, copy, tenant)
        if source is None or keys[depth] in seen:  # a chain has no block twice
            break
        seen[keys[depth]] = None
        sources.append(source)
    return sources


def _planned_copies(
    state: NodeState, keys: Sequence[bytes], costs: PrefixCosts
) -> list[Copy | None]:
    plan = worth_loading(state, keys, costs)
    state.counters.add("blocks_left_to_compute", plan.leading - plan.wanted)
    return [
        Copy(way.node, "ssd" if way.source in ("ssd", "remote_ssd") else "memory", False)
        for way in plan.ways
    ]


def worth_loading(state: NodeState, keys: Sequence[bytes], costs: PrefixCosts) -> LoadPlan:
    """Which leading blocks to load, and from where; under the node's lock.

    The keys may begin in the middle of their chain: an engine loads what it does not hold.
    """
    held = state.directory.held(keys[0]) if keys else None
    return plan_load(
        keys,
        state.directory,
        local=state.config.node,
        costs=costs,
        live=state.weights,
        first=0 if held is None else held.depth,
    )


def _best_copy(state: NodeState, key: bytes) -> Copy | None:
    """Own memory, else the faster of own SSD and another's memory, else another's SSD."""
    here = state.config.node
    if state.memory.get(key) is not None:
        return Copy(here, "memory", False)
    copies = [c for c in state.directory.copies(key) if c.node in state.weights]
    own = next((c for c in copies if c.node == here), None)
    fast = next((c for c in copies if c.node != here and c.tier == "memory"), None)
    if own is not None and (fast is None or not _is_network_faster(state)):
        return own
    return fast or next(iter(copies), None)


def _source(
    state: NodeState, keys: Sequence[bytes], depth: int, best: Copy, tenant: bytes
) -> Source | None:
    key = keys[depth]
    room = state.memory.get(key)
    if room is not None:
        return Source(room.info, "memory", room=room)
    if state.policy.is_reserved(key):
        return Source(_unknown(key, keys, depth), "coming")
    here = state.config.node
    held = state.directory.held_at(key, best.node, best.tier)
    if held is None or held.length > state.memory.arena.slot_bytes:
        return None
    info = BlockInfo(
        key=key,
        parent=keys[depth - 1] if depth else b"",
        region=held.region if isinstance(held.region, bytes) else key,
        index=held.index,
        depth=held.depth,
        length=held.length,
        crc=0,
        tenant=tenant,
    )
    if best.node == here:  # parent and tenant as they were written
        written = None if state.ssd is None else state.ssd.info(key)
        return None if written is None else Source(written, "ssd")
    return Source(info, "remote", node=best.node)


def _unknown(key: bytes, keys: Sequence[bytes], depth: int) -> BlockInfo:
    parent = keys[depth - 1] if depth else b""
    return BlockInfo(key=key, parent=parent, region=key, index=0, depth=depth, length=0, crc=0)


def _is_network_faster(state: NodeState) -> bool:
    costs = state.policy.costs
    return costs.remote.bytes_per_s > costs.ssd.bytes_per_s
