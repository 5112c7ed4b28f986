"""What a replay leaves on disk: the run directory of ``twin run``, put together from its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tomli_w

from models.workload import ResolvedWorkload, workload_summary
from runtime.engine.frames import EngineInfo
from runtime.engine.parts import EngineParts
from runtime.replay_question import ReplayQuestion
from runtime.replay_report import report_text
from runtime.replay_requests import ReplayRequests
from runtime.replay_run import ReplayRun
from runtime.replay_summary import (
    drawn_series,
    request_counts,
    request_table,
    run_row,
    warnings_of,
)
from traces.decisions import DecisionLog
from traces.environment import PACKAGES, commit, versions
from traces.record import RunRecord

KIND = "runtime-replay"
REFERENCE_BITS = 4
ENGINE_PACKAGES = (*PACKAGES, "torch", "transformers", "tokenizers", "safetensors", "msgspec")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDrive:
    """How requests were sent.

    Attributes:
        text: In words.
        facts: The options, JSON-ready.
    """

    text: str
    facts: Mapping[str, Any]


def replay_record(
    question: ReplayQuestion,
    workload: ResolvedWorkload,
    requests: ReplayRequests,
    run: ReplayRun,
    *,
    drive: ReplayDrive,
    deployment: Mapping[str, Any],
    policy: str | int,
    reference: float,
    log: DecisionLog | None,
    plots: bool,
) -> RunRecord:
    """The record of a replay.

    Args:
        question, workload, requests, run: What was asked and what came of it.
        drive: How requests were sent.
        deployment: See ``engine_deployment``; of a server what it tells.
        policy: Planner or width; a name where the engine is behind a server.
        reference: Damage that is reported as 1; 0: none is known.
        log: Decision log; None behind a server, which writes its own.
        plots: Whether pictures are drawn.
    """
    label = f"{policy} bits" if isinstance(policy, int) else policy
    table = request_table(requests, run, label)
    columns = run.series.columns()
    slo = dataclasses.asdict(question.slo)
    summary: dict[str, Any] = {
        "kind": KIND,
        "scenario": question.tables,
        "seed": question.seed,
        "versions": versions(ENGINE_PACKAGES),
        "commit": commit(),
        "workload": workload_summary(workload),
        "drive": {**drive.facts, "text": drive.text},
        "deployment": deployment,
        "requests": request_counts(requests, run),
        "slo": slo,
        "damage_unit_bits": REFERENCE_BITS if reference else None,
        "policies": [
            run_row(
                requests,
                run,
                policy=policy,
                label=label,
                reference=reference,
                slo=question.slo,
            )
        ],
        "counters": run.counters,
        "decision_calls": (
            None if log is None else {"kept": log.num_calls, "left_out": log.calls_left_out}
        ),
        "series": drawn_series(columns, page_bytes=deployment["page_bytes"], reference=reference),
        "warnings": warnings_of(requests, run),
    }
    files = {
        "scenario.toml": tomli_w.dumps(question.tables).encode(),
        "report.txt": report_text(summary),
    }
    if log is not None:
        files["decisions.jsonl.gz"] = log.to_bytes()
    if plots:
        from runtime.replay_plots import draw_replay

        files.update(draw_replay(summary, table))
    return RunRecord(
        summary=summary,
        requests=table,
        timeseries=columns if len(columns["time_s"]) else None,
        files=files,
    )


def engine_deployment(parts: EngineParts) -> dict[str, Any]:
    """Model, arena and limits of an engine in this process."""
    info, settings = parts.info, parts.settings
    arena_bytes = info.arena_pages * info.page_bytes
    precision = settings.precision if info.experts == "quantized" else None
    held = "" if precision is None else f", precision {precision}"
    return {
        "model": info.model.rstrip("/").rpartition("/")[2],
        "model_folder": info.model,
        "model_type": info.model_type,
        "dtype": info.dtype,
        "device": info.device,
        "threads": settings.threads,
        "experts": info.experts,
        "precision": precision,
        "context_tokens": info.context_tokens,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "max_running": settings.max_running,
        "prefill_tokens": settings.prefill_tokens,
        "preemption": settings.preemption,
        "has_prefix_store": info.has_prefix_store,
        "block_tokens": info.block_tokens,
        "arena_bytes": arena_bytes,
        "arena_pages": info.arena_pages,
        "page_bytes": info.page_bytes,
        "text": (
            f"{info.model}: {info.model_type}, {info.dtype}, {info.experts} experts{held}; arena "
            f"of {arena_bytes / 2**20:,.1f} MiB in {info.arena_pages:,} pages of "
            f"{info.page_bytes:,} bytes; at most {settings.max_running} running, "
            f"{settings.prefill_tokens} prompt tokens a step"
        ),
    }


def policy_of(info: EngineInfo, precision: str | int) -> str | int:
    """What reports call the policy: the planner or width, ``plain`` where weights do not move."""
    return precision if info.experts == "quantized" else "plain"
