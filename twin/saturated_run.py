"""What a saturated run leaves: series by cycle, and the shares that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from models.bundle import Bundle
from twin.cycle_log import RawCycles
from twin.faults import Fault
from twin.saturated_case import Start
from twin.stages import StageInterval, StageTimes

EngineUsed = Literal["simpy", "compiled"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SaturatedRun:
    """Always-full slots over ``n`` cycles. Cycle ``i`` is step ``i // m`` of microbatch ``i % m``.

    Stage and cycle seconds are per layer and microbatch period, so that they compare with theory;
    ``cycle_end_s`` is the run's own clock, with all layers.

    Attributes:
        bundle: What was run.
        attention_per_ffn: r.
        seed: Of the random streams.
        replication: Which independent repetition.
        start: ``stationary``: slots as met at a random step; ``cold``: all fresh.
        routing: Name of the routing policy.
        faults: What went wrong.
        engine: Which engine computed it.
        simulated_layers: Layers played one by one; each stands for L / simulated_layers.
        notes: What a reader should know, one sentence each.
        cycle_end_s: [n] when the cycle ended; never decreasing under ``barrier``.
        cycle_s: [n] length of the cycle. Under ``pingpong``: of the microbatch's step, divided by
            m * L.
        max_load_tokens: [n] tokens on the fullest worker.
        mean_load_tokens: [n] tokens on a worker, mean of those present.
        attention_max_s: [n] slowest worker.
        attention_mean_s: [n] mean of the workers present.
        ffn_s: [n] FFN busy.
        transfer_s: [n] round trip.
        live_slots: [n] tokens made: filled slots of the microbatch.
        workers_present: [n] workers that are not lost.
        completed: [n] requests that got their last token.
        healthy_cycle_s: [n] cycle on the same loads without slow, jittery or paused workers; equal
            to ``cycle_s`` where there were none.
        load_samples: [k, r] loads of all workers, every ``load_sample_stride`` cycles.
        load_sample_stride: See above.
        in_flight: Requests in slots at the end.
        waiting: Requests lost with a worker that had no slot again at the end.
        retries: How often a request lost its worker.
        timeline: Stage intervals of the first cycles, if asked for.
    """

    bundle: Bundle
    attention_per_ffn: int
    seed: int
    replication: int
    start: Start
    routing: str
    faults: tuple[Fault, ...]
    engine: EngineUsed
    simulated_layers: int
    notes: tuple[str, ...]
    cycle_end_s: NDArray[np.float64]
    cycle_s: NDArray[np.float64]
    max_load_tokens: NDArray[np.int64]
    mean_load_tokens: NDArray[np.float64]
    attention_max_s: NDArray[np.float64]
    attention_mean_s: NDArray[np.float64]
    ffn_s: NDArray[np.float64]
    transfer_s: NDArray[np.float64]
    live_slots: NDArray[np.int64]
    workers_present: NDArray[np.int64]
    completed: NDArray[np.int64]
    healthy_cycle_s: NDArray[np.float64]
    load_samples: NDArray[np.int64]
    load_sample_stride: int
    in_flight: int
    waiting: int
    retries: int
    timeline: tuple[StageInterval, ...]

    @property
    def num_cycles(self) -> int:
        """n."""
        return len(self.cycle_s)

    @property
    def completed_requests(self) -> int:
        """Requests that got their last token."""
        return int(self.completed.sum())

    @property
    def mean_cycle_s(self) -> float:
        """E[tau]: seconds per layer and microbatch period."""
        return float(self.cycle_s.mean())

    @property
    def throughput_per_instance(self) -> float:
        """X: tokens per second and unit of price, as if the model had one layer."""
        tokens = float(self.live_slots.sum())
        return tokens / (self.bundle.price(self.attention_per_ffn) * float(self.cycle_s.sum()))

    @property
    def tokens_per_s_per_instance(self) -> float:
        """Tokens per second and unit of price, of the whole model."""
        return self.throughput_per_instance / self.bundle.num_layers

    @property
    def tpot_s(self) -> float:
        """Seconds between two tokens of a request: L * m * E[tau]."""
        return self.bundle.num_layers * self.bundle.microbatches * self.mean_cycle_s

    @property
    def attention_idle(self) -> float:
        """Share of the r workers' time without attention, lost workers idle."""
        worked = self.attention_mean_s * self.workers_present / self.attention_per_ffn
        return 1.0 - float(worked.sum() / self.cycle_s.sum())

    @property
    def ffn_idle(self) -> float:
        """Share of the FFN server's time without work."""
        return 1.0 - float(self.ffn_s.sum() / self.cycle_s.sum())

    @property
    def barrier_wait_share(self) -> float:
        """Slowest minus mean attention worker, as a share of the cycle."""
        wait = self.attention_max_s - self.attention_mean_s
        return float(wait.sum() / self.cycle_s.sum())

    @property
    def barrier_overhead(self) -> float:
        """E[tau] over the cycle of workers that all hold the mean load, minus 1."""
        level_s = max(
            float(stage_s.mean())
            for stage_s in (self.attention_mean_s, self.transfer_s, self.ffn_s)
        )
        return self.mean_cycle_s / level_s - 1.0

    @property
    def fault_overhead(self) -> float:
        """Extra time caused by slow, jittery and paused workers, over the time without them."""
        return float(self.cycle_s.sum() / self.healthy_cycle_s.sum()) - 1.0

    @property
    def missing_slots(self) -> float:
        """Share of the bundle's slots that were away with lost workers."""
        full = self.attention_per_ffn * self.bundle.batch_per_worker
        return 1.0 - float(self.live_slots.mean()) / full

    @property
    def worker_mean_load_tokens(self) -> NDArray[np.float64]:
        """[r] mean load of each worker, from the samples."""
        means: NDArray[np.float64] = self.load_samples.mean(axis=0)
        return means

    def load_quantiles(self, probabilities: Sequence[float]) -> NDArray[np.float64]:
        """Quantiles of the load of a worker over workers and sampled cycles."""
        return np.quantile(self.load_samples, probabilities)

    def load_histogram(self, bins: int = 60) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Counts [bins] and edges [bins + 1] of the load of a worker, from the samples."""
        counts, edges = np.histogram(self.load_samples, bins=bins)
        return counts, edges

    def after(self, first_cycle: int) -> Self:
        """The same run without its first cycles, for shares and means past the warm-up.

        Raises:
            ValueError: If nothing is left.
        """
        if not 0 <= first_cycle < self.num_cycles:
            raise ValueError(
                f"first_cycle must be one of 0..{self.num_cycles - 1}, found {first_cycle!r}"
            )
        columns = {name: getattr(self, name)[first_cycle:] for name in _COLUMNS}
        first_sample = min(-(-first_cycle // self.load_sample_stride), len(self.load_samples) - 1)
        return replace(self, load_samples=self.load_samples[first_sample:], **columns)


_COLUMNS = (
    "cycle_end_s",
    "cycle_s",
    "max_load_tokens",
    "mean_load_tokens",
    "attention_max_s",
    "attention_mean_s",
    "ffn_s",
    "transfer_s",
    "live_slots",
    "workers_present",
    "completed",
    "healthy_cycle_s",
)


def series_from_raw(raw: RawCycles, times: StageTimes) -> dict[str, Any]:
    """The series columns of a run, stage seconds worked out from loads where nothing disturbed."""
    c, r = times.bundle.coefficients, times.attention_per_ffn
    n, full = len(raw.end_s), times.bundle.batch_per_worker
    if raw.faulty is None:
        present = np.full(n, r)
        mean_load = raw.sum_load_tokens / r
        disturbed = {
            "attention_max_s": c.alpha_attention * raw.max_load_tokens + c.beta_attention,
            "attention_mean_s": c.alpha_attention * mean_load + c.beta_attention,
            "healthy_cycle_s": raw.cycle_s,
            "live_slots": np.full(n, r * full),
        }
    else:
        present = raw.faulty.workers_present
        mean_load = raw.sum_load_tokens / present
        disturbed = {
            "attention_max_s": raw.faulty.attention_max_s,
            "attention_mean_s": raw.faulty.attention_mean_s,
            "healthy_cycle_s": raw.faulty.healthy_cycle_s,
            "live_slots": raw.faulty.live_slots,
        }
    live = disturbed["live_slots"]
    linked = live if c.communication == "bundle" else np.full(n, full)
    return {
        **disturbed,
        "cycle_end_s": raw.end_s,
        "cycle_s": raw.cycle_s,
        "max_load_tokens": raw.max_load_tokens,
        "mean_load_tokens": mean_load,
        "workers_present": present,
        "completed": raw.completed,
        "ffn_s": c.alpha_ffn * live + c.beta_ffn,
        "transfer_s": c.alpha_communication * linked + c.beta_communication,
    }
