"""One experiment: the tables of a scenario file and the rules between them.

A setting that another setting makes meaningless is an error here, not a surprise later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from models.bundle import (
    MAX_COEFFICIENT_S,
    Bundle,
    CommunicationForm,
    LatencyCoefficients,
    Semantics,
)
from models.strict_tables import (
    ScenarioError,
    require_at_least_one,
    require_at_most,
    require_not_negative,
    require_positive,
    require_within,
)
from models.workload_settings import Workload

# A replication keeps about 200 bytes a cycle while it runs and 100 when it is done: 4 GiB each.
MAX_CYCLES = 20_000_000
MAX_CYCLES_OF_ALL_REPLICATIONS = 40_000_000
DEFAULT_KV_SAFETY_Z = 3.0
SECONDS_PER = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientSettings:
    """The six latency coefficients per layer, in ``unit``."""

    alpha_attention: float
    beta_attention: float
    alpha_ffn: float
    beta_ffn: float
    alpha_communication: float = 0.0
    beta_communication: float = 0.0
    communication: CommunicationForm = "worker"
    unit: Literal["s", "ms", "us", "ns"] = "us"

    def in_seconds(self) -> LatencyCoefficients:
        """The same coefficients in seconds.

        Raises:
            ScenarioError: If a value is negative, not finite or out of any range (1e-20..1e6
                seconds), or a whole stage is free.
        """
        scale = SECONDS_PER[self.unit]
        try:
            seconds = LatencyCoefficients(
                alpha_attention=self.alpha_attention * scale,
                beta_attention=self.beta_attention * scale,
                alpha_ffn=self.alpha_ffn * scale,
                beta_ffn=self.beta_ffn * scale,
                alpha_communication=self.alpha_communication * scale,
                beta_communication=self.beta_communication * scale,
                communication=self.communication,
            )
            seconds.require_plausible_seconds()
        except ValueError as error:
            raise ScenarioError(f"[attention_ffn.coefficients] {error}") from error
        return seconds

    def __post_init__(self) -> None:
        self.in_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFfn:
    """The bundle and what may be chosen about it.

    Attributes:
        calibration: A named calibration or a calibration file; gives the coefficients and the
            number of layers.
        coefficients: The coefficients themselves, instead of a calibration.
        r: Attention workers per FFN server, or ``auto``: the best one within the constraints.
        r_max: Largest ratio looked at, or ``auto``: about twice the mean-field optimum.
        batch_per_worker: B, slots per microbatch and worker, or ``auto``: the best one within
            the constraints (needs at least one of them).
        semantics: ``barrier`` or ``pingpong``.
        microbatches: m; None: 1 under ``barrier``, 2 under ``pingpong``.
        one_way_s: One-way transfer latency under ``pingpong``; None: half of t_C.
        num_layers: Layers of the model; None: as calibrated, else 1.
        attention_price, ffn_price: Cost of an attention worker and of the FFN server.
        max_tpot_s: Upper limit of the mean time per output token.
        kv_capacity_tokens: KV tokens one attention worker can hold.
        kv_safety_z: Standard deviations of load kept free below that capacity.
        level: Which level of theory decides.
    """

    calibration: str | None = None
    coefficients: CoefficientSettings | None = None
    r: int | Literal["auto"] = "auto"
    r_max: int | Literal["auto"] = "auto"
    batch_per_worker: int | Literal["auto"] = 256
    semantics: Semantics = "barrier"
    microbatches: int | None = None
    one_way_s: float | None = None
    num_layers: int | None = None
    attention_price: float = 1.0
    ffn_price: float = 1.0
    max_tpot_s: float | None = None
    kv_capacity_tokens: int | None = None
    kv_safety_z: float = DEFAULT_KV_SAFETY_Z
    level: Literal["mean_field", "gaussian", "pearson3", "exact"] = "exact"

    def __post_init__(self) -> None:
        table = "attention_ffn"
        if self.calibration is not None and self.coefficients is not None:
            raise ScenarioError(
                "[attention_ffn] calibration and [attention_ffn.coefficients] exclude each other: "
                "remove one of them"
            )
        for name in ("r", "r_max", "batch_per_worker"):
            value = getattr(self, name)
            if not isinstance(value, str):
                require_at_least_one(table, **{name: value})
        if not isinstance(self.r, str):
            require_at_most(table, 4096, r=self.r)
        if not isinstance(self.r_max, str):
            require_at_most(table, 4096, r_max=self.r_max)
            if not isinstance(self.r, str) and self.r > self.r_max:
                raise ScenarioError(
                    f"[attention_ffn] r: must be <= r_max ({self.r_max}), found {self.r}"
                )
        if not isinstance(self.batch_per_worker, str):
            require_at_most(table, 65_536, batch_per_worker=self.batch_per_worker)
        require_at_least_one(table, microbatches=self.microbatches, num_layers=self.num_layers)
        require_at_most(table, 16, microbatches=self.microbatches)
        require_at_most(table, 10_000, num_layers=self.num_layers)
        require_not_negative(table, one_way_s=self.one_way_s, kv_safety_z=self.kv_safety_z)
        require_positive(
            table,
            attention_price=self.attention_price,
            ffn_price=self.ffn_price,
            max_tpot_s=self.max_tpot_s,
            kv_capacity_tokens=self.kv_capacity_tokens,
        )
        require_within(
            table, 1e-6, 1e9, attention_price=self.attention_price, ffn_price=self.ffn_price
        )
        require_within(table, 0.0, MAX_COEFFICIENT_S, one_way_s=self.one_way_s)
        if self.kv_capacity_tokens is None and self.kv_safety_z != DEFAULT_KV_SAFETY_Z:
            raise ScenarioError(
                "[attention_ffn] kv_safety_z: belongs to kv_capacity_tokens, which is not given"
            )
        if self.one_way_s is not None and self.semantics == "barrier":
            raise ScenarioError(
                "[attention_ffn] one_way_s: only semantics = 'pingpong' knows a one-way latency; "
                "under 'barrier' the transfer is a stage of its own"
            )
        if self.batch_per_worker == "auto" and not (self.max_tpot_s or self.kv_capacity_tokens):
            raise ScenarioError(
                "[attention_ffn] batch_per_worker: 'auto' needs max_tpot_s or kv_capacity_tokens, "
                "since throughput grows with B without end"
            )

    @property
    def num_microbatches(self) -> int:
        """m, with the default that belongs to the semantics."""
        if self.microbatches is not None:
            return self.microbatches
        return 2 if self.semantics == "pingpong" else 1


# --- [routing], [[faults]], [prefill], [slo], [run] ------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which attention worker a request goes to."""

    attention_worker: Literal["random", "round_robin", "least_token_load", "power_of_two"] = (
        "random"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSettings:
    """One thing that goes wrong with an attention worker.

    Attributes:
        kind: ``slow`` (factor on its attention time), ``jitter`` (random factor of mean 1 and
            coefficient of variation ``cv``), ``pause`` (it stands still), ``lost`` (it goes with
            its KV and, if ``duration_s`` is given, comes back empty).
        worker: Index of the worker, 0..r-1; None only for ``jitter``: every worker.
        start_s: When, in simulated seconds.
        duration_s: How long; None: to the end (not for ``pause``).
    """

    kind: Literal["slow", "jitter", "pause", "lost"]
    worker: int | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    factor: float | None = None
    cv: float | None = None

    def __post_init__(self) -> None:
        require_not_negative("faults", worker=self.worker, start_s=self.start_s)
        require_positive("faults", duration_s=self.duration_s, factor=self.factor, cv=self.cv)
        require_within("faults", 1e-6, 1e6, factor=self.factor)
        require_within("faults", 1e-3, 100.0, cv=self.cv)
        needs = {"slow": "factor", "jitter": "cv", "pause": "duration_s"}.get(self.kind)
        if needs is not None and getattr(self, needs) is None:
            raise ScenarioError(f"[[faults]] {needs}: missing; kind = '{self.kind}' needs it")
        if self.worker is None and self.kind != "jitter":
            raise ScenarioError(f"[[faults]] worker: missing; kind = '{self.kind}' needs it")
        for name, kind in (("factor", "slow"), ("cv", "jitter")):
            if getattr(self, name) is not None and self.kind != kind:
                raise ScenarioError(
                    f"[[faults]] {name}: belongs to kind = '{kind}', found kind = '{self.kind}'"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prefill happens elsewhere; this is how long a request spends there before it needs a slot."""

    base_s: float = 0.0
    s_per_token: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative("prefill", base_s=self.base_s, s_per_token=self.s_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency targets; a request is good if it meets all that are given."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        require_positive("slo", ttft_s=self.ttft_s, tpot_s=self.tpot_s, e2e_s=self.e2e_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the twin runs.

    Attributes:
        mode: ``saturated``: slots always full; ``open_loop``: requests arrive and queue.
        seed: Seed of all named random streams.
        replications: Independent repetitions.
        num_cycles: Simulated cycles of one replication (saturated), or ``auto``: about
            twelve request lifetimes, more where the standard error is still above target.
        target_relative_error: Relative standard error of the cycle time asked for by ``auto``.
        start: ``stationary`` slots, or ``cold``: all requests fresh at the first step.
        engine: ``simpy``, ``compiled`` (needs numba), or ``auto``.
        simulate_r: Ratios to simulate; ``auto``: a spread over 1..r_max and all around the best;
            ``chosen``: only the ratio in use.
        compare_routing: Also simulate the other routing policies at the ratio in use.
        confidence: Level of the intervals.
        horizon_s: End of an open-loop run; None: when the last request is done.
        decision_log_calls: How many policy calls at most are written to the decision log.
        timeline_cycles: How many cycles are drawn in the Perfetto timeline.
    """

    mode: Literal["saturated", "open_loop"] = "saturated"
    seed: int = 1
    replications: int = 4
    num_cycles: int | Literal["auto"] = "auto"
    target_relative_error: float = 0.004
    start: Literal["stationary", "cold"] = "stationary"
    engine: Literal["auto", "simpy", "compiled"] = "auto"
    simulate_r: Sequence[int] | Literal["auto", "chosen"] = "auto"
    compare_routing: bool = True
    confidence: float = 0.95
    horizon_s: float | None = None
    decision_log_calls: int = 10_000
    timeline_cycles: int = 40

    def __post_init__(self) -> None:
        require_not_negative(
            "run",
            seed=self.seed,
            decision_log_calls=self.decision_log_calls,
            timeline_cycles=self.timeline_cycles,
        )
        require_at_most("run", 2**63 - 1, seed=self.seed)
        require_at_least_one("run", replications=self.replications)
        require_at_most(
            "run", 10_000, replications=self.replications, timeline_cycles=self.timeline_cycles
        )
        require_positive(
            "run",
            horizon_s=self.horizon_s,
        )
        require_within("run", 1e-6, 1.0, target_relative_error=self.target_relative_error)
        if not isinstance(self.num_cycles, str):
            if self.num_cycles < 20:
                raise ScenarioError(
                    f"[run] num_cycles: must be >= 20 for an interval, found {self.num_cycles}"
                )
            limit = min(MAX_CYCLES, MAX_CYCLES_OF_ALL_REPLICATIONS // self.replications)
            if self.num_cycles > limit:
                raise ScenarioError(
                    f"[run] num_cycles: must be <= {limit:,} with {self.replications:,} "
                    f"replications (the series of all cycles are held in memory), "
                    f"found {self.num_cycles:,}"
                )
        if not isinstance(self.simulate_r, str):
            if not self.simulate_r:
                raise ScenarioError("[run] simulate_r: the list is empty; give ratios or 'auto'")
            for value in self.simulate_r:
                require_at_least_one("run", simulate_r=value)
                require_at_most("run", 4096, simulate_r=value)
        require_within("run", 0.5, 0.999999, confidence=self.confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One experiment."""

    workload: Workload
    attention_ffn: AttentionFfn = field(default_factory=AttentionFfn)
    routing: Routing = field(default_factory=Routing)
    faults: Sequence[FaultSettings] = ()
    prefill: Prefill = field(default_factory=Prefill)
    slo: Slo = field(default_factory=Slo)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        if self.run.mode == "saturated":
            if self.run.replications < 2:
                raise ScenarioError(
                    "[run] replications: a saturated run needs at least 2 for an interval, found 1"
                )
            for name, given in (
                ("[slo]", self.slo != Slo()),
                ("[prefill]", self.prefill != Prefill()),
                ("[workload.arrivals]", self.workload.arrivals is not None),
                ("[workload] num_requests", self.workload.num_requests is not None),
                ("[run] horizon_s", self.run.horizon_s is not None),
            ):
                if given:
                    raise ScenarioError(
                        f"{name}: only means something with [run] mode = 'open_loop'; "
                        "a saturated run has no arrivals and no queue"
                    )
        else:
            self._check_open_loop()
        r = self.attention_ffn.r
        for fault in self.faults:
            if not isinstance(r, str) and fault.worker is not None and fault.worker >= r:
                raise ScenarioError(f"[[faults]] worker: must be < r ({r}), found {fault.worker}")

    def _check_open_loop(self) -> None:
        if self.workload.lengths is not None and (
            self.workload.arrivals is None or self.workload.num_requests is None
        ):
            raise ScenarioError(
                "[workload] a length law in an open-loop run needs [workload.arrivals] and "
                "num_requests"
            )
        usual = Run(mode="open_loop")
        for name in (
            "start",
            "num_cycles",
            "target_relative_error",
            "simulate_r",
            "compare_routing",
        ):
            if getattr(self.run, name) != getattr(usual, name):
                raise ScenarioError(
                    f"[run] {name}: only means something with [run] mode = 'saturated'; "
                    "an open-loop run serves its requests once, at the ratio in use"
                )
        if self.run.engine == "compiled":
            raise ScenarioError(
                "[run] engine: 'compiled' only knows [run] mode = 'saturated'; "
                "an open-loop run is on 'simpy'"
            )

    def bundle(
        self, coefficients: LatencyCoefficients, num_layers: int, batch_per_worker: int
    ) -> Bundle:
        """The bundle this scenario describes, for resolved coefficients and B."""
        settings = self.attention_ffn
        return Bundle(
            coefficients=coefficients,
            batch_per_worker=batch_per_worker,
            semantics=settings.semantics,
            microbatches=settings.num_microbatches,
            one_way_s=settings.one_way_s,
            num_layers=settings.num_layers or num_layers,
            attention_price=settings.attention_price,
            ffn_price=settings.ffn_price,
        )
