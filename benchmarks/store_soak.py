"""Works on a pool of prefix stores for minutes and looks for anything that grows.

    python benchmarks/store_soak.py [--seconds 600] [--seed 1] [--json FILE]

Three servers on loopback, each with memory and SSD far smaller than what is put, so that eviction,
flushing and compaction never rest. The first lives all the time and is the one that is measured;
the other two leave (by SIGTERM or SIGKILL) and join again all the time. Five clients put, load,
hold, reserve without committing, and work under two tenants' quotas; four of them are killed again
and again, the fifth is measured too. Every two seconds: anonymous memory, threads, descriptors,
shared memory, SSD bytes, pins, leases, reservations, queues.

Bars, each for the second half of the run, by a straight line through its samples: anonymous
memory grows by at most 3 % of its mean or 2 MiB over that half; threads and descriptors by at most
3; pins, leases, reservations and queued work by at most 5 % of the slots; the directory, which
breathes as nodes come and go, by at most 15 %. SSD bytes never exceed what was given. In the end:
no pin, lease, reservation or queued work, all slots and bytes accounted for, no shared memory left,
SSD verified. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from store_crash import any_of, chain, connected, content, end, progress, spawn  # noqa: E402

from policies.prefix.keys import tenant_tag  # noqa: E402
from runtime.store import socket_link  # noqa: E402
from runtime.store.arena import arena_path  # noqa: E402
from runtime.store.logs import log_as_json  # noqa: E402
from runtime.store.malloc_arenas import limit_malloc_arenas  # noqa: E402
from runtime.store.offline import opened_ssd  # noqa: E402
from runtime.store.pool_config import PoolConfig  # noqa: E402
from runtime.store.store import PrefixStore, store_config  # noqa: E402
from runtime.store.store_server import ServerConfig, StoreServer  # noqa: E402
from traces.whole_file import write_whole  # noqa: E402

BLOCK = 1024
SLOTS = 2000
SSD_BYTES = 24 << 20
EVERY_S = 2.0
NODES = ("n0", "n1", "n2")
QUOTAS = {tenant_tag("small"): 100 * BLOCK, tenant_tag("large"): 400 * BLOCK}
TENANTS = (b"", b"", *QUOTAS)
SETTLE_S = 60.0
# What may not grow -> most growth over the second half, as a share of the mean and absolute.
BARS: Mapping[str, tuple[float, float]] = {
    "server_anonymous_bytes": (0.03, 2 << 20),
    "client_anonymous_bytes": (0.03, 2 << 20),
    "server_threads": (0, 3),
    "client_threads": (0, 3),
    "server_descriptors": (0, 3),
    "client_descriptors": (0, 3),
    "shared_memory_bytes": (0, 0),
    "ssd_used_bytes": (0.1, 1 << 20),
    "directory_blocks": (0.15, 0.05 * SLOTS),
    "pinned_blocks": (0, 0.05 * SLOTS),
    "leases": (0, 0.05 * SLOTS),
    "reservations": (0, 0.05 * SLOTS),
    "overdue_slots": (0, 0.05 * SLOTS),
    "flushes_waiting": (0, 0.05 * SLOTS),
    "sends_waiting": (0, 0.05 * SLOTS),
}


def serve(folder: Path, node: str, peers: str) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    log_as_json("error")
    limit_malloc_arenas()  # as ``runtime store serve`` does
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(1))
    config = store_config(
        folder,
        dram=SLOTS * BLOCK,
        ssd=SSD_BYTES,
        block_bytes=BLOCK,
        node=node,
        is_pooled=True,
        quota_bytes=QUOTAS,
        lease_s=3.0,
        reservation_s=3.0,
        segment_bytes=1 << 20,
    )
    pool = PoolConfig(node=node, peers=peers, heartbeat_s=0.3)
    server = StoreServer(ServerConfig(store=config, socket=folder / "s", pool=pool))
    parent = os.getppid()
    while not over and os.getppid() == parent:
        time.sleep(0.02)
    server.stop()


def work(folder: Path, seed: int, report: Path) -> None:
    """One client: puts, loads, holds, gives up."""
    rng, parent = np.random.default_rng(seed), os.getppid()
    store = connected(folder)
    wrong = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    held = []
    count = 0
    while os.getppid() == parent:
        count += 1
        # A few popular chains, and ever new ones that push the others out.
        number = int(rng.pareto(1.0) * 20) if rng.random() < 0.7 else int(rng.integers(2**40))
        tenant = TENANTS[number % len(TENANTS)]
        keys = chain(f"{number}", 1 + number % 12)
        at_most_s = float(rng.choice([0.02, 0.5, 2.0]))
        found = store.load(keys, deadline_s=at_most_s, tenant=tenant)
        data = [bytes(view) for view in found.views]
        for key, one in zip(keys[: found.still_valid()], data, strict=False):
            if one != content(key):
                os.write(wrong, f"{key.hex()[:8]}\n".encode())
        if rng.random() < 0.1:
            held.append(found)
            if len(held) > 5:  # some are held beyond their lease
                held.pop(int(rng.integers(len(held)))).close()
        else:
            found.close()
        if len(data) < len(keys):
            first = len(data)
            if rng.random() < 0.05:
                with store.reserve(keys, [BLOCK] * (len(keys) - first), first=first, tenant=tenant):
                    time.sleep(rng.random() * 0.05)
            else:
                store.put(
                    keys,
                    [content(key) for key in keys[first:]],
                    first=first,
                    tenant=tenant,
                    durable=rng.random() < 0.02,
                    deadline_s=at_most_s,
                )
        time.sleep(rng.random() * 0.01)


def sample(pid: int, prefix: str) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        f"{prefix}_anonymous_bytes": int(fields["RssAnon"].split()[0]) * 1024.0,
        f"{prefix}_threads": float(fields["Threads"]),
        f"{prefix}_descriptors": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
    }


def free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in NODES]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


@dataclass
class Pool:
    """Processes and their folders."""

    folder: Path
    rng: np.random.Generator

    def __post_init__(self) -> None:
        ports = zip(NODES, free_ports(), strict=True)
        self.peers = ",".join(f"{node}=127.0.0.1:{port}" for node, port in ports)
        for node in NODES:
            (self.folder / node).mkdir()
        self.servers = {node: self.start(node) for node in NODES}
        self.store: PrefixStore = connected(self.folder / "n0")
        self.clients = [self.start_client(i) for i in range(5)]
        self.killed_clients = self.lost_nodes = 0

    def start(self, node: str) -> int:
        return spawn(lambda: serve(self.folder / node, node, self.peers))

    def start_client(self, number: int) -> int:
        node, seed = "n0" if number < 3 else NODES[number - 2], int(self.rng.integers(2**32))
        return spawn(lambda: work(self.folder / node, seed, self.folder / "wrong"))

    def disturb(self) -> None:
        """Kill a client (not the first), now and then a server (not the first)."""
        if self.rng.random() < 0.3:
            number = int(self.rng.integers(1, 5))
            end(self.clients[number])
            self.clients[number] = self.start_client(number)
            self.killed_clients += 1
        if self.rng.random() < 0.1:
            node = any_of(self.rng, NODES[1:])
            end(self.servers[node], any_of(self.rng, (signal.SIGKILL, signal.SIGTERM)))
            self.lost_nodes += 1
            if self.rng.random() < 0.5:
                time.sleep(self.rng.random() * 3.0)  # long enough to be missed
            self.servers[node] = self.start(node)

    def sample(self) -> dict[str, float]:
        stats = self.store.stats(deadline_s=20.0)
        gauges = {k: float(v) for k, v in stats["gauges"].items() if k in BARS}
        shared = arena_path(self.folder / "n0").stat().st_size
        return (
            sample(self.servers["n0"], "server")
            | sample(self.clients[0], "client")
            | gauges
            | {"shared_memory_bytes": float(shared)}
        )

    def finish(self) -> tuple[dict[str, Any], list[str]]:
        """End all; the first server's counts, and what was not as it should be."""
        faults = []
        for pid in self.clients:
            end(pid)
        limit = time.monotonic() + SETTLE_S
        busy = ("pinned_blocks", "leases", "reservations", "overdue_slots", "sends_waiting")
        while True:
            stats = self.store.stats(deadline_s=20.0)
            gauges = stats["gauges"]
            left = {name: gauges[name] for name in busy if gauges[name]}
            if not left or time.monotonic() > limit:
                break
            time.sleep(0.2)
        if left:
            faults.append(f"left behind: {left}")
        if gauges["free_slots"] + gauges["memory_blocks"] != gauges["slots"]:
            faults.append(f"slots: {gauges}")
        if gauges["memory_used_bytes"] != gauges["memory_blocks"] * BLOCK:
            faults.append(f"bytes: {gauges}")
        self.store.close()
        for node, pid in self.servers.items():
            end(pid, signal.SIGTERM)
            if arena_path(self.folder / node).exists():
                faults.append(f"{node}: shared memory was left")
            with opened_ssd(self.folder / node) as ssd:
                report = ssd.verify()
            if not (report.is_good and report.is_exact):
                faults.append(f"{node}: SSD is not as its index says")
            if report.used_bytes > SSD_BYTES:
                faults.append(f"{node}: {report.used_bytes} bytes of SSD used")
        wrong = self.folder / "wrong"
        if wrong.exists() and wrong.read_text():
            faults.append(f"wrong blocks: {len(wrong.read_text().splitlines())}")
        return stats, faults


def growth(times: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> float:
    """By how much a straight line through the samples rises from the first to the last."""
    slope = np.polyfit(times - times[0], values, 1)[0]
    return float(slope * (times[-1] - times[0]))


def judge(times: list[float], samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    half = len(samples) // 2
    moments = np.array(times[half:])
    found = {}
    for name, (share, least) in BARS.items():
        values = np.array([one[name] for one in samples[half:]])
        mean = float(values.mean())
        found[name] = {
            "mean": round(mean, 1),
            "most": float(max(one[name] for one in samples)),
            "growth": round(growth(moments, values), 2),
            "bar": round(max(share * mean, least), 2),
        }
    return found


def soak(seconds: float, seed: int, folder: Path, show: Callable[[float, float], None]) -> Any:
    pool = Pool(folder, np.random.default_rng(seed))
    start = time.monotonic()
    times, samples = list[float](), list[dict[str, float]]()
    while (elapsed := time.monotonic() - start) < seconds:
        time.sleep(EVERY_S)
        pool.disturb()
        samples.append(pool.sample())
        times.append(round(time.monotonic() - start, 2))
        show(min(elapsed, seconds), seconds)
    stats, faults = pool.finish()
    judged = judge(times, samples)
    faults += [
        f"{name} grows by {one['growth']} over the second half, at most {one['bar']} is allowed"
        for name, one in judged.items()
        if one["growth"] > one["bar"]
    ]
    if judged["overdue_slots"]["mean"] > 0.002 * SLOTS:  # late writers are seen off at once
        faults.append(f"{judged['overdue_slots']['mean']} slots stay with late writers")
    if judged["ssd_used_bytes"]["most"] > SSD_BYTES:
        faults.append("more SSD used than given")
    thin = max(1, len(samples) // 100)
    return {
        "seconds": times[-1],
        "seed": seed,
        "killed_clients": pool.killed_clients,
        "lost_nodes": pool.lost_nodes,
        "second_half": judged,
        "counters": stats["counters"],
        "ssd_counters": stats["ssd_counters"],
        "samples": {
            "time_s": times[::thin],
            **{name: [one[name] for one in samples[::thin]] for name in BARS},
        },
        "failures": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="Where to work; default: a temporary folder.")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    socket_link.RETRY_S = 0.1
    folder = Path(tempfile.mkdtemp(prefix="store-soak-", dir=asked.folder))
    try:
        for show in progress():
            found = soak(asked.seconds, asked.seed, folder, show)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.json is not None:
        write_whole(asked.json, (json.dumps(found, indent=1) + "\n").encode())
    del found["samples"]
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
