"""Page copies beside the computation, as planes are moved: seconds against bytes."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.measurements import MIN_SECONDS
from runtime.page_arena import PageArena
from runtime.page_devices import CopyJob, CpuDevice
from runtime.page_movement import DEFAULT_JOB_BYTES
from runtime.page_tables import PageTables
from runtime.profile_clock import Clock, ProfileError

ARENA_BYTES: Final = 64 << 20
JOB_BYTES: Final = (64 << 10, 512 << 10, DEFAULT_JOB_BYTES)
PATIENCE_S: Final = 30.0
POLL_S: Final = 20e-6


def measure_page_copies(
    *, page_bytes: int, rounds: int, clock: Clock = time.perf_counter
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[n] bytes and [n] median seconds of jobs, from the order to their end being known.

    Pages are those of an arena that has been used: scattered, in no order. Every copy is read back
    for its checksum, as the engine has it.

    Args:
        page_bytes: Of the arena.
        rounds: Of which medians are taken.
        clock: Seconds; processor time takes in the thread that copies.

    Raises:
        ProfileError: If a copy fails or does not end.
    """
    random = np.random.default_rng(0)
    pages = ARENA_BYTES // page_bytes
    arena = PageArena(pages, page_bytes=page_bytes)
    host = random.integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    tables = PageTables.empty(
        1, parent_bits=1, min_bits=1, plane_pages=1, table_pages=1, page_bytes=page_bytes
    )
    device = CpuDevice(arena)
    try:
        device.attach(host, tables)
        counts = sorted({max(1, size // page_bytes) for size in JOB_BYTES})
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        number = 0
        for round_number in range(rounds + 1):
            for count in counts:
                job = CopyJob(
                    job_id=number,
                    blocks=np.zeros(1, np.int64),
                    parts=np.zeros(1, np.int64),
                    stream_bytes=np.array([count * page_bytes], np.int64),
                    first=np.array([0, count], np.int64),
                    host_pages=np.arange(count, dtype=np.int64)
                    + int(random.integers(0, pages - count)),
                    arena_pages=random.permutation(pages)[:count].astype(np.int32),
                )
                number += 1
                took_s = _copy(device, job, clock)
                if round_number:  # the first one touches memory for the first time
                    seconds[count].append(took_s)
    finally:
        device.close()
    load = np.array([count * page_bytes for count in counts], dtype=np.float64)
    return load, np.array([float(np.median(seconds[count])) for count in counts])


def _copy(device: CpuDevice, job: CopyJob, clock: Clock) -> float:
    late_s, start_s = time.monotonic() + PATIENCE_S, clock()
    device.start(job)
    while not (ends := device.ended()):
        if time.monotonic() > late_s:
            raise ProfileError(f"page copies: a job did not end within {PATIENCE_S:g} s")
        time.sleep(POLL_S)
    if ends[0].error is not None:
        raise ProfileError(f"page copies: {ends[0].error}")
    return max(clock() - start_s, MIN_SECONDS)
