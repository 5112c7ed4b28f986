"""Expected cycle time where m microbatches take turns and workers wait only for the FFN's answer.

For loads that stay constant over the layers of a step the period per microbatch is the max-plus
eigenvalue over m: max{ max_j mean_u A_ju, t_F, t_C, (1/m) max_u (max_j A_ju + t_F + 2 c) }. For
loads that are independent over workers and microbatches, P(tau <= t) = G(t)^r with
G(t) = P(every A_u <= V, sum_u A_u <= m t), V = m t - t_F - 2 c.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.barrier import other_stages_s
from models.bundle import Bundle
from models.mean_field import mean_field_cycle_s, one_way_line, stage_lines
from models.order_statistics import FloatArray, WorkerLoadLaw

# Lattices this coarse change the expected cycle by less than 2e-5 (two) and 1e-4 (more), measured
# on loads with a worker skew of up to 8.
TWO_MICROBATCH_POINTS = 4096
SUM_POINTS = 4096
LEAST_POINTS = 256
ROWS_AT_ONCE = 64


def fixed_period(
    attention_s: ArrayLike, ffn_s: float, one_way_s: float, link_s: float = 0.0
) -> float:
    """Seconds per microbatch when every worker and microbatch keeps its attention time.

    Args:
        attention_s: [r, m] attention time of worker j on microbatch u.
        ffn_s: FFN time of one microbatch.
        one_way_s: Latency from a worker to the FFN, and back.
        link_s: How long one microbatch occupies the link.

    Source:
        Max-plus eigenvalue of the cyclic schedule, docs/theory.md.
    """
    times = np.asarray(attention_s, dtype=np.float64)
    if times.ndim != 2 or times.size == 0:
        raise ValueError(f"attention_s must be [r, m] with r, m >= 1, found shape {times.shape}")
    slowest_worker = float(times.mean(axis=1).max())
    round_trip = (float(times.max()) + ffn_s + 2.0 * one_way_s) / times.shape[1]
    return max(slowest_worker, float(ffn_s), float(link_s), float(round_trip))


def law_cycle_s(bundle: Bundle, law: WorkerLoadLaw, ratios: ArrayLike) -> FloatArray:
    """[n] expected cycle time for any law of the worker load; see ``PingPong``."""
    return PingPong(bundle, law).cycle_s(ratios)


class PingPong:
    """Expected cycle times of one bundle under one law of the worker load.

    Args:
        bundle: Latency model and settings with m microbatches.
        law: Load of one worker's B slots of one microbatch; put on a coarser lattice where it
            is finer than the expectation can show.
    """

    def __init__(self, bundle: Bundle, law: WorkerLoadLaw) -> None:
        self._bundle = bundle
        self._mean_tokens = law.mean_tokens
        m = bundle.microbatches
        points = TWO_MICROBATCH_POINTS if m == 2 else max(LEAST_POINTS, SUM_POINTS // m)
        self._law = law.coarsened(points) if m > 1 else law
        self._sums: _TruncatedSums | None = None

    def cycle_s(self, ratios: ArrayLike) -> FloatArray:
        """[n] expected cycle time at each ratio r > 0; ratios need not be whole."""
        bundle, law, m = self._bundle, self._law, self._bundle.microbatches
        c = bundle.coefficients
        r = np.asarray(ratios, dtype=np.float64)
        if c.alpha_attention == 0.0 or len(law.cdf) == 1:
            return mean_field_cycle_s(bundle, law.mean_tokens / bundle.batch_per_worker, r)
        _, communication, ffn = stage_lines(bundle, 0.0)[:3]
        away_s = ffn.at(r) + 2.0 * one_way_line(bundle, communication).at(r)
        floor_s = other_stages_s(bundle, r)
        threshold = (m * floor_s - away_s - c.beta_attention) / c.alpha_attention
        if m == 1:
            return floor_s + c.alpha_attention * law.expected_excess(threshold, r)
        # In lattice steps: v counts from the smallest load of one microbatch, and the sum of m
        # loads may reach v + slack.
        start = (threshold - law.start_tokens) / law.step_tokens
        slack = (away_s - (m - 1) * c.beta_attention) / c.alpha_attention
        slack = (slack - (m - 1) * law.start_tokens) / law.step_tokens
        steps = [self._excess(*row) for row in zip(r, start, slack, strict=True)]
        scale_s = c.alpha_attention * law.step_tokens / m
        return floor_s + scale_s * np.asarray(steps, dtype=np.float64)

    def _excess(self, r: float, start: float, slack: float) -> float:
        """Integral of 1 - G^r over v from ``start``, in lattice steps.

        Within a cell v = k..k+1 the bound on the sum is k + floor(slack) up to a fraction, and one
        more beyond it; so G takes two values per cell and the integral is an exact sum.
        """
        whole = math.floor(slack)
        late = slack - whole
        n, m = len(self._law.cdf), self._bundle.microbatches
        num_cells = max(n, m * (n - 1) - whole + 1)
        first = min(max(0, math.floor(start)), num_cells)
        early_cell = 1.0 - self._joint_cdf(whole, num_cells) ** r
        late_cell = 1.0 - self._joint_cdf(whole + 1, num_cells) ** r
        total = float((1.0 - late) * early_cell[first:].sum() + late * late_cell[first:].sum())
        if start < 0.0:
            return total - start
        if first == num_cells:
            return 0.0
        into = start - first
        skipped = min(into, 1.0 - late) * early_cell[first]
        skipped += max(0.0, into - (1.0 - late)) * late_cell[first]
        return total - float(skipped)

    def _joint_cdf(self, slack: int, num_cells: int) -> FloatArray:
        """[num_cells] P(every load <= k, sum of m loads <= k + slack) in lattice steps."""
        if self._bundle.microbatches == 2:
            return _two_load_cdf(self._law, slack, num_cells)
        if self._sums is None:
            self._sums = _TruncatedSums(self._law.pmf, self._bundle.microbatches)
        return self._sums.joint_cdf(slack, num_cells)


def _two_load_cdf(law: WorkerLoadLaw, slack: int, num_cells: int) -> FloatArray:
    """[num_cells] P(I0 <= k, I1 <= k, I0 + I1 <= k + slack).

    Up to k = slack the sum adds nothing. Beyond it either both loads lie above ``slack``, a
    convolution of the law's tail, or at least one does not and the sum adds nothing again.
    """
    pmf, n = law.pmf, len(law.cdf)
    cdf = np.ones(max(num_cells, n))
    cdf[:n] = law.cdf
    cdf = cdf[:num_cells]
    if slack >= num_cells - 1:
        return cdf * cdf
    joint = np.zeros(num_cells)
    if slack < 0:
        sums = np.cumsum(_self_convolution(pmf))
        reached = np.arange(num_cells) + slack
        inside = reached >= 0
        joint[inside] = sums[np.minimum(reached[inside], len(sums) - 1)]
        return np.clip(joint, 0.0, 1.0)
    at_slack = float(cdf[slack])
    joint[: slack + 1] = cdf[: slack + 1] ** 2
    beyond = np.arange(1, num_cells - slack)
    joint[slack + 1 :] = at_slack * (2.0 * cdf[slack + 1 :] - at_slack)
    tail = pmf[slack + 1 :]
    if len(tail):
        # tail[0] is one step above the slack, so the sum of two offsets starts at 2.
        sums = np.concatenate([[0.0, 0.0], np.cumsum(_self_convolution(tail))])
        joint[slack + 1 :] += sums[np.minimum(beyond, len(sums) - 1)]
    return np.clip(joint, 0.0, 1.0)


def _self_convolution(pmf: FloatArray) -> FloatArray:
    size = 2 * len(pmf) - 1
    length = 1 << max(0, size - 1).bit_length()
    spectrum = np.fft.rfft(pmf, length)
    return np.asarray(np.fft.irfft(spectrum * spectrum, length)[:size], dtype=np.float64)


class _TruncatedSums:
    """P(every load <= k, sum of m loads <= s) for all k and s of a lattice law, m >= 3.

    One row per k: the law cut off above k, raised to its m-fold convolution, summed up. The table
    does not depend on r, so all ratios share it.
    """

    def __init__(self, pmf: FloatArray, num_loads: int) -> None:
        n = len(pmf)
        size = num_loads * (n - 1) + 1
        length = 1 << max(1, size - 1).bit_length()
        self._cdf: NDArray[np.float64] = np.empty((n, size))
        for begin in range(0, n, ROWS_AT_ONCE):
            end = min(n, begin + ROWS_AT_ONCE)
            rows = np.tile(pmf, (end - begin, 1))
            rows[np.arange(n) > np.arange(begin, end)[:, None]] = 0.0
            spectrum = np.fft.rfft(rows, length, axis=1)
            power = spectrum
            for _ in range(num_loads - 1):
                power = power * spectrum
            sums = np.fft.irfft(power, length, axis=1)[:, :size]
            self._cdf[begin:end] = np.cumsum(sums, axis=1)
        np.clip(self._cdf, 0.0, 1.0, out=self._cdf)

    def joint_cdf(self, slack: int, num_cells: int) -> FloatArray:
        """[num_cells] P(every load <= k, sum <= k + slack)."""
        n, size = self._cdf.shape
        cell = np.arange(num_cells)
        reached = cell + slack
        found = self._cdf[np.minimum(cell, n - 1), np.clip(reached, 0, size - 1)]
        return np.asarray(np.where(reached < 0, 0.0, found), dtype=np.float64)
