"""One replay from its options to the record of its run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models.hf_config import HfConfigError
from models.workload import ResolvedWorkload, resolve_workload
from runtime.replay_question import ReplayQuestion
from runtime.replay_record import ReplayDrive, engine_deployment, policy_of, replay_record
from runtime.replay_requests import ReplayError, ReplayLimits, ReplayRequests, replay_requests
from runtime.replay_run import ReplayRun
from runtime.serve_settings import ServeOptions
from traces.record import RunRecord

Show = Callable[[float, float], None]
CONFIG = "config.json"
REFERENCE_BITS = 4
UNTOLD_VOCABULARY = 1000
"""Token ids of a server's model where nobody says how many it has: all models have so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What the operator says.

    Attributes:
        question: Workload, targets, seed.
        limits: What of the workload is replayed.
        speed, concurrency: See ``ReplayArrivals``.
        temperature: Of sampling.
        settle_s: Seconds at the end in which bits may come back, at most.
        plots: Whether pictures are drawn.
        engine: Of the engine in this process.
        url, name, api_key: Of a server; without ``url`` the engine is in this process.
        vocabulary: Of its model; None: as the model's folder or the server says.
    """

    question: ReplayQuestion
    limits: ReplayLimits
    engine: ServeOptions
    speed: float = 1.0
    concurrency: int | None = None
    temperature: float = 0.0
    settle_s: float = 2.0
    plots: bool = True
    url: str | None = None
    name: str | None = None
    vocabulary: int | None = None
    api_key: str = ""


def trace_and_model(inputs: Sequence[str]) -> tuple[str | None, Path | None]:
    """Which of the words is the trace, and which the folder of a checkpoint.

    Raises:
        ReplayError: If there are more than one of either.
    """
    models = [word for word in inputs if (Path(word) / CONFIG).is_file()]
    traces = [word for word in inputs if word not in models]
    for what, words in (("checkpoint folder", models), ("trace", traces)):
        if len(words) > 1:
            raise ReplayError(f"one {what} at a time, found {' and '.join(words)}")
    return (traces[0] if traces else None), (Path(models[0]) if models else None)


def replay_engine(
    options: ReplayOptions,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    show: Show = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[RunRecord, bool]:
    """Replay on an engine in this process; the record, and whether it was stopped.

    Raises:
        ValueError: As reading the workload, the settings and the model do, naming the field.
    """
    from runtime.engine.build import build_engine
    from runtime.replay_arrivals import ReplayArrivals
    from runtime.replay_engine import EngineReplay
    from runtime.replay_prompts import ReplayPrompts
    from runtime.serve_settings import engine_settings

    question = options.question
    workload = resolve_workload(question.workload, seed=question.seed)
    settings = engine_settings(options.engine, say=say)
    say(f"loading {settings.model}")
    parts = build_engine(settings)
    try:
        limit = min(parts.info.context_tokens, parts.info.kv_capacity_tokens)
        requests = _fitted(options, workload, limit)
        prompts = ReplayPrompts(
            requests,
            seed=question.seed,
            vocabulary=parts.info.vocabulary,
            never=parts.info.eos_token_ids,
        )
        arrivals = ReplayArrivals(requests, speed=options.speed, concurrency=options.concurrency)
        driver = EngineReplay(
            parts,
            requests,
            prompts,
            arrivals,
            temperature=options.temperature,
            seed=question.seed,
            settle_s=options.settle_s,
        )
        say(f"replaying {len(requests):,} requests")
        run = driver.run(is_stopped=is_stopped, show=show)
        record = replay_record(
            question,
            workload,
            requests,
            run,
            drive=_drive(options),
            deployment=engine_deployment(parts),
            policy=policy_of(parts.info, settings.precision),
            reference=0.0 if parts.control is None else parts.control.damage_at(REFERENCE_BITS),
            log=parts.log,
            plots=options.plots,
        )
    finally:
        parts.close()
    return record, run.was_stopped


def replay_server(
    options: ReplayOptions,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    show: Show = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[RunRecord, bool]:
    """Replay on a running server; the record, and whether it was stopped.

    Raises:
        ValueError: As reading the workload does; if the server cannot be asked.
    """
    from runtime.replay_arrivals import ReplayArrivals
    from runtime.replay_client import ServerAddress
    from runtime.replay_prompts import ReplayPrompts
    from runtime.replay_server import ServedModel, ServerReplay, served_model

    assert options.url is not None
    server = ServerAddress.of(options.url, options.api_key)
    question = options.question
    workload = resolve_workload(question.workload, seed=question.seed)
    told, never = _vocabulary(options)

    async def drive() -> tuple[ReplayRequests, ReplayRun, ServedModel]:
        model = await served_model(server, options.name)
        say(f"{options.url}: {model.name}")
        requests = _fitted(options, workload, model.context_tokens)
        vocabulary = told or model.vocabulary or UNTOLD_VOCABULARY
        prompts = ReplayPrompts(requests, seed=question.seed, vocabulary=vocabulary, never=never)
        arrivals = ReplayArrivals(requests, speed=options.speed, concurrency=options.concurrency)
        driver = ServerReplay(
            server,
            model.name,
            requests,
            prompts,
            arrivals,
            temperature=options.temperature,
            seed=question.seed,
        )
        return requests, await driver.run(is_stopped=is_stopped, show=show), model

    requests, run, model = asyncio.run(drive())
    deployment = {
        "model": model.name,
        "context_tokens": model.context_tokens,
        "arena_bytes": 0,
        "page_bytes": 0,
        "text": f"{model.name} behind {options.url}",
    }
    record = replay_record(
        question,
        workload,
        requests,
        run,
        drive=_drive(options),
        deployment=deployment,
        policy="server",
        reference=0.0,
        log=None,
        plots=options.plots,
    )
    return record, run.was_stopped


def _fitted(
    options: ReplayOptions, workload: ResolvedWorkload, context_tokens: int | None
) -> ReplayRequests:
    limits = options.limits
    known = [n for n in (limits.context_tokens, context_tokens) if n is not None]
    limits = replace(limits, context_tokens=min(known) if known else None)
    return replay_requests(workload, seed=options.question.seed, limits=limits)


def _vocabulary(options: ReplayOptions) -> tuple[int | None, tuple[int, ...]]:
    """Token ids of a server's model, as the operator or its folder says; and what ends answers."""
    folder = options.engine.model
    if options.vocabulary is not None or folder is None:
        return options.vocabulary, ()
    import json

    try:
        config = json.loads((folder / CONFIG).read_bytes())
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
        ends = config.get("eos_token_id")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise HfConfigError(f"{folder / CONFIG}: vocab_size: cannot be read: {error}") from error
    ended = ends if isinstance(ends, list) else [ends]
    return int(size), tuple(token for token in ended if isinstance(token, int))


def _drive(options: ReplayOptions) -> ReplayDrive:
    if options.concurrency is not None:
        text = f"closed loop, {options.concurrency} at a time"
    else:
        text = "arrivals by the clock"
        if options.limits.rate_per_s is not None:
            text += f", stretched to {options.limits.rate_per_s:g} per second"
        if options.speed != 1.0:
            text += f", {options.speed:g} times faster than recorded"
    text += "; in this process" if options.url is None else f"; server {options.url}"
    return ReplayDrive(
        text=text,
        facts={
            "url": options.url,
            "speed": options.speed,
            "rate_per_s": options.limits.rate_per_s,
            "concurrency": options.concurrency,
            "scale_tokens": options.limits.scale_tokens,
            "max_requests": options.limits.max_requests,
            "temperature": options.temperature,
        },
    )
