"""Any sequence of calls, faults, damage and restarts against a dictionary."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.ssd import SsdTier
from runtime.store.ssd_index import BlockIndex
from runtime.store.ssd_layout import PAGE_BYTES
from runtime.store.ssd_segments import SegmentFiles

CAPACITY = 1 << 20
FAULTS = ("write", "sync", "index", "read", "create", "truncate", "unlink")
NUMBERS = st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True)


def block(number: int) -> tuple[BlockInfo, memoryview]:
    length = (number * 7919) % 40_000
    data = hashlib.shake_128(b"data %d" % number).digest(length)
    key = hashlib.sha256(b"key %d" % number).digest()
    return BlockInfo(key, b"", key, 0, number, length, checksum(data)), memoryview(data)


def soon() -> Deadline:
    return Deadline.after(60)


class Disk:
    """What the layers below share: the next failure, and a clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kind = ""
        self.skip = 0

    def clock(self) -> float:
        return self.now

    def meet(self, kind: str) -> None:
        if kind == self.kind:
            self.skip -= 1
            if self.skip < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Files(SegmentFiles):
    def __init__(self, folder: Path, disk: Disk) -> None:
        super().__init__(folder)
        self._disk = disk

    def create(self, segment: int) -> int:
        self._disk.meet("create")
        return super().create(segment)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        try:
            self._disk.meet("write")
        except OSError:
            super().write(descriptor, [bytes(buffers[0])[:100]], offset)
            raise
        return super().write(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        self._disk.meet("read")
        return super().read(descriptor, buffers, offset)

    def truncate(self, segment: int, size: int) -> None:
        self._disk.meet("truncate")
        super().truncate(segment, size)

    def unlink(self, segment: int) -> None:
        self._disk.meet("unlink")
        super().unlink(segment)

    def sync(self, descriptor: int) -> None:
        self._disk.meet("sync")

    def sync_folder(self) -> None:
        pass


class Index(BlockIndex):
    """A real index, unsynced: here the machine stays on."""

    def __init__(self, folder: Path, store: bytes, disk: Disk) -> None:
        super().__init__(folder, store)
        self._disk = disk

    def is_readable(self) -> bool:
        return True

    def _open(self) -> lmdb.Environment:
        if self._environment is None:
            self._environment = lmdb.open(
                str(self.folder), map_size=1 << 24, lock=False, sync=False
            )
        return self._environment

    def _write(self, *arguments: Any) -> None:
        try:
            self._disk.meet("index")
        except OSError as error:
            if self._disk.skip % 2:  # it failed, and yet the disk has it
                super()._write(*arguments)
            raise lmdb.DiskError(str(error)) from error
        super()._write(*arguments)


class SsdTierAgainstADictionary(RuleBasedStateMachine):
    """``sure`` must be there; ``maybe`` may be; nothing else may, and all that is is right."""

    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ssd-model-"))
        self.lives = 0
        self.disk = Disk()
        self.sure: set[int] = set()
        self.maybe: set[int] = set()
        self.damaged: set[int] = set()  # and nobody has noticed yet
        self.tier = self.opened()

    def opened(self) -> SsdTier:
        return SsdTier.open(
            self.root / str(self.lives),
            capacity_bytes=CAPACITY,
            files=lambda path: Files(path, self.disk),
            index=lambda path, store: Index(path, store, self.disk),
            clock=self.disk.clock,
        )

    @rule(numbers=NUMBERS)
    def write(self, numbers: list[int]) -> None:
        self.damaged &= {info.depth for info in self.tier.entries()}
        durable = self.tier.write([block(n) for n in numbers], soon())
        self.sure |= set(numbers[:durable]) - self.damaged
        self.maybe |= set(numbers[durable:])

    @rule(numbers=NUMBERS)
    def remove(self, numbers: list[int]) -> None:
        self.tier.remove([block(n)[0].key for n in numbers])
        for number in numbers:
            assert block(number)[0].key not in self.tier
        self.maybe |= self.sure & set(numbers)  # until the index knows a crash may bring it back
        self.sure -= set(numbers)

    @rule(number=st.integers(0, 60))
    def read(self, number: int) -> None:
        info, data = block(number)
        room = memoryview(bytearray(info.length + 3))
        got = self.tier.read_into(info.key, room, soon())
        if got is not None:
            assert got == info and room[: info.length] == data
            assert number in self.sure | self.maybe
        elif number in self.sure:
            assert self.tier.is_degraded, "a block that is held was not served"

    @rule(kind=st.sampled_from(FAULTS), skip=st.integers(0, 6))
    def fail(self, kind: str, skip: int) -> None:
        self.disk.kind, self.disk.skip = kind, skip

    @rule()
    def mend(self) -> None:
        self.disk.kind = ""
        self.disk.now += 100

    @rule(share=st.sampled_from([0.0, 0.3]))
    def compact(self, share: float) -> None:
        assert self.tier.compact(soon(), share) >= 0

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        if not self.sure:
            return
        number = data.draw(st.sampled_from(sorted(self.sure)))
        place = self.tier._ledger.get(block(number)[0].key)
        assert place is not None
        start = PAGE_BYTES if place.info.length and data.draw(st.booleans()) else 0
        offset = start + data.draw(st.integers(0, 200))
        path = self.root / str(self.lives) / "segments" / f"{place.segment:016d}.seg"
        with path.open("r+b") as stream:
            stream.seek(place.offset + offset)
            byte = stream.read(1)
            if byte:
                stream.seek(-1, os.SEEK_CUR)
                stream.write(bytes([byte[0] ^ 4]))
        self.sure.discard(number)
        self.maybe.add(number)
        self.damaged.add(number)

    @rule()
    def restart(self) -> None:
        self.mend()
        self.tier.close()
        self.tier = self.opened()
        self.maybe &= {info.depth for info in self.tier.entries()}

    @rule()
    def kill(self) -> None:
        """A copy of the folder as it is now is what a killed process leaves."""
        with self.tier._log.lock:
            shutil.copytree(self.root / str(self.lives), self.root / str(self.lives + 1))
        self.mend()
        self.tier.close()
        shutil.rmtree(self.root / str(self.lives))
        self.lives += 1
        self.tier = self.opened()

    @invariant()
    def everything_adds_up(self) -> None:
        tier = self.tier
        held = {info.depth for info in tier.entries()}
        assert self.sure <= held <= self.sure | self.maybe
        assert tier.live_bytes == sum(tier.record_bytes(i.length) for i in tier.entries())
        assert tier.live_bytes <= tier.used_bytes <= CAPACITY
        with tier._log.lock:
            files = tier._files.sizes()
            assert tier.used_bytes == sum(files.values())

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.mend()
            report = self.tier.verify()
            assert report.is_exact and report.wrong_index_entries == 0
            held = {info.depth for info in self.tier.entries()}
            assert self.sure <= held
            self.tier.close()
            shutil.rmtree(self.root)


SsdTierAgainstADictionary.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestAnySequenceOfCalls = SsdTierAgainstADictionary.TestCase
