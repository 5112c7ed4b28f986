"""The largest of r worker loads: expectation, variance, excess over a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

# Beyond 10 standard deviations a normal has 1e-23 of its mass.
NORMAL_REACH = 10.0
NORMAL_PANELS = 64


def kappa(r: float) -> float:
    """Expected maximum of r independent standard normals; 0 for r = 1.

    Source:
        H. A. David, Order Statistics; the barrier constant of arXiv 2601.21351.
    """
    if not r >= 1:
        raise ValueError(f"r must be >= 1, found {r!r}")
    return float(normal_excess([-NORMAL_REACH], [r])[0]) - NORMAL_REACH


def normal_excess(thresholds: ArrayLike, ratios: ArrayLike) -> FloatArray:
    """[n] E[(Z_(r) - z)+]: how far the largest of r standard normals exceeds z on average.

    The integral of 1 - Phi^r from z on, by eight-point Gauss-Legendre panels; exact to 1e-12.

    Args:
        thresholds: [n] z.
        ratios: [n] r > 0, need not be whole.
    """
    z = np.asarray(thresholds, dtype=np.float64)
    r = np.asarray(ratios, dtype=np.float64)
    edges = np.linspace(-NORMAL_REACH, NORMAL_REACH, NORMAL_PANELS + 1)
    width = float(edges[1] - edges[0])
    nodes, weights = gauss_legendre_unit()
    log_phi = np.log(normal_cdf(edges[:-1, None] + width * nodes))
    panel = -np.expm1(r[:, None, None] * log_phi) @ weights * width
    suffix = np.zeros((len(z), NORMAL_PANELS + 1))
    suffix[:, :-1] = np.cumsum(panel[:, ::-1], axis=1)[:, ::-1]
    inside = np.clip(z, -NORMAL_REACH, NORMAL_REACH)
    above = np.minimum(NORMAL_PANELS, np.ceil((inside + NORMAL_REACH) / width)).astype(np.int64)
    gap = edges[above] - inside
    log_gap = np.log(normal_cdf(inside[:, None] + gap[:, None] * nodes))
    first = (-np.expm1(r[:, None] * log_gap) @ weights) * gap
    whole = suffix[np.arange(len(z)), above] + first
    return np.asarray(whole + np.maximum(0.0, -NORMAL_REACH - z), dtype=np.float64)


def normal_cdf(z: FloatArray) -> FloatArray:
    """Phi(z), exact to rounding also in the lower tail.

    Looped over ``math.erfc``: ``scipy.special`` takes half a second to import, more than all of
    the closed forms together.
    """
    flat = [0.5 * math.erfc(-x * math.sqrt(0.5)) for x in z.ravel().tolist()]
    return np.asarray(flat, dtype=np.float64).reshape(z.shape)


def gauss_legendre_unit() -> tuple[FloatArray, FloatArray]:
    """Eight nodes and weights of Gauss-Legendre quadrature on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    return 0.5 * (nodes + 1.0), 0.5 * weights


@dataclass(frozen=True)
class WorkerLoadLaw:
    """Law of the token load of one attention worker on an even lattice.

    Attributes:
        start_tokens: Smallest load of the lattice.
        step_tokens: Distance of neighbours, > 0.
        cdf: [n] P(load <= start + k * step), never decreasing, last value 1.
        is_exact: Whether every load of the worker lies on the lattice; False where mass was split
            between neighbours, which keeps the mean and adds at most step^2 / 4 to the variance
            of each split.
    """

    start_tokens: float
    step_tokens: float
    cdf: FloatArray
    is_exact: bool = True

    @cached_property
    def grid_tokens(self) -> FloatArray:
        """[n] loads of the lattice."""
        return np.asarray(
            self.start_tokens + self.step_tokens * np.arange(len(self.cdf)), dtype=np.float64
        )

    @cached_property
    def pmf(self) -> FloatArray:
        """[n] probability of each load of the lattice."""
        return np.asarray(np.diff(self.cdf, prepend=0.0), dtype=np.float64)

    @cached_property
    def mean_tokens(self) -> float:
        """Expected load."""
        return float(self.start_tokens + self.step_tokens * np.sum(1.0 - self.cdf))

    @cached_property
    def sd_tokens(self) -> float:
        """Standard deviation of the load."""
        off = self.grid_tokens - self.mean_tokens
        return math.sqrt(float(self.pmf @ (off * off)))

    def quantile(self, probability: float) -> float:
        """Smallest load of the lattice that is not exceeded with ``probability``."""
        at = int(np.searchsorted(self.cdf, probability, side="left"))
        return float(self.grid_tokens[min(at, len(self.cdf) - 1)])

    def expected_maximum(self, ratios: ArrayLike) -> FloatArray:
        """[n] expected largest load of r independent workers, for each r."""
        r = np.asarray(ratios, dtype=np.float64)
        start = np.full(len(r), self.start_tokens)
        return np.asarray(self.start_tokens + self.expected_excess(start, r), dtype=np.float64)

    def maximum_variance(self, r: float) -> float:
        """Variance of the largest load of r independent workers."""
        above = 1.0 - np.exp(r * self._log_cdf)
        mean = float(above.sum())
        # Summed around the mean: E[(K - c)^2] with K the lattice index and c the mean rounded.
        offset = np.arange(len(above)) - np.floor(mean)
        upper = offset >= 0
        square = float(((2.0 * offset + 1.0) * above)[upper].sum())
        square -= float(((2.0 * offset + 1.0) * (1.0 - above))[~upper].sum())
        return self.step_tokens**2 * (square - (mean - math.floor(mean)) ** 2)

    def expected_excess(self, thresholds_tokens: ArrayLike, ratios: ArrayLike) -> FloatArray:
        """[n] E[(max of r loads - x)+] for pairs of a threshold x and a ratio r.

        The exact integral of 1 - F^r, a step function, from x on.

        Args:
            thresholds_tokens: [n] x.
            ratios: [n] r > 0, need not be whole.
        """
        x = np.asarray(thresholds_tokens, dtype=np.float64)
        r = np.asarray(ratios, dtype=np.float64)
        position = (x - self.start_tokens) / self.step_tokens
        steps = np.empty(len(x))
        for i, at in enumerate(position.tolist()):
            first = max(0, math.floor(at))
            above = 1.0 - np.exp(r[i] * self._log_cdf[first:])
            skipped = max(0.0, at - first) * (above[0] if len(above) else 0.0)
            steps[i] = above.sum() - skipped + max(0.0, -at)
        return np.asarray(self.step_tokens * steps, dtype=np.float64)

    def coarsened(self, max_points: int) -> WorkerLoadLaw:
        """The law on at most ``max_points`` loads: mass split between neighbours, mean kept."""
        if len(self.cdf) <= max_points:
            return self
        factor = -(-(len(self.cdf) - 1) // (max_points - 1))
        pmf = split_onto_lattice(self.pmf, factor)
        return WorkerLoadLaw(
            start_tokens=self.start_tokens,
            step_tokens=self.step_tokens * factor,
            cdf=cdf_of(pmf),
            is_exact=False,
        )

    @cached_property
    def _log_cdf(self) -> FloatArray:
        with np.errstate(divide="ignore"):
            log = np.log(self.cdf)
        # Loads that surely are not exceeded need no place in the sums.
        return np.asarray(log[: int(np.searchsorted(self.cdf, 1.0)) + 1], dtype=np.float64)


def split_onto_lattice(pmf: FloatArray, factor: int) -> FloatArray:
    """Mass of a lattice moved to every ``factor``-th point, split so that the mean is kept."""
    index, rest = np.divmod(np.arange(len(pmf)), factor)
    size = int(index[-1]) + 2
    upper = rest / factor
    split = np.bincount(index, weights=pmf * (1.0 - upper), minlength=size)
    split += np.bincount(index + 1, weights=pmf * upper, minlength=size)
    kept = split if split[-1] > 0.0 else split[:-1]
    return np.asarray(kept, dtype=np.float64)


def cdf_of(pmf: FloatArray) -> FloatArray:
    """Running sums of a probability mass, scaled so that the last is exactly 1.

    Each half is summed from its own end, so that a long tail does not collect the rounding of all
    sums before it. Mass from a Fourier transform is off by 1e-17 either way; such noise cancels
    in the sums; set to 0 where it is negative, it would not.
    """
    below = np.cumsum(pmf)
    above = np.append(np.cumsum(pmf[:0:-1])[::-1], 0.0)
    total = float(np.sum(pmf))
    cdf = np.where(below < 0.5 * total, below, total - above) / total
    cdf = np.maximum.accumulate(np.clip(cdf, 0.0, 1.0))
    return np.asarray(cdf, dtype=np.float64)
