"""Seconds and damage of the experts at their widths, under the traffic of now."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from models.moe_step_time import FULL_BITS, log_miss
from models.routing_mass import mass_multipliers
from twin.paged_weight_model import PagedWeightModel

Ints = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


class ExpertReads:
    """Seconds of the experts, and their damage, for given widths under the traffic of now."""

    def __init__(self, model: PagedWeightModel, replication: int) -> None:
        self.traffic = model.traffic(replication)
        self._model = model
        self._weights = (model.sizes.rows * model.sizes.columns).astype(np.float64)
        self._block = np.arange(model.sizes.num_blocks)
        _, self._calibrated = self.traffic.masses(self.traffic.long_run)
        self._seconds_by_tokens: dict[tuple[int, float], float] = {}
        self.mean_bits = self.damage = 0.0
        self._bits: Ints | None = None
        self._read = np.zeros((model.sizes.layers, model.sizes.experts))
        self._see_traffic()

    def advance(self, now: float) -> bool:
        """Go on to the traffic of ``now``; whether it has changed."""
        changed = self.traffic.advance(now)
        if changed:
            self._see_traffic()
            self._weigh()
        return changed

    def hold(self, bits: Ints) -> None:
        """Widths committed now; [2 L E], or all 16."""
        model = self._model
        self._bits = bits
        plain = bits[0] == FULL_BITS
        active = model.full_read_bytes() if plain else model.active_bytes[self._block, bits - 2]
        seconds = model.time.read_seconds(active, bits)
        self._read = seconds.reshape(model.sizes.layers, model.sizes.experts, 2).sum(axis=2)
        self.mean_bits = float(np.dot(self._weights, bits) / self._weights.sum())
        self._seconds_by_tokens.clear()
        self._weigh()

    def seconds(self, tokens: int, slowdown: float) -> float:
        """Of all expert layers in a step of so many tokens."""
        key = tokens, slowdown
        found = self._seconds_by_tokens.get(key)
        if found is None:
            found = self._model.time.expert_seconds(
                tokens, self._log_miss, self._read, slowdown=slowdown
            )
            self._seconds_by_tokens[key] = found
        return found

    def _see_traffic(self) -> None:
        self._log_miss = log_miss(self.traffic.now)
        _, mass = self.traffic.masses(self.traffic.now)
        self._multiplier = by_block(mass_multipliers(mass, self._calibrated))
        self._seconds_by_tokens.clear()

    def _weigh(self) -> None:
        if self._bits is None or self._bits[0] == FULL_BITS:
            return
        harm = self._model.damage[self._block, self._bits - 2]
        self.damage = float(np.dot(harm, self._multiplier))


def by_block(by_expert: NDArray[T]) -> NDArray[T]:
    """[L, E] values as [2 L E]: both matrices of an expert get its value."""
    return np.repeat(by_expert.ravel(), 2)
