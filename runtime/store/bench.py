"""How fast the store is on this machine, beside a plain memory copy of the same run.

A server of its own is started and asked over its socket, as an engine would.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.store.blocks import checksum
from runtime.store.config import LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError, StoreUnavailableError
from runtime.store.store import PrefixStore, connect

START_S = 30.0
LOOKUP_KEYS = 512


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[PrefixStore]:
    """A server process on a folder, and a client of it.

    Raises:
        StoreSetupError: If the server does not come up.
    """
    socket = folder / "store.sock"
    command = [sys.executable, "-m", "runtime", "store", "serve", str(folder), *options]
    log = (folder / "server.log").open("wb")
    process = subprocess.Popen(
        [*command, "--socket", str(socket), "--log-level", "warning"], stderr=log
    )
    deadline = Deadline.after(START_S)
    store = None
    try:
        while store is None:
            if process.poll() is not None or deadline.is_over:
                text = (folder / "server.log").read_text("utf-8", "replace").strip()
                last = text.splitlines()[-1] if text else "it says nothing"
                raise StoreSetupError(f"the server did not start: {last}")
            try:
                store = connect(socket)
            except StoreUnavailableError:
                time.sleep(0.05)
        yield store
    finally:
        if store is not None:
            store.close()
        process.terminate()
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def bench_store(
    folder: Path | None, *, block_bytes: int, num_blocks: int, rounds: int
) -> dict[str, Any]:
    """Medians and spreads.

    Args:
        folder: Where the server works; None: a temporary folder.
        block_bytes: Bytes of a block.
        num_blocks: Blocks of the prefix that is put and loaded.
        rounds: Repetitions.

    Raises:
        StoreSetupError: If a size or folder is none, or the server does not come up.
    """
    if not LEAST_BLOCK_BYTES <= block_bytes <= MOST_BLOCK_BYTES:
        raise StoreSetupError(
            f"block_bytes: must be >= {LEAST_BLOCK_BYTES} B and at most 1 GiB, found {block_bytes}"
        )
    try:
        made = Path(tempfile.mkdtemp(prefix="prefix-store-", dir=folder))
    except OSError as error:
        raise StoreSetupError(f"{folder}: {error.strerror}: bench works in a folder") from error
    try:
        return _measure(made, block_bytes, num_blocks, rounds)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _measure(folder: Path, block_bytes: int, num_blocks: int, rounds: int) -> dict[str, Any]:
    total = block_bytes * num_blocks
    source = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    chains = [
        [hashlib.sha256(f"{r}/{i}".encode()).digest() for i in range(num_blocks)]
        for r in range(rounds + 1)
    ]
    long_chain = (chains[0] * (LOOKUP_KEYS // num_blocks + 1))[:LOOKUP_KEYS]
    options = (
        *("--dram", str(total * 3), "--ssd", str(total * (rounds + 4) * 2)),
        *("--block-bytes", str(block_bytes), "--eviction", "lru"),
    )
    rows = []
    with served(folder, *options) as store:
        memcpy = _rates(rounds, total, lambda _: np.copyto(target, source))
        rows.append(_row("memcpy", memcpy, "GB/s", memcpy))
        sums = _rates(rounds, total, lambda _: [checksum(block) for block in source])
        rows.append(_row("CRC32C", sums, "GB/s", memcpy))
        puts = _rates(
            rounds, total, lambda r: _put(store, chains[r], source), between=lambda: store.flush()
        )
        rows.append(_row("put (one copy, CRC32C)", puts, "GB/s", memcpy))
        store.flush(deadline_s=60)
        newest = chains[rounds - 1]
        loads = _times(rounds, lambda _: _load(store, newest, num_blocks))
        rows.append(_row("load in place, checked", [t * 1e3 for t in loads], "ms", None))
        views = [target[i] for i in range(num_blocks)]
        copies = _rates(rounds, total, lambda _: _copy(store, newest, views))
        rows.append(_row("load into buffers (checked, one copy)", copies, "GB/s", memcpy))
        with store.load(newest, deadline_s=10) as found:
            reads = _rates(rounds, total, lambda _: found.copy_into(views))
        rows.append(_row("copy out of loaded blocks", reads, "GB/s", memcpy))
        lookups = _times(rounds * 20, lambda _: store.lookup(long_chain))
        rows.append(_row(f"lookup of {LOOKUP_KEYS} keys", [t * 1e6 for t in lookups], "us", None))
        small = _times(rounds * 100, lambda _: store.lookup(newest[:1]))
        rows.append(_row("lookup of one key", [t * 1e6 for t in small], "us", None))
        oldest = _rates(min(rounds, 5), total, lambda r: _load(store, chains[r], num_blocks))
        rows.append(_row("load from SSD (page cache may help)", oldest, "GB/s", memcpy))
    return {
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "rounds": rounds,
        "rows": rows,
    }


def _put(store: PrefixStore, keys: Sequence[bytes], source: Any) -> None:
    put = store.put(keys, [block.data for block in source], deadline_s=60)
    if put.stored != len(keys):
        raise StoreSetupError(f"only {put.stored} of {len(keys)} blocks were stored: {put.reason}")


def _load(store: PrefixStore, keys: Sequence[bytes], wanted: int) -> None:
    with store.load(keys, deadline_s=60) as found:
        if found.leading != wanted:
            raise StoreSetupError(f"only {found.leading} of {wanted} blocks were found")


def _copy(store: PrefixStore, keys: Sequence[bytes], views: Sequence[Any]) -> None:
    if store.load_into(keys, [view.data for view in views], deadline_s=60) != len(keys):
        raise StoreSetupError("not all blocks were found")


def _times(
    rounds: int, work: Callable[[int], object], between: Callable[[], object] | None = None
) -> list[float]:
    times = []
    for number in range(rounds):
        start = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - start)
        if between is not None:
            between()
    return times


def _rates(
    rounds: int,
    size: int,
    work: Callable[[int], object],
    between: Callable[[], object] | None = None,
) -> list[float]:
    return [size / seconds / 1e9 for seconds in _times(rounds, work, between)]


def _row(what: str, values: Sequence[float], unit: str, base: Sequence[float] | None) -> Any:
    middle = statistics.median(values)
    share = None if base is None else middle / statistics.median(base)
    return {
        "what": what,
        "unit": unit,
        "low": min(values),
        "median": middle,
        "high": max(values),
        "share": share,
    }
