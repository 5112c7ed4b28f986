"""How fast the SSD tier writes, reads and opens, and what 200 killed writers leave.

    python benchmarks/store_ssd.py [--folder DIR] [--block-mib 2] [--total-mib 512] [--repeat 5]
                                   [--entries 100000] [--kills 200] [--out FILE.json]

Everything is measured against what the same disk does in the same run, taking turns:

- write: batches of 16 blocks, each batch durable (data synced, index committed) against plain
  ``pwrite`` of the same bytes to one file with one ``fdatasync`` per batch.
- read: all blocks with their checks, against plain ``pread`` of the same bytes. Neither from page
  cache (dropped by posix_fadvise) nor into fresh memory.
- index: microseconds per get from LMDB, and per look-up in the tier.
- open: seconds until a tier with that many entries answers (index walk in another process, load,
  comparison with the files).
- kills: a writer process killed at random times; promised blocks lost, blocks wrong, sizes wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.ssd import SsdTier
from runtime.store.ssd_index import BlockIndex
from runtime.store.ssd_layout import PAGE_BYTES, Place

BATCH = 16
KILL_CAPACITY = 32 << 20
Blocks = Sequence[tuple[BlockInfo, memoryview]]


def soon() -> Deadline:
    return Deadline.after(600)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def random_numbers(seed: int) -> Any:
    import numpy as np  # not for the writers that are killed: they should start quickly

    return np.random.default_rng(seed)


def made_blocks(count: int, length: int) -> list[tuple[BlockInfo, memoryview]]:
    rng = random_numbers(1)
    blocks = []
    for number in range(count):
        data = memoryview(rng.bytes(length))
        key = key_of(number)
        blocks.append((BlockInfo(key, b"", key, 0, number, length, checksum(data)), data))
    return blocks


def timed(work: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def write_plain(path: Path, blocks: Blocks) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    offset = 0
    for start in range(0, len(blocks), BATCH):
        for _, data in blocks[start : start + BATCH]:
            offset += os.pwrite(descriptor, data, offset)
        os.fdatasync(descriptor)
    os.close(descriptor)


def write_tier(tier: SsdTier, blocks: Blocks) -> None:
    for start in range(0, len(blocks), BATCH):
        batch = blocks[start : start + BATCH]
        assert tier.write(batch, soon()) == len(batch)


def read_plain(path: Path, blocks: Blocks, room: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for number in range(len(blocks)):
        assert os.preadv(descriptor, [room], number * len(room)) == len(room)
    os.close(descriptor)


def read_tier(tier: SsdTier, blocks: Blocks, room: memoryview) -> None:
    for info, _ in blocks:
        assert tier.read_into(info.key, room, soon()) == info


def drop_cached(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def speeds(folder: Path, length: int, total: int, repeat: int) -> dict[str, list[float]]:
    blocks = made_blocks(total // length, length)
    size = len(blocks) * length / 1e9
    room = memoryview(bytearray(length))
    room[:] = blocks[0][1]
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(size / seconds)

    for turn in range(repeat):
        plain = folder / "plain"
        note("write_plain", timed(write_plain, plain, blocks))
        tier = SsdTier.open(folder / f"tier{turn}", capacity_bytes=3 * total + (1 << 30))
        note("write_tier", timed(write_tier, tier, blocks))
        drop_cached(plain)
        note("read_plain", timed(read_plain, plain, blocks, room))
        for path in (folder / f"tier{turn}" / "segments").iterdir():
            drop_cached(path)
        note("read_tier", timed(read_tier, tier, blocks, room))
        note("read_plain_cached", timed(read_plain, plain, blocks, room))
        note("checksum", timed(lambda: [checksum(data) for _, data in blocks]))
        tier.close()
        shutil.rmtree(folder / f"tier{turn}")
        plain.unlink()
    return found


def opening(folder: Path, entries: int, repeat: int) -> dict[str, list[float]]:
    """A folder with that many small records, by way of its own files and index."""
    tier = SsdTier.open(folder / "many", capacity_bytes=64 << 30)
    data = memoryview(b"x" * 100)
    crc = checksum(data)
    for start in range(0, entries, 5000):
        keys = [key_of(n) for n in range(start, min(entries, start + 5000))]
        batch = [
            (BlockInfo(key, keys[0], keys[0], 0, start + i, 100, crc), data)
            for i, key in enumerate(keys)
        ]
        assert tier.write(batch, soon()) == len(batch)
    store = tier._folder.store
    tier.close()
    found: dict[str, list[float]] = {
        "open_s": [],
        "open_cpu_s": [],
        "lmdb_get_us": [],
        "tier_look_up_us": [],
    }
    wanted = [key_of(int(n)) for n in random_numbers(2).permutation(entries)[:20_000]]
    for _ in range(repeat):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        tier = SsdTier.open(folder / "many", capacity_bytes=64 << 30)
        found["open_s"].append(time.perf_counter() - start_s)
        found["open_cpu_s"].append(time.process_time() - start_cpu_s)
        assert len(tier) == entries and not any(tier.counters.values())
        seconds = timed(lambda opened: [key in opened for key in wanted], tier)
        found["tier_look_up_us"].append(seconds / len(wanted) * 1e6)
        tier.close()
        with (
            lmdb.open(str(folder / "many" / "index"), lock=False, map_size=1 << 30) as index,
            index.begin() as transaction,
        ):
            seconds = timed(lambda t: [t.get(key) for key in wanted], transaction)
        found["lmdb_get_us"].append(seconds / len(wanted) * 1e6)
    shutil.rmtree(folder / "many")
    index_folder = folder / "index"
    index_folder.mkdir()
    block_index = BlockIndex(index_folder, store)
    block_index.open()
    found["index_put_us"] = []
    for turn in range(20):
        places = [
            Place(1, PAGE_BYTES, BlockInfo(key_of(n), b"", key_of(n), 0, n, 1, 0))
            for n in range(200 * turn, 200 * turn + 200)
        ]
        found["index_put_us"].append(timed(block_index.commit, places, (), 2) / 200 * 1e6)
    block_index.close()
    shutil.rmtree(index_folder)
    return found


def write_for_ever(folder: Path) -> None:
    """The writer that is killed: says "+n" for durable blocks, "-n" before it removes one."""

    def say(sign: str, numbers: Sequence[int]) -> None:
        sys.stdout.write("".join(f"{sign}{n}\n" for n in numbers))
        sys.stdout.flush()

    tier = SsdTier.open(folder, capacity_bytes=KILL_CAPACITY)
    held = [info.depth for info in tier.entries()]
    number = max(held, default=-1) + 1
    say("=", [number])
    while True:
        batch = list(range(number, number + 1 + number % 7))
        number += len(batch)
        durable = tier.write([kill_block(n) for n in batch], soon())
        say("+", batch[:durable])
        held += batch[:durable]
        if len(held) > 150:
            gone, held = held[::2], held[1::2]
            say("-", gone)
            tier.remove([key_of(n) for n in gone])
            tier.compact(soon(), 0.1)


def kill_block(number: int) -> tuple[BlockInfo, memoryview]:
    length = (number * 7919) % 150_000
    data = hashlib.shake_128(b"data %d" % number).digest(length)
    key = key_of(number)
    return BlockInfo(key, b"", key, 0, number, length, checksum(data)), memoryview(data)


def killed(folder: Path, after_s: float) -> list[str]:
    command = [sys.executable, __file__, "--writer", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline()]
        time.sleep(after_s)
        writer.kill()
        said += writer.stdout.read().splitlines(keepends=True)
        writer.wait(60)
    return [line for line in said if line.endswith("\n")]


def kill_writers(folder: Path, kills: int) -> dict[str, int]:
    """One folder lives through all of it; promises of earlier lives count too."""
    rng = random_numbers(3)
    counts = dict.fromkeys(
        ("kills", "promised", "checked", "lost", "wrong", "dropped", "inexact"), 0
    )
    sure: set[int] = set()
    for turn in range(kills):
        for line in killed(folder, float(rng.exponential(0.15))):
            number = int(line[1:])
            counts["promised"] += line[0] == "+"
            if line[0] == "+":
                sure.add(number)
            elif line[0] == "-":
                sure.discard(number)
        tier = SsdTier.open(folder, capacity_bytes=KILL_CAPACITY)
        found = {info.depth for info in tier.entries()}
        counts["lost"] += len(sure - found)
        for number in found:
            info, data = kill_block(number)
            room = memoryview(bytearray(info.length))
            is_right = tier.read_into(info.key, room, soon()) == info and room == data
            counts["wrong"] += not is_right
        counts["kills"] += 1
        counts["checked"] += len(found)
        counts["dropped"] += sum(
            n for name, n in tier.counters.items() if name.startswith("dropped")
        )
        counts["inexact"] += not tier.verify().is_good
        tier.close()
        if turn % 20 == 19:
            print(json.dumps(counts), flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--block-mib", type=float, default=2)
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--writer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.writer:
        write_for_ever(options.writer)
    folder = Path(tempfile.mkdtemp(prefix="store-ssd-", dir=options.folder))
    result: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}}
    try:
        if options.repeat:
            length = int(options.block_mib * (1 << 20))
            measured = speeds(folder, length, options.total_mib << 20, options.repeat)
            measured |= opening(folder, options.entries, options.repeat)
            result["measured"] = measured
            for name, values in measured.items():
                unit = "" if name.endswith(("_s", "_us")) else " GB/s"
                spread = f"{min(values):.3f} to {max(values):.3f}"
                print(f"{name:>18}: median {statistics.median(values):.3f}{unit}, {spread}")
            for kind in ("write", "read"):
                pairs = zip(measured[f"{kind}_tier"], measured[f"{kind}_plain"], strict=True)
                shares = [tier / plain for tier, plain in pairs]
                print(f"{kind} of the tier / plain: median {statistics.median(shares):.2f}")
        if options.kills:
            result["kills"] = kill_writers(folder / "kills", options.kills)
            print(json.dumps(result["kills"]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
