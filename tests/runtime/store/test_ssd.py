"""The SSD tier as its callers see it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.ssd import SsdTier
from runtime.store.ssd_index import BlockIndex
from runtime.store.ssd_layout import (
    HEADER_BYTES,
    PAGE_BYTES,
    Place,
    pack_record,
    record_bytes,
    unpack_record,
)

CAPACITY = 1 << 20


def block(number: int, length: int = 5000) -> tuple[BlockInfo, memoryview]:
    data = hashlib.shake_128(b"data %d" % number).digest(length)
    key = hashlib.sha256(b"key %d" % number).digest()
    parent = hashlib.sha256(b"key %d" % (number - 1)).digest() if number else b""
    first = hashlib.sha256(b"key 0").digest()
    info = BlockInfo(key, parent, first, number, number, length, checksum(data), b"tenant")
    return info, memoryview(data)


def soon() -> Deadline:
    return Deadline.after(60)


def is_served(tier: SsdTier, number: int, length: int = 5000) -> bool:
    info, data = block(number, length)
    room = memoryview(bytearray(length))
    got = tier.read_into(info.key, room, soon())
    assert got is None or (got == info and room == data), "served, but wrong"
    return got is not None


def seen(tier: SsdTier) -> dict[str, int]:
    return {name: count for name, count in tier.counters.items() if count}


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "segments").iterdir())


def test_blocks_come_back_as_they_were_written_after_a_restart(tmp_path: Path) -> None:
    """Sizes from nothing to several pages; parents come before their children."""
    lengths = [0, 1, 4095, 4096, 4097, 20_000, 60_000]
    blocks = [block(number, length) for number, length in enumerate(lengths)]
    tier = SsdTier.open(tmp_path / "new" / "ssd", capacity_bytes=CAPACITY)
    assert tier.write(blocks, soon()) == len(blocks)
    live = tier.live_bytes
    tier.close()
    tier = SsdTier.open(tmp_path / "new" / "ssd", capacity_bytes=CAPACITY)
    assert list(tier.entries()) == [info for info, _ in blocks]
    assert all(is_served(tier, number, length) for number, length in enumerate(lengths))
    assert tier.live_bytes == live == sum(record_bytes(length) for length in lengths)
    assert tier.used_bytes == disk_bytes(tmp_path / "new" / "ssd")
    assert seen(tier) == {"blocks_read": len(lengths), "bytes_read": sum(lengths)}
    tier.close()


def test_a_record_header_says_everything_again(tmp_path: Path) -> None:
    """And any flipped bit of it is noticed; so is another store."""
    place = Place(7, 3 * PAGE_BYTES, block(5)[0])
    header = pack_record(b"s" * 16, place)
    assert len(header) == HEADER_BYTES
    assert unpack_record(b"s" * 16, header) == place
    assert unpack_record(b"t" * 16, header) is None
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack_record(b"s" * 16, flipped) is None


def test_headers_and_dead_records_count_against_the_capacity(tmp_path: Path) -> None:
    """Never more on disk than allowed, and what is refused is the end of the run."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    blocks = [block(number) for number in range(200)]
    durable = tier.write(blocks, soon())
    assert 60 < durable < 200
    assert [info for info, _ in blocks[:durable]] == list(tier.entries())
    assert tier.used_bytes == disk_bytes(tmp_path) <= CAPACITY
    assert tier.write(blocks[durable:], soon()) == 0
    assert seen(tier)["writes_full"] == 2
    assert not tier.is_degraded, "a full tier is no failing disk"
    tier.close()


def test_removed_blocks_make_room_at_once_even_scattered_over_all_segments(tmp_path: Path) -> None:
    """Every other record goes: segments are compacted within the write, sizes stay exact."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    held = list(range(tier.write([block(number) for number in range(200)], soon())))
    number = 1000
    for _ in range(6):
        gone, held = held[::2], held[1::2]
        assert tier.remove([block(n)[0].key for n in gone]) == len(gone)
        fresh = list(range(number, number + len(gone) - 3))
        number += len(gone)
        assert tier.write([block(n) for n in fresh], soon()) == len(fresh)
        held += fresh
        assert disk_bytes(tmp_path) <= CAPACITY
    assert all(is_served(tier, n) for n in held)
    assert not any(is_served(tier, n) for n in gone)
    report = tier.verify()
    assert report.is_good and report.blocks == len(held)
    tier.close()


def test_a_segment_without_a_live_record_is_unlinked(tmp_path: Path) -> None:
    """By the next batch at the latest, and for good."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    tier.write([block(number) for number in range(40)], soon())
    tier.remove([block(number)[0].key for number in range(40)])
    tier.write([block(99)], soon())
    assert len(list((tmp_path / "segments").iterdir())) == 1
    assert tier.used_bytes == disk_bytes(tmp_path) == PAGE_BYTES + record_bytes(5000)
    tier.close()


def test_compaction_frees_what_is_dead_and_moves_what_lives(tmp_path: Path) -> None:
    """Only segments dead enough are touched; the blocks survive a restart where they are now."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    tier.write([block(number) for number in range(40)], soon())
    tier.remove([block(number)[0].key for number in range(40) if number % 5])
    assert tier.compact(soon(), 0.99) == 0
    before = tier.used_bytes
    freed = tier.compact(soon())
    assert freed == before - tier.used_bytes > 0.6 * before
    assert tier.counters["bytes_compacted"] == freed
    assert tier.used_bytes == disk_bytes(tmp_path)
    tier.close()
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert [info.depth for info in tier.entries()] == list(range(0, 40, 5))
    assert all(is_served(tier, number) for number in range(0, 40, 5))
    tier.close()


@pytest.mark.parametrize("segment_bytes", [64 << 10, 1 << 20])
def test_larger_segments_of_earlier_settings_are_compacted_piece_by_piece(
    tmp_path: Path, segment_bytes: int
) -> None:
    """The segments of 1 MiB are more than what is kept free for moving under later settings."""
    tier = SsdTier.open(tmp_path, capacity_bytes=16 << 20, segment_bytes=1 << 20)
    held = list(range(tier.write([block(number) for number in range(2000)], soon())))
    tier.close()
    tier = SsdTier.open(tmp_path, capacity_bytes=16 << 20, segment_bytes=segment_bytes)
    tier.remove([block(n)[0].key for n in held[::3]])
    kept = [n for n in held if n % 3]
    fresh = list(range(5000, 5000 + len(held) // 3 - 20))
    assert tier.write([block(n) for n in fresh], soon()) == len(fresh)
    assert tier.used_bytes == disk_bytes(tmp_path) <= 16 << 20
    assert all(is_served(tier, n) for n in (*kept[::7], *fresh[::7]))
    assert tier.verify().is_good
    tier.close()


def test_a_smaller_capacity_keeps_the_beginnings(tmp_path: Path) -> None:
    """What does not fit any more goes from the deep end, and the disk shrinks on opening."""
    tier = SsdTier.open(tmp_path, capacity_bytes=4 * CAPACITY)
    assert tier.write([block(number) for number in range(200)], soon()) == 200
    tier.close()
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    depths = [info.depth for info in tier.entries()]
    assert depths == list(range(len(depths))) and 50 < len(depths) < 80
    assert tier.counters["dropped_over_capacity"] == 200 - len(depths)
    assert disk_bytes(tmp_path) == tier.used_bytes <= CAPACITY
    assert tier.verify().is_good
    tier.close()


def test_what_is_held_already_counts_as_durable_and_is_not_written_again(tmp_path: Path) -> None:
    """Within a batch and over batches; another length under the same key is refused."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert tier.write([block(1), block(1), block(2)], soon()) == 3
    used = tier.used_bytes
    assert tier.write([block(2), block(1)], soon()) == 2
    assert tier.used_bytes == used
    assert tier.write([block(1), block(2, 6000), block(3)], soon()) == 1
    assert seen(tier)["writes_mismatched"] == 1
    assert not is_served(tier, 3)
    tier.close()


def test_bytes_that_are_not_what_is_said_of_them_are_not_stored(tmp_path: Path) -> None:
    """A buffer that was reused before it was written must not become somebody's block."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    other = memoryview(bytes(5000))
    assert tier.write([block(1), (block(2)[0], other), block(3)], soon()) == 1
    assert seen(tier)["writes_bad_checksum"] == 1
    with pytest.raises(ValueError, match="a block of 5000 bytes comes with 4999"):
        tier.write([(block(2)[0], other[1:])], soon())
    with pytest.raises(ValueError, match="key has 31 bytes"):
        tier.write([(BlockInfo(b"k" * 31, b"", b"r" * 32, 0, 0, 5000, 0), other)], soon())
    tier.close()


def test_a_read_without_time_or_room_is_a_miss_and_loses_nothing(tmp_path: Path) -> None:
    """Each is counted by its kind."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    tier.write([block(1)], soon())
    room = memoryview(bytearray(5000))
    assert tier.read_into(block(1)[0].key, room, Deadline.after(-1)) is None
    assert tier.read_into(block(1)[0].key, room[:4999], soon()) is None
    assert tier.read_into(block(2)[0].key, room, soon()) is None
    assert {name: n for name, n in seen(tier).items() if name.startswith("reads")} == {
        "reads_late": 1,
        "reads_misfit": 1,
        "reads_absent": 1,
    }
    with pytest.raises(ValueError, match="read-only"):
        tier.read_into(block(1)[0].key, memoryview(bytes(5000)), soon())
    assert is_served(tier, 1)
    tier.close()


def test_writers_at_once_share_batches_and_lose_nothing(tmp_path: Path) -> None:
    """Eight threads, some with the same blocks."""
    tier = SsdTier.open(tmp_path, capacity_bytes=8 * CAPACITY)
    counts: list[int] = []

    def write(first: int) -> None:
        batches = [range(start, start + 8) for start in range(first, first + 40, 8)]
        counts.extend(tier.write([block(n) for n in batch], soon()) for batch in batches)

    threads = [threading.Thread(target=write, args=(20 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [8] * 40
    assert len(tier) == 180 and tier.counters["blocks_written"] == 180
    assert all(is_served(tier, n) for n in range(180))
    assert tier.verify().is_good
    tier.close()


def test_reads_stay_right_while_their_records_are_moved(tmp_path: Path) -> None:
    """A block that is held is served whatever compaction does."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    kept = list(range(0, 60, 3))
    tier.write([block(n) for n in range(60)], soon())
    is_over = threading.Event()
    misses: list[int] = []

    def read() -> None:
        while not is_over.is_set():
            misses.extend(n for n in kept if not is_served(tier, n))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(12):
        fresh = [block(1000 + 20 * turn + n) for n in range(20)]
        tier.remove([block(n)[0].key for n in range(60) if n % 3])
        tier.remove([block(1000 + 20 * (turn - 1) + n)[0].key for n in range(20)])
        assert tier.write(fresh, soon()) == 20
        tier.compact(soon(), 0.01)
    is_over.set()
    reader.join(60)
    assert misses == []
    tier.close()


def test_a_folder_belongs_to_one_tier_in_one_process(tmp_path: Path) -> None:
    """Whoever comes second is told who holds it; afterwards the folder is free."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    with pytest.raises(StoreSetupError, match=r"in use by another SSD tier \(process \d+\)"):
        SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    script = (
        "import sys; from pathlib import Path; from runtime.store.ssd import SsdTier\n"
        f"SsdTier.open(Path(sys.argv[1]), capacity_bytes={CAPACITY})"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = Path(__file__).resolve().parents[3]
    other = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert other.returncode == 1 and "in use by another SSD tier" in other.stderr
    assert tier.write([block(1)], soon()) == 1
    tier.close()
    assert subprocess.run(command, cwd=root, timeout=60).returncode == 0
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert is_served(tier, 1)
    tier.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"format": "other", "version": 1, "store": "00" * 16}, "format is 'other'"),
        ({"format": "ptstore-ssd", "version": 2, "store": "00" * 16}, "version is 2"),
        ({"format": "ptstore-ssd", "version": 1, "store": "00"}, "store has 1 bytes"),
        ({"version": 1}, "not the format file"),
        (["ptstore-ssd"], "not the format file"),
    ],
)
def test_another_format_or_version_is_refused_untouched(
    tmp_path: Path, content: object, said: str
) -> None:
    (tmp_path / "format.json").write_text(json.dumps(content))
    (tmp_path / "segments").mkdir()
    with pytest.raises(StoreSetupError, match=said):
        SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert json.loads((tmp_path / "format.json").read_text()) == content


def test_segments_without_a_format_are_refused(tmp_path: Path) -> None:
    """They may be anybody's; a file that only looks alike is left alone."""
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    tier.write([block(1)], soon())
    tier.close()
    stranger = tmp_path / "segments" / "notes.txt"
    stranger.write_text("mine")
    (tmp_path / "format.json").rename(tmp_path / "aside")
    with pytest.raises(StoreSetupError, match=r"no format\.json"):
        SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    (tmp_path / "aside").rename(tmp_path / "format.json")
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    assert is_served(tier, 1) and stranger.read_text() == "mine"
    tier.close()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"capacity_bytes": 1 << 19}, "at least 1048576"),
        ({"capacity_bytes": CAPACITY, "segment_bytes": 0}, "at least 16384"),
    ],
)
def test_sizes_that_cannot_work_are_refused(
    tmp_path: Path, sizes: dict[str, int], said: str
) -> None:
    with pytest.raises(StoreSetupError, match=said):
        SsdTier.open(tmp_path, **sizes)


def test_a_closed_tier_misses_and_can_be_closed_again(tmp_path: Path) -> None:
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    tier.write([block(1)], soon())
    tier.close()
    tier.close()
    assert not is_served(tier, 1)
    assert tier.write([block(2)], soon()) == 0
    assert tier.compact(soon()) == 0


def test_the_index_grows_beyond_its_first_map(tmp_path: Path) -> None:
    """The map doubles until a transaction fits; nothing is lost on the way."""
    index = BlockIndex(tmp_path, b"s" * 16)
    index._map_bytes = 1 << 16
    places = [Place(1, PAGE_BYTES * n, block(n)[0]) for n in range(1, 600)]
    index.commit(places, (), 2)
    index.commit(places[:10], [place.info.key for place in places[10:20]], 3)
    loaded, bad, next_segment = index.load()
    kept = places[:10] + places[20:]
    assert sorted(loaded, key=lambda p: p.offset) == kept and (bad, next_segment) == (0, 3)
    index.close()
