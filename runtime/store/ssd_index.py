"""The index of the SSD tier: which record is valid, decided by one LMDB transaction.

A record counts only once its entry is committed, and its entry is committed only after its data are
synced. Entries are record headers, so each carries a checksum of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import lmdb

from runtime.store.errors import StoreSetupError
from runtime.store.ssd_index_probe import DAMAGED
from runtime.store.ssd_layout import Place, pack_record, unpack_record

_NEXT_SEGMENT = b"next_segment"
_FIRST_MAP_BYTES = 64 << 20
_PROBE_S = 120.0


class IndexWriteError(Exception):
    """A transaction failed; whether the disk has it is unknown until the next one succeeds."""


class BlockIndex:
    """Key -> record header, durable.

    One process, and one thread at a time: the folder's lock and the log's see to it.
    """

    def __init__(self, folder: Path, store: bytes) -> None:
        self.folder = folder
        self._store = store
        self._map_bytes = _FIRST_MAP_BYTES
        self._environment: lmdb.Environment | None = None
        with suppress(FileNotFoundError):
            self._map_bytes = max(_FIRST_MAP_BYTES, 2 * self.size_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of the index file."""
        return (self.folder / "data.mdb").stat().st_size

    def is_readable(self) -> bool:
        """Whether another process could walk all entries; true where none could be started."""
        if not (self.folder / "data.mdb").exists() or not sys.executable:
            return True
        script = str(Path(__file__).with_name("ssd_index_probe.py"))
        try:
            ended = subprocess.run(
                [sys.executable, "-P", script, str(self.folder)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_S,
            )
        except subprocess.TimeoutExpired:
            return False
        except OSError:
            return True
        return ended.returncode >= 0 and ended.returncode != DAMAGED

    def set_aside(self) -> None:
        """Keep a damaged index for inspection, in place of an earlier one, and start empty."""
        self.close()
        aside = self.folder.with_name("index.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self.folder.rename(aside)
        self.folder.mkdir()
        self._map_bytes = _FIRST_MAP_BYTES

    def open(self) -> None:
        """Open or create the index.

        Raises:
            StoreSetupError: If LMDB cannot, say for want of room.
            lmdb.Error: If what is there is no index, or a damaged one.
        """
        try:
            self._open()
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError):
            raise
        except lmdb.Error as error:
            raise StoreSetupError(f"{self.folder}: cannot open the index: {error}") from error

    def _open(self) -> lmdb.Environment:
        if self._environment is None:
            self._environment = lmdb.open(
                str(self.folder), map_size=self._map_bytes, lock=False, mode=0o600
            )
        return self._environment

    def load(self) -> tuple[list[Place], int, int]:
        """All valid entries, the number of invalid ones, and the first unused segment id.

        The id is 0 where nothing was ever committed.

        Raises:
            lmdb.Error: If the index is damaged.
        """
        places: list[Place] = []
        shared: dict[bytes, bytes] = {}
        bad = 0
        next_segment = 0
        for key, value in self._items():
            if key == _NEXT_SEGMENT:
                next_segment = int.from_bytes(value, "little")
                continue
            place = unpack_record(self._store, value, shared)
            if place is None or place.info.key != key:
                bad += 1
            else:
                places.append(place)
        return places, bad, next_segment

    def _items(self) -> Iterator[tuple[bytes, bytes]]:
        with self._open().begin() as transaction:
            yield from transaction.cursor()

    def commit(self, puts: Sequence[Place], deletes: Iterable[bytes], next_segment: int) -> None:
        """Make entries durable in one transaction: deletes, then puts.

        Raises:
            IndexWriteError: If it fails; the index is opened anew for the next one.
        """
        packed = [(place.info.key, pack_record(self._store, place)) for place in puts]
        gone = list(deletes)
        try:
            for _ in range(32):  # each round doubles the map: 32 are more than any disk
                try:
                    self._write(packed, gone, next_segment)
                    return
                except lmdb.MapFullError:
                    self._map_bytes *= 2
                    self._open().set_mapsize(self._map_bytes)
            raise IndexWriteError("the index does not fit its map")
        except (lmdb.Error, OSError) as error:
            self.close()  # after a failed sync LMDB refuses all further work
            raise IndexWriteError(str(error)) from error

    def _write(
        self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes], next_segment: int
    ) -> None:
        with self._open().begin(write=True) as transaction:
            for key in deletes:
                transaction.delete(key)
            for key, value in puts:
                transaction.put(key, value)
            transaction.put(_NEXT_SEGMENT, next_segment.to_bytes(8, "little"))

    def close(self) -> None:
        """Close; a later call opens again."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()
