"""Seconds of one engine step of a mixture-of-experts model: bytes over bandwidth, or arithmetic.

    step = overhead + sum over layers [launches * t0]
         + experts    sum over layers max( sum_e P_e(T) * bytes_e(q_e) / (share_q * BW),  FLOP )
         + attention  max( KV bytes / (share * BW),  FLOP )
         + the rest   max( weight bytes / (share * BW),  FLOP )

for T tokens computed in the step, prefill and decode alike. P_e(T) = 1 - (1 - p_e)^T is the chance
that expert e is read at all when a token picks it with probability p_e; with equal experts the sum
of P_e is E (1 - (1 - k/E)^T). Bandwidth shares of widths are static estimates until measured.

Source:
    Roofline model: Williams, Waterman, Patterson, CACM 52 (2009). Distinct experts: expected
    coverage of independent draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.kv_bytes import KvLayers
from models.llm_parameters import expert_parameters
from models.llm_shape import LlmShape, MoeShape
from models.step_counts import FULL_BYTES, StepCounts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FULL_BITS = 16
MAX_SELECTION = 1.0 - 1e-12  # keeps log(1 - p) finite for an expert that every token picks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """How fast the device does what a step needs.

    Attributes:
        memory_bytes_per_s: BW, what a copy sustains.
        flops_per_s: Dense 16-bit arithmetic at its peak.
        share_by_bits: Width (16: plain) -> share of BW that an expert kernel reaches.
        dense_share: Share of BW that all other weights reach.
        attention_share: Share of BW that reading the KV cache reaches.
        compute_share: Share of ``flops_per_s`` that matrix products of many tokens reach.
        expert_compute_share: The same of routed experts; None: ``compute_share``.
        attention_compute_share: The same of attention; None: ``compute_share``.
        launch_seconds: t0, of one kernel.
        launches_per_layer: Kernels of a layer.
        overhead_seconds: Of a step: scheduling, sampling.
    """

    memory_bytes_per_s: float
    flops_per_s: float
    share_by_bits: Mapping[int, float]
    dense_share: float
    attention_share: float
    compute_share: float
    launch_seconds: float
    launches_per_layer: float
    overhead_seconds: float
    expert_compute_share: float | None = None
    attention_compute_share: float | None = None

    def __post_init__(self) -> None:
        shares = {
            "dense_share": self.dense_share,
            "attention_share": self.attention_share,
            "compute_share": self.compute_share,
            "expert_compute_share": self.expert_compute_share or self.compute_share,
            "attention_compute_share": self.attention_compute_share or self.compute_share,
            **{f"share_by_bits[{bits}]": share for bits, share in self.share_by_bits.items()},
        }
        for name, share in shares.items():
            if not 0.0 < share <= 1.0:
                raise ValueError(f"{name} must be within (0, 1], found {share}")
        for name in ("memory_bytes_per_s", "flops_per_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and > 0, found {getattr(self, name)}")
        for name in ("launch_seconds", "launches_per_layer", "overhead_seconds"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, found {getattr(self, name)}")


def distinct_experts(num_experts: int, experts_per_token: int, tokens: float) -> float:
    """Expected number of experts that so many tokens pick, all experts alike: E(1-(1-k/E)^b).

    Raises:
        ValueError: If ``experts_per_token`` is not within 1..num_experts or tokens < 0.
    """
    if not 1 <= experts_per_token <= num_experts or tokens < 0:
        raise ValueError(
            "need 1 <= experts_per_token <= num_experts and tokens >= 0, found "
            f"{experts_per_token}, {num_experts}, {tokens}"
        )
    miss = 1.0 - experts_per_token / num_experts
    return num_experts * (1.0 - math.pow(miss, tokens))


def selection_probability(popularity: Floats, experts_per_token: int) -> Floats:
    """[..., E] chance that a token picks each expert: min(1, c * popularity), k in sum.

    Args:
        popularity: [..., E] > 0; scale does not matter.
        experts_per_token: k, 1..E.

    Raises:
        ValueError: If a popularity is not finite and > 0, or k is out of range.
    """
    given = np.asarray(popularity, dtype=np.float64)
    experts = given.shape[-1]
    if not 1 <= experts_per_token <= experts:
        raise ValueError(f"experts_per_token must be within 1..{experts}, not {experts_per_token}")
    if not (np.isfinite(given) & (given > 0.0)).all():
        raise ValueError("popularity must be finite and > 0")
    full = np.zeros(given.shape, np.bool_)
    for _ in range(experts):
        free = np.where(full, 0.0, given)
        left = experts_per_token - full.sum(axis=-1, keepdims=True)
        total = free.sum(axis=-1, keepdims=True)
        scale = np.divide(left, total, out=np.zeros(total.shape), where=total > 0.0)
        picked: Floats = np.where(full, 1.0, scale * given)
        above = ~full & (picked >= 1.0)
        if not above.any():
            return picked
        full |= above
    return np.ones(given.shape)


class MoeStepTime:
    """Seconds of the parts of a step of one model on one device.

    Attributes:
        rates: Of the device.
        moe: The expert part, the same in every layer that has one.
        num_moe_layers: Layers with experts.
        counts: Bytes and operations of its steps.
        kv: Caching layers by equal cache.
        fixed_seconds: Of every step, whatever it computes: overhead and launches.
        dense_bytes: Weight bytes at 16 bits, experts and input embedding left out.
    """

    def __init__(
        self, shape: LlmShape, rates: StepRates, *, kv_value_bytes: int = FULL_BYTES
    ) -> None:
        """Count the model's bytes and operations.

        Raises:
            ValueError: If the model has no experts, or layers with different ones.
        """
        kinds = set(shape.moe_layers)
        if len(kinds) != 1:
            found = "none" if not kinds else f"{len(kinds)} kinds"
            raise ValueError(f"{shape.name}: needs expert layers that are all alike, found {found}")
        self.rates = rates
        self.moe: MoeShape = shape.moe_layers[0]
        self.num_moe_layers = len(shape.moe_layers)
        self.counts = StepCounts(shape, kv_value_bytes=kv_value_bytes)
        self.kv: tuple[KvLayers, ...] = self.counts.kv
        self.dense_bytes = self.counts.dense_bytes
        self.fixed_seconds = (
            rates.overhead_seconds
            + len(shape.layers) * rates.launches_per_layer * rates.launch_seconds
        )
        self._expert_token_flops = (
            2.0 * self.moe.experts_per_token * expert_parameters(self.moe, shape.hidden_size)
        )
        self._memory = rates.memory_bytes_per_s
        self._compute = rates.compute_share * rates.flops_per_s
        self._expert_compute = self._compute
        if rates.expert_compute_share is not None:
            self._expert_compute = rates.expert_compute_share * rates.flops_per_s
        self._attention_compute = self._compute
        if rates.attention_compute_share is not None:
            self._attention_compute = rates.attention_compute_share * rates.flops_per_s

    def dense_seconds(self, tokens: float, outputs: float, *, slowdown: float = 1.0) -> float:
        """Attention projections, shared and dense parts, and the output matrix.

        Args:
            tokens: Tokens computed.
            outputs: Tokens whose next token is asked for.
            slowdown: Factor on memory time, >= 1.
        """
        flops = self.counts.token_flops * tokens + self.counts.output_flops * outputs
        memory = self.dense_bytes / (self.rates.dense_share * self._memory)
        return max(slowdown * memory, flops / self._compute)

    def attention_seconds(self, kv_bytes: float, flops: float, *, slowdown: float = 1.0) -> float:
        """Reading the cache, or the products with it, whatever takes longer."""
        memory = kv_bytes / (self.rates.attention_share * self._memory)
        return max(slowdown * memory, flops / self._attention_compute)

    def attention_flops(self, held: int, added: int) -> float:
        """Operations of attention for ``added`` tokens after ``held`` ones, all layers."""
        return self.counts.attention_flops(held, added)

    def kv_read_bytes(self, held: Ints, added: Ints) -> float:
        """Bytes of cache that a step reads: every sequence its own, once a layer.

        Args:
            held: [n] tokens cached before the step.
            added: [n] tokens computed in it.
        """
        return self.counts.kv_read_bytes(held, added)

    def read_seconds(self, active_bytes: Floats, bits: Ints) -> Floats:
        """Seconds to read weight blocks at their widths.

        Args:
            active_bytes: [...] planes and table in use, or plain weights.
            bits: [...] widths, keys of ``share_by_bits``.
        """
        share = np.ones(FULL_BITS + 1)
        for width, value in self.rates.share_by_bits.items():
            share[width] = value
        seconds: Floats = active_bytes / (share[bits] * self._memory)
        return seconds

    def expert_seconds(
        self, tokens: int, log_miss: Floats, expert_seconds: Floats, *, slowdown: float = 1.0
    ) -> float:
        """All expert layers.

        Args:
            tokens: T computed in the step.
            log_miss: [L, E] log(1 - p), p the chance that a token picks the expert.
            expert_seconds: [L, E] to read the expert's matrices once.
            slowdown: Factor on memory time, >= 1.
        """
        reads = -np.expm1(tokens * log_miss)
        layers = np.einsum("le,le->l", reads, expert_seconds)
        flops = tokens * self._expert_token_flops / self._expert_compute
        return float(np.maximum(slowdown * layers, flops).sum())


def log_miss(selection: Floats) -> Floats:
    """log(1 - p), finite for p = 1."""
    return np.log1p(-np.minimum(selection, MAX_SELECTION))
