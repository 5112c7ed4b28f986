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
    """Best first group i in [low, high] of the last cell [i, end); ties to the smallest i."""
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
    box: tuple[int, int],
    cut_box: tuple[int, int],
) -> None:
    """For every end j in ``box`` the best last cut in ``cut_box``, by divide and conquer.

    The best last cut does not move left as j grows, so known cuts of nearer and nearer j bound
    the search for those between.
    """
    first, last = box
    ends = last - first + 1
    stride = 1
    while stride * 2 <= ends:
        stride *= 2
    while stride > 0:
        for place in range(stride - 1, ends, 2 * stride):
            end = first + place
            low = cut_box[0]
            high = min(cut_box[1], end - 1)
            if place >= stride:
                low = cuts[end - stride]
            if place + stride < ends:
                high = min(high, cuts[end + stride])
            after[end], cuts[end] = _best_cut(before, sums, masses, end, low, high)
        stride //= 2


@_compiled
def _group_equal(values: Floats, mass: Floats, sums: Floats, masses: Floats, starts: Ints) -> int:
    """Prefix sums over runs of equal values; returns the number of runs.

    Some best clustering never cuts a run, so runs stand for their columns: a row of bfloat16
    weights has far fewer values than columns. Values are taken relative to the middle one,
    against cancellation.

    Args:
        values: [K], ascending.
        mass: [K].
        sums: [K + 1], written: prefix sums of mass * value.
        masses: [K + 1], written: prefix sums of mass.
        starts: [K + 1], written: the first column of each run, then K.
    """
    columns = len(values)
    shift = values[columns // 2]
    group = 0
    total_sum = 0.0
    total_mass = 0.0
    for k in range(columns):
        if k > 0 and values[k] != values[k - 1]:
            group += 1
            starts[group] = k
            sums[group] = total_sum
            masses[group] = total_mass
        total_sum += mass[k] * (values[k] - shift)
        total_mass += mass[k]
    group += 1
    starts[group] = columns
    sums[group] = total_sum
    masses[group] = total_mass
    return group


@_compiled
def _one_more_cell(
    sums: Floats, masses: Floats, groups: int, borders: Ints, cells: int, cuts: NDArray[np.int32]
) -> None:
    """From the best ``cells`` cells to the best with one more; ``borders`` is replaced.

    The best cuts interlace: the m-th of the new ones lies between the old (m-1)-th and m-th.
    """
    before = np.zeros(groups + 1)
    after = np.zeros(groups + 1)
    box = (1, min(borders[1], groups - cells))
    for j in range(box[0], box[1] + 1):
        before[j] = _gain(sums, masses, 0, j)
    for layer in range(2, cells + 1):
        cut_box = box
        box = (max(borders[layer - 1], layer), min(borders[layer], groups - cells - 1 + layer))
        _next_layer(before, after, cuts[layer], sums, masses, box, cut_box)
        before, after = after, before
    _, end = _best_cut(before, sums, masses, groups, box[0], box[1])
    borders[cells + 1] = groups
    for layer in range(cells, 0, -1):
        borders[layer] = end
        end = cuts[layer, end]


@_compiled
def _seed_borders(
    sums: Floats, masses: Floats, starts: Ints, groups: int, cells: int, borders: Ints
) -> None:
    """Exact weighted k-means of a grouped row: borders of ``cells`` cells, [cells + 1].

    Maximizes sum over cells of (S_b - S_a)^2 / (W_b - W_a), which is sum s w^2 less the squared
    error. With fewer groups than cells the last cells stay empty.
    """
    used = min(cells, groups)
    cuts = np.zeros((used + 1, groups + 1), np.int32)
    ends = np.zeros(used + 1, np.int32)
    ends[1] = groups
    for known in range(1, used):
        _one_more_cell(sums, masses, groups, ends, known, cuts)
    borders[used:] = starts[groups]
    for cell in range(used):
        borders[cell] = starts[ends[cell]]


@_compiled
def _split_point(values: Floats, mass: Floats, a: int, b: int) -> int:
    """Best m of [a, m) and [m, b); ties to the smallest m; one column stays on the left.

    With values relative to the first, S_l^2/W_l + S_r^2/W_r is S^2/W + t^2 / (W_l W_r W) with
    t = S_l W - W_l S. Only a better m pays for the division.
    """
    if b - a < 2:
        return b
    first = values[a]
    total_mass = 0.0
    total_sum = 0.0
    for k in range(a, b):
        total_mass += mass[k]
        total_sum += mass[k] * (values[k] - first)
    tie = TIE * total_sum * total_sum
    to_beat = tie
    where = a + 1
    left_mass = 0.0
    left_sum = 0.0
    for k in range(a, b - 1):
        left_mass += mass[k]
        left_sum += mass[k] * (values[k] - first)
        between = left_sum * total_mass - left_mass * total_sum
        masses = left_mass * (total_mass - left_mass)
        if masses > 0.0 and between * between > to_beat * masses:
            to_beat = between * between / masses + tie
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
    sums = np.zeros(columns + 1)
    masses = np.zeros(columns + 1)
    starts = np.zeros(columns + 1, np.int32)
    borders = np.zeros((1 << parent_bits) + 1, np.int32)
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
        groups = _group_equal(values, mass, sums, masses, starts)
        cells = 1 << seed_bits
        while cells >> 1 >= groups:
            cells >>= 1  # one value a cell: exact at every width that has the cells
        step = (1 << parent_bits) // cells
        _seed_borders(sums, masses, starts, groups, cells, borders[::step])
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
