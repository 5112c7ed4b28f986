"""Which A/F ratio and batch size to deploy, and how sure that answer is.

Maximises throughput per unit of price under limits on the time per output token and on KV
memory. The levels of theory in ``models.attention_ffn`` are the entries of the catalog: the
paper's mean field, its Gaussian barrier, and the two that also know the skew of the load.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.attention_ffn import (
    LevelPrediction,
    SlotMoments,
    WorkerLoadLaw,
    exact_law,
    largest_batch,
    predict,
    slot_moments,
)
from models.bundle import Bundle
from traces.lengths import LengthPairs

MAX_AUTO_RATIO = 512
MAX_AUTO_BATCH = 65_536


class InfeasibleError(ValueError):
    """No ratio and batch size meets the constraints; the message says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisioningLimits:
    """What a deployment must respect.

    Attributes:
        r_max: Largest ratio allowed, >= 1; None: about twice the mean-field optimum.
        max_tpot_s: Limit of the mean time per output token, or None.
        kv_capacity_tokens: KV tokens one attention worker holds, or None.
        kv_safety_z: Standard deviations of load kept free below the capacity.
    """

    r_max: int | None = None
    max_tpot_s: float | None = None
    kv_capacity_tokens: int | None = None
    kv_safety_z: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionBundle:
    """Order: deploy r attention workers per FFN server with B slots a microbatch.

    Attributes:
        attention_per_ffn: r.
        batch_per_worker: B.
        level: Level of theory that decided.
        throughput_per_instance: Tokens per second, layer and unit of price.
        cycle_s: Expected time of one microbatch period in one layer.
        tpot_s: Expected time per output token over all layers.
        r_low, r_high: Where the best ratio lies when the mean slot load is off by two standard
            errors of the trace; both equal r for a law that is known exactly.
        regret_low, regret_high: Share of throughput lost by deploying r although the best is
            r_low or r_high.
        regret_one_less, regret_one_more: Share lost by deploying one worker less or more; NaN
            where that is not allowed.
        binding: Names of the limits that hold the answer back: ``max_tpot_s``,
            ``kv_capacity_tokens``, ``r_max``.
        misses_limit_high: Whether r would miss ``max_tpot_s`` if the mean slot load were two
            standard errors of the trace higher.
    """

    attention_per_ffn: int
    batch_per_worker: int
    level: str
    throughput_per_instance: float
    cycle_s: float
    tpot_s: float
    r_low: int
    r_high: int
    regret_low: float
    regret_high: float
    regret_one_less: float
    regret_one_more: float
    binding: tuple[str, ...]
    misses_limit_high: bool = False


def batch_limit_of(moments: SlotMoments, microbatches: int, limits: ProvisioningLimits) -> int:
    """Largest B within the KV capacity; 0 where not even one slot fits."""
    if limits.kv_capacity_tokens is None:
        return MAX_AUTO_BATCH
    fits = largest_batch(limits.kv_capacity_tokens, moments, microbatches, limits.kv_safety_z)
    return MAX_AUTO_BATCH if fits is None else min(MAX_AUTO_BATCH, fits)


def automatic_r_max(lengths: LengthPairs, bundle: Bundle, moments: SlotMoments) -> int:
    """A range of ratios that surely contains the optimum and shows what lies beyond it."""
    mean_field = predict(lengths, bundle, [1, 2], level="mean_field", moments=moments).r_real
    widest = MAX_AUTO_RATIO if math.isinf(mean_field) else max(16, math.ceil(2.0 * mean_field))
    widest = min(MAX_AUTO_RATIO, widest)
    ratios = np.arange(1, widest + 1)
    best = predict(lengths, bundle, ratios, level="gaussian", moments=moments).r
    return min(MAX_AUTO_RATIO, max(16, 8 * math.ceil(2.0 * best / 8)))


class Provisioning:
    """Chooses r, and B where it is left open, by one level of theory.

    Args:
        level: ``mean_field``, ``gaussian``, ``pearson3`` or ``exact``.
    """

    def __init__(self, level: str = "exact") -> None:
        self.level = level

    def decide(
        self,
        lengths: LengthPairs,
        bundle: Bundle,
        limits: ProvisioningLimits,
        *,
        choose_batch: bool = False,
        given_r: int | None = None,
        now: float,
    ) -> ProvisionBundle:
        """The best deployment for this traffic within the limits.

        Args:
            lengths: Joint law of prompt and output lengths.
            bundle: Latency model and settings; its B is used unless ``choose_batch``.
            limits: What must be respected.
            choose_batch: Choose B as well.
            given_r: The ratio that will be deployed, where it is not free: B is chosen for it. The
                order names the best ratio for that B all the same.
            now: Seconds since the start of the run.

        Raises:
            InfeasibleError: If nothing meets the limits.
        """
        moments = slot_moments(lengths)
        batch_limit = batch_limit_of(moments, bundle.microbatches, limits)
        if choose_batch:
            bundle = self._with_best_batch(lengths, bundle, limits, moments, batch_limit, given_r)
        elif bundle.batch_per_worker > batch_limit:
            raise InfeasibleError(
                f"batch_per_worker = {bundle.batch_per_worker} does not fit into "
                f"kv_capacity_tokens = {limits.kv_capacity_tokens}: at theta = "
                f"{moments.theta_tokens:.0f} tokens a slot, {bundle.microbatches} microbatch(es) "
                f"and z = {limits.kv_safety_z:g} the largest B that fits is {batch_limit}"
            )
        order = self._best_ratio(lengths, bundle, limits, moments, batch_limit)
        if choose_batch and "max_tpot_s" not in order.binding:
            value = order.throughput_per_instance
            if given_r is not None:
                value = _best_throughput(lengths, bundle, limits, self.level, given_r, moments)
            if self._gains_by_more_slots(
                lengths, bundle, limits, moments, batch_limit, given_r, value
            ):
                order = dataclasses.replace(order, binding=("max_tpot_s", *order.binding))
        return order

    def _gains_by_more_slots(
        self,
        lengths: LengthPairs,
        bundle: Bundle,
        limits: ProvisioningLimits,
        moments: SlotMoments,
        batch_limit: int,
        given_r: int | None,
        value: float,
    ) -> bool:
        """Whether a somewhat larger B would be worth more if ``max_tpot_s`` were not there."""
        batch = bundle.batch_per_worker
        larger = min(batch_limit, batch + max(1, batch // 20))
        if limits.max_tpot_s is None or larger == batch:
            return False
        more = dataclasses.replace(bundle, batch_per_worker=larger)
        free = dataclasses.replace(limits, max_tpot_s=None)
        return _best_throughput(lengths, more, free, self.level, given_r, moments) > value

    def _best_ratio(
        self,
        lengths: LengthPairs,
        bundle: Bundle,
        limits: ProvisioningLimits,
        moments: SlotMoments,
        batch_limit: int,
    ) -> ProvisionBundle:
        r_max = limits.r_max or automatic_r_max(lengths, bundle, moments)
        ratios = np.arange(1, r_max + 1)
        load = exact_law(lengths, bundle.batch_per_worker) if self.level == "exact" else None
        prediction = predict(lengths, bundle, ratios, level=self.level, load=load, moments=moments)
        allowed = _within_tpot(prediction, limits)
        if not bool(allowed.any()):
            raise InfeasibleError(
                f"max_tpot_s = {limits.max_tpot_s:g} cannot be met with batch_per_worker = "
                f"{bundle.batch_per_worker}: even one attention worker needs "
                f"{float(prediction.tpot_s[0]):.4g} s per output token"
            )
        value = np.where(allowed, prediction.throughput_per_instance, -np.inf)
        best = int(np.argmax(value))
        low, high, misses = self._uncertain_optima(
            lengths, bundle, ratios, limits, moments, load, best
        )
        binding = _binding(prediction, limits, best, bundle.batch_per_worker, batch_limit)
        return ProvisionBundle(
            attention_per_ffn=int(ratios[best]),
            batch_per_worker=bundle.batch_per_worker,
            level=self.level,
            throughput_per_instance=float(prediction.throughput_per_instance[best]),
            cycle_s=float(prediction.cycle_s[best]),
            tpot_s=float(prediction.tpot_s[best]),
            r_low=min(low[0], high[0]),
            r_high=max(low[0], high[0]),
            regret_low=low[1] if low[0] <= high[0] else high[1],
            regret_high=high[1] if low[0] <= high[0] else low[1],
            regret_one_less=_regret(value, best, best - 1),
            regret_one_more=_regret(value, best, best + 1),
            binding=binding,
            misses_limit_high=misses,
        )

    def _uncertain_optima(
        self,
        lengths: LengthPairs,
        bundle: Bundle,
        ratios: NDArray[np.int64],
        limits: ProvisioningLimits,
        moments: SlotMoments,
        load: WorkerLoadLaw | None,
        best: int,
    ) -> tuple[tuple[int, float], tuple[int, float], bool]:
        """(best ratio, regret of ours) when theta is two standard errors lower, and higher.

        And whether ours then misses ``max_tpot_s`` at the higher one.
        """
        same = (int(ratios[best]), 0.0)
        if not moments.theta_se:
            return same, same, False
        answers, misses = [], False
        for shift_tokens in (-2.0 * moments.theta_se, 2.0 * moments.theta_se):
            shifted = predict(
                lengths,
                shift_load(bundle, shift_tokens),
                ratios,
                level=self.level,
                load=load,
                moments=moments,
            )
            allowed = _within_tpot(shifted, limits)
            misses = not bool(allowed[best])
            if not bool(allowed.any()):
                answers.append(same)
                continue
            value = np.where(allowed, shifted.throughput_per_instance, -np.inf)
            at = int(np.argmax(value))
            ours = float(shifted.throughput_per_instance[best])
            theirs = float(shifted.throughput_per_instance[at])
            answers.append((int(ratios[at]), max(0.0, 1.0 - ours / theirs)))
        return answers[0], answers[1], misses

    def _with_best_batch(
        self,
        lengths: LengthPairs,
        bundle: Bundle,
        limits: ProvisioningLimits,
        moments: SlotMoments,
        batch_limit: int,
        given_r: int | None,
    ) -> Bundle:
        """The bundle with the B of most throughput: a coarse geometric scan, then a fine one."""
        if batch_limit < 1:
            raise InfeasibleError(
                f"kv_capacity_tokens = {limits.kv_capacity_tokens} cannot hold one slot per "
                "microbatch of this traffic"
            )
        scan = "pearson3" if self.level == "exact" else self.level
        value_by_batch: dict[int, float] = {}

        def value_at(batch: int, level: str) -> float:
            tried = dataclasses.replace(bundle, batch_per_worker=batch)
            return _best_throughput(lengths, tried, limits, level, given_r, moments)

        def value(batch: int) -> float:
            if batch not in value_by_batch:
                value_by_batch[batch] = value_at(batch, scan)
            return value_by_batch[batch]

        grid = sorted({round(x) for x in np.geomspace(1, batch_limit, 33)})
        for batch in grid:
            if value(batch) == -math.inf and len(value_by_batch) > 1:
                break  # the time per token only grows with B
        for _ in range(3):
            best = max(value_by_batch, key=lambda b: (value_by_batch[b], -b))
            known = sorted(value_by_batch)
            at = known.index(best)
            low = known[max(0, at - 1)]
            high = known[min(len(known) - 1, at + 1)]
            for batch in sorted({round(x) for x in np.linspace(low, high, 11)}):
                value(batch)
        best = max(value_by_batch, key=lambda b: (value_by_batch[b], -b))
        while not math.isfinite(value_at(best, self.level)):
            if best == 1:
                raise self._nothing_fits(lengths, bundle, limits, given_r)
            best -= max(1, best // 100)
        return dataclasses.replace(bundle, batch_per_worker=best)

    def _nothing_fits(
        self, lengths: LengthPairs, bundle: Bundle, limits: ProvisioningLimits, given_r: int | None
    ) -> InfeasibleError:
        """What even one slot a worker needs, at the given ratio or with a single worker."""
        smallest = dataclasses.replace(bundle, batch_per_worker=1)
        needed = predict(lengths, smallest, [given_r or 1], level=self.level).tpot_s[0]
        who = "one attention worker" if given_r is None else f"r = {given_r}"
        return InfeasibleError(
            f"max_tpot_s = {limits.max_tpot_s:g} cannot be met by any batch_per_worker: with a "
            f"single slot a worker, {who} needs {float(needed):.4g} s per output token"
        )


def shift_load(bundle: Bundle, shift_tokens: float) -> Bundle:
    """The bundle as if every slot held ``shift_tokens`` more: the shift moves beta_attention."""
    c = bundle.coefficients
    beta = c.beta_attention + c.alpha_attention * bundle.batch_per_worker * shift_tokens
    return dataclasses.replace(
        bundle, coefficients=dataclasses.replace(c, beta_attention=max(0.0, beta))
    )


def _within_tpot(prediction: LevelPrediction, limits: ProvisioningLimits) -> NDArray[np.bool_]:
    if limits.max_tpot_s is None:
        return np.ones(len(prediction.ratios), dtype=np.bool_)
    return np.asarray(prediction.tpot_s <= limits.max_tpot_s, dtype=np.bool_)


def _best_throughput(
    lengths: LengthPairs,
    bundle: Bundle,
    limits: ProvisioningLimits,
    level: str,
    given_r: int | None,
    moments: SlotMoments,
) -> float:
    """Largest throughput within the limits, of the given ratio or of all; -inf where none is."""
    if given_r is not None:
        ratios = [given_r]
    else:
        ratios = list(range(1, (limits.r_max or automatic_r_max(lengths, bundle, moments)) + 1))
    prediction = predict(lengths, bundle, ratios, level=level, moments=moments)
    allowed = _within_tpot(prediction, limits)
    if not bool(allowed.any()):
        return -math.inf
    return float(prediction.throughput_per_instance[allowed].max())


def _regret(value: NDArray[np.float64], best: int, other: int) -> float:
    if not 0 <= other < len(value) or not math.isfinite(float(value[other])):
        return math.nan
    return float(1.0 - value[other] / value[best])


def _binding(
    prediction: LevelPrediction,
    limits: ProvisioningLimits,
    best: int,
    batch: int,
    batch_limit: int,
) -> tuple[str, ...]:
    binding = []
    unlimited = int(np.argmax(prediction.throughput_per_instance))
    if limits.max_tpot_s is not None and unlimited != best:
        binding.append("max_tpot_s")
    if limits.kv_capacity_tokens is not None and batch >= batch_limit:
        binding.append("kv_capacity_tokens")
    if best == len(prediction.ratios) - 1 and unlimited == best:
        binding.append("r_max")
    return tuple(binding)
