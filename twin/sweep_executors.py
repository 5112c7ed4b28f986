"""Runs the cells of a sweep: one by one, on a pool of processes, or on a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

from models.scenario_file import parse_scenario
from models.strict_tables import ScenarioError
from twin.sweep_grid import Point

RAY_ANSWER_S = 5.0

Results = Generator[tuple[Point, dict[str, Any]], None, None]


def run_point(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of one point, or the reason why it has none.

    ``infeasible`` holds why it cannot meet its limits, ``error`` what is wrong with its input.
    """
    from models.calibration import CalibrationError
    from models.slot_load import HeavyTailError
    from policies.provisioning import InfeasibleError
    from traces.errors import TraceError
    from twin.experiment import run_experiment

    try:
        return dict(run_experiment(parse_scenario(tables)).summary)
    except InfeasibleError as error:
        return {"infeasible": str(error)}
    except (TraceError, ScenarioError, CalibrationError, HeavyTailError) as error:
        return {"error": str(error)}


def process_results(points: Sequence[Point], jobs: int | None) -> Results:
    """Results as they come from a pool of processes (or from this one, for one job)."""
    workers = min(jobs or os.cpu_count() or 1, max(1, len(points)))
    if workers == 1:
        for point in points:
            yield point, run_point(point.tables)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["twin.experiment"])
    with _pool(workers, context) as pool:
        waiting = {pool.submit(run_point, point.tables): point for point in points}
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(finished, key=lambda f: waiting[f].number):
                point = waiting.pop(future)
                try:
                    summary = future.result()
                except BrokenProcessPool:
                    raise ScenarioError(
                        f"a worker process was killed (out of memory?) before {_named(point)} was "
                        "done; finished points are kept: repeat the command, perhaps with --jobs 1"
                    ) from None
                yield point, summary


def _named(point: Point) -> str:
    return ", ".join(f"{key} = {value}" for key, value in point.settings.items())


@contextmanager
def _pool(workers: int, context: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes are ended at once when the block is left early (Ctrl-C)."""
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_ignore_interrupt)
    try:
        yield pool
    except BaseException:
        # the pool has no public way to end a task that has begun; these are its own processes
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ray_results(points: Sequence[Point], jobs: int | None) -> Results:
    """Results as they come from a Ray cluster: the one of RAY_ADDRESS, else a local one."""
    import ray

    started_here = not ray.is_initialized()
    if started_here:
        ray.init(
            num_cpus=jobs, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
    try:
        task = ray.remote(num_cpus=1)(run_point)
        waiting = {task.remote(point.tables): point for point in points}
        while waiting:
            finished, _ = ray.wait(list(waiting), num_returns=1)
            for reference in finished:
                yield waiting.pop(reference), ray.get(reference)
    finally:
        if started_here:
            ray.shutdown()


def require_ray() -> None:
    """Fail before anything is made where Ray is absent or its cluster does not answer.

    Raises:
        ScenarioError: Saying which of them.
    """
    if find_spec("ray") is None:
        raise ScenarioError(
            "--engine ray: Ray is not installed; pip install 'serving-twin[cluster]'"
        )
    require_reachable(os.environ.get("RAY_ADDRESS", ""))


def require_reachable(address: str) -> None:
    """Fail at once where no cluster answers; Ray itself would try for minutes.

    Args:
        address: As in RAY_ADDRESS: ``host:port`` or ``ray://host:port``; nothing is tried for an
            empty one, ``auto`` and ``local``.

    Raises:
        ScenarioError: If the address has no port or nothing answers there.
    """
    if address in ("", "auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ScenarioError(
            f"--engine ray: RAY_ADDRESS must be host:port, ray://host:port, auto or local, "
            f"found {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_ANSWER_S).close()
    except OSError as error:
        raise ScenarioError(
            f"--engine ray: no Ray cluster answers at RAY_ADDRESS={address} "
            f"({error.strerror or error}); start one, or unset RAY_ADDRESS for a local one"
        ) from error
