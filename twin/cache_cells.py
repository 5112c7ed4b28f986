"""One policy at one size over all requests, and many such cells on a pool of processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.context import BaseContext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.strict_tables import ScenarioError
from policies.catalog import eviction_policy
from policies.prefix.bound import bound_hits
from policies.prefix.cache import PrefixCache
from twin.cache_costs import BlockCosts
from twin.cache_requests import CacheRequests

BOUND = "bound"
"""In the place of a policy's name: Belady's bound, which knows the future."""


class Cell(NamedTuple):
    """One simulation: a policy of the catalog or ``BOUND``, and a capacity in blocks."""

    policy: str
    blocks: int


def cell_hits(requests: CacheRequests, costs: BlockCosts, cell: Cell) -> NDArray[np.int64]:
    """Leading prompt blocks of each request found in the cache: [n].

    Blocks are units of capacity; a policy that weighs costs is told the seconds to compute the
    block at its position again.
    """
    if cell.policy == BOUND:
        chains = [_once(request.prompt, request.generated) for request in requests]
        return np.array(bound_hits(chains, cell.blocks), dtype=np.int64)
    cache = PrefixCache(eviction_policy(cell.policy, cell.blocks), cell.blocks)
    seconds = [costs.recompute_s(depth) for depth in range(requests.longest_chain)]
    hits = np.zeros(len(requests), dtype=np.int64)
    for i, (time_s, category, prompt, generated) in enumerate(requests):
        hits[i] = cache.leading(prompt)
        known, added = _once(prompt, generated)
        cache.request(
            known,
            added,
            now=time_s,
            cost_of_depth=seconds.__getitem__,
            category=category,
        )
    return hits


def _once(
    prompt: tuple[int, ...], generated: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both without repetitions: a source may name a block twice, but a cache has it once."""
    known = dict.fromkeys(prompt)
    return tuple(known), tuple(block for block in dict.fromkeys(generated) if block not in known)


def all_cell_hits(
    requests: CacheRequests, costs: BlockCosts, cells: Sequence[Cell], *, jobs: int | None = None
) -> Iterator[tuple[Cell, NDArray[np.int64]]]:
    """Every cell with its hits [n], as they are done; the hits do not depend on ``jobs``.

    Args:
        requests: The workload; every process gets one copy of its columns.
        costs: Of its blocks.
        cells: What to simulate.
        jobs: Processes, >= 1; None for one a core. One stays in this process.

    Raises:
        ScenarioError: If a process was killed.
    """
    workers = min(jobs or os.cpu_count() or 1, max(1, len(cells)))
    if workers == 1:
        for cell in cells:
            yield cell, cell_hits(requests, costs, cell)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["twin.cache_cells"])
    _start_forkserver()
    with _pool(workers, context, requests, costs) as pool:
        waiting: dict[Future[NDArray[np.int64]], Cell] = {
            pool.submit(_hits_here, cell): cell for cell in cells
        }
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(finished, key=lambda f: cells.index(waiting[f])):
                cell = waiting.pop(future)
                try:
                    yield cell, future.result()
                except BrokenProcessPool:
                    raise ScenarioError(
                        f"a worker process was killed (out of memory?) before {cell.policy} at "
                        f"{cell.blocks:,} blocks was done; repeat with --jobs 1 or fewer --requests"
                    ) from None


def _start_forkserver() -> None:
    """Start what the workers are forked from with Ctrl-C blocked; they inherit that.

    Ctrl-C in a terminal goes to all processes of the command. It is for this one, which ends the
    others; they must not answer it with a traceback, even while they import.
    """
    with _silenced():
        resource_tracker.ensure_running()  # it unblocks signals when it starts, so not in between
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Standard error goes nowhere, for processes started meanwhile as well.

    What helpers of the pool say when their parent goes while they start is of no use to anybody
    (tracebacks of workers, semaphores that the tracker cleans up); errors of work come back as
    exceptions.
    """
    try:
        shown = os.dup(2)
    except OSError:  # closed: nothing is said anyway
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(nowhere)


_given: list[tuple[CacheRequests, BlockCosts]] = []  # of a worker process: what all its cells read


def _receive(requests: CacheRequests, costs: BlockCosts) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    _given.append((requests, costs))


def _hits_here(cell: Cell) -> NDArray[np.int64]:
    return cell_hits(*_given[0], cell)


@contextmanager
def _pool(
    workers: int, context: BaseContext, requests: CacheRequests, costs: BlockCosts
) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes are ended at once when the block is left early (Ctrl-C)."""
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_receive, initargs=(requests, costs)
    )
    try:
        yield pool
    except BaseException:
        # the pool has no public way to end a task that has begun; these are its own processes
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
