"""The clocks of a measurement: wall time, or the processor time of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal, get_args

ClockName = Literal["wall", "cpu"]
CLOCKS: Final = get_args(ClockName)
Clock = Callable[[], float]


class ProfileError(ValueError):
    """Something cannot be measured, or what was measured means nothing; says which part."""


def clock_of(name: str, threads: int) -> Clock:
    """Seconds, from some moment on.

    Processor time leaves out what other processes took, so it suits a busy machine; with several
    threads it counts all of them, which is no time that anybody waits.

    Raises:
        ProfileError: If there is no such clock, or it does not go with the threads.
    """
    if name not in CLOCKS:
        raise ProfileError(f"--clock: must be {' or '.join(CLOCKS)}, found {name!r}")
    if name == "wall":
        return time.perf_counter
    if threads > 1:
        raise ProfileError(
            f"--clock cpu: adds up the seconds of all threads; use --threads 1, found {threads}"
        )
    return time.process_time
