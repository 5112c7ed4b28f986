"""The law of one attention worker's token load, at three levels of detail.

Exact: the slot law raised to the B-fold convolution. Gaussian and Pearson III: continuous laws with
the first two or three moments of it, put on a fine lattice so that one code serves all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from models.order_statistics import (
    FloatArray,
    WorkerLoadLaw,
    cdf_of,
    gauss_legendre_unit,
    split_onto_lattice,
)
from traces.lengths import LengthPairs

# Chance, at each end, of a load outside the lattice that is kept.
LOST_MASS_LOG = math.log(1e16)
MAX_POINTS = 1 << 18
MAX_LOAD_TOKENS = 1 << 25
STEPS_PER_SD = 512
# A shifted gamma this close to symmetric differs from a normal by less than 1e-6 sd.
LEAST_SKEW = 1e-5
MAX_DENSITY_CELLS = 1 << 17


def slot_load_pmf(lengths: LengthPairs) -> tuple[int, FloatArray]:
    """Probability of every load of one slot at a random step.

    Returns:
        The smallest load in tokens, and the mass of it and of every following load.

    Raises:
        ValueError: If loads span more than 2^25 tokens.
    """
    first = int(lengths.prompt_tokens.min())
    begin = lengths.prompt_tokens - first
    end = begin + lengths.output_tokens
    size = int(end.max())
    if size > MAX_LOAD_TOKENS:
        raise ValueError(f"slot loads span {size} tokens, more than the {MAX_LOAD_TOKENS} allowed")
    change = np.bincount(end, weights=lengths.weight, minlength=size + 1)
    change -= np.bincount(begin, weights=lengths.weight, minlength=size + 1)
    # Summed from the far end, so that the thin upper tail keeps its relative precision.
    mass = np.maximum(0.0, np.cumsum(change[:0:-1])[::-1])
    return first, mass / mass.sum()


def exact_law(
    lengths: LengthPairs, batch_per_worker: int, *, max_points: int = MAX_POINTS
) -> WorkerLoadLaw:
    """Law of the sum of B independent slot loads, by one Fourier transform.

    Only the window that matters is kept: outside of it lies less than 1e-16 of the mass at either
    end by Chernoff's bound, so the wrap-around of the transform cannot be seen. Where the window
    is wider than ``max_points`` tokens the slot law is first put on a coarser lattice.

    Args:
        lengths: Joint law of (P, D).
        batch_per_worker: B, slots of the worker in one microbatch.
        max_points: Most points of the lattice, >= 2.

    Source:
        docs/theory.md; Chernoff, Ann. Math. Stat. 23 (1952) 493.
    """
    if batch_per_worker < 1:
        raise ValueError(f"batch_per_worker must be >= 1, found {batch_per_worker!r}")
    if max_points < 2:
        raise ValueError(f"max_points must be >= 2, found {max_points!r}")
    first, pmf = slot_load_pmf(lengths)
    low, high = _window(pmf, batch_per_worker)
    factor = max(1, -(-(high - low) // (max_points - 1)))
    if factor > 1:
        pmf = split_onto_lattice(pmf, factor)
        low, high = low // factor, -(-high // factor)
    num_points = high - low + 1
    period = _fast_length(num_points)
    wrapped = np.zeros(-(-len(pmf) // period) * period)
    wrapped[: len(pmf)] = pmf
    spectrum = np.fft.rfft(wrapped.reshape(-1, period).sum(axis=0))
    total = np.fft.irfft(_integer_power(spectrum, batch_per_worker), period)
    kept = np.roll(total, -(low % period))[:num_points]
    return WorkerLoadLaw(
        start_tokens=float(batch_per_worker * first + factor * low),
        step_tokens=float(factor),
        cdf=cdf_of(kept),
        is_exact=factor == 1,
    )


def gaussian_law(mean_tokens: float, sd_tokens: float) -> WorkerLoadLaw:
    """A normal worker load on a lattice of 512 steps per standard deviation."""
    if sd_tokens == 0.0:
        return _point_law(mean_tokens)
    reach = math.sqrt(2.0 * LOST_MASS_LOG)
    num_cells = math.ceil(2.0 * reach * STEPS_PER_SD)
    width = 2.0 * reach / num_cells
    pmf = _split_density(lambda z: np.asarray(-0.5 * z * z), -reach, width, num_cells)
    return _scaled(pmf, -reach, width, mean_tokens, sd_tokens)


def pearson3_law(mean_tokens: float, sd_tokens: float, skew: float) -> WorkerLoadLaw:
    """A shifted gamma (Pearson III) with the given mean, standard deviation and skewness.

    Source:
        N. L. Johnson, S. Kotz, N. Balakrishnan, Continuous Univariate Distributions 1, ch. 17;
        the reach of the upper tail is the sub-gamma bound of S. Boucheron, G. Lugosi, P. Massart,
        Concentration Inequalities, 2.4.
    """
    if sd_tokens == 0.0:
        return _point_law(mean_tokens)
    if abs(skew) < LEAST_SKEW:
        return gaussian_law(mean_tokens, sd_tokens)
    shape = 4.0 / (skew * skew)
    root = math.sqrt(shape)
    reach = math.sqrt(2.0 * LOST_MASS_LOG)
    low, high = -min(root, reach), reach + LOST_MASS_LOG / root
    num_cells = min(MAX_DENSITY_CELLS, math.ceil((high - low) * STEPS_PER_SD))
    width = (high - low) / num_cells

    def log_density(z: FloatArray) -> FloatArray:
        return np.asarray((shape - 1.0) * np.log1p(z / root) - root * z, dtype=np.float64)

    if low == -root:
        pmf = np.zeros(num_cells + 1)
        pmf[1:] = _split_density(log_density, low + width, width, num_cells - 1)
        pmf[:2] += _first_gamma_cell(shape, width * root)
    else:
        pmf = _split_density(log_density, low, width, num_cells)
    if skew < 0.0:
        pmf, low = pmf[::-1], -high
    return _scaled(pmf, low, width, mean_tokens, sd_tokens)


def _window(pmf: FloatArray, batch: int) -> tuple[int, int]:
    """Lattice indices between which all but 2e-16 of the B-fold sum lies, by Chernoff's bound."""
    index = np.arange(len(pmf))
    mean = float(pmf @ index)
    sd = math.sqrt(float(pmf @ ((index - mean) ** 2)))
    if sd == 0.0:
        return batch * round(mean), batch * round(mean)
    block = -(-len(pmf) // 4096)
    starts = np.arange(0, len(pmf), block)
    mass = np.add.reduceat(pmf, starts)
    kept = mass > 0.0
    mass, lower = mass[kept], starts[kept].astype(np.float64)
    upper = np.minimum(lower + block, len(pmf)) - 1.0
    tilt = np.geomspace(0.02, 60.0, 64) / (sd * math.sqrt(batch))
    reach_up = _chernoff_reach(upper - mean, mass, tilt, batch)
    reach_down = _chernoff_reach(mean - lower, mass, tilt, batch)
    low = math.floor(batch * mean - reach_down)
    high = math.ceil(batch * mean + reach_up)
    return max(0, low), min(batch * (len(pmf) - 1), high)


def _chernoff_reach(off: FloatArray, mass: FloatArray, tilt: FloatArray, batch: int) -> float:
    """x with P(sum of B offs > x) <= 1e-16: the least (B log E[e^(s off)] + log 1e16) / s."""
    exponent = tilt[:, None] * off
    top = exponent.max(axis=1)
    log_mean = top + np.log(np.exp(exponent - top[:, None]) @ mass)
    return float(((batch * log_mean + LOST_MASS_LOG) / tilt).min())


def _integer_power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """base^exponent by squaring: numpy's complex power is slower and less exact."""
    result: NDArray[np.complex128] | None = None
    while True:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if not exponent:
            return base if result is None else result
        base = base * base


def _fast_length(num_points: int) -> int:
    """Smallest 2^k or 3 * 2^k that is not below ``num_points``."""
    power = 1 << max(0, num_points - 1).bit_length()
    return 3 * power // 4 if power >= 4 and 3 * power // 4 >= num_points else power


def _split_density(
    log_density: Callable[[FloatArray], FloatArray], low: float, width: float, num_cells: int
) -> FloatArray:
    """[num_cells + 1] mass of a density on a lattice, each cell split so that its mean is kept."""
    nodes, weights = gauss_legendre_unit()
    z = low + width * (np.arange(num_cells)[:, None] + nodes)
    density = np.exp(log_density(z)) * weights
    pmf = np.zeros(num_cells + 1)
    pmf[:-1] += density @ (1.0 - nodes)
    pmf[1:] += density @ nodes
    return pmf


def _first_gamma_cell(shape: float, end: float) -> FloatArray:
    """[2] mass of the gamma's cell from 0 to ``end``, where its density may be infinite.

    By the power series of exp, in the scale of ``_split_density`` with a density of
    (y / a)^(a - 1) e^(a - y): a cell's mass over its width.
    """
    n = np.arange(12)
    term = np.cumprod(np.append(1.0, -end / n[1:]))
    scale = math.exp(shape + (shape - 1.0) * math.log(end / shape))
    mass = scale * float(term @ (1.0 / (shape + n)))
    upper = scale * float(term @ (1.0 / (shape + n + 1.0)))
    return np.asarray([mass - upper, upper])


def _scaled(
    pmf: FloatArray, low: float, width: float, mean_tokens: float, sd_tokens: float
) -> WorkerLoadLaw:
    """A standardised lattice law in tokens."""
    return WorkerLoadLaw(
        start_tokens=mean_tokens + low * sd_tokens,
        step_tokens=width * sd_tokens,
        cdf=cdf_of(pmf),
        is_exact=False,
    )


def _point_law(tokens: float) -> WorkerLoadLaw:
    return WorkerLoadLaw(start_tokens=tokens, step_tokens=1.0, cdf=np.ones(1))
