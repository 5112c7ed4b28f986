"""The inner loops of saturated runs, compiled. Needs numba; imported only where it is wanted.

Every number is worked out by the same operations in the same order as on SimPy's clock
(``twin.slots``, ``twin.barrier_cycles``, ``twin.pingpong_cycles``, ``policies.routing``), so that
the results are equal to the last bit. Random numbers come from outside, drawn by numpy. All is in
one file because numba's cache notices changes only in the file of the loop it has kept.

Arrays, with m microbatches, r workers, S = r * B slots, R buckets of the calendar:

    loads      [m, r] int64   tokens each worker reads in the coming step
    full_load  [m, S] int64   prompt plus output tokens of the request in a slot
    head       [m, R] int32   first slot that finishes with step s, s mod R; -1: none
    behind     [m, S] int32   next slot in the same bucket; -1: none
    line_of    [m, S] int32   line of requests that the one in a slot comes from
    prompts    [r, K] int64   requests at hand of each line; row j from ``used[j]`` to ``have[j]``
    outputs    [r, K] int64
    cursor     [3]    int64   next cycle, routing draws used, worker next in turn
    needed     [r]    int64   room for counting requests
    batch      [3, S] int64   prompt, output and line of the requests that come in
    scratch    [4, S + 2 r] int64   room for routing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., object])
Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]
Floats = NDArray[np.float64]

IN_PLACE, ROUND_ROBIN, LEAST_TOKEN_LOAD, POWER_OF_TWO = range(4)
_CYCLE, _DRAW, _TURN = range(3)
_FEW = 48


def compiled(function: Function) -> Function:
    """Compile on first call; keep the machine code on disk where a folder can be written."""
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(Function, numba.njit(function))


@compiled
def collect_done(head: SmallInts, behind: SmallInts, bucket: int, done: Ints) -> int:
    """Take the slots of a bucket, ascending, into ``done``; how many."""
    n = 0
    slot = head[bucket]
    while slot >= 0:
        done[n] = slot
        n += 1
        slot = behind[slot]
    head[bucket] = -1
    if n > _FEW:
        done[:n].sort()
        return n
    for i in range(1, n):
        slot_i = done[i]
        j = i
        while j > 0 and done[j - 1] > slot_i:
            done[j] = done[j - 1]
            j -= 1
        done[j] = slot_i
    return n


@compiled
def longest_first(prompts: Ints, n: int, order: Ints) -> None:
    """``order`` [n]: positions by descending prompt, equal ones by position."""
    if n > _FEW:
        order[:n] = np.argsort(-prompts[:n], kind="mergesort")
        return
    for i in range(n):
        prompt = prompts[i]
        j = i
        while j > 0 and prompts[order[j - 1]] < prompt:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i


@compiled
def choose_round_robin(free: Ints, n: int, cursor: Ints, chosen: Ints) -> None:
    """``policies.routing.RoundRobin``."""
    r = len(free)
    worker = cursor[_TURN]
    for i in range(n):
        while free[worker] == 0:
            worker = (worker + 1) % r
        chosen[i] = worker
        free[worker] -= 1
        worker = (worker + 1) % r
    cursor[_TURN] = worker


@compiled
def choose_least_loaded(
    prompts: Ints, n: int, free: Ints, loads: Ints, order: Ints, chosen: Ints
) -> None:
    """``policies.routing.LeastTokenLoad``; ``loads`` is used up."""
    longest_first(prompts, n, order)
    for k in range(n):
        i = order[k]
        worker = -1
        for j in range(len(free)):
            if free[j] > 0 and (worker < 0 or loads[j] < loads[worker]):
                worker = j
        chosen[i] = worker
        free[worker] -= 1
        loads[worker] += prompts[i]


@compiled
def choose_lighter_of_two(
    prompts: Ints,
    n: int,
    free: Ints,
    loads: Ints,
    draws: Floats,
    cursor: Ints,
    open_workers: Ints,
    chosen: Ints,
) -> None:
    """``policies.routing.PowerOfTwo``; ``loads`` is used up."""
    count = 0
    for j in range(len(free)):
        if free[j] > 0:
            open_workers[count] = j
            count += 1
    for i in range(n):
        u = draws[cursor[_DRAW]]
        v = draws[cursor[_DRAW] + 1]
        cursor[_DRAW] += 2
        at = int(u * count)
        worker = open_workers[at]
        if count > 1:
            second = int(v * (count - 1))
            if second >= at:
                second += 1
            other = open_workers[second]
            if loads[other] < loads[worker] or (loads[other] == loads[worker] and other < worker):
                worker = other
                at = second
        chosen[i] = worker
        loads[worker] += prompts[i]
        free[worker] -= 1
        if free[worker] == 0:
            for j in range(at, count - 1):
                open_workers[j] = open_workers[j + 1]
            count -= 1


@compiled
def route(
    routing: int,
    done: Ints,
    n: int,
    slots_per_worker: int,
    loads: Ints,
    prompts: Ints,
    draws: Floats,
    cursor: Ints,
    scratch: Ints,
    pick: Ints,
) -> None:
    """``pick`` [n]: which of the next n requests each finished slot takes.

    The requests given to a worker take its free slots in ascending order, in order of requests.
    """
    r = len(loads)
    free, left, at, chosen = scratch[0, :r], scratch[1, :r], scratch[2, :r], scratch[3]
    open_workers = scratch[0, r : 2 * r]
    order = scratch[1, r:]
    for j in range(r):
        free[j] = 0
        left[j] = loads[j]
    for i in range(n):
        free[done[i] // slots_per_worker] += 1
    before = 0
    for j in range(r):
        at[j] = before
        before += free[j]
    if routing == ROUND_ROBIN:
        choose_round_robin(free, n, cursor, chosen)
    elif routing == LEAST_TOKEN_LOAD:
        choose_least_loaded(prompts, n, free, left, order, chosen)
    else:
        choose_lighter_of_two(prompts, n, free, left, draws, cursor, open_workers, chosen)
    for i in range(n):
        pick[at[chosen[i]]] = i
        at[chosen[i]] += 1


@compiled
def count_needed(
    head: SmallInts, behind: SmallInts, line_of: SmallInts, bucket: int, needed: Ints
) -> None:
    """Add to ``needed`` [r] how many requests of each line a bucket's slots will take."""
    slot = head[bucket]
    while slot >= 0:
        needed[line_of[slot]] += 1
        slot = behind[slot]


@compiled
def are_at_hand(needed: Ints, used: Ints, have: Ints) -> bool:
    """Whether every line still has the requests it needs."""
    short = False
    for j in range(len(needed)):
        short |= used[j] + needed[j] > have[j]
    return not short


@compiled
def finish_step(
    step: int,
    slots_per_worker: int,
    routing: int,
    loads: Ints,
    full_load: Ints,
    line_of: SmallInts,
    head: SmallInts,
    behind: SmallInts,
    prompts: Ints,
    outputs: Ints,
    used: Ints,
    draws: Floats,
    cursor: Ints,
    done: Ints,
    pick: Ints,
    batch: Ints,
    scratch: Ints,
) -> int:
    """One step of one microbatch: age, free, refill, as ``twin.slots.SlotPool.finish_step``."""
    num_buckets = len(head)
    bucket = step % num_buckets
    for j in range(len(loads)):
        loads[j] += slots_per_worker
    n = collect_done(head, behind, bucket, done)
    for i in range(n):
        slot = done[i]
        line = line_of[slot]
        loads[slot // slots_per_worker] -= full_load[slot]
        batch[0, i] = prompts[line, used[line]]
        batch[1, i] = outputs[line, used[line]]
        batch[2, i] = line
        used[line] += 1
        pick[i] = i
    if routing != IN_PLACE:
        route(routing, done, n, slots_per_worker, loads, batch[0], draws, cursor, scratch, pick)
    for i in range(n):
        slot = done[i]
        prompt = batch[0, pick[i]]
        output = batch[1, pick[i]]
        loads[slot // slots_per_worker] += prompt
        full_load[slot] = prompt + output
        line_of[slot] = batch[2, pick[i]]
        last = (bucket + output) % num_buckets
        behind[slot] = head[last]
        head[last] = slot
    return n


@compiled
def barrier_cycles(
    until: int,
    slots_per_worker: int,
    routing: int,
    stage: Floats,
    clock: Floats,
    loads: Ints,
    full_load: Ints,
    line_of: SmallInts,
    head: SmallInts,
    behind: SmallInts,
    prompts: Ints,
    outputs: Ints,
    used: Ints,
    have: Ints,
    draws: Floats,
    cursor: Ints,
    done: Ints,
    pick: Ints,
    batch: Ints,
    needed: Ints,
    scratch: Ints,
    stride: int,
    end_s: Floats,
    cycle_s: Floats,
    max_load: Ints,
    sum_load: Ints,
    completed: Ints,
    samples: Ints,
) -> None:
    """Cycles under the barrier, until ``until`` or until the requests at hand do not suffice.

    Args:
        stage: alpha, beta of attention, longest shared stage, layers each simulated one stands for.
        clock: [0]: end of the last cycle.
    """
    m, num_buckets = head.shape
    alpha, beta, floor, layers = stage[0], stage[1], stage[2], stage[3]
    while cursor[_CYCLE] < until:
        cycle = cursor[_CYCLE]
        u, step = cycle % m, cycle // m
        needed[:] = 0
        count_needed(head[u], behind[u], line_of[u], step % num_buckets, needed)
        if not are_at_hand(needed, used, have):
            return
        if routing == POWER_OF_TWO and cursor[_DRAW] + 2 * needed.sum() > len(draws):
            return
        top, total = loads[u, 0], loads[u, 0]
        for j in range(1, loads.shape[1]):
            total += loads[u, j]
            top = max(top, loads[u, j])
        slowest = alpha * top + beta
        length = slowest if slowest > floor else floor
        clock[0] += length * layers
        end_s[cycle] = clock[0]
        cycle_s[cycle] = length
        max_load[cycle] = top
        sum_load[cycle] = total
        if cycle % stride == 0:
            samples[cycle // stride] = loads[u]
        completed[cycle] = finish_step(
            step, slots_per_worker, routing, loads[u], full_load[u], line_of[u], head[u],
            behind[u], prompts, outputs, used, draws, cursor, done, pick, batch, scratch,
        )  # fmt: skip
        cursor[_CYCLE] = cycle + 1


@compiled
def pass_layers(
    simulated_layers: int,
    stage: Floats,
    worker_free: Floats,
    shared_free: Floats,
    arrived: Floats,
    loads: Ints,
) -> None:
    """One step of all microbatches through workers, link and FFN; see ``pingpong_cycles``.

    Microbatches never overtake each other, so their stages can be worked out in turn.
    """
    alpha, beta, layers = stage[0], stage[1], stage[2]
    one_way, round_trip, ffn = stage[3], stage[4], stage[5]
    for _ in range(simulated_layers):
        for u in range(len(arrived)):
            ready = arrived[u]
            for j in range(loads.shape[1]):
                start = max(worker_free[j], arrived[u])
                finish = start + (alpha * loads[u, j] + beta) * layers
                worker_free[j] = finish
                ready = max(ready, finish)
            sent = max(ready, shared_free[0])
            shared_free[0] = sent + round_trip
            begun = max(sent + one_way, shared_free[1])
            shared_free[1] = begun + ffn
            arrived[u] = shared_free[1] + one_way


@compiled
def pingpong_cycles(
    until: int,
    simulated_layers: int,
    slots_per_worker: int,
    routing: int,
    stage: Floats,
    worker_free: Floats,
    shared_free: Floats,
    arrived: Floats,
    loads: Ints,
    full_load: Ints,
    line_of: SmallInts,
    head: SmallInts,
    behind: SmallInts,
    prompts: Ints,
    outputs: Ints,
    used: Ints,
    have: Ints,
    draws: Floats,
    cursor: Ints,
    done: Ints,
    pick: Ints,
    batch: Ints,
    needed: Ints,
    scratch: Ints,
    stride: int,
    end_s: Floats,
    max_load: Ints,
    sum_load: Ints,
    completed: Ints,
    samples: Ints,
) -> None:
    """Rounds of all microbatches, until ``until`` or until the requests at hand do not suffice.

    Only the last round of a run may be cut: elsewhere ``until`` is a multiple of m. All
    microbatches pass through it, but only those up to ``until`` are noted. ``pass_layers`` has
    filled the pipeline before.

    Args:
        stage: alpha, beta of attention per layer, layers each simulated one stands for, and for
            one simulated layer the one-way, round-trip and FFN seconds.
        worker_free: [r] when each worker is free.
        shared_free: [2] when link and FFN are free.
        arrived: [m] when the workers have each microbatch.
    """
    m, num_buckets = head.shape
    r = loads.shape[1]
    while cursor[_CYCLE] < until:
        step = cursor[_CYCLE] // m
        running = min(m, until - cursor[_CYCLE])
        needed[:] = 0
        for u in range(running):
            count_needed(head[u], behind[u], line_of[u], step % num_buckets, needed)
        if not are_at_hand(needed, used, have):
            return
        if routing == POWER_OF_TWO and cursor[_DRAW] + 2 * needed.sum() > len(draws):
            return
        pass_layers(simulated_layers, stage, worker_free, shared_free, arrived, loads)
        for u in range(running):
            cycle = cursor[_CYCLE] + u
            top, total = loads[u, 0], loads[u, 0]
            for j in range(1, r):
                total += loads[u, j]
                top = max(top, loads[u, j])
            end_s[cycle] = arrived[u]
            max_load[cycle] = top
            sum_load[cycle] = total
            if cycle % stride == 0:
                samples[cycle // stride] = loads[u]
            completed[cycle] = finish_step(
                step, slots_per_worker, routing, loads[u], full_load[u], line_of[u], head[u],
                behind[u], prompts, outputs, used, draws, cursor, done, pick, batch, scratch,
            )  # fmt: skip
        cursor[_CYCLE] += m
