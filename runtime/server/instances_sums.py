"""Several engines as one: what all of them serve, and their numbers together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from runtime.engine.frames import EngineInfo, EngineStats

_SHARED: Final = ("model_type", "vocabulary", "eos_token_ids", "dtype", "block_tokens")


class InstancesDifferError(ValueError):
    """Instances do not serve the same model."""


def info_of_all(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What holds wherever a sequence goes: the smallest context and the smallest memory.

    Raises:
        InstancesDifferError: If they do not serve the same.
    """
    first = infos[0]
    for number, info in enumerate(infos):
        for name in _SHARED:
            if getattr(info, name) != getattr(first, name):
                raise InstancesDifferError(
                    f"instance {number}: {name} is {getattr(info, name)!r}, "
                    f"of instance 0 it is {getattr(first, name)!r}"
                )
    return msgspec.structs.replace(
        first,
        context_tokens=min(info.context_tokens for info in infos),
        kv_capacity_tokens=min(info.kv_capacity_tokens for info in infos),
        has_prefix_store=all(info.has_prefix_store for info in infos),
    )


def stats_of_all(reports: Sequence[EngineStats]) -> EngineStats:
    """Sums; shares and averages by the pages behind them; no step's tokens."""
    if not reports:
        return EngineStats()
    summed = {
        field.name: sum(getattr(report, field.name) for report in reports)
        for field in msgspec.structs.fields(EngineStats)
        if field.type is int
    }
    moves: Counter[str] = Counter()
    store: Counter[str] = Counter()
    for report in reports:
        moves.update(report.planner_moves_total)
        store.update(report.store)
    room = sum(report.kv_pages + report.free_pages for report in reports)
    pages = sum(report.weight_pages for report in reports)
    return EngineStats(
        **summed,
        kv_usage=summed["kv_pages"] / room if room else 0.0,
        mean_bits=sum(r.mean_bits * r.weight_pages for r in reports) / pages if pages else 0.0,
        damage=max(report.damage for report in reports),
        planner_moves_total=dict(moves),
        store=dict(store),
    )
