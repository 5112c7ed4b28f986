"""The tables of a scenario about expert weights that shrink while the KV cache grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from models.hardware_settings import FULL_BITS, Hardware
from models.plane_bytes import MAX_BITS, MIN_PAGE_BYTES, ResidentTables, TableEntry
from models.scenario import Slo
from models.strict_tables import (
    ScenarioError,
    require_at_least_one,
    require_at_most,
    require_not_negative,
    require_positive,
    require_within,
)
from models.workload_settings import Workload

Planner = Literal["hull", "greedy", "uniform", "uniform_remainder"]
PrecisionPolicyName = int | Planner
DEFAULT_COMPARE: tuple[PrecisionPolicyName, ...] = (
    "greedy",
    "uniform",
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llm:
    """The model that is served.

    Attributes:
        model: A name of the catalog, a ``config.json``, or a folder with one.
        kv_value_bytes: Bytes per cached number.
    """

    model: str
    kv_value_bytes: int = 2

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ScenarioError("[llm] model: is empty; give a name of the catalog or a path")
        require_within("llm", 1, 4, kv_value_bytes=self.kv_value_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How expert weights are held, and who decides on their widths.

    Attributes:
        policy: A planner of moving widths, or one fixed width: 2..8, or 16 for plain weights.
        compare: Policies that serve the same requests, for comparison.
        parent_bits, min_bits: Widest and narrowest width of a weight block.
        page_bytes: Bytes of a page, shared by weights and KV cache.
        tables: Resident tables of moving widths: all up to the width in use (a drop moves
            nothing), or that one. A fixed width always holds its own alone.
        table_entry: What a table entry is.
        damage: ``lognormal``: synthetic; else a quantized checkpoint (folder or its
            ``pagedweight.json``) whose damage table is used.
        damage_layer_sigma, damage_block_sigma, damage_noise: Spread of the synthetic damage over
            layers, blocks, and single widths (standard deviations of the logarithm).
        low_share, target_share, high_share: Watermarks: free pages over all.
        calm_steps: Steps above ``high_share`` before widths are restored.
        exchange_margin: Damage saved over damage added that an exchange must exceed, less 1; None:
            0.25, or 0.5 on a link below 30 GB/s.
        plan_interval_s: Least time between plans with copies.
        link_share: Share of the link that copies may fill.
        timeout_steps: Steps until a copy that has not landed is given up.
        use_routing, use_movement: Whether the policy sees routing, and whether it may raise.
    """

    policy: PrecisionPolicyName = "hull"
    compare: Sequence[PrecisionPolicyName] = DEFAULT_COMPARE
    parent_bits: int = 8
    min_bits: int = 2
    page_bytes: int = 32 * 1024
    tables: ResidentTables = "all"
    table_entry: TableEntry = "fp16"
    damage: str = "lognormal"
    damage_layer_sigma: float = 0.7
    damage_block_sigma: float = 0.75
    damage_noise: float = 0.05
    low_share: float = 0.03
    target_share: float = 0.08
    high_share: float = 0.14
    calm_steps: int = 32
    exchange_margin: float | None = None
    plan_interval_s: float = 1.0
    link_share: float = 0.5
    timeout_steps: int = 256
    use_routing: bool = True
    use_movement: bool = True

    def __post_init__(self) -> None:
        table = "precision"
        require_within(table, 2, MAX_BITS, parent_bits=self.parent_bits, min_bits=self.min_bits)
        if self.min_bits > self.parent_bits:
            raise ScenarioError(
                f"[precision] min_bits: must be <= parent_bits ({self.parent_bits}), "
                f"found {self.min_bits}"
            )
        if self.page_bytes < MIN_PAGE_BYTES or self.page_bytes & (self.page_bytes - 1):
            raise ScenarioError(
                f"[precision] page_bytes: must be a power of two >= {MIN_PAGE_BYTES:,}, "
                f"found {self.page_bytes:,}"
            )
        for name, widths in (("policy", (self.policy,)), ("compare", self.compare)):
            for width in widths:
                if isinstance(width, int) and not (2 <= width <= MAX_BITS or width == FULL_BITS):
                    raise ScenarioError(
                        f"[precision] {name}: a fixed width must be 2..{MAX_BITS} or {FULL_BITS}, "
                        f"found {width}"
                    )
        if not self.damage.strip():
            raise ScenarioError("[precision] damage: is empty; give 'lognormal' or a path")
        require_within(
            table,
            0.0,
            5.0,
            damage_layer_sigma=self.damage_layer_sigma,
            damage_block_sigma=self.damage_block_sigma,
            damage_noise=self.damage_noise,
        )
        if not 0.0 <= self.low_share < self.target_share < self.high_share <= 1.0:
            raise ScenarioError(
                "[precision] low_share: low_share < target_share < high_share must hold within "
                f"0..1, found {self.low_share:g}, {self.target_share:g}, {self.high_share:g}"
            )
        require_not_negative(
            table, calm_steps=self.calm_steps, exchange_margin=self.exchange_margin
        )
        require_within(table, 1e-3, 1e6, plan_interval_s=self.plan_interval_s)
        require_within(table, 0.0, 1.0, link_share=self.link_share)
        require_at_least_one(table, timeout_steps=self.timeout_steps)

    @property
    def levels(self) -> tuple[int, ...]:
        """Widths of moving blocks, ascending."""
        return tuple(range(self.min_bits, self.parent_bits + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """Which experts tokens pick: popularity is skewed, and drifts.

    Attributes:
        skew: Standard deviation of the logarithm of an expert's long-run popularity.
        drift: Standard deviation of its logarithm about that, over time.
        drift_time_s: Seconds after which a deviation has fallen to 1/e.
        interval_s: Seconds between two looks at it: what the policy is told is that old.
        hot_coverage: Share of a layer's mass that its hot experts hold.
        hot_bits: Least width of hot experts.
        half_life_tokens: Of the moving average of the routing mass.
    """

    skew: float = 0.8
    drift: float = 0.6
    drift_time_s: float = 60.0
    interval_s: float = 1.0
    hot_coverage: float = 0.5
    hot_bits: int = 4
    half_life_tokens: float = 4096.0

    def __post_init__(self) -> None:
        require_within("routing", 0.0, 5.0, skew=self.skew, drift=self.drift)
        require_within(
            "routing", 1e-3, 1e9, drift_time_s=self.drift_time_s, interval_s=self.interval_s
        )
        require_within("routing", 0.0, 1.0, hot_coverage=self.hot_coverage)
        require_within("routing", 2, MAX_BITS, hot_bits=self.hot_bits)
        require_within("routing", 1.0, 1e12, half_life_tokens=self.half_life_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Continuous batching, first come, first served.

    Attributes:
        max_running: Most sequences at a time.
        prefill_tokens: Most prompt tokens computed in a step.
    """

    max_running: int = 64
    prefill_tokens: int = 512

    def __post_init__(self) -> None:
        require_at_least_one(
            "serving", max_running=self.max_running, prefill_tokens=self.prefill_tokens
        )
        require_at_most("serving", 65_536, max_running=self.max_running)
        require_at_most("serving", 1_000_000, prefill_tokens=self.prefill_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedWeightRun:
    """How the twin runs.

    Attributes:
        seed: Seed of all named random streams.
        replications: Independent repetitions; a recorded trace only meets other experts.
        horizon_s: End of the run; None: when the last request is done.
        confidence: Level of the intervals.
        decision_log_calls: How many policy calls at most are written to the decision log.
    """

    seed: int = 1
    replications: int = 1
    horizon_s: float | None = None
    confidence: float = 0.95
    decision_log_calls: int = 2_000

    def __post_init__(self) -> None:
        require_not_negative("run", seed=self.seed, decision_log_calls=self.decision_log_calls)
        require_at_most("run", 2**63 - 1, seed=self.seed)
        require_at_least_one("run", replications=self.replications)
        require_at_most("run", 1_000, replications=self.replications)
        require_positive("run", horizon_s=self.horizon_s)
        require_within("run", 0.5, 0.999999, confidence=self.confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedWeightScenario:
    """One experiment: how far may expert weights shrink while the KV cache grows?"""

    workload: Workload
    llm: Llm
    hardware: Hardware
    precision: Precision = field(default_factory=Precision)
    routing: ExpertRouting = field(default_factory=ExpertRouting)
    serving: Serving = field(default_factory=Serving)
    slo: Slo = field(default_factory=Slo)
    run: PagedWeightRun = field(default_factory=PagedWeightRun)

    def __post_init__(self) -> None:
        if self.workload.lengths is not None and (
            self.workload.arrivals is None or self.workload.num_requests is None
        ):
            raise ScenarioError(
                "[workload] a length law needs [workload.arrivals] and num_requests here"
            )
