"""The inner loops of the precision planner, compiled. Needs numba; imported only when wanted.

Every number is worked out by the same operations in the same order as in ``precision_select`` and
``precision_core``, so that the plans are equal. All is in one file because numba's cache notices
changes only in the file of the loop it has kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., object])
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_DIGIT_BITS = 13
_FEW = 64
_BISECTIONS = 12


def compiled(function: Function) -> Function:
    """Compile on first call; keep the machine code on disk where a folder can be written."""
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(Function, numba.njit(function))


@compiled
def hull_steps(
    bytes_: Ints, damage: Floats, cap_level: Ints, below_cap: int, next_level: Ints, ratio: Floats
) -> None:
    """``precision_tables.hull_steps`` of the blocks whose cap is below ``below_cap``, in place."""
    for i in range(len(bytes_)):
        if cap_level[i] >= below_cap:
            continue
        for low in range(bytes_.shape[1]):
            best, vertex = 0.0, low
            for high in range(low + 1, cap_level[i] + 1):
                saved = damage[i, low] - damage[i, high]
                if saved > 0.0:
                    cost = bytes_[i, high] - bytes_[i, low]
                    slope = saved / cost if cost > 0 else np.inf
                    if slope >= best:
                        best, vertex = slope, high
            next_level[i, low] = vertex
            ratio[i, low] = best


@compiled
def chains(
    bytes_: Ints,
    next_level: Ints,
    ratio: Floats,
    multiplier: Floats,
    floor_level: Ints,
    step_ratio: Floats,
    step_bytes: Ints,
) -> int:
    """Steps of every block from its floor up, into two flat arrays; their bytes in all."""
    num_blocks, num_levels = bytes_.shape
    total = 0
    for i in range(num_blocks):
        level = floor_level[i]
        above = np.inf
        while next_level[i, level] != level:
            vertex = next_level[i, level]
            slope = multiplier[i] * ratio[i, level] if multiplier[i] > 0.0 else 0.0  # not 0 x inf
            above = min(above, slope)
            if above <= 0.0:
                break
            step = i * num_levels + level
            step_ratio[step] = above
            step_bytes[step] = bytes_[i, vertex] - bytes_[i, level]
            total += step_bytes[step]
            level = vertex
    return total


@compiled
def critical_step(keys: Ints, step_bytes: Ints, room: int) -> tuple[int, int]:
    """The first step, by falling key and rising number, that ``room`` has no bytes for.

    Keys are the bits of positive floats; they order like integers. A digit of the keys at a time is
    counted in bytes, and only the steps in the digit that the cut falls into are looked at again.

    Returns:
        Its number and the room that is left before it.
    """
    members = np.empty(len(keys), dtype=np.int64)
    count = 0
    for s in range(len(keys)):
        if keys[s] != 0:
            members[count] = s
            count += 1
    mask = (1 << _DIGIT_BITS) - 1
    weight = np.empty(mask + 1, dtype=np.int64)
    shift = 63 - _DIGIT_BITS
    while count > _FEW and shift >= 0:
        weight[:] = 0
        for m in range(count):
            weight[(keys[members[m]] >> shift) & mask] += step_bytes[members[m]]
        digit = mask
        while weight[digit] <= room:
            room -= weight[digit]
            digit -= 1
        kept = 0
        for m in range(count):
            if (keys[members[m]] >> shift) & mask == digit:
                members[kept] = members[m]
                kept += 1
        count = kept
        shift = max(0, shift - _DIGIT_BITS) if shift > 0 else -1
    if count <= _FEW:  # else all keys are equal, and the numbers already rise
        for m in range(1, count):
            step = members[m]
            at = m
            while at > 0 and keys[members[at - 1]] < keys[step]:
                members[at] = members[at - 1]
                at -= 1
            members[at] = step
    for m in range(count):
        if step_bytes[members[m]] > room:
            return members[m], room
        room -= step_bytes[members[m]]
    return -1, room


@compiled
def climb(
    next_level: Ints, keys: Ints, floor_level: Ints, critical: int, critical_key: int, level: Ints
) -> None:
    """Levels after all steps before the critical one."""
    num_blocks, num_levels = next_level.shape
    for i in range(num_blocks):
        at = floor_level[i]
        while True:
            step = i * num_levels + at
            key = keys[step]
            if key == 0 or key < critical_key or (key == critical_key and step >= critical):
                break
            at = next_level[i, at]
        level[i] = at


@compiled
def single_move(
    bytes_: Ints,
    damage: Floats,
    level: Ints,
    floor_level: Ints,
    cap_level: Ints,
    price: float,
    room: int,
    reduced: Floats,
) -> float:
    """Reduced cost of every level into ``reduced``; the least loss one move leaves, or none."""
    num_blocks, num_levels = bytes_.shape
    least = price * room
    for i in range(num_blocks):
        at = level[i]
        for j in range(num_levels):
            reduced[i, j] = np.inf
            if j == at or j < floor_level[i] or j > cap_level[i]:
                continue
            more = bytes_[i, j] - bytes_[i, at]
            cost = max((damage[i, j] - damage[i, at]) + price * more, 0.0)
            reduced[i, j] = cost
            if more <= room:
                least = min(least, cost + price * (room - more))
    return least


@compiled
def core_states(
    block_cost: Floats,
    first_move: Ints,
    move_cost: Floats,
    move_bytes: Ints,
    price: float,
    room: int,
    max_states: int,
    max_work: int,
    moves: Ints,
) -> tuple[int, bool, int]:
    """``precision_core.core_search``: how many ``moves``, whether they are proved best, work."""
    parent = np.empty(max_work + max_states + 2, dtype=np.int64)
    parent_move = np.empty(max_work + max_states + 2, dtype=np.int64)
    parent[0], parent_move[0] = -1, -1
    num_nodes = 1
    size = 2 * max_states + 2
    cost, new_cost, base_cost = np.zeros(size), np.zeros(size), np.zeros(size)
    more, new_more = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    node, new_node = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    base_more, base_node = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    count = 1
    best, best_parent, best_move = price * room, -1, -1
    proved, work = True, 0
    for k in range(len(block_cost)):
        if block_cost[k] >= best or work > max_work:
            break
        after = block_cost[k + 1] if k + 1 < len(block_cost) else np.inf
        base = count
        for s in range(base):
            base_cost[s], base_more[s], base_node[s] = cost[s], more[s], node[s]
        for move in range(first_move[k], first_move[k + 1]):
            plus, shift = move_cost[move], move_bytes[move]
            work += base + count
            if work > max_work:
                proved = False
                break
            for s in range(base):
                unused = room - (base_more[s] + shift)
                if unused >= 0:
                    loss = (base_cost[s] + plus) + price * unused
                    if loss < best:
                        best, best_parent, best_move = loss, base_node[s], move
            # states that stay and states that make the move, merged by bytes, then by damage
            kept, a, b, least = 0, 0, 0, np.inf
            while a < count or b < base:
                goes = a == count
                if a < count and b < base:
                    there = base_more[b] + shift
                    goes = there < more[a] or (
                        there == more[a]
                        and (base_cost[b] + plus) - price * there < cost[a] - price * more[a]
                    )
                if goes:
                    c, m, n = base_cost[b] + plus, base_more[b] + shift, base_node[b]
                    b += 1
                else:
                    c, m, n = cost[a], more[a], node[a]
                    a += 1
                harm = c - price * m
                if harm < least and c + after < best:
                    least = harm
                    if goes:
                        parent[num_nodes], parent_move[num_nodes] = n, move
                        n = num_nodes
                        num_nodes += 1
                    new_cost[kept], new_more[kept], new_node[kept] = c, m, n
                    kept += 1
            low, high, spare = np.inf, np.inf, 0
            if kept > max_states:  # the costly ones go; within the last band, those of most bytes
                proved = False
                low, high, spare = 0.0, best, max_states
                for _ in range(_BISECTIONS):
                    middle = 0.5 * (low + high)
                    below = 0
                    for s in range(kept):
                        below += new_cost[s] < middle
                    if below <= max_states:
                        low, spare = middle, max_states - below
                    else:
                        high = middle
            count = 0
            for s in range(kept):
                if new_cost[s] >= low:
                    if spare == 0 or new_cost[s] >= high:
                        continue
                    spare -= 1
                cost[count], more[count], node[count] = new_cost[s], new_more[s], new_node[s]
                count += 1
    length = 0
    while best_move >= 0:
        moves[length] = best_move
        length += 1
        best_move, best_parent = parent_move[best_parent], parent[best_parent]
    return length, proved, work
