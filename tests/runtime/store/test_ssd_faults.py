"""Disks that fill up, fail, hang or lie: fewer blocks, never wrong ones, and all of it counted."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.ssd import SsdTier
from runtime.store.ssd_health import Backoff
from runtime.store.ssd_index import BlockIndex
from runtime.store.ssd_layout import HEADER_BYTES, PAGE_BYTES, record_bytes
from runtime.store.ssd_segments import SegmentFiles

CAPACITY = 1 << 20


def block(number: int, length: int = 5000) -> tuple[BlockInfo, memoryview]:
    data = hashlib.shake_128(b"data %d" % number).digest(length)
    key = hashlib.sha256(b"key %d" % number).digest()
    return BlockInfo(key, b"", key, 0, number, length, checksum(data)), memoryview(data)


def soon() -> Deadline:
    return Deadline.after(60)


def is_served(tier: SsdTier, number: int) -> bool:
    info, data = block(number)
    room = memoryview(bytearray(info.length))
    got = tier.read_into(info.key, room, soon())
    assert got is None or (got == info and room == data), "served, but wrong"
    return got is not None


def dropped(tier: SsdTier) -> dict[str, int]:
    counts = tier.counters
    return {name: n for name, n in counts.items() if n and name.startswith("dropped")}


def written(folder: Path, count: int = 30) -> list[Path]:
    """A closed tier with some blocks; its segment files."""
    tier = SsdTier.open(folder, capacity_bytes=CAPACITY)
    assert tier.write([block(number) for number in range(count)], soon()) == count
    tier.close()
    return sorted((folder / "segments").iterdir())


def flip(path: Path, offset: int, bit: int = 3) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FaultyFiles(SegmentFiles):
    """Real files; each kind of call asks ``fault`` first, which may raise or wait."""

    def __init__(self, folder: Path, fault: Callable[[str], None]) -> None:
        super().__init__(folder)
        self._fault = fault

    def create(self, segment: int) -> int:
        self._fault("create")
        return super().create(segment)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        self._fault("write")
        half = b"".join(bytes(buffer) for buffer in buffers)
        return super().write(descriptor, [half[: len(half) // 2 + 1]], offset)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        self._fault("read")
        first = memoryview(buffers[0])
        return super().read(descriptor, [first[: len(first) // 2 + 1]], offset)

    def sync(self, descriptor: int) -> None:
        self._fault("sync")
        super().sync(descriptor)

    def sync_folder(self) -> None:
        self._fault("sync_folder")
        super().sync_folder()

    def truncate(self, segment: int, size: int) -> None:
        self._fault("truncate")
        super().truncate(segment, size)

    def unlink(self, segment: int) -> None:
        self._fault("unlink")
        super().unlink(segment)


class FaultyIndex(BlockIndex):
    """Fails within LMDB's own write; whether the transaction is on disk then is anybody's guess."""

    fault: Callable[[str], None]
    is_written_anyway = False

    def _write(self, *arguments: Any) -> None:
        if self.is_written_anyway:
            super()._write(*arguments)
        try:
            self.fault("index")
        except OSError as error:
            raise lmdb.DiskError(str(error)) from error
        super()._write(*arguments)


class Trouble:
    """Makes the next calls of one kind fail."""

    def __init__(self) -> None:
        self.kind = ""
        self.skip = 0
        self.errno = errno.EIO

    def __call__(self, kind: str) -> None:
        if kind != self.kind:
            return
        if self.skip:
            self.skip -= 1
            return
        raise OSError(self.errno, os.strerror(self.errno))


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[False, True], ids=["", "index-written-anyway"])
def tier(
    tmp_path: Path, trouble: Trouble, clock: Clock, request: pytest.FixtureRequest
) -> Iterator[SsdTier]:
    def index(path: Path, store: bytes) -> BlockIndex:
        made = FaultyIndex(path, store)
        made.fault = trouble
        made.is_written_anyway = request.param
        return made

    opened = SsdTier.open(
        tmp_path / "ssd",
        capacity_bytes=CAPACITY,
        files=lambda path: FaultyFiles(path, trouble),
        index=index,
        clock=clock,
    )
    yield opened
    trouble.kind = ""
    opened.close()


@pytest.mark.parametrize("skip", [0, 1, 5])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("kind", ["write", "sync", "create", "sync_folder", "index"])
def test_a_disk_that_fails_takes_fewer_blocks_and_recovers(
    tier: SsdTier, trouble: Trouble, clock: Clock, kind: str, number: int, skip: int
) -> None:
    """Before, during and after: what was durable stays, what was not is whole or absent."""
    assert tier.write([block(n) for n in range(10)], soon()) == 10
    trouble.kind, trouble.skip, trouble.errno = kind, skip, number
    durable = tier.write([block(n) for n in range(10, 40)], soon())
    is_hit = durable < 30
    assert is_hit or skip
    assert tier.is_degraded == is_hit
    assert (
        tier.counters["disk_full" if number == errno.ENOSPC and kind != "index" else "write_errors"]
        == is_hit
    )
    assert all(is_served(tier, n) for n in range(10 + durable))
    assert not any(is_served(tier, n) for n in range(10 + durable, 40))
    if is_hit:
        assert tier.write([block(50)], soon()) == 0
        assert tier.counters["writes_skipped"] == 1, "while it rests nothing is tried"
    trouble.kind = ""
    clock.now += 60
    assert tier.write([block(n) for n in range(50, 60)], soon()) == 10
    assert not tier.is_degraded
    assert tier.verify().is_good
    assert tier.used_bytes == sum(tier._files.sizes().values())


def test_a_removal_that_the_index_did_not_learn_is_told_again(
    tier: SsdTier, trouble: Trouble, clock: Clock
) -> None:
    """The disk has its room back at once, and in the end index and tier agree."""
    tier.write([block(n) for n in range(40)], soon())
    trouble.kind = "index"
    tier.remove([block(n)[0].key for n in range(40)])
    assert tier.write([block(100)], soon()) == 0
    assert tier.live_bytes == 0 and not any(is_served(tier, n) for n in range(40))
    trouble.kind = ""
    clock.now += 60
    assert tier.write([block(100)], soon()) == 1
    assert len(tier._files.sizes()) == 1
    assert tier.verify().is_good


@pytest.mark.parametrize("kind", ["write", "sync", "create", "index", "read", "unlink"])
def test_compaction_on_a_failing_disk_loses_no_block(
    tier: SsdTier, trouble: Trouble, clock: Clock, kind: str
) -> None:
    """A block has its old or its new place, and a reopened index knows which."""
    tier.write([block(n) for n in range(40)], soon())
    tier.remove([block(n)[0].key for n in range(1, 40, 2)])
    trouble.kind, trouble.skip = kind, 3 if kind in ("write", "read") else 0
    if kind == "read":
        trouble.errno = errno.ENOMEM
    tier.compact(soon(), 0.1)
    trouble.kind = ""
    clock.now += 60
    assert all(is_served(tier, n) for n in range(0, 40, 2))
    assert tier.write([block(200)], soon()) == 1
    assert tier.verify().is_good
    assert tier.compact(soon(), 0.1) > 0 or kind == "unlink"
    assert all(is_served(tier, n) for n in range(0, 40, 2))
    assert tier.verify().is_good


def test_a_record_that_cannot_be_cut_off_is_dead_weight_and_counted(
    tier: SsdTier, trouble: Trouble, clock: Clock
) -> None:
    """Half a record stays in its segment; nothing is written behind it."""

    def twice(kind: str) -> None:
        if kind in ("write", "truncate"):
            trouble.skip -= kind == "write"
            if trouble.skip < 0:
                raise OSError(errno.EIO, "gone")

    trouble.skip = 3
    tier._files._fault = twice  # type: ignore[attr-defined]
    assert tier.write([block(n) for n in range(5)], soon()) < 5
    tier._files._fault = trouble  # type: ignore[attr-defined]
    clock.now += 60
    assert tier.write([block(n) for n in range(5)], soon()) == 5
    assert tier.used_bytes == sum(tier._files.sizes().values())
    assert tier.verify().is_good


def test_a_disk_that_hangs_is_left_at_the_deadline(tmp_path: Path) -> None:
    """The caller goes with what was durable; a block nobody waited for never turns up."""
    may_go = threading.Event()
    is_hanging = threading.Event()

    def hang(kind: str) -> None:
        if kind == "sync" and is_hanging.is_set():
            assert may_go.wait(60)

    tier = SsdTier.open(
        tmp_path, capacity_bytes=CAPACITY, files=lambda path: FaultyFiles(path, hang)
    )
    assert tier.write([block(1)], soon()) == 1
    is_hanging.set()
    assert tier.write([block(1), block(2)], Deadline.after(0.2)) == 1
    assert tier.write([block(3)], Deadline.after(0.05)) == 0
    assert tier.compact(Deadline.after(0.05)) == 0
    assert is_served(tier, 1), "reads do not wait for writes"
    assert tier.counters["writes_late"] == 2
    may_go.set()
    assert tier.write([block(4)], soon()) == 1
    assert [info.depth for info in tier.entries()] == [1, 4]
    tier.close()
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert [info.depth for info in tier.entries()] == [1, 4]
    assert tier.verify().is_good
    tier.close()


def test_reads_of_a_failing_disk_are_misses_and_rest_in_between(
    tier: SsdTier, trouble: Trouble, clock: Clock
) -> None:
    """An error of the system drops nothing; damage the disk reports drops that block alone."""
    tier.write([block(n) for n in range(4)], soon())
    trouble.kind, trouble.errno = "read", errno.EMFILE
    assert not is_served(tier, 1)
    assert not is_served(tier, 1)
    assert (tier.counters["read_errors"], tier.counters["reads_skipped"]) == (1, 1)
    trouble.errno = errno.EIO
    clock.now += 60
    assert not is_served(tier, 2)
    trouble.kind = ""
    clock.now += 60
    assert [is_served(tier, n) for n in range(4)] == [True, True, False, True]
    assert dropped(tier) == {"dropped_unreadable": 1}
    assert not tier.is_degraded


def test_the_wait_after_failures_doubles_up_to_its_longest() -> None:
    """And one try per wait is let through."""
    clock = Clock()
    backoff = Backoff(clock, first_s=1.0, longest_s=5.0)
    waits = []
    for _ in range(5):
        backoff.failed()
        start = clock.now
        while not backoff.may_try():
            clock.now += 0.5
        assert not backoff.may_try()
        waits.append(clock.now - start)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.succeeded()
    assert backoff.may_try() and backoff.may_try() and not backoff.is_degraded


def test_a_flipped_bit_anywhere_is_noticed_and_only_its_block_is_lost(tmp_path: Path) -> None:
    """In header, data or padding of a record, or in the header of a segment."""
    segments = written(tmp_path, 20)
    size = record_bytes(5000)
    flips = [
        (0, "dropped_header", 0 * size + 40),
        (1, "dropped_header", 1 * size + HEADER_BYTES - 1),
        (2, "dropped_data", 2 * size + PAGE_BYTES),
        (3, "dropped_data", 3 * size + PAGE_BYTES + 4999),
    ]
    for _, _, offset in flips:
        flip(segments[0], PAGE_BYTES + offset)
    flip(segments[0], PAGE_BYTES + 4 * size + PAGE_BYTES + 5000)
    flip(segments[1], 9)
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert [n for n in range(20) if not is_served(tier, n)] == [0, 1, 2, 3]
    assert dropped(tier) == {"dropped_header": 2, "dropped_data": 2}
    assert len(tier) == 16
    report = tier.verify()
    assert (report.blocks, report.bad, report.is_exact) == (16, {}, True)
    assert report.damaged_segment_headers == 1 and not report.is_good
    tier.close()


def test_verify_finds_what_nobody_has_read_yet(tmp_path: Path) -> None:
    """All records are read, bad ones dropped, progress is told."""
    segments = written(tmp_path, 20)
    flip(segments[1], 3 * PAGE_BYTES)
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    told: list[tuple[int, int]] = []
    report = tier.verify(lambda done, total: told.append((done, total)))
    assert (report.blocks, report.bad, report.is_exact) == (19, {"data": 1}, True)
    assert told == [(n, 20) for n in range(1, 21)]
    assert tier.verify().is_good
    tier.close()


def test_truncated_missing_and_swapped_segments_serve_nothing_wrong(tmp_path: Path) -> None:
    """Each block of them is a miss, counted by what happened; all others are served."""
    segments = written(tmp_path, 30)
    per_segment = (65536 - PAGE_BYTES) // record_bytes(5000)
    assert len(segments) >= 5
    segments[0].unlink()
    with segments[1].open("r+b") as stream:
        stream.truncate(PAGE_BYTES + 2 * record_bytes(5000) - 1)
    aside = tmp_path / "aside"
    segments[2].rename(aside)
    segments[3].rename(segments[2])
    aside.rename(segments[3])
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    whole = [n for n in range(30) if is_served(tier, n)]
    assert whole == [per_segment, *range(4 * per_segment, 30)]
    assert dropped(tier) == {
        "dropped_missing": per_segment,
        "dropped_torn": per_segment - 1,
        "dropped_foreign": 2 * per_segment,
    }
    assert tier.verify().is_exact
    tier.close()


def test_a_segment_of_another_store_is_foreign(tmp_path: Path) -> None:
    """Although key, place and checksum agree: it may be another tenant's folder."""
    mine = written(tmp_path / "mine", 5)
    others = written(tmp_path / "other", 5)
    shutil.copy(others[0], mine[0])
    tier = SsdTier.open(tmp_path / "mine", capacity_bytes=CAPACITY)
    assert not any(is_served(tier, n) for n in range(5))
    assert sum(dropped(tier).values()) == 5
    tier.close()


def test_a_damaged_index_is_written_anew_from_the_records(tmp_path: Path) -> None:
    """Whatever bit of it flips: blocks are served right or missed, and the tier opens."""
    written(tmp_path / "clean", 30)
    size = (tmp_path / "clean" / "index" / "data.mdb").stat().st_size
    served = rebuilt = 0
    offsets = [8, 24, 100, 4096 + 24, *range(8192, size, size // 12)]
    for number, offset in enumerate(offsets):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "clean", folder)
        for page in range(0, size, 4096) if offset == 8 else (0,):
            flip(folder / "index" / "data.mdb", (page + offset) % size, 6)
        tier = SsdTier.open(folder, capacity_bytes=CAPACITY)
        served += sum(is_served(tier, n) for n in range(30))
        rebuilt += tier.counters["index_rebuilt"]
        assert tier.write([block(n) for n in range(100, 105)], soon()) == 5
        assert tier.verify().is_exact
        tier.close()
    assert served >= 29 * len(offsets)
    assert rebuilt >= 1


@pytest.mark.parametrize("damage", ["gone", "empty", "garbage", "half"])
def test_a_lost_index_costs_nothing_but_a_scan(tmp_path: Path, damage: str) -> None:
    """Every whole record is found again; a torn end of the newest segment is not."""
    segments = written(tmp_path, 30)
    flip(segments[-1], segments[-1].stat().st_size - PAGE_BYTES - 100)
    data = tmp_path / "index" / "data.mdb"
    content = data.read_bytes()
    if damage == "gone":
        shutil.rmtree(tmp_path / "index")
    else:
        left = {"empty": b"", "garbage": os.urandom(len(content)), "half": content[:8192]}
        data.write_bytes(left[damage])
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert tier.counters["index_rebuilt"] == 1
    assert len(tier) == 29 and sum(is_served(tier, n) for n in range(30)) == 29
    assert tier.verify().is_good
    tier.close()
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert (len(tier), tier.counters["index_rebuilt"]) == (29, 0)
    tier.close()


def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20)
    except OSError:
        pytest.skip("no mount command here")
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=20, check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "size=2m")


def test_a_full_disk_takes_what_fits_and_more_when_room_comes_back(small_disk: Path) -> None:
    """The disk is smaller than the tier was told; somebody else's file takes the rest."""
    clock = Clock()
    tier = SsdTier.open(small_disk / "ssd", capacity_bytes=8 << 20, clock=clock)
    blocks = [block(n) for n in range(300)]
    durable = tier.write(blocks, soon())
    clock.now += 60
    durable = tier.write(blocks, soon())
    assert 50 < durable < 250 and tier.is_degraded
    assert tier.counters["disk_full"] >= 1
    assert all(is_served(tier, n) for n in range(durable))
    tier.remove([info.key for info, _ in blocks[: durable // 2]])
    clock.now += 60
    tier.compact(soon(), 0.0)
    assert tier.write([block(n) for n in range(500, 510)], soon()) == 10
    assert not tier.is_degraded and tier.verify().is_good
    live = tier.live_bytes
    (small_disk / "other").write_bytes(b"x" * 100)
    with (small_disk / "other").open("ab", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError:
            pass
    tier.close()
    tier = SsdTier.open(small_disk / "ssd", capacity_bytes=8 << 20, clock=clock)
    assert tier.live_bytes == live and tier.is_degraded, "what is held is served from a full disk"
    assert all(is_served(tier, n) for n in range(500, 510))
    assert tier.write([block(600)], soon()) == 0
    (small_disk / "other").unlink()
    clock.now += 60
    assert tier.write([block(600)], soon()) == 1
    assert tier.verify().is_good
    tier.close()


def test_a_disk_without_room_for_an_index_is_a_setup_error(small_disk: Path) -> None:
    """Said at the start, not found out by the first write."""
    with (small_disk / "other").open("wb") as stream:
        stream.write(bytes((2 << 20) - 8192))
    with pytest.raises(StoreSetupError, match=r"[Nn]o space|no room"):
        SsdTier.open(small_disk / "ssd", capacity_bytes=CAPACITY)


def test_a_read_only_folder_is_a_setup_error(small_disk: Path) -> None:
    """The disk is asked at the start whether it takes writes."""
    written(small_disk / "ssd", 3)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], timeout=20, check=True)
    for folder in (small_disk / "ssd", small_disk / "new"):
        with pytest.raises(StoreSetupError, match="cannot be used as SSD folder: Read-only"):
            SsdTier.open(folder, capacity_bytes=CAPACITY)


def test_a_path_that_is_no_folder_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreSetupError, match="cannot be used as SSD folder"):
        SsdTier.open(tmp_path / "file", capacity_bytes=CAPACITY)
