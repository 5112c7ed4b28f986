"""A bundle of r attention workers and one FFN server, and the time of its stages.

Coefficients are per layer: one pass of one microbatch through the attention of a layer, the
transfer, and the FFN of that layer. Any time unit works as long as it is one; the product keeps
seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MAX_COEFFICIENT_S = 1e6
MIN_COEFFICIENT_S = 1e-20

Semantics = Literal["barrier", "pingpong"]
CommunicationForm = Literal["worker", "bundle"]

_COEFFICIENTS = (
    "alpha_attention",
    "beta_attention",
    "alpha_ffn",
    "beta_ffn",
    "alpha_communication",
    "beta_communication",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCoefficients:
    """The six numbers of the linear latency model, per layer.

    Attributes:
        alpha_attention: Attention seconds per token of KV read by a worker.
        beta_attention: Attention seconds that do not depend on load.
        alpha_ffn: FFN seconds per token of the aggregated batch r * B.
        beta_ffn: FFN seconds that do not depend on batch.
        alpha_communication: Round-trip transfer seconds per token.
        beta_communication: Round-trip transfer seconds that do not depend on batch.
        communication: ``worker``: the transfer carries the B tokens of one worker
            (t_C(B), independent of r); ``bundle``: the r * B tokens of all (t_C(rB)).

    Source:
        arXiv 2601.21351: t_C(B) in v1, t_C(rB) as quoted from v3/v4.
    """

    alpha_attention: float
    beta_attention: float
    alpha_ffn: float
    beta_ffn: float
    alpha_communication: float = 0.0
    beta_communication: float = 0.0
    communication: CommunicationForm = "worker"

    def __post_init__(self) -> None:
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be finite and >= 0, found {value!r}")
        if self.alpha_attention == 0.0 and self.beta_attention == 0.0:
            raise ValueError("alpha_attention and beta_attention are both 0: attention is free")
        if self.alpha_ffn == 0.0 and self.beta_ffn == 0.0:
            raise ValueError("alpha_ffn and beta_ffn are both 0: the FFN is free")
        if self.communication not in ("worker", "bundle"):
            raise ValueError(
                f"communication must be 'worker' or 'bundle', found {self.communication!r}"
            )

    def require_plausible_seconds(self) -> None:
        """Each coefficient, taken as seconds, must be 0 or within 1e-20..1e6.

        Beyond, stage times leave the range in which their sums and ratios mean anything.

        Raises:
            ValueError: Naming the coefficient.
        """
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            if value != 0.0 and not MIN_COEFFICIENT_S <= value <= MAX_COEFFICIENT_S:
                raise ValueError(
                    f"{name} must be 0 or within {MIN_COEFFICIENT_S:g}..{MAX_COEFFICIENT_S:g} "
                    f"seconds, found {value:g} s"
                )

    def attention_s(self, load_tokens: float) -> float:
        """Seconds of attention on one worker that holds ``load_tokens``."""
        return self.alpha_attention * load_tokens + self.beta_attention

    def ffn_s(self, batch_tokens: float) -> float:
        """Seconds of FFN on the aggregated batch of ``batch_tokens``."""
        return self.alpha_ffn * batch_tokens + self.beta_ffn

    def communication_s(self, attention_per_ffn: float, batch_per_worker: float) -> float:
        """Seconds of the round-trip transfer of one microbatch."""
        tokens = batch_per_worker
        if self.communication == "bundle":
            tokens *= attention_per_ffn
        return self.alpha_communication * tokens + self.beta_communication


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What does not change when the ratio r is varied.

    Attributes:
        coefficients: The latency model.
        batch_per_worker: B, slots of one microbatch on one attention worker, >= 1.
        semantics: ``barrier``: every cycle lasts max(slowest attention, transfer, FFN), the
            paper's model; ``pingpong``: m microbatches take turns, workers wait only for the
            FFN's answer.
        microbatches: m, microbatches in flight, >= 1. Each worker holds m * B slots, and a token
            needs m cycles per layer.
        one_way_s: One-way latency of a transfer under ``pingpong``; None: half of t_C.
        num_layers: Layers of the model: a token passes all of them.
        attention_price: Cost of one attention worker, any unit, > 0.
        ffn_price: Cost of the FFN server, same unit, > 0.
    """

    coefficients: LatencyCoefficients
    batch_per_worker: int
    semantics: Semantics = "barrier"
    microbatches: int = 1
    one_way_s: float | None = None
    num_layers: int = 1
    attention_price: float = 1.0
    ffn_price: float = 1.0

    def __post_init__(self) -> None:
        for name in ("batch_per_worker", "microbatches", "num_layers"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, found {value!r}")
        for name in ("attention_price", "ffn_price"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} must be finite and > 0, found {value!r}")
        if self.semantics not in ("barrier", "pingpong"):
            raise ValueError(f"semantics must be 'barrier' or 'pingpong', found {self.semantics!r}")
        if self.one_way_s is not None and not (
            math.isfinite(self.one_way_s) and self.one_way_s >= 0.0
        ):
            raise ValueError(f"one_way_s must be finite and >= 0, found {self.one_way_s!r}")

    def one_way_time_s(self, attention_per_ffn: float) -> float:
        """One-way transfer latency c: as given, else half of the round trip t_C."""
        if self.one_way_s is not None:
            return self.one_way_s
        return 0.5 * self.coefficients.communication_s(attention_per_ffn, self.batch_per_worker)

    def price(self, attention_per_ffn: float) -> float:
        """Cost of a bundle with that ratio: r * w_A + w_F; r + 1 at unit prices."""
        return attention_per_ffn * self.attention_price + self.ffn_price
