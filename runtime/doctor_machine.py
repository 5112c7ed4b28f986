"""What the doctor finds out about the machine itself: cores, memory, limits, disk, port.

Every check gives the fields of a ``Check`` by name.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEFAULT_PORT = 8000
LEAST_MEMORY_BYTES = 2 << 30
"""The demo model in bfloat16, a front end, an engine and room for keys and values."""
LEAST_SHARED_BYTES = 256 << 20
LEAST_OPEN_FILES = 1024
LEAST_CACHE_BYTES = 1 << 30
"""The demo model and what it is made of."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def cores() -> dict[str, Any]:
    """Cores that this process may use."""
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} usable of {all_cores}"
    if usable > 1:
        return {"name": "cores", "status": "ok", "found": found}
    advice = "front end and engine share one core; answers come slower"
    return {"name": "cores", "status": "note", "found": found, "advice": advice}


def available_memory_bytes() -> int:
    """What the system and this process's control group leave; 0 where it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0
    try:
        limit = int(CGROUP_LIMIT.read_text())
        used = int(CGROUP_LIMIT.with_name("memory.current").read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return available
    return min(available, max(0, limit - used))


def memory() -> dict[str, Any]:
    """Memory that is free now."""
    available = available_memory_bytes()
    if available == 0:
        return {"name": "memory", "status": "note", "found": "not known (no /proc/meminfo)"}
    if available >= LEAST_MEMORY_BYTES:
        return {"name": "memory", "status": "ok", "found": f"{_gib(available)} available"}
    advice = f"the demo model needs about {_gib(LEAST_MEMORY_BYTES)}; a tiny one needs less"
    found = f"{_gib(available)} available"
    return {"name": "memory", "status": "note", "found": found, "advice": advice}


def shared_memory(folder: Path = Path("/dev/shm")) -> dict[str, Any]:
    """Room for a prefix store that several processes use."""
    fields: dict[str, Any] = {"name": "shared memory"}
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        why = error.strerror or "not there"
        advice = "a served prefix store lies in a plain file instead, and is slower"
        return fields | {"status": "note", "found": f"{folder}: {why}", "advice": advice}
    found = f"{folder}: {_gib(usage.free)} free of {_gib(usage.total)}"
    if usage.free >= LEAST_SHARED_BYTES:
        return fields | {"status": "ok", "found": found}
    advice = "a prefix store has little room: enlarge it (in a container: --shm-size)"
    return fields | {"status": "note", "found": found, "advice": advice}


def open_files() -> dict[str, Any]:
    """How many connections can be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, can be raised to {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= LEAST_OPEN_FILES:
        return {"name": "open files", "status": "ok", "found": found}
    advice = f"every client needs one: ulimit -n {LEAST_OPEN_FILES}"
    return {"name": "open files", "status": "note", "found": found, "advice": advice}


def _limit(count: int) -> str:
    return "no limit" if count == resource.RLIM_INFINITY else str(count)


def cache_disk() -> dict[str, Any]:
    """Room for the demo model and compiled kernels."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "serving-twin"
    existing = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    fields: dict[str, Any] = {"name": "cache folder"}
    if not os.access(existing, os.W_OK):
        advice = "set XDG_CACHE_HOME to a folder that can be written"
        return fields | {
            "status": "missing",
            "found": f"{folder}: {existing} cannot be written",
            "advice": advice,
            "is_required": True,
        }
    free = shutil.disk_usage(existing).free
    found = f"{folder}: {_gib(free)} free"
    if free >= LEAST_CACHE_BYTES:
        return fields | {"status": "ok", "found": found, "is_required": True}
    advice = f"the demo model needs {_gib(LEAST_CACHE_BYTES)}"
    return fields | {"status": "note", "found": found, "advice": advice, "is_required": True}


def port(number: int = DEFAULT_PORT) -> dict[str, Any]:
    """Whether the port that is used by default is free."""
    fields: dict[str, Any] = {"name": f"port {number}"}
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", number))
    except OSError as error:
        is_used = error.errno == errno.EADDRINUSE
        found = "in use" if is_used else error.strerror or str(error)
        return fields | {"status": "note", "found": found, "advice": "runtime serve --port N"}
    return fields | {"status": "ok", "found": "free"}


MACHINE_CHECKS: tuple[Callable[[], dict[str, Any]], ...] = (
    cores, memory, shared_memory, open_files, cache_disk, port,
)  # fmt: skip
