"""What the form asks, as the tables of a scenario file. Knows screen units, not the screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.strict_tables import ScenarioError

AUTO, CHOSEN, LISTED = "auto", "chosen", "listed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The fields of the form; None stands for an empty one, which asks for the default.

    Attributes:
        workload: Table ``[workload]``.
        stages: The latency model: ``calibration``, or ``coefficients`` and ``num_layers``.
        batch_per_worker, r, r_max: Empty: ``auto``.
        semantics, microbatches: As in a scenario.
        one_way_ms, max_tpot_ms: Milliseconds.
        kv_capacity_tokens, kv_safety_z: KV memory of one attention worker.
        attention_price, ffn_price: Cost of each device.
        level: Level of theory that decides.
        routing: Routing policy of the attention workers.
        seed, replications, confidence, start, compare_routing: As in ``[run]``.
        num_cycles: Empty: ``auto``.
        simulate_r: ``auto``, ``chosen``, or ``listed`` with ``listed_r``.
        listed_r: Ratios, separated by commas.
    """

    workload: Mapping[str, Any]
    stages: Mapping[str, Any] = field(default_factory=dict)
    batch_per_worker: int | None = None
    r: int | None = None
    r_max: int | None = None
    semantics: str = "barrier"
    microbatches: int | None = None
    one_way_ms: float | None = None
    max_tpot_ms: float | None = None
    kv_capacity_tokens: int | None = None
    kv_safety_z: float | None = None
    attention_price: float | None = None
    ffn_price: float | None = None
    level: str = "exact"
    routing: str = "random"
    seed: int | None = None
    replications: int | None = None
    num_cycles: int | None = None
    simulate_r: str = AUTO
    listed_r: str = ""
    compare_routing: bool = True
    start: str = "stationary"
    confidence: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every file that the form needs has been named."""
        named = (self.workload.get("trace"), self.stages.get("calibration"))
        return "" not in named

    def tables(self) -> dict[str, Any]:
        """The tables of the scenario that this form describes.

        Raises:
            ScenarioError: If the listed ratios are not integers.
        """
        return {
            "workload": dict(self.workload),
            "attention_ffn": self._attention_ffn(),
            "routing": {"attention_worker": self.routing},
            "run": self._run(),
        }

    def _run(self) -> dict[str, Any]:
        return filled(
            seed=self.seed,
            replications=self.replications,
            num_cycles=self.num_cycles or AUTO,
            simulate_r=self._ratios(),
            compare_routing=self.compare_routing,
            start=self.start,
            confidence=self.confidence,
        )

    def _attention_ffn(self) -> dict[str, Any]:
        return filled(
            **self.stages,
            batch_per_worker=self.batch_per_worker or AUTO,
            r=self.r or AUTO,
            r_max=self.r_max or AUTO,
            semantics=self.semantics,
            microbatches=self.microbatches,
            one_way_s=seconds(self.one_way_ms),
            max_tpot_s=seconds(self.max_tpot_ms),
            kv_capacity_tokens=self.kv_capacity_tokens,
            kv_safety_z=self.kv_safety_z,
            attention_price=self.attention_price,
            ffn_price=self.ffn_price,
            level=self.level,
        )

    def _ratios(self) -> str | list[int]:
        if self.simulate_r != LISTED:
            return self.simulate_r
        try:
            return [int(part) for part in self.listed_r.replace(",", " ").split()]
        except ValueError:
            raise ScenarioError(
                f"[run] simulate_r: must be integers separated by commas, found {self.listed_r!r}"
            ) from None


def seconds(milliseconds: float | None) -> float | None:
    """Milliseconds of the screen as seconds; None stays None."""
    return None if milliseconds is None else milliseconds / 1000.0


def filled(**fields: Any) -> dict[str, Any]:
    """The fields that are not empty."""
    return {key: value for key, value in fields.items() if value not in (None, "")}
