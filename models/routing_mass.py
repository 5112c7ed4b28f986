"""Which experts the traffic uses now: a moving average of gate weights, by layer and expert.

After a step of T tokens, with a_e and b_e the token means of g and g^2:

    m1 <- k m1 + (1 - k) a,   m2 <- k m2 + (1 - k) b,   k = 2^(-T / half life)

so the average depends on tokens, not on how they were cut into steps, up to the order within one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

HALF_LIFE_TOKENS = 4096.0
SMALLEST_MULTIPLIER = 1.0 / 16.0
LARGEST_MULTIPLIER = 16.0


class RoutingMass:
    """Moving averages m1, m2 of every (layer, expert).

    Attributes:
        m1: [L, E] mean gate weight per token.
        m2: [L, E] mean squared gate weight per token.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        *,
        half_life_tokens: float = HALF_LIFE_TOKENS,
        start: tuple[ArrayLike, ArrayLike] | None = None,
    ) -> None:
        """Start from zero, or from calibrated masses ``start = (m1, m2)``, each [L, E].

        Raises:
            ValueError: If a count or the half life is not positive, or ``start`` has another shape.
        """
        if layers < 1 or experts < 1 or not half_life_tokens > 0.0:
            raise ValueError(
                "layers, experts and half_life_tokens must be > 0, "
                f"found {layers}, {experts}, {half_life_tokens}"
            )
        self.half_life_tokens = half_life_tokens
        first, second = (np.zeros((layers, experts)),) * 2 if start is None else start
        self.m1 = np.array(first, dtype=np.float64)
        self.m2 = np.array(second, dtype=np.float64)
        if self.m1.shape != (layers, experts) or self.m2.shape != (layers, experts):
            raise ValueError(
                f"start must hold two [{layers}, {experts}] arrays, "
                f"found {self.m1.shape} and {self.m2.shape}"
            )

    def observe(self, layer: int, expert_index: ArrayLike, gate_weight: ArrayLike) -> None:
        """Count one step of one layer.

        Args:
            layer: Which layer's router.
            expert_index: [T, k] experts chosen for each token; T = 0 changes nothing.
            gate_weight: [T, k] their gate weights.

        Raises:
            ValueError: If shapes disagree or an expert does not exist.
        """
        index = np.asarray(expert_index)
        gate = np.asarray(gate_weight, dtype=np.float64)
        experts = self.m1.shape[1]
        if index.ndim != 2 or index.shape != gate.shape:
            raise ValueError(
                f"expert_index and gate_weight must be [T, k], found {index.shape}, {gate.shape}"
            )
        if index.size == 0:
            return
        if index.min() < 0 or index.max() >= experts:
            raise ValueError(
                f"expert_index must be within 0..{experts - 1}, found {index.min()}..{index.max()}"
            )
        flat = index.ravel()
        tokens = len(index)
        self.observe_sums(
            layer,
            np.bincount(flat, gate.ravel(), experts),
            np.bincount(flat, gate.ravel() ** 2, experts),
            tokens,
        )

    def observe_layers(self, expert_index: ArrayLike, gate_weight: ArrayLike) -> None:
        """Count one step of all layers at once; the same numbers as ``observe`` layer by layer.

        Args:
            expert_index: [L, T, k] experts chosen in each layer; T = 0 changes nothing.
            gate_weight: [L, T, k] their gate weights.

        Raises:
            ValueError: If shapes disagree or an expert does not exist.
        """
        index = np.asarray(expert_index)
        gate = np.asarray(gate_weight, dtype=np.float64)
        layers, experts = self.m1.shape
        if index.ndim != 3 or index.shape != gate.shape or len(index) != layers:
            raise ValueError(
                f"expert_index and gate_weight must be [{layers}, T, k], "
                f"found {index.shape}, {gate.shape}"
            )
        if index.size == 0:
            return
        if index.min() < 0 or index.max() >= experts:
            raise ValueError(
                f"expert_index must be within 0..{experts - 1}, found {index.min()}..{index.max()}"
            )
        flat = (index + experts * np.arange(layers)[:, None, None]).ravel()
        weights, slots = gate.ravel(), layers * experts
        gate_sum = np.bincount(flat, weights, slots).reshape(layers, experts)
        squared = np.bincount(flat, weights**2, slots).reshape(layers, experts)
        self.observe_sums(slice(None), gate_sum, squared, index.shape[1])

    def observe_sums(
        self, layer: int | slice, gate_sum: ArrayLike, squared_gate_sum: ArrayLike, tokens: int
    ) -> None:
        """Count one step from its sums, as a scatter-add on the device leaves them.

        Args:
            layer: Which layer's router; ``slice(None)`` for all, with sums [L, E].
            gate_sum: [E] sum of g over the step's tokens.
            squared_gate_sum: [E] sum of g^2.
            tokens: T > 0.
        """
        keep = 2.0 ** (-tokens / self.half_life_tokens)
        fresh = (1.0 - keep) / tokens
        self.m1[layer] = keep * self.m1[layer] + fresh * np.asarray(gate_sum, dtype=np.float64)
        self.m2[layer] = keep * self.m2[layer] + fresh * np.asarray(squared_gate_sum, np.float64)


def mass_multipliers(
    m2: ArrayLike, calibrated_m2: ArrayLike, *, gamma: float = 1.0, epsilon: float = 1e-6
) -> FloatArray:
    """clip(((m2 + eps) / (calibrated + eps))^gamma, 1/16, 16), elementwise.

    Multiplies a damage that was tabulated with the calibrated mass; gamma = 0 switches it off.

    Args:
        m2: Mean squared gate weight now, any shape.
        calibrated_m2: The same at calibration, same shape.
        gamma: How far to trust the change.
        epsilon: Added to both, so that an unused expert has a finite ratio.
    """
    now = np.asarray(m2, dtype=np.float64) + epsilon
    then = np.asarray(calibrated_m2, dtype=np.float64) + epsilon
    return np.asarray(np.clip((now / then) ** gamma, SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER))


def hot_experts(m1: ArrayLike, coverage: float = 0.5) -> NDArray[np.bool_]:
    """[L, E] true for the smallest set of experts that holds ``coverage`` of a layer's mass.

    Experts are taken by falling m1, ties by rising index; a layer without mass has no hot expert.
    A set that falls short by no more than E + 4 rounding errors of the whole mass holds it, so that
    1.8 + 1.5 is half of 6.6.

    Args:
        m1: [L, E] mean gate weight; or [E] of one layer. Rounding errors are those of its type.
        coverage: Share of the mass, in [0, 1].

    Raises:
        ValueError: If the coverage is outside [0, 1].
    """
    if not 0.0 <= coverage <= 1.0:
        raise ValueError(f"coverage must be within [0, 1], found {coverage}")
    given = np.asarray(m1)
    kind = given.dtype if given.dtype.kind == "f" else np.dtype(np.float64)
    mass = given.astype(np.float64)
    order = np.argsort(-mass, axis=-1, kind="stable")
    ranked = np.take_along_axis(mass, order, axis=-1)
    before = np.zeros_like(ranked)
    before[..., 1:] = np.cumsum(ranked, axis=-1)[..., :-1]
    total = ranked.sum(axis=-1, keepdims=True)
    rounding = (mass.shape[-1] + 4) * float(np.finfo(kind).eps)
    wanted = (coverage - rounding) * total
    hot = np.zeros(mass.shape, dtype=np.bool_)
    np.put_along_axis(hot, order, (before < wanted) & (ranked > 0.0), axis=-1)
    return hot


def floor_bits(
    m1: ArrayLike, *, coverage: float = 0.5, hot_bits: int = 4, cold_bits: int = 2
) -> NDArray[np.int64]:
    """[L, E] lowest bitwidth of each expert: ``hot_bits`` in the hot set, else ``cold_bits``."""
    return np.where(hot_experts(m1, coverage), hot_bits, cold_bits).astype(np.int64)
