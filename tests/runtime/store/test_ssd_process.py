"""A writer process is killed; whoever opens the folder next finds what was promised."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.ssd import SsdTier

CAPACITY = 8 << 20
ROOT = Path(__file__).resolve().parents[3]

# Says "+n" once block n is durable, "-n" before it is removed. Compacts on the way.
WRITER = """
import hashlib, sys
from pathlib import Path
from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.ssd import SsdTier

def block(number):
    length = (number * 7919) % 60_000
    data = hashlib.shake_128(b"data %d" % number).digest(length)
    key = hashlib.sha256(b"key %d" % number).digest()
    return BlockInfo(key, b"", key, 0, number, length, checksum(data)), memoryview(data)

def say(sign, numbers):
    sys.stdout.write("".join(f"{sign}{n}\\n" for n in numbers))
    sys.stdout.flush()

tier = SsdTier.open(Path(sys.argv[1]), capacity_bytes=8 << 20)
held, number = [], 0
say("=", [0])
while True:
    batch = list(range(number, number + 1 + number % 7))
    number += len(batch)
    durable = tier.write([block(n) for n in batch], Deadline.after(30))
    say("+", batch[:durable])
    held += batch[:durable]
    if len(held) > 100:
        gone, held = held[::2], held[1::2]
        say("-", gone)
        tier.remove([block(n)[0].key for n in gone])
        tier.compact(Deadline.after(30), 0.1)
"""


def block(number: int) -> tuple[BlockInfo, memoryview]:
    length = (number * 7919) % 60_000
    data = hashlib.shake_128(b"data %d" % number).digest(length)
    key = hashlib.sha256(b"key %d" % number).digest()
    return BlockInfo(key, b"", key, 0, number, length, checksum(data)), memoryview(data)


def killed_after(folder: Path, lines: int) -> set[int]:
    """Blocks promised, and not removed, by a writer that was killed once it had said so much."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(lines)]
        writer.kill()
        said += writer.stdout.read().splitlines(keepends=True)
        assert writer.wait(60) == -signal.SIGKILL
    whole = [line for line in said if line.endswith("\n")]
    promised = {int(line[1:]) for line in whole if line[0] == "+"}
    removed = {int(line[1:]) for line in whole if line[0] == "-"}
    return promised - removed


@pytest.mark.parametrize("lines", [2, 90, 231, 377])
def test_a_killed_writer_loses_nothing_it_promised(tmp_path: Path, lines: int) -> None:
    """Killed between, before or while blocks are removed and moved; the sizes are exact."""
    sure = killed_after(tmp_path, lines)
    tier = SsdTier.open(tmp_path, capacity_bytes=CAPACITY)
    found = {info.depth: info for info in tier.entries()}
    assert sure <= set(found)
    assert len(sure) > 30 or lines == 2
    for number, info in found.items():
        room = memoryview(bytearray(info.length))
        assert tier.read_into(info.key, room, Deadline.after(60)) == block(number)[0]
        assert room == block(number)[1]
    report = tier.verify()
    assert report.is_good and report.blocks == len(found)
    assert not {name: n for name, n in tier.counters.items() if n and name.startswith("dropped")}
    assert tier.write([block(n) for n in range(5000, 5010)], Deadline.after(60)) == 10
    tier.close()
