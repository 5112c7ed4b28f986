"""What the SSD tier holds, in memory: places, bytes by segment, and what the index must learn.

bytes of a segment file = live + pending + dead
live      records that the index has and reads may use
pending   records written but not committed yet
dead      segment header, removed records, torn ends
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.store.ssd_layout import PAGE_BYTES, Place

# A segment's own header and at least one more page.
_WORTH_BYTES = 2 * PAGE_BYTES


@dataclass(slots=True)
class _Segment:
    file_bytes: int
    live_bytes: int = 0
    pending_bytes: int = 0

    @property
    def is_dead(self) -> bool:
        return not (self.live_bytes or self.pending_bytes)


@dataclass(frozen=True, slots=True)
class Unsaved:
    """What the index must learn, taken at one moment.

    Attributes:
        puts: Places of keys whose entries may differ.
        deletes: Keys without a place whose entries may still be there.
        dead: Segments without a live record once that is learnt.
    """

    puts: tuple[Place, ...]
    deletes: tuple[bytes, ...]
    dead: tuple[int, ...]


class Ledger:
    """Thread-safe; no call waits for a disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[bytes, Place] = {}
        self._segments: dict[int, _Segment] = {}
        self._unsaved: dict[bytes, None] = {}
        self._used_bytes = 0
        self._live_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files."""
        return self._used_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of all live records, headers and padding included."""
        return self._live_bytes

    def is_dead(self, segment: int) -> bool:
        """Whether a segment holds no live and no pending record."""
        with self._lock:
            return self._segments[segment].is_dead

    def is_pending(self, segment: int) -> bool:
        """Whether a segment holds records that are not committed yet."""
        with self._lock:
            return self._segments[segment].pending_bytes > 0

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: bytes) -> Place | None:
        """Where a key's record lies."""
        return self._places.get(key)

    def places(self) -> list[Place]:
        """All places, parents before their children."""
        with self._lock:
            found = list(self._places.values())
        return sorted(found, key=lambda place: place.info.depth)

    def places_in(self, segment: int) -> list[Place]:
        """Live records of one segment by offset."""
        with self._lock:
            found = [place for place in self._places.values() if place.segment == segment]
        return sorted(found, key=lambda place: place.offset)

    def set_file_bytes(self, segment: int, file_bytes: int) -> None:
        """A segment file has this size now."""
        with self._lock:
            state = self._segments.setdefault(segment, _Segment(0))
            self._used_bytes += file_bytes - state.file_bytes
            state.file_bytes = file_bytes

    def appended(self, place: Place) -> None:
        """A record was written at the end of its segment."""
        with self._lock:
            state = self._segments[place.segment]
            self._used_bytes += place.end - state.file_bytes
            state.file_bytes = place.end
            state.pending_bytes += place.size_bytes

    def load(self, places: Iterable[Place]) -> None:
        """Records found on opening."""
        with self._lock:
            for place in places:
                self._put(place)

    def publish(
        self, place: Place, *, replaces: Place | None = None, is_wanted: bool = True
    ) -> None:
        """A pending record is committed: live from now on.

        Unless nobody wants it any more, or the record it was moved from was removed meanwhile:
        then it is dead, and the index has to forget it.
        """
        with self._lock:
            self._segments[place.segment].pending_bytes -= place.size_bytes
            key = place.info.key
            if is_wanted and self._places.get(key) is replaces:
                self._drop(key)
                self._put(place)
            else:
                self._unsaved[key] = None

    def withdraw(self, place: Place) -> None:
        """A pending record will not be committed; whether the index has it is unknown."""
        with self._lock:
            self._segments[place.segment].pending_bytes -= place.size_bytes
            self._unsaved[place.info.key] = None

    def remove(self, key: bytes, only: Place | None = None) -> bool:
        """Forget a key, or only if it still lies at ``only``; whether it was there."""
        with self._lock:
            place = self._places.get(key)
            if place is None or (only is not None and place is not only):
                return False
            self._drop(key)
            self._unsaved[key] = None
            return True

    @property
    def is_in_doubt(self) -> bool:
        """Whether the index may name another place for a block that is held."""
        with self._lock:
            return any(key in self._places for key in self._unsaved)

    def dead(self) -> list[int]:
        """Segments without a live or pending record."""
        with self._lock:
            return [segment for segment, state in self._segments.items() if state.is_dead]

    def unsaved(self) -> Unsaved:
        """What the index must learn, and no longer counts as unlearnt."""
        with self._lock:
            keys, self._unsaved = self._unsaved, {}
            puts = tuple(self._places[key] for key in keys if key in self._places)
            deletes = tuple(key for key in keys if key not in self._places)
            dead = tuple(s for s, state in self._segments.items() if state.is_dead)
            return Unsaved(puts, deletes, dead)

    def doubt(self, keys: Iterable[bytes]) -> None:
        """Entries of these keys may differ from the places here: a commit failed."""
        with self._lock:
            self._unsaved.update(dict.fromkeys(keys))

    def forget_segment(self, segment: int) -> None:
        """A segment file is gone."""
        with self._lock:
            self._used_bytes -= self._segments.pop(segment).file_bytes

    def mostly_dead(self, min_dead_share: float) -> list[int]:
        """Segments with at least that share of dead bytes and no pending record, most dead first.

        A segment that would not shrink by being copied is left out.
        """
        shares: list[tuple[float, int]] = []
        with self._lock:
            for segment, state in self._segments.items():
                dead = state.file_bytes - state.live_bytes
                if state.pending_bytes or dead < _WORTH_BYTES:
                    continue
                if dead >= min_dead_share * state.file_bytes:
                    shares.append((-dead / state.file_bytes, segment))
        return [segment for _, segment in sorted(shares)]

    def sizes(self) -> dict[int, tuple[int, int]]:
        """(file bytes, live bytes) by segment."""
        with self._lock:
            return {s: (state.file_bytes, state.live_bytes) for s, state in self._segments.items()}

    def _put(self, place: Place) -> None:
        size = place.size_bytes
        self._places[place.info.key] = place
        self._segments[place.segment].live_bytes += size
        self._live_bytes += size

    def _drop(self, key: bytes) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._segments[place.segment].live_bytes -= place.size_bytes
            self._live_bytes -= place.size_bytes
