"""The compiled inner loops of nested k-means: one sorted row at a time, without the GIL.

A row's cells are intervals of its sorted columns, given by their borders: cell c is
[borders[c], borders[c + 1]).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

TIE = 1e-14  # relative; two splits this close are the same split but for rounding


def _compiled(function: F) -> F:
    compiled: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    return cast("F", compiled)


@_compiled
def _gain(sums: Floats, masses: Floats, a: int, b: int) -> float:
    """(S_b - S_a)^2 / (W_b - W_a): what clustering [a, b) takes off sum s w^2; 0 for no mass."""
    mass = masses[b] - masses[a]
    if mass > 0.0:
        total = sums[b] - sums[a]
        return float(total * total / mass)
    return 0.0


@_compiled
def _best_cut(
    before: Floats, sums: Floats, masses: Floats, end: int, low: int, high: int
) -> tuple[float, int]:
    """Best first column i in [low, high] of the last cell [i, end); ties to the smallest i."""
    best = -1.0
    where = low
    sum_end = sums[end]
    mass_end = masses[end]
    for i in range(low, high + 1):
        mass = mass_end - masses[i]
        total = sum_end - sums[i]
        gain = before[i] + (total * total / mass if mass > 0.0 else 0.0)
        if gain > best:
            best = gain
            where = i
    return best, where


@_compiled
def _next_layer(
    before: Floats,
    after: Floats,
    cuts: Ints,
    sums: Floats,
    masses: Floats,
    cells: int,
    last: int,
    stack: Ints,
) -> None:
    """Best ``cells`` cells of [0, j) for j in cells..last, by divide and conquer.

    The best cut never moves left as j grows, so the cut of the middle j bounds both halves.
    """
    depth = 1
    stack[0, 0] = cells
    stack[0, 1] = last
    stack[0, 2] = cells - 1
    stack[0, 3] = last - 1
    while depth > 0:
        depth -= 1
        first_end = stack[depth, 0]
        last_end = stack[depth, 1]
        low = stack[depth, 2]
        high = stack[depth, 3]
        middle = (first_end + last_end) // 2
        best, where = _best_cut(before, sums, masses, middle, low, min(high, middle - 1))
        after[middle] = best
        cuts[middle] = where
        if middle < last_end:
            stack[depth, 0] = middle + 1
            stack[depth, 1] = last_end
            stack[depth, 2] = where
            stack[depth, 3] = high
            depth += 1
        if first_end < middle:
            stack[depth, 0] = first_end
            stack[depth, 1] = middle - 1
            stack[depth, 2] = low
            stack[depth, 3] = where
            depth += 1


@_compiled
def _seed_borders(values: Floats, mass: Floats, cells: int, borders: Ints) -> None:
    """Exact weighted k-means of a sorted row: borders of ``cells`` cells, [cells + 1].

    Maximizes sum over cells of (S_b - S_a)^2 / (W_b - W_a), which is sum s w^2 less the squared
    error. Values are taken relative to the middle one, against cancellation. A row shorter than
    the number of cells leaves the last cells empty.
    """
    columns = len(values)
    used = min(cells, columns)
    sums = np.zeros(columns + 1)
    masses = np.zeros(columns + 1)
    shift = values[columns // 2]
    for k in range(columns):
        sums[k + 1] = sums[k] + mass[k] * (values[k] - shift)
        masses[k + 1] = masses[k] + mass[k]
    before = np.zeros(columns + 1)
    after = np.zeros(columns + 1)
    cuts = np.zeros((used + 1, columns + 1), np.int32)
    stack = np.empty((128, 4), np.int32)
    for j in range(1, columns + 1):
        before[j] = _gain(sums, masses, 0, j)
    for layer in range(2, used):
        _next_layer(
            before, after, cuts[layer], sums, masses, layer, columns - (used - layer), stack
        )
        before, after = after, before
    if used > 1:
        _, cuts[used, columns] = _best_cut(before, sums, masses, columns, used - 1, columns - 1)
    borders[used:] = columns
    for layer in range(used, 0, -1):
        borders[layer - 1] = cuts[layer, borders[layer]]


@_compiled
def _split_point(values: Floats, mass: Floats, a: int, b: int) -> int:
    """Best m of [a, m) and [m, b); ties to the smallest m; one column stays on the left."""
    if b - a < 2:
        return b
    first = values[a]
    total_mass = 0.0
    total_sum = 0.0
    for k in range(a, b):
        total_mass += mass[k]
        total_sum += mass[k] * (values[k] - first)
    to_beat = -1.0
    where = a + 1
    left_mass = 0.0
    left_sum = 0.0
    for k in range(a, b - 1):
        left_mass += mass[k]
        left_sum += mass[k] * (values[k] - first)
        right_mass = total_mass - left_mass
        right_sum = total_sum - left_sum
        gain = left_sum * left_sum / left_mass if left_mass > 0.0 else 0.0
        if right_mass > 0.0:
            gain += right_sum * right_sum / right_mass
        if gain > to_beat:
            to_beat = gain * (1.0 + TIE)
            where = k + 1
    return where


@_compiled
def _centroid(values: Floats, mass: Floats, a: int, b: int) -> float:
    """Weighted mean of [a, b), b > a; the plain mean where there is no mass."""
    first = values[a]
    total_mass = 0.0
    total_sum = 0.0
    plain_sum = 0.0
    for k in range(a, b):
        offset = values[k] - first
        total_mass += mass[k]
        total_sum += mass[k] * offset
        plain_sum += offset
    if total_mass > 0.0:
        return float(first + total_sum / total_mass)
    return float(first + plain_sum / (b - a))


@_compiled
def _fill_tables(
    values: Floats, mass: Floats, borders: Ints, parent_bits: int, lowest: int, table: Floats
) -> None:
    """Centroids of every width, one table after the other; an empty cell takes its parent's.

    At the lowest width the first cell is never empty; an empty one takes its left neighbour's.
    """
    place = 0
    for bits in range(lowest, parent_bits + 1):
        stride = 1 << (parent_bits - bits)
        cells = 1 << bits
        for cell in range(cells):
            a = borders[cell * stride]
            b = borders[(cell + 1) * stride]
            if b > a:
                table[place + cell] = _centroid(values, mass, a, b)
            elif bits > lowest:
                table[place + cell] = table[place - (cells >> 1) + (cell >> 1)]
            else:
                table[place + cell] = table[place + cell - 1]
        place += cells


@_compiled
def nested_rows(
    weights: Any,
    sensitivity: Floats,
    order: NDArray[np.uint32],
    parent_bits: int,
    seed_bits: int,
    lowest: int,
    codes: NDArray[np.uint8],
    tables: Floats,
) -> None:
    """Cluster rows; fills codes [N, K] and tables [N, sum of 2**q for q in lowest..parent_bits].

    Args:
        weights: [N, K] float32 or float64, finite.
        sensitivity: [1, K] or [N, K], finite, >= 0.
        order: [N, K], the columns of each row by ascending weight.
        parent_bits: Bits of a code.
        seed_bits: Width of the exact clustering.
        lowest: Narrowest table.
        codes: Written.
        tables: Written.
    """
    rows, columns = weights.shape
    values = np.empty(columns)
    mass = np.empty(columns)
    borders = np.zeros((1 << parent_bits) + 1, np.int32)
    while seed_bits > 0 and (1 << (seed_bits - 1)) >= columns:
        seed_bits -= 1  # a short row: one column a cell, exact at every width that has the cells
    seed = np.zeros((1 << seed_bits) + 1, np.int32)
    stride = 1 << (parent_bits - seed_bits)
    for row in range(rows):
        own = row if sensitivity.shape[0] > 1 else 0
        heaviest = 0.0
        for k in range(columns):
            column = order[row, k]
            values[k] = weights[row, column]
            mass[k] = sensitivity[own, column]
            heaviest = max(heaviest, mass[k])
        _normalize(values, mass, heaviest)
        spread_exponent = _scale(values)
        _seed_borders(values, mass, 1 << seed_bits, seed)
        for cell in range(len(seed)):
            borders[cell * stride] = seed[cell]
        step = stride
        while step > 1:
            half = step >> 1
            for start in range(0, 1 << parent_bits, step):
                borders[start + half] = _split_point(
                    values, mass, borders[start], borders[start + step]
                )
            step = half
        _fill_tables(values, mass, borders, parent_bits, lowest, tables[row])
        for entry in range(tables.shape[1]):
            tables[row, entry] = math.ldexp(tables[row, entry], spread_exponent)
        for cell in range(1 << parent_bits):
            for k in range(borders[cell], borders[cell + 1]):
                codes[row, order[row, k]] = cell


@_compiled
def _normalize(values: Floats, mass: Floats, heaviest: float) -> None:
    """Scale sensitivities by a power of two to at most 1; all zero become ones."""
    if heaviest == 0.0:
        mass[:] = 1.0
        return
    exponent = -math.frexp(heaviest)[1]
    for k in range(len(mass)):
        mass[k] = math.ldexp(mass[k], exponent)


@_compiled
def _scale(values: Floats) -> int:
    """Scale a sorted row by a power of two to at most 1, so that no square over- or underflows."""
    exponent = math.frexp(max(abs(values[0]), abs(values[-1])))[1]
    for k in range(len(values)):
        values[k] = math.ldexp(values[k], -exponent)
    return exponent
