"""Kills clients and servers of the prefix store with SIGKILL, under load, and counts what is lost.

    python benchmarks/store_crash.py [--kills 1000] [--seed 1] [--index-blocks 100000] [--json FILE]

One server and five clients (three writers, two readers) work in processes of their own on small
blocks, in memory and on SSD. At random moments one of them is killed and started again. A writer
notes in a journal what the store said is stored, with one write() a put, so the journal is right
whatever dies. After each death of the server the blocks of the journal since the death before are
loaded and compared, and 20 older chains; at the end of every era of 100 kills all of them, twice:
from memory and SSD, and after a clean stop from SSD alone. Bytes follow from keys, so a wrong one
is always seen. Writers also reserve room, write to it and never commit: nobody may ever see that.

Exit code 1 if a bar is missed: >= 99.9 % of committed blocks back, no uncommitted one visible, no
wrong byte, accounts exact, 100,000 blocks indexed within 2 s (only judged if that many are asked).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from runtime.store import socket_link  # noqa: E402
from runtime.store.arena import arena_path  # noqa: E402
from runtime.store.config import StoreConfig  # noqa: E402
from runtime.store.deadline import Deadline  # noqa: E402
from runtime.store.errors import StoreUnavailableError  # noqa: E402
from runtime.store.logs import log_as_json  # noqa: E402
from runtime.store.node import StoreNode  # noqa: E402
from runtime.store.offline import opened_ssd  # noqa: E402
from runtime.store.ssd import SsdTier  # noqa: E402
from runtime.store.store import PrefixStore, connect, store_config  # noqa: E402
from runtime.store.store_server import ServerConfig, StoreServer  # noqa: E402
from traces.whole_file import write_whole  # noqa: E402

BLOCK = 1024
SLOTS = 6000  # fewer than the blocks of an era, so that some come back from SSD alone
ERA_KILLS = 100
ERA_CHAINS = 900  # of each writer
SERVER_SHARE = 0.35
RESERVATION_S = 2.0
WAIT_S = 60.0


def chain(name: str, length: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(length)]


def content(key: bytes, size: int = BLOCK) -> bytes:
    return hashlib.shake_128(key).digest(size)


@dataclass
class Result:
    """What the run found; bars are judged by ``failures``."""

    kills: int = 0
    server_kills: int = 0
    writer_kills: int = 0
    reader_kills: int = 0
    committed_blocks: int = 0
    blocks_asked: int = 0
    blocks_lost: int = 0
    blocks_lost_after_clean_stop: int = 0
    wrong_blocks: int = 0
    uncommitted_visible: int = 0
    accounts_wrong: list[str] = field(default_factory=list)
    blocks_read_by_clients: int = 0
    restart_s_median: float = 0.0
    restart_s_longest: float = 0.0
    index_blocks: int = 0
    ssd_index_s: float = 0.0
    ssd_index_cpu_s: float = 0.0
    node_restart_s: float = 0.0
    node_restart_cpu_s: float = 0.0
    seconds: float = 0.0

    def failures(self) -> list[str]:
        found = list(self.accounts_wrong)
        most = {
            "blocks_lost": 0.001 * self.blocks_asked,
            "blocks_lost_after_clean_stop": 0.001 * self.committed_blocks,
            "wrong_blocks": 0,
            "uncommitted_visible": 0,
        }
        found += [f"{k}: {getattr(self, k)}" for k, bar in most.items() if getattr(self, k) > bar]
        if self.index_blocks >= 100_000 and self.ssd_index_s > 2.0:
            found.append(f"{self.index_blocks} blocks indexed in {self.ssd_index_s:.2f} s")
        return found


Item = TypeVar("Item")


def any_of(rng: np.random.Generator, items: Iterable[Item]) -> Item:
    among = list(items)
    return among[int(rng.integers(len(among)))]


# --- processes -----------------------------------------------------------------------------


def spawn(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"child failed: {error!r}\n".encode())
        finally:
            os._exit(code)
    return pid


def serve(folder: Path) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    log_as_json("warning")
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(1))
    config = store_config(
        folder,
        dram=SLOTS * BLOCK,
        ssd="512MiB",
        block_bytes=BLOCK,
        node="n",
        reservation_s=RESERVATION_S,
        segment_bytes=2 << 20,
    )
    server = StoreServer(ServerConfig(store=config, socket=folder / "s"))
    parent = os.getppid()
    while not over and os.getppid() == parent:
        time.sleep(0.02)
    server.stop()


def connected(folder: Path, seconds: float = WAIT_S) -> PrefixStore:
    end = time.monotonic() + seconds
    while True:
        try:
            return connect(folder / "s")
        except StoreUnavailableError:
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


def note(file: int, line: str) -> None:
    os.write(file, f"{line}\n".encode())


def write(folder: Path, number: int, life: int, seed: int) -> None:
    """Puts new chains, some shared with the other writers; leaves some room uncommitted."""
    rng = np.random.default_rng(seed)
    journal = os.open(folder / f"journal-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store, parent, count = connected(folder), os.getppid(), 0
    while os.getppid() == parent and count < ERA_CHAINS // 4:
        count += 1
        owner = "shared" if rng.random() < 0.2 else str(number)
        name, length = f"{owner}-{0 if owner == 'shared' else life}-{count}", 1 + count % 6
        keys = chain(name, length)
        if rng.random() < 0.15:
            keys = chain(f"u-{name}", length)
            note(journal, f"u {name} {length}")
            with store.reserve(keys, [BLOCK] * length) as room:
                for buffer in room.buffers:
                    buffer[: BLOCK // 2] = b"\xee" * (BLOCK // 2)
                time.sleep(rng.random() * 0.02)
            continue
        put = store.put(
            keys, [content(key) for key in keys], durable=rng.random() < 0.1, deadline_s=2.0
        )
        if put.stored == length and not put.reason:
            note(journal, f"c {name} {length}")
        elif put.reason == "unavailable":
            time.sleep(0.02)
        time.sleep(rng.random() * 0.03)
    while os.getppid() == parent:
        time.sleep(0.1)


class Journals:
    """What all writers have noted so far."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[Path, int]()
        self.committed: dict[str, int] = {}
        self.uncommitted: dict[str, int] = {}

    def update(self) -> list[str]:
        new = []
        for path in sorted(self._folder.glob("journal-*")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode().splitlines():
                kind, name, length = line.split()
                (self.committed if kind == "c" else self.uncommitted)[name] = int(length)
                if kind == "c":
                    new.append(name)
        return new


def read(folder: Path, number: int, seed: int) -> None:
    rng, journals = np.random.default_rng(seed), Journals(folder)
    report = os.open(folder / f"reader-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store, parent = connected(folder), os.getppid()
    count = 0
    while os.getppid() == parent:
        if count % 50 == 0:
            journals.update()
        count += 1
        if not journals.committed:
            time.sleep(0.05)
            count = 0
            continue
        name = any_of(rng, journals.committed)
        keys = chain(name, journals.committed[name])
        if rng.random() < 0.5:
            with store.load(keys, deadline_s=2.0) as found:
                data = [bytes(view) for view in found.views]
                time.sleep(rng.random() * 0.01)
                again = [bytes(view) for view in found.views][: found.still_valid()]
            right = [content(key) for key in keys[: len(data)]]
            wrong = sum(a != b for a, b in zip(again, right, strict=False))
            wrong += sum(a != b for a, b in zip(data[: len(again)], right, strict=False))
            size = len(data)
        else:
            targets = [bytearray(BLOCK) for _ in keys]
            size = store.load_into(keys, targets, deadline_s=2.0)
            wrong = sum(targets[i] != content(keys[i]) for i in range(size))
        seen = 0
        if journals.uncommitted and rng.random() < 0.3:
            name = any_of(rng, journals.uncommitted)
            seen = store.lookup(chain(f"u-{name}", journals.uncommitted[name]))
        if size or wrong or seen:
            note(report, f"{size} {wrong} {seen}")
        time.sleep(rng.random() * 0.02)


# --- the run -------------------------------------------------------------------------------


class Era:
    """One store, its server and clients, from an empty folder on."""

    def __init__(self, folder: Path, rng: np.random.Generator, result: Result) -> None:
        self.folder, self.rng, self.result = folder, rng, result
        self.journals = Journals(folder)
        self.restarts: list[float] = []
        self.lives = 0
        self.server = self.start_server()
        self.clients = {("w", i): self.start_client(("w", i)) for i in range(3)}
        self.clients |= {("r", i): self.start_client(("r", i)) for i in range(2)}

    def start_server(self) -> int:
        start = time.monotonic()
        pid = spawn(lambda: serve(self.folder))
        self.store = connected(self.folder)
        self.restarts.append(time.monotonic() - start)
        return pid

    def start_client(self, client: tuple[str, int]) -> int:
        kind, number = client
        self.lives += 1
        life, seed = self.lives, int(self.rng.integers(2**32))
        if kind == "w":
            return spawn(lambda: write(self.folder, number, life, seed))
        return spawn(lambda: read(self.folder, number, seed))

    def kill_one(self) -> None:
        self.result.kills += 1
        if self.rng.random() < SERVER_SHARE:
            self.result.server_kills += 1
            self.store.close()
            end(self.server)
            self.server = self.start_server()
            self.compare([*self.journals.update(), *self.sample(20)])
            return
        client = any_of(self.rng, self.clients)
        if client[0] == "w":
            self.result.writer_kills += 1
        else:
            self.result.reader_kills += 1
        end(self.clients[client])
        self.clients[client] = self.start_client(client)

    def sample(self, count: int) -> list[str]:
        names = self.journals.committed
        return [any_of(self.rng, names) for _ in range(count if names else 0)]

    def compare(self, names: list[str], store: PrefixStore | None = None) -> int:
        """Load chains and compare every byte; how many blocks are not there."""
        result, lost = self.result, 0
        for name in dict.fromkeys(names):
            length = self.journals.committed[name]
            keys, targets = chain(name, length), [bytearray(BLOCK) for _ in range(length)]
            found = (store or self.store).load_into(keys, targets, deadline_s=10.0)
            result.wrong_blocks += sum(targets[i] != content(keys[i]) for i in range(found))
            lost += length - found
            if store is None:
                result.blocks_asked += length
        if store is None:
            result.blocks_lost += lost
        return lost

    def finish(self) -> None:
        for pid in self.clients.values():
            end(pid)
        self.journals.update()
        for name, length in self.journals.uncommitted.items():
            self.result.uncommitted_visible += self.store.lookup(chain(f"u-{name}", length))
        names = list(self.journals.committed)
        self.result.committed_blocks += sum(self.journals.committed.values())
        self.compare(names)
        if not self.store.flush(deadline_s=WAIT_S):
            self.result.accounts_wrong.append("not all was flushed")
        self.check_gauges()
        for path in self.folder.glob("reader-*"):
            for line in path.read_text().splitlines():
                size, wrong, seen = map(int, line.split())
                self.result.blocks_read_by_clients += size
                self.result.wrong_blocks += wrong
                self.result.uncommitted_visible += seen
        self.store.close()
        end(self.server, signal.SIGTERM)
        if arena_path(self.folder).exists():
            self.result.accounts_wrong.append("shared memory was left")
        with opened_ssd(self.folder) as ssd:
            report = ssd.verify()
        if not (report.is_good and report.is_exact):
            self.result.accounts_wrong.append(f"SSD: {asdict(report)}")
        self.server = self.start_server()
        self.result.blocks_lost_after_clean_stop += self.compare(names, self.store)
        self.store.close()
        end(self.server, signal.SIGTERM)

    def check_gauges(self) -> None:
        """Nothing stays pinned or reserved; every slot and byte is accounted for."""
        limit = time.monotonic() + WAIT_S
        while True:
            gauges = self.store.stats(deadline_s=10.0).get("gauges", {})
            left = {
                name: gauges.get(name)
                for name in ("pinned_blocks", "leases", "reservations", "overdue_slots")
                if gauges.get(name) != 0
            }
            if not left or time.monotonic() > limit:
                break
            time.sleep(0.1)
        if left:
            self.result.accounts_wrong.append(f"left behind: {left}")
        if gauges["free_slots"] + gauges["memory_blocks"] != gauges["slots"]:
            self.result.accounts_wrong.append(f"slots: {gauges}")
        if gauges["memory_used_bytes"] != gauges["memory_blocks"] * BLOCK:
            self.result.accounts_wrong.append(f"bytes: {gauges}")


def end(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
    os.waitpid(pid, 0)


def crash(kills: int, seed: int, folder: Path, show: Callable[[float, float], None]) -> Result:
    """Kill so many processes; era after era in folders of their own."""
    rng, result, restarts = np.random.default_rng(seed), Result(), list[float]()
    start = time.monotonic()
    while result.kills < kills:
        here = folder / f"era-{result.kills}"
        here.mkdir()
        era = Era(here, rng, result)
        for _ in range(min(ERA_KILLS, kills - result.kills)):
            time.sleep(rng.uniform(0.05, 0.6))
            era.kill_one()
            show(result.kills, kills)
        era.finish()
        restarts += era.restarts
        shutil.rmtree(here)
    restarts.sort()
    result.restart_s_median = round(restarts[len(restarts) // 2], 3)
    result.restart_s_longest = round(restarts[-1], 3)
    result.seconds = round(time.monotonic() - start, 1)
    return result


def index(blocks: int, folder: Path, result: Result) -> None:
    """How long a store of many blocks takes to be there again after a kill."""
    folder.mkdir()
    config = StoreConfig(
        folder=folder, dram_bytes=blocks // 10 * 256, ssd_bytes=blocks * 12_000, block_bytes=256
    )

    def fill() -> None:
        node = StoreNode(config)
        assert node.state.ssd is not None
        node.close()
        tier = SsdTier.open(folder / "ssd", capacity_bytes=config.ssd_bytes)
        from runtime.store.blocks import BlockInfo, checksum

        for start in range(0, blocks, 1000):
            part = []
            for number in range(start, min(start + 1000, blocks)):
                key = number.to_bytes(32, "big")
                data = content(key, 256)
                info = BlockInfo(key, b"", key, 0, 0, 256, checksum(data))
                part.append((info, memoryview(data)))
            assert tier.write(part, Deadline.after(WAIT_S)) == len(part)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(spawn(fill), 0)
    start, cpu_start = time.monotonic(), time.process_time()
    tier = SsdTier.open(folder / "ssd", capacity_bytes=config.ssd_bytes)
    result.ssd_index_s = round(time.monotonic() - start, 3)
    result.ssd_index_cpu_s = round(time.process_time() - cpu_start, 3)
    result.index_blocks = len(tier)
    tier.close()
    start, cpu_start = time.monotonic(), time.process_time()
    node = StoreNode(config)
    result.node_restart_s = round(time.monotonic() - start, 3)
    result.node_restart_cpu_s = round(time.process_time() - cpu_start, 3)
    if node.state.counters["blocks_recovered_on_ssd"] != blocks:
        result.accounts_wrong.append("not all blocks were indexed")
    node.close()


def progress() -> Iterator[Callable[[float, float], None]]:
    """A bar without a thread: a process with threads must not fork."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("killing")
        yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--index-blocks", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="Where to work; default: a temporary folder.")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    socket_link.RETRY_S = 0.05  # clients find a new server at once: more load between two kills
    folder = Path(tempfile.mkdtemp(prefix="store-crash-", dir=asked.folder))
    try:
        for show in progress():
            result = crash(asked.kills, asked.seed, folder, show)
        if asked.index_blocks:
            index(asked.index_blocks, folder / "index", result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failures = result.failures()
    found: dict[str, Any] = {"seed": asked.seed, **asdict(result), "failures": failures}
    text = json.dumps(found, indent=2) + "\n"
    sys.stdout.write(text)
    if asked.json is not None:
        write_whole(asked.json, text.encode())
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
