"""How many engines there are, where they run, and what each of them is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast, get_args

import msgspec

from policies.prefix.request_routing import RoutingRule
from runtime.engine.settings import EngineSettings, EngineSettingsError

Place = Literal["process", "ray"]
MOST_INSTANCES: Final = 64
MOST_SESSIONS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """Of the operator.

    Attributes:
        count: Engines.
        place: Processes of this machine, or replicas of Ray Serve.
        routing: Rule by which a request gets its engine.
        ray_address: Of a cluster; empty: Ray is started on this machine.
    """

    count: int = 1
    place: Place = "process"
    routing: RoutingRule = "prefix_aware"
    ray_address: str = ""

    @property
    def is_plain(self) -> bool:
        """One process, with nothing before it."""
        return self.count == 1 and self.place == "process"


def instance_settings(
    count: int, place: str, routing: str | None, ray_address: str
) -> InstanceSettings:
    """Settings from the options of the command line.

    Raises:
        EngineSettingsError: Naming the option.
    """
    if not 1 <= count <= MOST_INSTANCES:
        raise EngineSettingsError(f"--instances: must be 1..{MOST_INSTANCES}, found {count}")
    for option, found, allowed in (
        ("--engine", place, get_args(Place)),
        ("--routing", routing, (None, *get_args(RoutingRule))),
    ):
        if found not in allowed:
            names = ", ".join(name for name in allowed if name)
            raise EngineSettingsError(f"{option}: must be {names}, found {found!r}")
    if routing is not None and count == 1:
        raise EngineSettingsError("--routing: says nothing with one instance; give --instances")
    if ray_address and place != "ray":
        raise EngineSettingsError("--ray-address: only with --engine ray")
    return InstanceSettings(
        count=count,
        place=cast(Place, place),
        routing=cast(RoutingRule, routing or "prefix_aware"),
        ray_address=ray_address,
    )


def settings_of_instance(
    settings: EngineSettings, number: int, chosen: InstanceSettings, *, starts: int = 0
) -> EngineSettings:
    """One engine's settings: its share of the threads, a GPU, a folder and a log of its own.

    On a cluster that was there before, machines are not shared: each has all the threads.
    Processes take the GPUs from the given one on; of a Ray cluster's each sees one, as the first.
    Memory sizes are each engine's. An in-process store in a folder gets a folder within it, since
    only one process may open one; a socket is shared.

    Args:
        settings: Of all.
        number: Of the instance.
        chosen: How many there are, and where.
        starts: Engines that this instance had before, whose logs are kept.
    """
    prefix, device, count = settings.prefix, settings.device, chosen.count
    kind, _, first = device.partition(":")
    if kind == "cuda" and first.isdecimal():
        device = f"cuda:{int(first) + number}" if chosen.place == "process" else "cuda:0"
    if is_folder(prefix.place) and count > 1:
        place = str(Path(prefix.place) / f"instance-{number}")
        prefix = msgspec.structs.replace(prefix, place=place)
    log = settings.decision_log
    if log is not None:
        log = str(decision_file_of(Path(log), number, starts))
    return msgspec.structs.replace(
        settings,
        threads=settings.threads if chosen.ray_address else max(1, settings.threads // count),
        device=device,
        prefix=prefix,
        decision_log=log,
    )


def decision_files(log: str | None, chosen: InstanceSettings) -> list[Path]:
    """All files that a server writes logs to, but for those of engines started again."""
    if log is None:
        return []
    own = Path(log)
    if chosen.is_plain:
        return [own]
    return [own, *(decision_file_of(own, number) for number in range(chosen.count))]


def is_folder(place: str) -> bool:
    """Whether a store's place is a folder, not ``memory``, ``none`` or a socket."""
    if place in ("memory", "none"):
        return False
    path = Path(place)
    return not (path.is_socket() or (path.suffix == ".sock" and not path.is_dir()))


def is_shared(place: str) -> bool:
    """Whether all instances load from one store there."""
    return place not in ("memory", "none") and not is_folder(place)


def decision_file_of(router: Path, number: int, starts: int = 0) -> Path:
    """An instance's log beside the router's: ``x.jsonl.gz`` -> ``x-0.jsonl.gz``.

    After the first start: ``x-0-start-2.jsonl.gz``.
    """
    stem, dot, suffix = router.name.partition(".")
    again = f"-start-{starts + 1}" if starts else ""
    return router.with_name(f"{stem}-{number}{again}{dot}{suffix}")
