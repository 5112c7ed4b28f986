"""A bundle with arrivals: requests queue for slots, and every one of them is accounted for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.bundle import Bundle
from models.streams import stream
from policies.catalog import routing_policy
from policies.routing import RoutingPolicy
from twin.admission import RequestTable
from twin.clock import cyclic_collector_off
from twin.fault_effects import FaultEffects
from twin.faults import Fault, require_fits
from twin.open_floor import OpenFloor
from twin.open_run import OpenLoopRun
from twin.open_turns import BarrierTurns, PingPongTurns
from twin.stages import StageTimes, default_simulated_layers

__all__ = ["OpenLoopRun", "simulate_open_loop"]


def simulate_open_loop(
    bundle: Bundle,
    attention_per_ffn: int,
    arrival_s: ArrayLike,
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    *,
    seed: int,
    replication: int = 0,
    routing: str | RoutingPolicy = "least_token_load",
    faults: Sequence[Fault] = (),
    prefill_s_per_token: float = 0.0,
    prefill_base_s: float = 0.0,
    horizon_s: float | None = None,
    simulated_layers: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    timeline_cycles: int = 0,
) -> OpenLoopRun:
    """Run a bundle on given arrivals until all are served, or until ``horizon_s``.

    Requests wait first come, first served; they are let in at step boundaries of microbatches.
    Attention works on filled slots only, FFN and transfer on those of the whole microbatch.

    Args:
        bundle: Coefficients, B, semantics, m, layers.
        attention_per_ffn: r, >= 1.
        arrival_s: [n] >= 0, never decreasing.
        prompt_tokens: [n] >= 0.
        output_tokens: [n] >= 1; all of them come from decode steps.
        seed: Of the named random streams, >= 0.
        replication: Which independent repetition, >= 0.
        routing: A name of ``policies.catalog.ROUTING``, or a policy.
        faults: Slow, jittery, paused or lost workers.
        prefill_s_per_token: Delay for each prompt token before a slot is asked for; prefill
            happens elsewhere and never queues.
        prefill_base_s: Delay besides.
        horizon_s: End of the run, > 0; None: when every request is done.
        simulated_layers: Layers played one by one, 1..L; see ``simulate_saturated``.
        on_progress: Told now and then how many requests are done.
        timeline_cycles: Note the stage intervals of so many steps.

    Raises:
        ValueError: If an argument is out of its range.
    """
    _check_arguments(
        attention_per_ffn, timeline_cycles, prefill_s_per_token, prefill_base_s, horizon_s
    )
    require_fits(faults, attention_per_ffn)
    arrivals, prompts, outputs = _checked_requests(arrival_s, prompt_tokens, output_tokens)
    table = RequestTable(
        arrivals,
        prompts,
        outputs,
        prefill_base_s=prefill_base_s,
        prefill_s_per_token=prefill_s_per_token,
    )
    if isinstance(routing, str):
        policy = routing_policy(routing, stream(seed, "routing", replication))
    else:
        policy, routing = routing, type(routing).__name__
    times = StageTimes(
        bundle=bundle,
        attention_per_ffn=attention_per_ffn,
        simulated_layers=(
            default_simulated_layers(bundle) if simulated_layers is None else simulated_layers
        ),
    )
    effects = FaultEffects(faults, attention_per_ffn, seed=seed, replication=replication)
    floor = OpenFloor(
        times,
        table,
        policy,
        effects=effects if faults else None,
        horizon_s=math.inf if horizon_s is None else horizon_s,
        on_progress=on_progress,
        timeline_steps=timeline_cycles,
    )
    engine = BarrierTurns if bundle.semantics == "barrier" else PingPongTurns
    with cyclic_collector_off():
        engine(floor).start()
        floor.env.run()
    end_s = floor.last_s if horizon_s is None else horizon_s
    floor.line.open_until(end_s)
    counts = _count(floor, end_s)
    if on_progress is not None:
        on_progress(counts["completed"])
    return OpenLoopRun(
        bundle=bundle,
        attention_per_ffn=attention_per_ffn,
        seed=seed,
        replication=replication,
        routing=routing,
        faults=tuple(faults),
        simulated_layers=times.simulated_layers,
        notes=_notes(times, counts, prefill_base_s + prefill_s_per_token, floor),
        arrival_s=arrivals,
        prompt_tokens=prompts,
        output_tokens=outputs,
        ready_s=table.by_arrival(table.ready_s),
        admitted_s=table.by_arrival(table.admitted_s),
        first_token_s=table.by_arrival(table.first_token_s),
        last_token_s=table.by_arrival(table.last_token_s),
        worker=table.counts_by_arrival(table.worker),
        retries=table.counts_by_arrival(table.retries),
        end_s=end_s,
        totals=floor.totals,
        series=tuple(floor.series.points),
        gaps=floor.gaps.histogram(),
        timeline=tuple(floor.timeline),
        **counts,
    )


def _count(floor: OpenFloor, end_s: float) -> dict[str, int]:
    """Where every request that arrived is at the end."""
    table, line = floor.table, floor.line
    injected = int(np.searchsorted(np.sort(np.array(table.arrival_s)), end_s, side="right"))
    counts = {
        "injected": injected,
        "completed": floor.totals.completed,
        "running": sum(pool.num_live for pool in floor.pools),
        "queued": len(line),
        "preparing": injected - line.num_opened + line.num_preparing,
    }
    if 2 * injected != sum(counts.values()):
        raise RuntimeError(f"requests got lost or doubled: {counts}")
    return counts


def _notes(
    times: StageTimes, counts: dict[str, int], prefill_s: float, floor: OpenFloor
) -> tuple[str, ...]:
    notes = ["Ran on SimPy's clock."]
    if prefill_s == 0.0:
        notes.append("Prefill happens elsewhere and takes no time here: TTFT has no prefill in it.")
    else:
        notes.append("Prefill is a delay by prompt length; prefill servers never queue.")
    if times.bundle.num_layers > times.simulated_layers:
        notes.append(
            f"{times.simulated_layers} of {times.bundle.num_layers} equal layers were played, each "
            f"standing for {times.layers_each:g}."
        )
    unfinished = counts["injected"] - counts["completed"]
    if unfinished:
        notes.append(
            f"{unfinished} of {counts['injected']} requests were unfinished at the end: "
            f"{counts['running']} running, {counts['queued']} queued, "
            f"{counts['preparing']} in prefill."
        )
    if floor.effects is not None and floor.effects.has_losses:
        notes.append("A lost worker is noticed at the next step boundary of each microbatch.")
    return tuple(notes)


def _check_arguments(
    attention_per_ffn: int,
    timeline_cycles: int,
    prefill_s_per_token: float,
    prefill_base_s: float,
    horizon_s: float | None,
) -> None:
    _require(attention_per_ffn >= 1, "attention_per_ffn must be >= 1", attention_per_ffn)
    _require(timeline_cycles >= 0, "timeline_cycles must be >= 0", timeline_cycles)
    for name, delay_s in (
        ("prefill_s_per_token", prefill_s_per_token),
        ("prefill_base_s", prefill_base_s),
    ):
        _require(
            math.isfinite(delay_s) and delay_s >= 0.0, f"{name} must be finite and >= 0", delay_s
        )
    _require(
        horizon_s is None or (math.isfinite(horizon_s) and horizon_s > 0.0),
        "horizon_s must be finite and > 0, or None",
        horizon_s,
    )


def _checked_requests(
    arrival_s: ArrayLike, prompt_tokens: ArrayLike, output_tokens: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The three columns as arrays of one length and in range."""
    arrivals = np.asarray(arrival_s, dtype=np.float64)
    prompts = np.asarray(prompt_tokens, dtype=np.int64)
    outputs = np.asarray(output_tokens, dtype=np.int64)
    n = len(arrivals)
    _require(n > 0, "arrival_s must have at least one request", n)
    for name, column in (("prompt_tokens", prompts), ("output_tokens", outputs)):
        _require(len(column) == n, f"{name} must have one value a request, {n}", len(column))
    _require(bool(np.isfinite(arrivals).all()), "arrival_s must be finite", "NaN or infinity")
    _require(arrivals[0] >= 0.0, "arrival_s must be >= 0", float(arrivals[0]))
    steps_back = np.flatnonzero(np.diff(arrivals) < 0.0)
    if len(steps_back):
        row = int(steps_back[0]) + 1
        raise ValueError(
            f"arrival_s must not decrease, found {arrivals[row]:.17g} after "
            f"{arrivals[row - 1]:.17g} at index {row}"
        )
    _require(int(prompts.min()) >= 0, "prompt_tokens must be >= 0", int(prompts.min()))
    _require(int(outputs.min()) >= 1, "output_tokens must be >= 1", int(outputs.min()))
    return arrivals, prompts, outputs


def _require(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{rule}, found {found!r}")
