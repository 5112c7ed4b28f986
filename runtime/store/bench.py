"""How fast the store is on this machine, beside a plain memory copy of the same run.

A server of its own is started and asked over its socket, as an engine would.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
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
from numpy.typing import NDArray

from runtime.store.arena import SHARED_MEMORY
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
    target = np.ones_like(source)  # every page present
    chains = [
        [hashlib.sha256(f"{r}/{i}".encode()).digest() for i in range(num_blocks)]
        for r in range(rounds + 1)
    ]
    long_chain = (chains[0] * (LOOKUP_KEYS // num_blocks + 1))[:LOOKUP_KEYS]
    options = (
        *("--dram", str(total * 4), "--ssd", str(total * (rounds + 4) * 2)),
        *("--block-bytes", str(block_bytes), "--eviction", "lru"),
    )
    with served(folder, *options) as store, _shared(source.shape) as shared:
        figures = _interleaved(store, chains, source, target, shared, rounds)
        newest = chains[rounds - 1]
        loads = _times(rounds, lambda _: _load(store, newest, num_blocks))
        lookups = _times(rounds * 20, lambda _: store.lookup(long_chain))
        small = _times(rounds * 100, lambda _: store.lookup(newest[:1]))
        oldest = _rates(min(rounds, 5), total, lambda r: _load(store, chains[r], num_blocks))
    private, into, out_of = figures["private"], figures["into"], figures["out of"]
    rows = [
        _row("memcpy", private, "GB/s", private),
        _row("memcpy into shared memory", into, "GB/s", private),
        _row("memcpy out of shared memory", out_of, "GB/s", private),
        _row("CRC32C", figures["sums"], "GB/s", private),
        _row("put (one copy into shared memory, CRC32C)", figures["put"], "GB/s", into),
        _row("load in place, checked", [t * 1e3 for t in loads], "ms", None),
        _row("load into buffers (checked, one copy)", figures["load"], "GB/s", out_of),
        _row("copy out of loaded blocks", figures["copy"], "GB/s", out_of),
        _row(f"lookup of {LOOKUP_KEYS} keys", [t * 1e6 for t in lookups], "us", None),
        _row("lookup of one key", [t * 1e6 for t in small], "us", None),
        _row("load from SSD (page cache may help)", oldest, "GB/s", private),
    ]
    return {
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "rounds": rounds,
        "rows": rows,
    }


def _interleaved(
    store: PrefixStore,
    chains: Sequence[Sequence[bytes]],
    source: NDArray[np.uint8],
    target: NDArray[np.uint8],
    shared: NDArray[np.uint8],
    rounds: int,
) -> dict[str, list[float]]:
    """GB/s of copies, a round of each after the other: a busy machine slows all alike.

    Every copy goes block by block between memories of the kind that the store uses: private ones
    of an engine, and shared memory. One round before the first warms all of them up.
    """
    views = list(target)
    works: dict[str, Callable[[Sequence[bytes]], object]] = {
        "private": lambda _: _copy_blocks(target, source),
        "into": lambda _: _copy_blocks(shared, source),
        "put": lambda keys: _put(store, keys, source),
        "out of": lambda _: _copy_blocks(target, shared),
        "load": lambda keys: _copy(store, keys, views),
        "copy": lambda _: found.copy_into(views),
        "sums": lambda _: [checksum(block) for block in source],
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    for keys in (chains[rounds], *chains[:rounds]):
        with contextlib.ExitStack() as leased:
            for name, work in works.items():
                if name == "copy":
                    found = leased.enter_context(store.load(keys, deadline_s=60))
                start = time.perf_counter()
                work(keys)
                rates[name].append(source.nbytes / (time.perf_counter() - start) / 1e9)
        store.flush(deadline_s=60)
    return {name: values[1:] for name, values in rates.items()}


def _copy_blocks(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    for there, here in zip(target, source, strict=True):
        np.copyto(there, here)


@contextlib.contextmanager
def _shared(shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
    """Shared memory like the store's, every page of it present."""
    size = math.prod(shape)
    with tempfile.TemporaryFile(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as file:
        file.truncate(size)
        mapped = mmap.mmap(file.fileno(), size)
        with contextlib.suppress(OSError, AttributeError, ValueError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        shared = np.frombuffer(mapped, np.uint8).reshape(shape)
        shared[:] = 0
        yield shared


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


def _times(rounds: int, work: Callable[[int], object]) -> list[float]:
    times = []
    for number in range(rounds):
        start = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - start)
    return times


def _rates(rounds: int, size: int, work: Callable[[int], object]) -> list[float]:
    return [size / seconds / 1e9 for seconds in _times(rounds, work)]


def _row(what: str, values: Sequence[float], unit: str, base: Sequence[float] | None) -> Any:
    middle = statistics.median(values)
    share = None
    if base is not None:  # of the same round where there is one: the machine's pace changes
        share = statistics.median(
            value / beside for value, beside in zip(values, base, strict=False)
        )
    return {
        "what": what,
        "unit": unit,
        "low": min(values),
        "median": middle,
        "high": max(values),
        "share": share,
    }
