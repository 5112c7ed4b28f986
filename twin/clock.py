"""Computed instants on SimPy's clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import simpy
from simpy.events import Event, Timeout


def call_at(env: simpy.Environment, due_s: float, callback: Callable[[Event], Any]) -> None:
    """Have SimPy call back at ``due_s``.

    SimPy takes delays, so its clock meets ``due_s`` within rounding; the run keeps and records the
    computed instant, which no clock has rounded.
    """
    due = Timeout(env, max(0.0, due_s - env.now))
    due.callbacks.append(callback)


@contextmanager
def cyclic_collector_off() -> Iterator[None]:
    """No garbage collection of cycles meanwhile: an event loop makes millions of objects and none
    in cycles.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
