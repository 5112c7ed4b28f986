"""A bundle whose slots are always full: which engine runs it, from which start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import simpy

from models.bundle import Bundle
from policies.catalog import ROUTING, routing_policy
from policies.routing import RoutingPolicy
from traces.lengths import LengthPairs
from twin.barrier_cycles import BarrierCycles
from twin.clock import cyclic_collector_off
from twin.cycle_log import CycleLog, RawCycles, sample_stride
from twin.fault_effects import FaultEffects
from twin.faults import Fault, require_fits
from twin.kernel import knows_routing, missing_because, run_compiled
from twin.pingpong_cycles import PingPongCycles
from twin.request_stream import RequestLaw
from twin.saturated_case import SaturatedCase, Start
from twin.saturated_plan import SaturatedPlan
from twin.saturated_run import EngineUsed, SaturatedRun, series_from_raw
from twin.slots import RequestLines, SlotPool
from twin.stages import StageInterval, StageTimes, default_simulated_layers

Engine = Literal["auto", "simpy", "compiled"]


def simulate_saturated(
    bundle: Bundle,
    attention_per_ffn: int,
    lengths: LengthPairs,
    *,
    seed: int,
    num_cycles: int,
    replication: int = 0,
    start: Start = "stationary",
    routing: str | RoutingPolicy = "random",
    faults: Sequence[Fault] = (),
    engine: Engine = "auto",
    simulated_layers: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    timeline_cycles: int = 0,
) -> SaturatedRun:
    """Run a bundle with always-full slots.

    Every finished request is replaced at once by the next one of its line; lines are endless and
    their requests independent. All engines draw the same numbers and return the same series. Under
    one seed, all routing policies meet the same requests in the same steps, and with ``random``
    the workers that two ratios share carry the same loads.

    Args:
        bundle: Coefficients, B, semantics, m, layers.
        attention_per_ffn: r, >= 1.
        lengths: Law of the requests.
        seed: Of the named random streams, >= 0.
        num_cycles: Steps of microbatches to run, >= 1.
        replication: Which independent repetition, >= 0.
        start: ``stationary``: slots as met at a random step; ``cold``: all requests at age 0.
        routing: ``random`` (the next request of a line goes where the last one was), another name
            of ``ROUTING``, or a policy, which only SimPy's clock can ask.
        faults: Slow, jittery, paused or lost workers.
        engine: ``auto``: the compiled one where numba is installed and there are no faults.
        simulated_layers: Layers played one by one, 1..L; None: 1 under ``barrier``, where that is
            exact, and up to 4 under ``pingpong``.
        on_progress: Told now and then how many cycles are done.
        timeline_cycles: Note the stage intervals of so many cycles.

    Raises:
        ValueError: If an argument is out of its range, or ``compiled`` cannot do the run.
    """
    _require(attention_per_ffn >= 1, "attention_per_ffn must be >= 1", attention_per_ffn)
    _require(num_cycles >= 1, "num_cycles must be >= 1", num_cycles)
    _require(timeline_cycles >= 0, "timeline_cycles must be >= 0", timeline_cycles)
    _require(start in ("stationary", "cold"), "start must be 'stationary' or 'cold'", start)
    if isinstance(routing, str):
        _require(routing in ROUTING, f"routing must be one of {', '.join(ROUTING)}", routing)
    require_fits(faults, attention_per_ffn)
    case = SaturatedCase(
        times=StageTimes(
            bundle=bundle,
            attention_per_ffn=attention_per_ffn,
            simulated_layers=(
                default_simulated_layers(bundle) if simulated_layers is None else simulated_layers
            ),
        ),
        lengths=lengths,
        num_cycles=num_cycles,
        seed=seed,
        replication=replication,
        start=start,
        routing=routing,
        faults=tuple(faults),
    )
    used, why = _choose_engine(engine, case)
    timeline: list[StageInterval] = []
    if used == "compiled":
        raw = run_compiled(case, on_progress)
        if timeline_cycles:
            first_cycles = replace(case, num_cycles=min(timeline_cycles, num_cycles))
            run_on_simpy(first_cycles, timeline=timeline, timeline_cycles=timeline_cycles)
    else:
        raw = run_on_simpy(
            case, on_progress=on_progress, timeline=timeline, timeline_cycles=timeline_cycles
        )
    return _run_record(case, raw, used, why, timeline)


def run_on_simpy(
    case: SaturatedCase,
    *,
    on_progress: Callable[[int], None] | None = None,
    timeline: list[StageInterval] | None = None,
    timeline_cycles: int = 0,
) -> RawCycles:
    """Play a case on SimPy's clock: one event a cycle or, under ``pingpong``, two a stage."""
    times, r = case.times, case.times.attention_per_ffn
    law = RequestLaw(case.lengths)
    lines = RequestLines([law.endless(rng) for rng in case.request_chance()])
    policy = _policy(case)
    pools = [SlotPool(start, r, lines, policy) for start in case.in_service()]
    log = CycleLog(case.num_cycles, on_progress)
    effects = FaultEffects(case.faults, r, seed=case.seed, replication=case.replication)
    plan = SaturatedPlan(
        times=times,
        pools=pools,
        log=log,
        effects=effects if case.faults else None,
        timeline=[] if timeline is None else timeline,
        timeline_cycles=timeline_cycles,
    )
    env = simpy.Environment()
    engine = BarrierCycles if times.bundle.semantics == "barrier" else PingPongCycles
    with cyclic_collector_off():
        engine(env, plan).start()
        env.run()
    in_flight = sum(sum(pool.live) for pool in pools)
    return log.columns(in_flight=in_flight, num_retries=lines.num_retries, num_waiting=len(lines))


def _policy(case: SaturatedCase) -> RoutingPolicy | None:
    """The policy to ask; None where the next request takes the next free slot."""
    if not isinstance(case.routing, str):
        return case.routing
    if case.routing == "random":
        return None
    return routing_policy(case.routing, case.routing_chance())


def _choose_engine(engine: Engine, case: SaturatedCase) -> tuple[EngineUsed, str]:
    """The engine to use, and the sentence for the notes."""
    _require(
        engine in ("auto", "simpy", "compiled"),
        "engine must be 'auto', 'simpy' or 'compiled'",
        engine,
    )
    if engine == "simpy":
        return "simpy", "Ran on SimPy's clock, as asked."
    if case.faults:
        _require(engine == "auto", "engine must be 'simpy' or 'auto' with faults", engine)
        return "simpy", "Ran on SimPy's clock: the compiled loops know no faults."
    if not knows_routing(case.routing):
        _require(engine == "auto", "engine must be 'simpy' or 'auto' with this routing", engine)
        return "simpy", "Ran on SimPy's clock: the compiled loops do not know this routing policy."
    missing = missing_because()
    if missing is not None:
        _require(
            engine == "auto",
            f"engine 'compiled' needs numba (pip install 'serving-twin[fast]'): {missing}",
            engine,
        )
        return "simpy", f"Ran on SimPy's clock: {missing}."
    return "compiled", "Ran in the compiled loops, which give SimPy's numbers to the last bit."


def _run_record(
    case: SaturatedCase,
    raw: RawCycles,
    used: EngineUsed,
    why: str,
    timeline: list[StageInterval],
) -> SaturatedRun:
    bundle, layers = case.times.bundle, case.times.simulated_layers
    notes = [why, "Prefill happens elsewhere: a request brings the KV of its prompt."]
    if bundle.num_layers > layers:
        notes.append(
            f"{layers} of {bundle.num_layers} equal layers were played, each standing for "
            f"{case.times.layers_each:g}."
        )
    if bundle.semantics == "pingpong":
        notes.append("The pipeline was filled by one step that is not counted.")
    if case.start == "cold":
        notes.append("Cold start: all slots begin with requests of age 0; cut the warm-up.")
    if raw.num_waiting:
        notes.append(f"{raw.num_waiting} requests of lost workers still waited at the end.")
    return SaturatedRun(
        bundle=bundle,
        attention_per_ffn=case.times.attention_per_ffn,
        seed=case.seed,
        replication=case.replication,
        start=case.start,
        routing=case.routing if isinstance(case.routing, str) else type(case.routing).__name__,
        faults=case.faults,
        engine=used,
        simulated_layers=layers,
        notes=tuple(notes),
        load_samples=raw.load_samples,
        load_sample_stride=sample_stride(case.num_cycles),
        in_flight=raw.in_flight,
        waiting=raw.num_waiting,
        retries=raw.num_retries,
        timeline=tuple(timeline),
        **series_from_raw(raw, case.times),
    )


def _require(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{rule}, found {found!r}")
