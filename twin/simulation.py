"""Saturated runs of a scenario: points over r beside theory, stragglers, faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.attention_ffn import predict
from models.barrier import law_cycle_sd_s
from models.scenario import FaultSettings
from policies.catalog import ROUTING
from twin.bundle import Engine, simulate_saturated
from twin.comparisons import not_worse_than_best, paired_difference
from twin.faults import Fault, JitteryWorker, LostWorker, PauseWorker, SlowWorker
from twin.output_statistics import Estimate, ratio_replications, replications
from twin.saturated_run import SaturatedRun
from twin.theory import Theory

LIFETIMES_PER_RUN = 2
FEWEST_CYCLES, MOST_CYCLES = 400, 40_000
MOST_ROUNDS = 6
# Loading or compiling the kernel takes longer than SimPy takes for so many cycles.
CYCLES_FOR_SIMPY = 400_000

OnRun = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedPoint:
    """Independent replications of one ratio under one routing policy.

    Attributes:
        r: Attention workers.
        routing: Policy.
        runs: One a replication, replication 0 first.
        target_met: Whether the standard error asked for was reached.
    """

    r: int
    routing: str
    runs: tuple[SaturatedRun, ...]
    target_met: bool

    def values(self, name: str) -> NDArray[np.float64]:
        """One number a replication."""
        return np.asarray([getattr(run, name) for run in self.runs], dtype=np.float64)

    def sums(self, name: str) -> NDArray[np.float64]:
        """Sum over the cycles of each replication."""
        return np.asarray([getattr(run, name).sum() for run in self.runs], dtype=np.float64)

    @property
    def tokens(self) -> NDArray[np.float64]:
        """Tokens made, per replication."""
        return self.sums("live_slots")

    @property
    def priced_s(self) -> NDArray[np.float64]:
        """Seconds per layer times the price of the bundle, per replication."""
        return self.sums("cycle_s") * self.runs[0].bundle.price(self.r)

    @property
    def attention_work_s(self) -> NDArray[np.float64]:
        """Attention seconds of the mean worker, lost ones idle, per replication."""
        return np.asarray(
            [
                float((run.attention_mean_s * run.workers_present).sum()) / self.r
                for run in self.runs
            ]
        )


@dataclass(slots=True)
class Simulator:
    """Runs and remembers the saturated points of one scenario.

    Attributes:
        theory: The question and its closed forms.
        on_run: Told the name of every run that is finished.
    """

    theory: Theory
    on_run: OnRun | None = None
    _points: dict[tuple[int, str, bool], SaturatedPoint] = field(default_factory=dict)
    _cycles_played: int = 0

    def point(self, r: int, routing: str | None = None, *, faulty: bool = False) -> SaturatedPoint:
        """The replications of one ratio; more of them while the interval is too wide."""
        run, routing = self.theory.scenario.run, routing or self._routing
        key = (r, routing, faulty)
        if key in self._points:
            return self._points[key]
        runs: list[SaturatedRun] = []
        met = False
        needed = self.needed_replications(r)
        for _ in range(1 if isinstance(run.num_cycles, int) else MOST_ROUNDS):
            wanted = max(run.replications, 2 * len(runs))
            runs += [self._run(r, routing, faulty, n) for n in range(len(runs), wanted)]
            error = relative_error([one.mean_cycle_s for one in runs])
            met = error <= run.target_relative_error and len(runs) >= needed
            if met:
                break
        self._points[key] = SaturatedPoint(r=r, routing=routing, runs=tuple(runs), target_met=met)
        return self._points[key]

    @property
    def _routing(self) -> str:
        return self.theory.scenario.routing.attention_worker

    @property
    def num_cycles(self) -> int:
        """Cycles of one replication: as given, or a few lifetimes of a request."""
        run, bundle = self.theory.scenario.run, self.theory.bundle
        if isinstance(run.num_cycles, int):
            return run.num_cycles
        lengths = self.theory.workload.lengths
        outputs = lengths.output_tokens.astype(np.float64)
        lifetime = float(np.dot(lengths.weight, outputs**2) / np.dot(lengths.weight, outputs))
        steps: int = max(FEWEST_CYCLES, min(MOST_CYCLES, math.ceil(LIFETIMES_PER_RUN * lifetime)))
        return steps * bundle.microbatches

    def needed_replications(self, r: int) -> int:
        """How many the target needs by the spread that theory knows.

        Stopping by the observed spread alone would stop heavy-tailed runs early, at those that
        happen to hold no long request. Each replication counts as ``LIFETIMES_PER_RUN`` samples.
        """
        target = self.theory.scenario.run.target_relative_error
        spread = law_cycle_sd_s(self.theory.bundle, self.theory.load, r)
        mean = self.theory.at("exact", "cycle_s", r)
        return math.ceil((spread / (target * mean)) ** 2 / LIFETIMES_PER_RUN)

    def _run(self, r: int, routing: str, faulty: bool, replication: int) -> SaturatedRun:
        scenario = self.theory.scenario
        chosen = r == self.theory.r and replication == 0 and routing == self._routing
        result = simulate_saturated(
            self.theory.bundle,
            r,
            self.theory.workload.lengths,
            seed=scenario.run.seed,
            replication=replication,
            num_cycles=self.num_cycles,
            start=scenario.run.start,
            routing=routing,
            faults=fault_events(scenario.faults) if faulty else (),
            engine=self._engine(faulty),
            timeline_cycles=scenario.run.timeline_cycles if chosen else 0,
        )
        if self.on_run is not None:
            self.on_run(f"r = {r}, {routing}{', faults' if faulty else ''}")
        return result

    def _engine(self, faulty: bool) -> Engine:
        """The engine asked for; under ``auto`` a short experiment stays on SimPy."""
        asked = self.theory.scenario.run.engine
        if faulty:
            return "auto"
        weight = 3 if self.theory.bundle.semantics == "pingpong" else 1
        self._cycles_played += weight * self.num_cycles
        if asked == "auto" and self._cycles_played <= CYCLES_FOR_SIMPY:
            return "simpy"
        return asked

    # --- what is asked of the points ----------------------------------------------------------

    def predicted_throughput(self, ratios: Sequence[int]) -> NDArray[np.float64]:
        """What the deciding level predicts for these runs, cold starts included."""
        theory = self.theory
        level = theory.scenario.attention_ffn.level
        if theory.scenario.run.start == "stationary":
            curve = theory.deciding.throughput_per_instance
            return np.asarray([curve[r - 1] for r in ratios])
        steps = max(1, self.num_cycles // theory.bundle.microbatches)
        prediction = predict(
            theory.workload.lengths,
            theory.bundle,
            ratios,
            level=level,
            load=theory.load,
            moments=theory.moments,
            horizon_steps=steps,
        )
        return prediction.throughput_per_instance

    def points_summary(self, ratios: Sequence[int]) -> dict[str, Any]:
        """Theory beside twin at each ratio, and which ratios are as good as the best."""
        run = self.theory.scenario.run
        points = [self.point(r) for r in ratios]
        rows = [
            self._point_summary(point, predicted)
            for point, predicted in zip(points, self.predicted_throughput(ratios), strict=True)
        ]
        by_ratio = {point.r: point.tokens / point.priced_s for point in points}
        best = max(rows, key=lambda row: row["throughput_per_instance"]["mean"])["r"]
        return {
            "points": rows,
            "best_r": best,
            "not_worse_than_best": sorted(
                not_worse_than_best(by_ratio, best=best, confidence=run.confidence)
            ),
            "confidence": run.confidence,
            "engine": " and ".join(sorted({run.engine for p in points for run in p.runs})),
            "start": run.start,
            "routing": self._routing,
        }

    def _point_summary(self, point: SaturatedPoint, predicted: float) -> dict[str, Any]:
        twin = self._ratio(point.tokens, point.priced_s)
        cycles_s = point.sums("cycle_s")
        return {
            "r": point.r,
            "predicted_throughput_per_instance": float(predicted),
            "throughput_per_instance": estimate_summary(twin),
            "difference": float(predicted / twin.mean - 1.0),
            "difference_half_width": float(predicted * twin.half_width / twin.mean**2),
            "cycle_s": self._summary(point.values("mean_cycle_s")),
            "tpot_s": self._summary(point.values("tpot_s")),
            "attention_idle": self._ratio_summary(cycles_s - point.attention_work_s, cycles_s),
            "ffn_idle": self._ratio_summary(cycles_s - point.sums("ffn_s"), cycles_s),
            "barrier_share": self._ratio_summary(_barrier_wait_s(point), cycles_s),
            "load_overhead": self._load_overhead(point),
            "replications": len(point.runs),
            "num_cycles": point.runs[0].num_cycles,
            "completed_requests": sum(run.completed_requests for run in point.runs),
            "in_flight_at_end": sum(run.in_flight for run in point.runs),
            "target_met": point.target_met,
            "engine": point.runs[0].engine,
        }

    def stragglers_summary(self) -> dict[str, Any]:
        """Barrier overhead and throughput of every routing policy on the same requests."""
        baseline = "random"
        reference = self.point(self.theory.r, baseline)
        rows = []
        for policy in ROUTING:
            point = self.point(self.theory.r, policy)
            shared = min(len(point.runs), len(reference.runs))
            gain = None
            if policy != baseline:
                gain = self._gain(
                    point.values("throughput_per_instance")[:shared],
                    reference.values("throughput_per_instance")[:shared],
                )
            rows.append(
                {
                    "policy": policy,
                    "overhead": self._load_overhead(point),
                    "throughput_per_instance": self._ratio_summary(point.tokens, point.priced_s),
                    "gain": gain,
                }
            )
        return {"r": self.theory.r, "baseline": baseline, "routing": rows}

    def faults_summary(self) -> dict[str, Any]:
        """The ratio in use with and without the scenario's faults, on the same requests."""
        healthy, faulty = self.point(self.theory.r), self.point(self.theory.r, faulty=True)
        shared = min(len(healthy.runs), len(faulty.runs))
        return {
            "r": self.theory.r,
            "events": [describe_fault(fault) for fault in self.theory.scenario.faults],
            "healthy": self._fault_side(healthy),
            "faulty": self._fault_side(faulty),
            "throughput_change": self._gain(
                faulty.values("throughput_per_instance")[:shared],
                healthy.values("throughput_per_instance")[:shared],
            ),
            "slowed_share": self._summary(faulty.values("fault_overhead")),
            "retries": sum(run.retries for run in faulty.runs),
            "simulated_s": float(faulty.runs[0].cycle_end_s[-1]),
            "engine": faulty.runs[0].engine,
        }

    def _fault_side(self, point: SaturatedPoint) -> dict[str, Any]:
        cycles_s = point.sums("cycle_s")
        return {
            "cycle_s": self._summary(point.values("mean_cycle_s")),
            "tpot_s": self._summary(point.values("tpot_s")),
            "throughput_per_instance": self._ratio_summary(point.tokens, point.priced_s),
            "barrier_share": self._ratio_summary(_barrier_wait_s(point), cycles_s),
            "attention_idle": self._ratio_summary(cycles_s - point.attention_work_s, cycles_s),
            "ffn_idle": self._ratio_summary(cycles_s - point.sums("ffn_s"), cycles_s),
        }

    def load_distribution(self, bins: int = 60) -> dict[str, Any]:
        """Histogram of one worker's load at the ratio in use, and what the exact law says."""
        point = self.point(self.theory.r)
        samples = np.concatenate([run.load_samples.ravel() for run in point.runs])
        edges = np.linspace(float(samples.min()), float(samples.max()) + 1.0, bins + 1)
        counts, _ = np.histogram(samples, bins=edges)
        law = self.theory.load
        # Loads of an edge belong to the bin above it: P(load < edge).
        below = np.interp(edges - 1e-9, law.grid_tokens, law.cdf, left=0.0, right=1.0)
        return {
            "r": self.theory.r,
            "edges_tokens": edges.tolist(),
            "twin_share": (counts / counts.sum()).tolist(),
            "theory_share": np.diff(below).tolist(),
            "mean_tokens": float(law.mean_tokens),
            "mean_max_tokens": float(law.expected_maximum([self.theory.r])[0]),
        }

    def _gain(self, value: NDArray[np.float64], reference: NDArray[np.float64]) -> dict[str, Any]:
        """Relative change against the reference, from pairs of the same replication."""
        scale = float(reference.mean())
        difference = paired_difference(
            value / scale, reference / scale, confidence=self.theory.scenario.run.confidence
        )
        return {
            "mean": difference.mean,
            "half_width": difference.half_width,
            "verdict": difference.verdict,
        }

    def _summary(self, values: NDArray[np.float64]) -> dict[str, Any]:
        confidence = self.theory.scenario.run.confidence
        return estimate_summary(replications(values, confidence=confidence))

    def _ratio(self, above: NDArray[np.float64], below: NDArray[np.float64]) -> Estimate:
        confidence = self.theory.scenario.run.confidence
        return ratio_replications(above, below, confidence=confidence)

    def _ratio_summary(
        self, above: NDArray[np.float64], below: NDArray[np.float64]
    ) -> dict[str, Any]:
        return estimate_summary(self._ratio(above, below))

    def _load_overhead(self, point: SaturatedPoint) -> dict[str, Any]:
        """Load of the slowest worker over the mean load, minus 1."""
        mean = point.sums("mean_load_tokens")
        if not mean.any():  # no prompt tokens and one output token: slots hold nothing
            mean = np.ones_like(mean)
            return self._ratio_summary(0.0 * mean, mean)
        return self._ratio_summary(point.sums("max_load_tokens") - mean, mean)


def estimate_summary(estimate: Estimate) -> dict[str, Any]:
    """JSON-ready mean and interval."""
    return {
        "mean": estimate.mean,
        "half_width": estimate.half_width,
        "standard_error": estimate.standard_error,
        "num_samples": estimate.num_samples,
    }


def _barrier_wait_s(point: SaturatedPoint) -> NDArray[np.float64]:
    return point.sums("attention_max_s") - point.sums("attention_mean_s")


def relative_error(values: Sequence[float]) -> float:
    """Relative standard error of the mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    array = np.asarray(values)
    return float(array.std(ddof=1) / math.sqrt(len(array)) / array.mean())


def simulated_ratios(theory: Theory) -> list[int]:
    """Which ratios to simulate: as given, or a spread over all and every one near the best."""
    chosen = theory.scenario.run.simulate_r
    if chosen == "chosen":
        return [theory.r]
    if not isinstance(chosen, str):
        beyond = [r for r in chosen if r > len(theory.ratios)]
        if beyond:
            raise ValueError(f"simulate_r holds {beyond[0]}, beyond r_max = {len(theory.ratios)}")
        return sorted({*chosen, theory.r})
    r_max = int(theory.ratios[-1])
    spread = {round(x) for x in np.geomspace(1, r_max, 7)}
    spread |= {round(x) for x in np.linspace(theory.r, r_max, 4)}
    near = {theory.r, *(level.r for level in theory.levels.values())}
    near |= {r + step for r in (theory.r, theory.decision.attention_per_ffn) for step in (-1, 1)}
    return sorted(r for r in spread | near if 1 <= r <= r_max)


def fault_events(settings: Sequence[FaultSettings]) -> tuple[Fault, ...]:
    """The twin's faults from a scenario's tables."""
    return tuple(_fault(one) for one in settings)


def _fault(one: FaultSettings) -> Fault:
    end_s = math.inf if one.duration_s is None else one.start_s + one.duration_s
    if one.kind == "jitter" and one.cv is not None:
        return JitteryWorker(worker=one.worker, cv=one.cv, start_s=one.start_s, end_s=end_s)
    if one.kind == "slow" and one.worker is not None and one.factor is not None:
        return SlowWorker(worker=one.worker, factor=one.factor, start_s=one.start_s, end_s=end_s)
    if one.kind == "pause" and one.worker is not None and one.duration_s is not None:
        return PauseWorker(worker=one.worker, at_s=one.start_s, duration_s=one.duration_s)
    if one.kind == "lost" and one.worker is not None:
        return LostWorker(worker=one.worker, at_s=one.start_s, back_after_s=one.duration_s)
    raise ValueError(f"fault {dataclasses.asdict(one)} is incomplete")


def describe_fault(one: FaultSettings) -> str:
    """One fault in words."""
    who = "every worker" if one.worker is None else f"worker {one.worker}"
    what = {
        "slow": f"x{one.factor:g} slow" if one.factor else "",
        "jitter": f"jitter cv {one.cv:g}" if one.cv else "",
        "pause": "paused",
        "lost": "lost",
    }[one.kind]
    when = f"from {one.start_s:g} s"
    if one.duration_s is not None:
        when += f" for {one.duration_s:g} s"
    return f"{who} {what} {when}"
