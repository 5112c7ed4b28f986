"""Engines as deployments of Ray Serve: one of its own per instance, one replica each.

So every instance can be addressed, which our router needs; Serve places them by their resources,
on this machine or on others, and starts a replica anew that has ended.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from runtime.engine.settings import EngineSettings, EngineSettingsError
from runtime.server.process_engine import PASSIVE_THREADS
from runtime.server.ray_engine import RayEngine
from runtime.server.ray_replica import EngineReplica

DEPLOYMENT: Final = "engine"
LOCAL: Final = ("", "local")
OBJECT_STORE_BYTES: Final = 80 << 20
"""Of a Ray started here: frames are small and go inline, so the least that Ray takes will do."""

MOST_CALLS: Final = 1024  # at a time, of one replica: the stream, and one call that tells
HEALTH_PERIOD_S: Final = 1.0
HEALTH_TIMEOUT_S: Final = 30.0
ANSWER_S: Final = 5.0
INIT_TRIES: Final = 2


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Deployments of one front end.

    Attributes:
        names: Application of each instance.
        is_ours: Ray was started here and ends here.
    """

    names: tuple[str, ...]
    is_ours: bool

    @classmethod
    async def deploy(cls, settings: Sequence[EngineSettings], *, address: str = "") -> RayCluster:
        """Connect to Ray, or start one on this machine, and deploy an engine per settings.

        Does not wait until their models are loaded.

        Args:
            settings: Of each instance.
            address: ``host:port`` or ``ray://host:port`` of a cluster, ``auto`` for the one of
                this machine; empty or ``local``: Ray is started here, on loopback only.

        Raises:
            EngineSettingsError: If Ray is not installed, does not start or does not answer.
        """
        require_ray(address)
        return await asyncio.to_thread(_deploy, tuple(settings), address)

    async def connect(self, number: int) -> RayEngine:
        """An instance's replica, as soon as it is there.

        Raises:
            EngineStartError: If its engine did not start.
        """
        serve = _serve()
        handle = await asyncio.to_thread(serve.get_app_handle, self.names[number])
        return await RayEngine.connect(handle)

    async def close(self) -> None:
        """Take the deployments away, and end Ray if it was started here."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        import ray

        serve = _serve()
        try:
            for name in self.names:
                serve.delete(name, _blocking=False)
            for name in self.names:
                serve.delete(name)
            if self.is_ours:
                serve.shutdown()
        finally:
            if self.is_ours:
                ray.shutdown()


def require_ray(address: str = "") -> None:
    """Fail at once where Ray Serve is absent or the cluster does not answer.

    Raises:
        EngineSettingsError: Saying which of them.
    """
    _serve(address)
    if address in (*LOCAL, "auto"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise EngineSettingsError(
            f"--ray-address: must be host:port, ray://host:port, auto or local, found {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise EngineSettingsError(
            f"--ray-address: no Ray cluster answers at {address} ({error.strerror or error})"
        ) from error


def _serve(address: str = "auto") -> Any:
    """The module ``ray.serve``; with an address before it is imported for the first time.

    Raises:
        EngineSettingsError: If it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own switch that makes a node use the loopback address, read when it is imported.
    if address in LOCAL and "ray" not in sys.modules:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        return importlib.import_module("ray.serve")
    except ImportError as error:
        raise EngineSettingsError(
            f"--engine ray: Ray Serve is not installed ({error.name} is missing); "
            "pip install 'serving-twin[cluster]'"
        ) from error


def _deploy(settings: tuple[EngineSettings, ...], address: str) -> RayCluster:
    import ray

    serve = _serve()
    is_ours = address in LOCAL
    cpus = [max(1, each.threads) for each in settings]
    if is_ours:
        options = {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, sum(cpus)),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    else:
        options = {"address": address}
    _init(ray, options)
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        serve.start(proxy_location="Disabled")  # our front end is the entrance
        token = secrets.token_hex(4)
        names = tuple(f"serving-twin-{token}-{number}" for number in range(len(settings)))
        serve.run_many(
            [
                serve.RunTarget(
                    _deployment(serve, each, num_cpus, is_ours), name=name, route_prefix=None
                )
                for name, each, num_cpus in zip(names, settings, cpus, strict=True)
            ],
            wait_for_applications_running=False,
        )
    except BaseException:
        if is_ours:
            ray.shutdown()
        raise
    return RayCluster(names, is_ours)


def _init(ray: Any, options: dict[str, Any]) -> None:
    """Connect or start; the second time what it loads is in memory, which busy machines need."""
    for tries_left in reversed(range(INIT_TRIES)):
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as error:  # Ray raises bare ones
            ray.shutdown()
            if not tries_left:
                words = " ".join(str(error).split()) or type(error).__name__
                raise EngineSettingsError(
                    f"--engine ray: Ray did not start: {words[:300]}"
                ) from error


def _deployment(serve: Any, settings: EngineSettings, num_cpus: int, is_local: bool) -> Any:
    resources = {
        "num_cpus": num_cpus,
        "num_gpus": 1 if settings.device.startswith("cuda") else 0,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(num_cpus), **PASSIVE_THREADS}},
    }
    deployed = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        num_replicas=1,
        ray_actor_options=resources,
        max_ongoing_requests=MOST_CALLS,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=15.0,
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    return deployed.bind(msgspec.msgpack.encode(settings), is_local)
