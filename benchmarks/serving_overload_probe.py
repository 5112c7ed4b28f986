"""What is seen of a server from beside: memory, files, cores, state routes, its counters."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from serving_overload_client import Outcome, Target

PROBE_S = 0.25


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest, in the unit of the values."""
    if not values:
        return {}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": round(float(p50), 5), "p99": round(float(p99), 5), "max": round(max(values), 5)}


class Probe:
    """What is seen from beside: memory, open files, and how fast the state routes answer."""

    def __init__(self, target: Target, front: int, engine: int) -> None:
        self._target, self._processes = target, {"front_end": front, "engine": engine}
        self.memory_bytes: dict[str, list[int]] = {name: [] for name in self._processes}
        self.files: list[int] = []
        self._open_files = Path(f"/proc/{front}/fd")
        self._began = self._run_and_wait()
        self.answer_s: dict[str, list[float]] = {"/health": [], "/metrics": []}
        self.lag_s: list[float] = []
        self.failed: list[str] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            for name, process in self._processes.items():
                self.memory_bytes[name].append(resident_bytes(process))
            self.files.append(sum(1 for _ in self._open_files.iterdir()))
            for path, times in self.answer_s.items():
                try:
                    status, seconds, _ = await self._target.get(path)
                    times.append(seconds)
                    if status != 200:
                        self.failed.append(f"{path}: {status}")
                except OSError as error:
                    self.failed.append(f"{path}: {type(error).__name__}")
            asked_s = time.perf_counter()
            await asyncio.sleep(PROBE_S)
            self.lag_s.append(time.perf_counter() - asked_s - PROBE_S)

    def _run_and_wait(self) -> dict[str, tuple[float, float]]:
        """Seconds that each main thread has run, and has waited for a core."""
        found = {}
        for name, process in (*self._processes.items(), ("client", os.getpid())):
            fields = Path(f"/proc/{process}/schedstat").read_text().split()
            found[name] = (int(fields[0]) / 1e9, int(fields[1]) / 1e9)
        return found

    def row(self) -> dict[str, Any]:
        """Of the round's JSON; memory as first, peak and last."""
        memory = {
            name: {
                "first_mib": round(values[0] / 2**20, 1),
                "peak_mib": round(max(values) / 2**20, 1),
                "last_mib": round(values[-1] / 2**20, 1),
                "every_5_s_mib": [round(each / 2**20, 1) for each in values[:: int(5 / PROBE_S)]],
            }
            for name, values in self.memory_bytes.items()
        }
        return {
            "memory": memory,
            "open_files_peak": max(self.files),
            "state_routes_s": {path: spread(times) for path, times in self.answer_s.items()},
            "state_routes_failed": dict(Counter(self.failed)),
            "client_lag_s": spread(self.lag_s),
            "cores": {
                name: {
                    "ran_s": round(ran - self._began[name][0], 2),
                    "waited_for_a_core_s": round(waited - self._began[name][1], 2),
                }
                for name, (ran, waited) in self._run_and_wait().items()
            },
        }


def resident_bytes(process: int) -> int:
    """Resident memory that the process shares with no file: what it has taken itself."""
    text = Path(f"/proc/{process}/status").read_text()
    return 1024 * sum(
        int(re.search(rf"{name}:\s+(\d+)", text)[1]) for name in ("RssAnon", "RssShmem")
    )


async def counters(target: Target) -> dict[str, float]:
    """Numbers of ``/metrics`` by name and labels."""
    _, _, text = await target.get("/metrics")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def of_status(values: dict[str, float], status: int) -> float:
    """Completions answered with a status, as the server counts them."""
    return sum(
        value
        for name, value in values.items()
        if name.startswith("serving_twin_http_requests_total")
        and 'route="/v1/completions"' in name
        and f'status="{status}"' in name
    )


def labelled(values: dict[str, float], name: str, label: str = "") -> float:
    """Sum over all labels of one of our metrics, or of those with this label."""
    return sum(
        value
        for key, value in values.items()
        if key.partition("{")[0] == f"serving_twin_{name}" and label in key
    )


def accounts(before: dict, after: dict, outcomes: list[Outcome]) -> dict[str, Any]:
    """Client's counts beside the server's; every pair must be equal."""
    statuses = Counter(each.status for each in outcomes)
    pairs = {
        f"status_{status}": (
            count,
            int(of_status(after, status) - of_status(before, status)),
        )
        for status, count in sorted(statuses.items())
    }
    ended = [each for each in outcomes if each.status == 200]
    for name, mine in (
        ("generation_tokens_total", sum(each.tokens for each in ended)),
        ("request_success_total", len(ended)),
        ("admission_rejections_total", statuses[429] + statuses[503]),
        ("engine_finished_total", len(ended)),
    ):
        pairs[name] = (mine, int(labelled(after, name) - labelled(before, name)))
    return {
        name: {"client": mine, "server": server, "equal": mine == server}
        for name, (mine, server) in pairs.items()
    }


async def at_rest(target: Target) -> dict[str, float]:
    """The counters once the engine's report says that nothing runs."""
    for _ in range(100):
        values = await counters(target)
        busy = ("num_requests_running", "num_requests_waiting", "active_requests")
        if not any(labelled(values, name) for name in busy) and not labelled(
            values, "pages", 'use="kv"'
        ):
            break
        await asyncio.sleep(0.1)
    return values
