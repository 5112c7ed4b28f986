"""Disks that fail, fill up, lie or hang, seen through the whole store."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.store.errors import StoreSetupError
from runtime.store.local_link import LocalLink
from runtime.store.offline import opened_ssd
from runtime.store.ssd_segments import SegmentFiles
from runtime.store.store import PrefixStore, open_store
from tests.runtime.store.conftest import BLOCK, blocks, chain
from tests.runtime.store.faults.accounts import counter, right, settled

Open = Callable[..., PrefixStore]
LENGTH = 4


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    stores: list[PrefixStore] = []

    def open_one(folder: Path | None = None, **changes: Any) -> PrefixStore:
        given: dict[str, Any] = {
            "dram": 32 * BLOCK,
            "ssd": "4MiB",
            "block_bytes": BLOCK,
            "eviction": "lru",
            "segment_bytes": 128 << 10,
        }
        stores.append(open_store(folder or tmp_path / "s", **(given | changes)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20)
    except OSError:
        pytest.skip("no mount command here")
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=20, check=True)


def ssd_of(store: PrefixStore) -> Any:
    assert isinstance(store._link, LocalLink)
    return store._link._node.state.ssd


def names(count: int) -> list[list[bytes]]:
    return [chain(f"n{i}", LENGTH) for i in range(count)]


def fill(store: PrefixStore, count: int = 20) -> list[list[bytes]]:
    for keys in names(count):
        assert store.put(keys, blocks(keys), durable=True, deadline_s=10).stored == LENGTH
    return names(count)


def segments(folder: Path) -> list[Path]:
    """Segment files, those with blocks first."""
    found = [p for p in (folder / "ssd").rglob("*") if p.is_file() and "index" not in p.parts[-2]]
    return sorted((p for p in found if p.stat().st_size > 16 << 10), key=lambda p: p.name)


def test_a_full_disk_skips_stores_in_bounded_time_and_serves_what_it_has(
    small_disk: Path, opened: Open
) -> None:
    """Rows 1, 5, 27: the tier was promised more than others leave it."""
    given: dict[str, Any] = {"ssd": 1_900_000, "dram": 512 * BLOCK}
    store = opened(small_disk / "s", **given)
    (small_disk / "of somebody else").write_bytes(bytes(900_000))
    stored = {}
    start = time.monotonic()
    for number in range(160):
        keys = chain(f"d{number}", LENGTH)
        put = store.put(keys, blocks(keys), durable=number % 8 == 0, deadline_s=1.0)
        stored[number] = put.stored
    assert time.monotonic() - start < 60
    store.flush(deadline_s=10)
    assert counter(store, "flushes_failed") > 0
    assert store.stats()["ssd_counters"]["disk_full"] >= 1
    for number in range(160):
        right(store, chain(f"d{number}", LENGTH))
    settled(store)
    store.close()
    with opened_ssd(small_disk / "s") as ssd:
        report = ssd.verify()
    assert report.is_good
    assert report.is_exact
    again = opened(small_disk / "s", **given)
    there = sum(right(again, chain(f"d{number}", LENGTH)) for number in range(160))
    assert there == report.blocks > 40


def test_a_disk_that_turns_read_only_serves_on_and_stores_in_memory(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 1, 23: as a kernel does after an error of the device."""
    store = opened()
    chains = fill(store, 10)
    keys = chain("more", LENGTH)
    with monkeypatch.context() as patch:

        def refuse(*args: Any) -> Any:
            raise OSError(errno.EROFS, "Read-only file system")

        for name in ("create", "write"):
            patch.setattr(SegmentFiles, name, refuse)
        put = store.put(keys, blocks(keys), durable=True, deadline_s=5.0)
        assert (put.stored, put.reason) == (0, "late")
        assert right(store, keys) == LENGTH  # not on disk, as was said, but in memory
        assert counter(store, "flushes_failed") >= LENGTH
        assert store.stats()["ssd_counters"]["write_errors"] >= 1
        for one in chains:
            assert right(store, one) == LENGTH
        settled(store)
    store.close()
    again = opened()
    for one in chains:
        assert right(again, one) == LENGTH
    assert right(again, keys) == 0


def test_a_read_only_disk_is_said_at_the_start_and_read_again_later(
    small_disk: Path, opened: Open
) -> None:
    """Row 23: a missing ability is found at the start, not by a request."""
    store = opened(small_disk / "s", ssd="1MiB")
    chains = fill(store, 10)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], timeout=20, check=True)
    with pytest.raises(StoreSetupError, match="Read-only") as error:
        opened(small_disk / "s", ssd="1MiB")
    assert "\n" not in str(error.value)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], timeout=20, check=True)
    again = opened(small_disk / "s", ssd="1MiB")
    for one in chains:
        assert right(again, one) == LENGTH


@pytest.mark.parametrize("while_open", [True, False], ids=["running", "down"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "unlink", "zero"])
def test_damaged_segment_files_never_give_a_wrong_byte(
    tmp_path: Path, opened: Open, damage: str, while_open: bool
) -> None:
    """Rows 1, 3, 22."""
    store = opened()
    chains = fill(store, 40)
    if not while_open:
        store.close()
    files = segments(tmp_path / "s")
    assert len(files) >= 2
    rng = np.random.default_rng(5)
    if damage == "flip":
        for path in files:
            with path.open("r+b") as file:
                for at in rng.integers(0, path.stat().st_size, 40):
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ (1 << int(rng.integers(8)))]))
    elif damage == "truncate":
        for path in files:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2 + 100)
    elif damage == "swap":
        first, second = files[0].read_bytes(), files[1].read_bytes()
        for path, data in ((files[0], second), (files[1], first)):
            with path.open("r+b") as file:
                file.write(data)
                file.truncate(len(data))
    elif damage == "unlink":
        for path in files[::2]:
            path.unlink()
    else:
        for path in files:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 3)
                file.write(bytes(path.stat().st_size // 3))
    if not while_open:
        store = opened()
    found = sum(right(store, keys) for keys in chains)
    if not (while_open and damage == "unlink"):  # an open file outlives its name
        assert found < 40 * LENGTH
    for keys in chains:  # what was lost is stored again, and then it is there
        have = right(store, keys)
        put = store.put(keys, blocks(keys), durable=True, deadline_s=10)
        assert have + put.stored >= 1
        assert right(store, keys) == LENGTH
    settled(store)
    store.close()
    with opened_ssd(tmp_path / "s") as ssd:
        ssd.verify()  # drops what nobody has read since
        report = ssd.verify()
    assert report.bad == {}
    assert report.is_exact
    again = opened()
    for keys in chains:
        right(again, keys)


def test_a_write_that_fails_makes_its_block_no_hit_after_a_restart(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1: the key of a failed store stays invisible."""
    store = opened()
    write, ssd = ssd_of(store).write, ssd_of(store)
    monkeypatch.setattr(ssd, "write", lambda todo, deadline: write(todo[:1], deadline))
    keys = chain("a", LENGTH)
    assert store.put(keys, blocks(keys), durable=True, deadline_s=5).stored <= 1
    assert store.flush()
    assert counter(store, "flushes_failed") >= LENGTH - 1
    assert right(store, keys) == LENGTH
    store.close()
    again = opened()
    assert again.lookup(keys) == right(again, keys) == counter(again, "blocks_recovered_on_ssd")
    assert again.lookup(keys) < LENGTH


def test_a_disk_that_hangs_holds_up_no_put_and_no_load_from_memory(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 5, 16, 26, 28: queues stay short, deadlines hold, and afterwards all is well."""
    store = opened(dram=128 * BLOCK)
    chains = fill(store, 5)
    ssd, gate = ssd_of(store), threading.Event()
    write = ssd.write

    def hang(todo: Any, deadline: Any) -> int:
        gate.wait(30)
        return int(write(todo, deadline))

    monkeypatch.setattr(ssd, "write", hang)
    start = time.monotonic()
    for number in range(100):
        keys = chain(f"h{number}", LENGTH)
        store.put(keys, blocks(keys), deadline_s=1.0)
        right(store, keys, 1.0)
    put = store.put(chain("d", 1), blocks(chain("d", 1)), durable=True, deadline_s=0.2)
    assert put.stored == 0
    assert not store.flush(deadline_s=0.1)
    assert time.monotonic() - start < 25
    assert store.stats()["gauges"]["flushes_waiting"] <= 128 + 2 * 64
    assert counter(store, "flushes_dropped") > 0
    gate.set()
    assert store.flush(deadline_s=20)
    settled(store)
    for keys in chains:
        assert right(store, keys) == LENGTH


def test_reads_that_hang_cost_their_deadline_and_block_nobody_else(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 21, 26."""
    store = opened()
    chains = fill(store, 20)
    hot = chain("hot", LENGTH)
    store.put(hot, blocks(hot))
    ssd, gate = ssd_of(store), threading.Event()
    read = ssd.read_into

    def hang(key: bytes, view: memoryview, deadline: Any) -> Any:
        gate.wait(min(30.0, deadline.left_s()))
        return read(key, view, deadline)

    cold = next(keys for keys in chains if store._link._node.state.memory.get(keys[0]) is None)  # type: ignore[attr-defined]
    monkeypatch.setattr(ssd, "read_into", hang)
    start = time.monotonic()
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(right(store, cold, 0.5)))
    thread.start()
    for _ in range(20):
        assert right(store, hot, 1.0) == LENGTH
    thread.join(20)
    assert results == [0]
    assert time.monotonic() - start < 15
    gate.set()
    assert right(store, cold) == LENGTH  # late is not lost
    settled(store)


def test_a_store_whose_folder_vanishes_goes_on_in_memory(tmp_path: Path, opened: Open) -> None:
    """Rows 1, 8: somebody cleans up under the store."""
    import shutil

    store = opened()
    fill(store, 10)
    shutil.rmtree(tmp_path / "s" / "ssd")
    stored = []
    for number in range(400):  # files that are open take blocks for a while yet
        keys = chain(f"v{number}", LENGTH)
        stored.append(store.put(keys, blocks(keys), deadline_s=2.0).stored)
        assert right(store, keys, 5.0) == stored[-1]
        if number >= 20 and counter(store, "flushes_failed"):
            break
    for keys in names(10):
        right(store, keys, 2.0)
    settled(store)
    assert sum(stored) > 20  # less than all where blocks on their way to the disk filled memory
    assert counter(store, "flushes_failed") > 0
