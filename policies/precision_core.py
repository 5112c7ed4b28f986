"""The last bytes of a plan: an exact search over the few blocks around the threshold.

With the price lambda of a byte at the cut, any plan loses against the linear bound exactly
    loss = sum of reduced costs c_ij + lambda * unused bytes,
    c_ij = damage_ij - damage_i,cut + lambda * (bytes_ij - bytes_i,cut) >= 0.
A level whose reduced cost is no less than the loss of a plan at hand is in no better plan. What
remains is a core of some dozens of blocks, searched by dynamic programming over states (bytes,
reduced cost), blocks by rising cost. A state that still needs a move pays at least the cheapest
move left, which ends the search early.

Source:
    D. Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", European Journal of
    Operational Research 83, 1995 (core, states, bounds); E. Balas and E. Zemel, "An algorithm for
    large zero-one knapsack problems", Operations Research 28, 1980 (core problem).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.precision_tables import Floats, Ints

_BISECTIONS = 12

State = tuple[Floats, Ints, Ints]


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """Moves that may be part of a better plan, by rising reduced cost of their blocks.

    Attributes:
        block_cost: [num_core] float64, the least reduced cost of each block, ascending.
        first_move: [num_core + 1] int64, where each block's moves begin.
        move_cost: [num_moves] float64, reduced costs.
        move_bytes: [num_moves] int64, bytes added; negative for a narrower width.
        move_block: [num_moves] int64.
        move_level: [num_moves] int64.
    """

    block_cost: Floats
    first_move: Ints
    move_cost: Floats
    move_bytes: Ints
    move_block: Ints
    move_level: Ints

    def loss(self, moves: Ints, price: float, room: int) -> float:
        """What a plan of these moves loses against the linear bound."""
        unused = room - int(self.move_bytes[moves].sum())
        return float(self.move_cost[moves].sum()) + price * unused


def single_move_numpy(
    bytes_: Ints,
    damage: Floats,
    level: Ints,
    floor_level: Ints,
    cap_level: Ints,
    price: float,
    room: int,
    reduced: Floats,
) -> float:
    """Reduced cost of every level into ``reduced``; the least loss of one move or none."""
    at = level[:, None]
    levels = np.arange(bytes_.shape[1])
    more = bytes_ - np.take_along_axis(bytes_, at, axis=1)
    cost = (damage - np.take_along_axis(damage, at, axis=1)) + price * more
    reduced[:] = np.maximum(cost, 0.0)
    barred = (levels == at) | (levels < floor_level[:, None]) | (levels > cap_level[:, None])
    reduced[barred] = np.inf
    loss = reduced + price * (room - more)
    return float(min(price * room, np.min(loss, where=more <= room, initial=np.inf)))


def core_of(
    reduced: Floats, bytes_: Ints, level: Ints, least_loss: float, max_moves: int
) -> tuple[Core, float]:
    """Levels whose reduced cost is at most the least loss that one move leaves.

    Returns:
        The core, and the least cost left out: of more than ``max_moves`` the cheapest are kept.
    """
    block, to = np.nonzero(reduced <= least_loss)
    cost = reduced[block, to]
    left_out = np.inf
    if len(cost) > max_moves:
        kept = _cheapest(cost, max_moves, float(np.nextafter(least_loss, np.inf)))
        left_out = float(cost[~kept].min())
        block, to, cost = block[kept], to[kept], cost[kept]
    starts = np.flatnonzero(np.diff(block, prepend=-1))
    block_cost = np.minimum.reduceat(cost, starts) if len(starts) else cost
    by_cost = np.argsort(block_cost, kind="stable")
    sizes = np.diff(starts, append=len(block))[by_cost]
    first = np.concatenate(([0], np.cumsum(sizes)))
    order = np.repeat(starts[by_cost] - first[:-1], sizes) + np.arange(len(block))
    block, to = block[order], to[order]
    core = Core(
        block_cost=block_cost[by_cost],
        first_move=first.astype(np.int64),
        move_cost=cost[order],
        move_bytes=bytes_[block, to] - bytes_[block, level[block]],
        move_block=block,
        move_level=to,
    )
    return core, left_out


def core_search(
    core: Core, price: float, room: int, max_states: int, max_work: int
) -> tuple[Ints, bool, int]:
    """Moves of the best plan found in the core, in plain numpy; the oracle of the compiled search.

    Args:
        core: The moves.
        price: Damage per byte at the cut.
        room: Bytes unused at the cut.
        max_states: States kept after a move; the costliest go first.
        max_work: States looked at before the search gives up.

    Returns:
        Numbers of the moves, whether no better plan exists, states looked at.
    """
    cost, more = np.zeros(1), np.zeros(1, dtype=np.int64)
    node = np.zeros(1, dtype=np.int64)
    parents: list[tuple[int, int]] = [(-1, -1)]
    best, best_parent, best_move = price * room, -1, -1
    proved, work = True, 0
    for k in range(len(core.block_cost)):
        if core.block_cost[k] >= best or work > max_work:
            break
        after = core.block_cost[k + 1] if k + 1 < len(core.block_cost) else np.inf
        base_cost, base_more, base_node = cost, more, node
        for move in range(int(core.first_move[k]), int(core.first_move[k + 1])):
            work += len(base_cost) + len(cost)
            if work > max_work:
                proved = False
                break
            moved_cost = base_cost + core.move_cost[move]
            moved_more = base_more + core.move_bytes[move]
            loss = np.where(moved_more <= room, moved_cost + price * (room - moved_more), np.inf)
            if len(loss) and loss.min() < best:
                s = int(np.argmin(loss))
                best, best_parent, best_move = float(loss[s]), int(base_node[s]), move
            cost, more, node, moved = _merged(
                (cost, more, node), (moved_cost, moved_more, base_node), price, best, after
            )
            for new in np.flatnonzero(moved).tolist():
                parents.append((int(node[new]), move))
                node[new] = len(parents) - 1
            if len(cost) > max_states:
                proved = False
                keep = _cheapest(cost, max_states, best)
                cost, more, node = cost[keep], more[keep], node[keep]
    moves = []
    while best_move >= 0:
        moves.append(best_move)
        best_parent, best_move = parents[best_parent]
    return np.array(moves, dtype=np.int64), proved, work


def _cheapest(cost: Floats, count: int, above: float) -> NDArray[np.bool_]:
    """Which ``count`` costs below ``above`` stay; in the last band, those that come last go.

    States come by rising bytes, moves by block.
    """
    low, high = 0.0, above
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if np.count_nonzero(cost < middle) <= count:
            low = middle
        else:
            high = middle
    band = (cost >= low) & (cost < high)
    spare = count - np.count_nonzero(cost < low)
    return (cost < low) | (band & (np.cumsum(band) <= spare))


def _merged(
    stay: State, go: State, price: float, best: float, after: float
) -> tuple[Floats, Ints, Ints, NDArray[np.bool_]]:
    """States by rising bytes and falling damage; those that cannot beat ``best`` are left out."""
    cost, more, node = (np.concatenate(pair) for pair in zip(stay, go, strict=True))
    moved = np.arange(len(cost)) >= len(stay[0])
    useful = cost + after < best
    cost, more, node, moved = cost[useful], more[useful], node[useful], moved[useful]
    harm = cost - price * more
    order = np.lexsort((moved, harm, more))
    harm = harm[order]
    falling = harm < np.minimum.accumulate(np.concatenate(([np.inf], harm[:-1])))
    order = order[falling]
    return cost[order], more[order], node[order], moved[order]
