"""Which experts the traffic picks: skewed popularity that drifts, the same for every policy.

The logarithm of an expert's popularity is a fixed normal value plus an Ornstein-Uhlenbeck process,
looked at every ``interval_s`` seconds of simulated time. So it does not depend on what a policy
does, and all policies of a comparison meet the same traffic.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from models.moe_step_time import selection_probability
from models.precision_settings import ExpertRouting
from models.streams import stream

Floats = NDArray[np.float64]


class ExpertTraffic:
    """Selection probabilities of a layer's experts over simulated time.

    Attributes:
        long_run: [L, E] chance that a token picks an expert, without drift.
        now: [L, E] the same in the current interval.
        interval: Number of the current interval.
    """

    def __init__(
        self,
        settings: ExpertRouting,
        layers: int,
        experts: int,
        experts_per_token: int,
        *,
        seed: int,
        replication: int = 0,
    ) -> None:
        self._k = experts_per_token
        self._interval_s = settings.interval_s
        self._keep = math.exp(-settings.interval_s / settings.drift_time_s)
        self._drift = settings.drift
        # long-run popularity belongs to the model, not to the day: no replication in its name
        base = stream(seed, "expert popularity")
        self._base = settings.skew * base.standard_normal((layers, experts))
        self._rng = stream(seed, "expert drift", replication)
        self._state = self._rng.standard_normal((layers, experts))
        self.long_run = selection_probability(np.exp(self._base), experts_per_token)
        self.interval = 0
        self.now = self._selection()

    def advance(self, now: float) -> bool:
        """Go on to the interval of ``now`` seconds; whether it is a new one."""
        wanted = int(now / self._interval_s)
        if wanted <= self.interval:
            return False
        fresh = math.sqrt(1.0 - self._keep * self._keep)
        for _ in range(wanted - self.interval):  # one by one: the path must not depend on steps
            shock = self._rng.standard_normal(self._state.shape)
            self._state = self._keep * self._state + fresh * shock
        self.interval = wanted
        self.now = self._selection()
        return True

    @property
    def next_change_s(self) -> float:
        """When the current interval ends."""
        return (self.interval + 1) * self._interval_s

    def masses(self, selection: Floats) -> tuple[Floats, Floats]:
        """[L, E] mean gate weight and mean squared gate weight per token, gates of 1/k each."""
        return selection / self._k, selection / self._k**2

    def _selection(self) -> Floats:
        return selection_probability(np.exp(self._base + self._drift * self._state), self._k)
