"""Ten times more requests than a server can answer, for a minute, and what comes after.

    python benchmarks/serving_overload.py [--model CKPT] [--rounds 3] [--seconds 60]

Starts ``runtime serve`` with small limits. A round is: normal load (as many clients as may run,
each asking again when it is answered), which gives the sustainable rate and the normal latency; ten
times that rate, in Poisson arrivals that wait for nobody, each on a connection of its own; normal
load again. Meanwhile the memory of front end and engine is read, and ``/health`` and ``/metrics``
are asked four times a second. At the end every request is accounted for: by its client, and by the
server's counters. Written: ``results/serving_overload.json``.

Times are what the client saw, on a machine that it shares with the server and whoever else computes
there. So the JSON has beside them the client's own delay (``client_lag_s``) and, from the kernel's
scheduler, the seconds that the front end's loop, the engine and the client ran and the seconds
they were ready to run and got no core (``cores``). Where that waiting is most of the time, no
figure is the server's own: with ``--realtime`` front end and client (which need little) go before
all else on the machine, the engine does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from serving_engines import ServerEngine
from serving_overload_client import Outcome, Target, mixed_request
from serving_overload_probe import Probe, accounts, at_rest, labelled, spread

from runtime.demo_model_tiny import make_tiny_checkpoint

RESULTS = Path(__file__).parent / "results"
RECOVERY_WAIT_S = 1.0
REJECT_LIMIT_S = 1.0


async def closed_loop(
    target: Target, clients: int, seconds: float, rng: np.random.Generator, vocabulary: int
) -> tuple[float, list[Outcome]]:
    """(answers per second, outcomes) of clients that ask again when they are answered."""
    outcomes: list[Outcome] = []
    began_s = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - began_s < seconds:
            outcomes.append(await target.ask(mixed_request(rng, vocabulary)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return len(outcomes) / (time.perf_counter() - began_s), outcomes


async def open_loop(
    target: Target, per_s: float, seconds: float, rng: np.random.Generator, vocabulary: int
) -> list[Outcome]:
    """Outcomes of arrivals at a rate, whatever becomes of those before them."""
    began_s, due_s = time.perf_counter(), 0.0
    tasks: list[asyncio.Task[Outcome]] = []
    while (due_s := due_s + rng.exponential(1.0 / per_s)) < seconds:
        await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(target.ask(mixed_request(rng, vocabulary))))
    return list(await asyncio.gather(*tasks))


def engine_of(front: int) -> int:
    """The engine's process, the one child of the front end that runs it."""
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    for child in children:
        if "runtime.engine" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise SystemExit("the front end has no engine")


def load_row(outcomes: list[Outcome]) -> dict[str, Any]:
    """Latencies and statuses of one phase, and everything that went wrong."""
    answered = [each for each in outcomes if each.status == 200]
    refused = [each for each in outcomes if each.status in (429, 503)]
    return {
        "requests": len(outcomes),
        "statuses": {str(k): v for k, v in sorted(Counter(o.status for o in outcomes).items())},
        "problems": dict(Counter(each.problem for each in outcomes if each.problem)),
        "accepted_s": spread([each.seconds for each in answered]),
        "accepted_first_token_s": spread([e.first_byte_s for e in answered if e.is_stream]),
        "refused_s": spread([each.seconds for each in refused]),
        "refused_without_retry_after": sum(not each.has_retry_after for each in refused),
    }


async def one_round(target: Target, number: int, front: int, a: argparse.Namespace) -> dict:
    """Normal, overload, normal."""
    rng = np.random.default_rng((a.seed, number))
    pages = labelled(await at_rest(target), "pages", 'use="free"')
    rate, before = await closed_loop(target, a.max_running, a.normal, rng, a.vocabulary)
    start = await at_rest(target)
    probe = Probe(target, front, engine_of(front))
    probing = asyncio.create_task(probe.run())
    began_s = time.perf_counter()
    outcomes = await open_loop(target, a.times * rate, a.seconds, rng, a.vocabulary)
    last_answer_s = time.perf_counter() - began_s - a.seconds
    probing.cancel()
    end = await at_rest(target)
    await asyncio.sleep(RECOVERY_WAIT_S)
    after_rate, after = await closed_loop(target, a.max_running, a.normal, rng, a.vocabulary)
    rest = await at_rest(target)
    return {
        "load": os.getloadavg()[0],
        "normal": {"per_s": round(rate, 2), **load_row(before)},
        "overload": {
            "asked_per_s": round(len(outcomes) / a.seconds, 2),
            "last_answer_after_s": round(last_answer_s, 3),
            **load_row(outcomes),
            **probe.row(),
            "accounts": accounts(start, end, outcomes),
        },
        "recovered": {"per_s": round(after_rate, 2), **load_row(after)},
        "recovered_to_normal_latency": round(
            load_row(after)["accepted_s"]["p50"] / load_row(before)["accepted_s"]["p50"], 3
        ),
        "pages_free_at_the_end": [int(labelled(rest, "pages", 'use="free"')), int(pages)],
        "failed_steps": int(labelled(rest, "engine_failed_steps_total")),
        "preemptions": int(labelled(rest, "num_preemptions_total")),
    }


def verdicts(rounds: list[dict]) -> dict[str, bool]:
    """The bars, over all rounds."""
    over = [each["overload"] for each in rounds]
    return {
        "only_200_429_503": all(set(o["statuses"]) <= {"200", "429", "503"} for o in over),
        "no_problem": not any(
            each[phase]["problems"]
            for each in rounds
            for phase in ("normal", "overload", "recovered")
        ),
        "refused_within_1_s": all(o["refused_s"].get("max", 0) <= REJECT_LIMIT_S for o in over),
        "refusals_say_when": all(o["refused_without_retry_after"] == 0 for o in over),
        "counts_equal": all(pair["equal"] for o in over for pair in o["accounts"].values()),
        "pages_free": all(len(set(each["pages_free_at_the_end"])) == 1 for each in rounds),
        "state_routes_answer": all(not o["state_routes_failed"] for o in over),
    }


def medians(rounds: list[dict]) -> dict[str, float]:
    """Over the rounds, of what one looks at first."""

    def median(*path: str) -> float:
        values = []
        for value in rounds:
            for name in path:
                value = value[name]
            values.append(value)
        return round(statistics.median(values), 5)

    over = "overload"
    return {
        "sustainable_per_s": median("normal", "per_s"),
        "asked_per_s": median(over, "asked_per_s"),
        "normal_p50_s": median("normal", "accepted_s", "p50"),
        "normal_p99_s": median("normal", "accepted_s", "p99"),
        "accepted_p50_s": median(over, "accepted_s", "p50"),
        "accepted_p99_s": median(over, "accepted_s", "p99"),
        "refused_p50_s": median(over, "refused_s", "p50"),
        "refused_p99_s": median(over, "refused_s", "p99"),
        "refused_max_s": median(over, "refused_s", "max"),
        "health_p50_s": median(over, "state_routes_s", "/health", "p50"),
        "health_max_s": median(over, "state_routes_s", "/health", "max"),
        "metrics_p50_s": median(over, "state_routes_s", "/metrics", "p50"),
        "metrics_max_s": median(over, "state_routes_s", "/metrics", "max"),
        "client_lag_p99_s": median(over, "client_lag_s", "p99"),
        "front_end_ran_s": median(over, "cores", "front_end", "ran_s"),
        "front_end_waited_for_a_core_s": median(over, "cores", "front_end", "waited_for_a_core_s"),
        "front_end_peak_mib": median(over, "memory", "front_end", "peak_mib"),
        "engine_peak_mib": median(over, "memory", "engine", "peak_mib"),
        "recovered_to_normal_latency": median("recovered_to_normal_latency"),
        "last_answer_after_s": median(over, "last_answer_after_s"),
    }


async def measure(a: argparse.Namespace, server: ServerEngine) -> dict[str, Any]:
    target = Target("127.0.0.1", a.port)
    front = server.process_id
    if a.realtime:
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        for process in (front, os.getpid()):
            os.sched_setscheduler(process, policy, os.sched_param(1))
    await closed_loop(target, a.max_running, 5.0, np.random.default_rng(a.seed), a.vocabulary)
    rounds = []
    for number in range(a.rounds):
        rounds.append(await one_round(target, number, front, a))
        sys.stdout.write(json.dumps(medians(rounds[-1:])) + "\n")
        sys.stdout.flush()
    return {
        "model": Path(a.model).name,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "note": a.note,
        "front_end_and_client_realtime": a.realtime,
        "limits": {"max_running": a.max_running, "max_queued_requests": a.max_queued},
        "times_the_sustainable_rate": a.times,
        "seconds": a.seconds,
        "verdicts": verdicts(rounds),
        "medians": medians(rounds),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="none: a tiny random one, made here")
    parser.add_argument("--port", type=int, default=8815)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--normal", type=float, default=12.0, help="seconds of normal load")
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--max-queued", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--realtime", action="store_true", help="see above; needs root")
    parser.add_argument("--note", default="", help="about the machine, for the JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "serving_overload.json")
    a = parser.parse_args()
    logs = Path(tempfile.mkdtemp())
    if not a.model:
        a.model = str(logs / "tiny")
        make_tiny_checkpoint(Path(a.model))
    command = (
        f"{sys.executable} -m runtime serve {a.model} --name m --port {a.port} --threads 1 "
        f"--max-running {a.max_running} --max-queued-requests {a.max_queued}"
    )
    server = ServerEngine("overload", "m", f"http://127.0.0.1:{a.port}", command, 1, logs)
    try:
        server.start()
        found = asyncio.run(measure(a, server))
    finally:
        server.stop()
    a.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found["verdicts"]) + "\n")


if __name__ == "__main__":
    main()
