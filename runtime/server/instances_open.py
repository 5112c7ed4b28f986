"""Starts several engines and puts them behind one entrance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from models.streams import stream
from policies.prefix.request_routing import RequestRouting
from policies.prefix.request_routing_log import LoggedRequestRouting
from runtime.clock import RunClock
from runtime.engine.frames import EngineInfo
from runtime.engine.settings import EngineSettings
from runtime.server.engine_client import EngineClient
from runtime.server.instances import Instances, Routing
from runtime.server.instances_costs import PrefillSpeed, routing_costs
from runtime.server.instances_prefixes import MOST_BLOCKS, InstancePrefixes
from runtime.server.instances_restart import Backoff, RestartedEngine, Start
from runtime.server.instances_settings import (
    MOST_SESSIONS,
    InstanceSettings,
    is_shared,
    settings_of_instance,
)
from runtime.server.process_engine import ProcessEngine
from traces.decisions import CompactDecisionLog

SEED: Final = 0
STREAM: Final = "request_routing"


async def open_instances(
    settings: EngineSettings, chosen: InstanceSettings, *, backoff: Backoff | None = None
) -> Instances:
    """Start all engines, at the same time, and wait until all are ready.

    Args:
        settings: Of each of them; threads are those of the machine and shared out.
        chosen: How many, where, and the rule.
        backoff: Of engines that have ended.

    Raises:
        EngineStartError: If one of them does not start; none is left then.
        EngineSettingsError: If Ray cannot be used.
        InstancesDifferError: If they do not serve the same model.
    """
    if chosen.place == "process":
        starts = [_process_start(settings, number, chosen) for number in range(chosen.count)]
        return await _behind_one(starts, settings, chosen, backoff, None)
    from runtime.server.ray_cluster import RayCluster

    cluster = await RayCluster.deploy(
        [settings_of_instance(settings, number, chosen) for number in range(chosen.count)],
        address=chosen.ray_address,
    )
    try:
        starts = [_ray_start(cluster.connect, number) for number in range(chosen.count)]
        return await _behind_one(starts, settings, chosen, backoff, cluster.close)
    except BaseException:
        await cluster.close()
        raise


def _process_start(settings: EngineSettings, number: int, chosen: InstanceSettings) -> Start:
    async def start(starts: int) -> EngineClient:
        return await ProcessEngine.start(
            settings_of_instance(settings, number, chosen, starts=starts)
        )

    return start


def _ray_start(connect: Callable[[int], Coroutine[Any, Any, EngineClient]], number: int) -> Start:
    async def start(_: int) -> EngineClient:
        return await connect(number)

    return start


async def _behind_one(
    starts: list[Start],
    settings: EngineSettings,
    chosen: InstanceSettings,
    backoff: Backoff | None,
    after_close: Callable[[], Coroutine[Any, Any, None]] | None,
) -> Instances:
    tasks = [asyncio.ensure_future(start(0)) for start in starts]
    try:
        engines = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(ended, BaseException):
                await ended.close()
        raise
    restarted = [
        RestartedEngine(number, engine, start, backoff)
        for number, (engine, start) in enumerate(zip(engines, starts, strict=True))
    ]
    try:
        routing = make_routing(engines[0].info, settings, chosen)
        return Instances(restarted, routing, after_close=after_close)
    except BaseException:
        await asyncio.gather(*(one.close() for one in restarted), return_exceptions=True)
        raise


def make_routing(info: EngineInfo, settings: EngineSettings, chosen: InstanceSettings) -> Routing:
    """The policy and what it is told, for engines that serve that model."""
    reckoned = routing_costs(info)
    policy = RequestRouting(
        chosen.routing,
        num_servers=chosen.count,
        prefill=reckoned.prefill,
        costs=reckoned.costs,
        block_bytes=reckoned.block_bytes,
        max_sessions=MOST_SESSIONS,
    )
    log = CompactDecisionLog(max_calls=settings.decision_log_calls)
    store = settings.prefix
    is_one_store = is_shared(store.place)
    room = (store.memory_bytes + store.ssd_bytes) // reckoned.block_bytes
    return Routing(
        policy=LoggedRequestRouting(policy, log),
        log=log,
        prefixes=InstancePrefixes(
            info,
            chosen.count,
            most_blocks=MOST_BLOCKS if is_one_store else min(MOST_BLOCKS, room),
            is_shared=is_one_store,
            is_near=chosen.place == "process",
        ),
        speed=PrefillSpeed(reckoned.prefill),
        clock=RunClock(),
        draws=stream(SEED, STREAM),
        decision_file=None if settings.decision_log is None else Path(settings.decision_log),
    )
