"""Crashes at every step: what a power cut may leave of files and index, opened again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.ssd import SsdTier
from runtime.store.ssd_index import BlockIndex
from runtime.store.ssd_layout import Place
from runtime.store.ssd_segments import SegmentFiles

CAPACITY = 1 << 20
STORE = bytes(range(16))


def block(number: int) -> tuple[BlockInfo, memoryview]:
    length = 1 + (number * 2654435761) % 20_000
    data = hashlib.shake_128(b"data %d" % number).digest(length)
    key = hashlib.sha256(b"key %d" % number).digest()
    return BlockInfo(key, b"", key, 0, number, length, checksum(data)), memoryview(data)


class Journal:
    """Everything that reached the disk layer, in order, and what was promised in between."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []


class RecordingFiles(SegmentFiles):
    """Real files; every change is also written down. Some writes are short."""

    def __init__(self, folder: Path, journal: Journal, rng: np.random.Generator) -> None:
        super().__init__(folder)
        self._journal = journal.steps
        self._rng = rng
        self._segments: dict[int, int] = {}

    def create(self, segment: int) -> int:
        descriptor = super().create(segment)
        self._segments[descriptor] = segment
        self._journal.append(("create", segment))
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        if self._rng.random() < 0.3:
            data = data[: int(self._rng.integers(1, len(data) + 1))]
        self._journal.append(("write", self._segments[descriptor], offset, data))
        return super().write(descriptor, [data], offset)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._journal.append(("sync", self._segments[descriptor]))

    def sync_folder(self) -> None:
        self._journal.append(("sync_folder",))

    def truncate(self, segment: int, size: int) -> None:
        super().truncate(segment, size)
        self._journal.append(("truncate", segment, size))

    def unlink(self, segment: int) -> None:
        super().unlink(segment)
        self._journal.append(("unlink", segment))


class UnsyncedFiles(SegmentFiles):
    """Real files of a machine that will not crash again."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self) -> None:
        pass


class MemoryIndex(BlockIndex):
    """An index whose transactions are atomic by construction, as LMDB's are on a disk."""

    def __init__(self, entries: dict[bytes, Place], next_segment: int, journal: Journal) -> None:
        super().__init__(Path("/nowhere"), STORE)
        self.entries = entries
        self.next_segment = next_segment
        self._journal = journal.steps

    def is_readable(self) -> bool:
        return True

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def load(self) -> tuple[list[Place], int, int]:
        return list(self.entries.values()), 0, self.next_segment

    def commit(self, puts: Any, deletes: Any, next_segment: int) -> None:
        for key in deletes:
            self.entries.pop(key, None)
        self.entries.update({place.info.key: place for place in puts})
        self.next_segment = next_segment
        self._journal.append(("commit", dict(self.entries), next_segment))


def folder_with_format(path: Path) -> Path:
    (path / "segments").mkdir(parents=True)
    (path / "index").mkdir()
    facts = {"format": "ptstore-ssd", "version": 1, "store": STORE.hex()}
    (path / "format.json").write_text(json.dumps(facts))
    return path


def history(folder: Path, seed: int) -> Journal:
    """A life of a small tier: batches, removals, moves, a segment or more at every turn."""
    rng = np.random.default_rng(seed)
    journal = Journal()
    tier = SsdTier.open(
        folder_with_format(folder),
        capacity_bytes=CAPACITY,
        files=lambda path: RecordingFiles(path, journal, rng),
        index=lambda path, store: MemoryIndex({}, 0, journal),
    )
    held: list[int] = []
    number = 0
    for _ in range(14):
        batch = list(range(number, number + int(rng.integers(1, 12))))
        number += len(batch)
        durable = tier.write([block(n) for n in batch], Deadline.after(20))
        journal.steps.append(("promised", batch[:durable]))
        held += batch[:durable]
        gone = [n for n in held if rng.random() < (0.5 if len(held) > 30 else 0.1)]
        journal.steps.append(("removed", gone))
        tier.remove([block(n)[0].key for n in gone])
        held = [n for n in held if n not in gone]
        if rng.random() < 0.4:
            tier.compact(Deadline.after(20), 0.1)
    tier.close()
    return journal


class Disk:
    """Which bytes are safe, and which a crash may or may not leave."""

    def __init__(self) -> None:
        self.safe: dict[int, bytes] = {}
        self.unsynced: dict[int, list[tuple[Any, ...]]] = {}
        self.unnamed: dict[int, None] = {}
        self.unlinked: dict[int, bytes] = {}

    def apply(self, step: tuple[Any, ...]) -> None:
        kind = step[0]
        if kind == "create":
            self.safe[step[1]] = b""
            self.unnamed[step[1]] = None
        elif kind in ("write", "truncate"):
            self.unsynced.setdefault(step[1], []).append(step)
        elif kind == "sync":
            for change in self.unsynced.pop(step[1], []):
                self.safe[step[1]] = changed(self.safe[step[1]], change)
        elif kind == "sync_folder":
            self.unnamed.clear()
            self.unlinked.clear()
        elif kind == "unlink" and step[1] in self.safe:
            self.unlinked[step[1]] = self.safe.pop(step[1])
            self.unsynced.pop(step[1], None)

    def after_crash(self, rng: np.random.Generator) -> dict[int, bytes]:
        """One of the states that the disk may be in."""
        left: dict[int, bytes] = {}
        for segment, content in {**self.unlinked, **self.safe}.items():
            if segment in self.unlinked and rng.random() < 0.5:
                continue
            if segment in self.unnamed and rng.random() < 0.3:
                continue
            for change in self.unsynced.get(segment, []):
                fate = rng.random()
                if fate < 0.3:
                    continue
                content = changed(content, torn(change, rng) if fate < 0.7 else change)
            left[segment] = content
        return left


def changed(content: bytes, change: tuple[Any, ...]) -> bytes:
    if change[0] == "truncate":
        return content[: change[2]].ljust(change[2], b"\0")
    _, _, offset, data = change
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


def torn(change: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
    """A write of which some sectors, and at the end some bytes, never arrived."""
    if change[0] == "truncate":
        return change
    kind, segment, offset, data = change
    kept = bytearray(data[: int(rng.integers(0, len(data) + 1))])
    for start in range(0, len(kept), 512):
        if rng.random() < 0.2:
            kept[start : start + 512] = bytes(len(kept[start : start + 512]))
    return kind, segment, offset, bytes(kept)


def check_after_crash(
    folder: Path, files: dict[int, bytes], index: MemoryIndex, sure: set[int], known: set[int]
) -> None:
    """All that was promised is there, all that is there is right, and the tier works on."""
    folder_with_format(folder)
    for segment, content in files.items():
        SegmentFiles(folder / "segments").path(segment).write_bytes(content)
    tier = SsdTier.open(
        folder, capacity_bytes=CAPACITY, files=UnsyncedFiles, index=lambda path, store: index
    )
    try:
        numbers = {block(n)[0].key: n for n in known}
        found = {numbers[info.key]: info for info in tier.entries()}
        assert sure <= set(found), "acknowledged blocks are lost"
        for number, info in found.items():
            expected, data = block(number)
            room = memoryview(bytearray(info.length))
            assert tier.read_into(info.key, room, Deadline.after(20)) == expected == info
            assert room == data
        assert {n: c for n, c in tier.counters.items() if c and n.startswith("dropped")} == {}
        report = tier.verify()
        assert report.is_exact and not report.bad
        assert tier.used_bytes <= CAPACITY
        tier.remove([block(n)[0].key for n in found])
        fresh = [block(n) for n in range(100_000, 100_004)]
        assert tier.write(fresh, Deadline.after(20)) == 4
    finally:
        tier.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_after_a_crash_at_any_step_promises_hold_and_nothing_torn_is_there(
    tmp_path: Path, seed: int
) -> None:
    """Every prefix of what reached the disk; what was not synced is there, torn or absent."""
    journal = history(tmp_path / "life", seed)
    rng = np.random.default_rng(1000 + seed)
    disk = Disk()
    entries: dict[bytes, Place] = {}
    next_segment = 0
    sure: set[int] = set()
    known = set(range(500))
    kinds: dict[str, int] = {}
    for count, step in enumerate(journal.steps):
        kinds[step[0]] = kinds.get(step[0], 0) + 1
        if step[0] == "promised":
            sure |= set(step[1])
        elif step[0] == "removed":
            sure -= set(step[1])
        elif step[0] == "commit":
            entries, next_segment = step[1], step[2]
        else:
            disk.apply(step)
        if count % 7 == seed or step[0] in ("commit", "unlink", "truncate"):
            index = MemoryIndex(dict(entries), next_segment, Journal())
            check_after_crash(tmp_path / f"{count}", disk.after_crash(rng), index, sure, known)
    assert kinds["unlink"] >= 2 and kinds["commit"] >= 10 and kinds["sync"] >= 10
