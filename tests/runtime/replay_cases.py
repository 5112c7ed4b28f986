"""Workloads and engines for the tests of replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.workload import ResolvedWorkload, resolve_workload
from models.workload_settings import Workload
from runtime.demo_model_tiny import make_tiny_checkpoint
from runtime.engine.settings import EngineSettings, PrefixSettings
from runtime.quantize import quantize_checkpoint

PAGE_BYTES = 4096


def quantized_checkpoint(folder: Path) -> Path:
    """A tiny model whose widths can move."""
    plain = make_tiny_checkpoint(folder / "plain")
    quantize_checkpoint(plain, folder / "quantized", threads=1)
    return folder / "quantized"


def engine_of(model: Path, **changes: Any) -> EngineSettings:
    """Settings of a small engine."""
    settings: dict[str, Any] = {
        "model": str(model),
        "memory_bytes": 2 << 20,
        "page_bytes": PAGE_BYTES,
        "prefix": PrefixSettings(place="none"),
        "decision_log_calls": 1_000_000,
        **changes,
    }
    return EngineSettings(**settings)


def mooncake_file(path: Path, rows: list[tuple[float, int, int, list[int]]]) -> Path:
    """A trace of (seconds, prompt, output, blocks of 512 tokens)."""
    lines = [
        json.dumps(
            {
                "timestamp": int(1000 * time_s),
                "input_length": prompt,
                "output_length": output,
                "hash_ids": blocks,
            }
        )
        for time_s, prompt, output, blocks in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def agentic_file(path: Path, sessions: list[list[dict[str, Any]]]) -> Path:
    """A trace of sessions with think times, blocks of 16 tokens."""
    lines = [
        json.dumps(
            {"id": f"s{i}", "block_size": 16, "hash_id_scope": "local", "requests": requests}
        )
        for i, requests in enumerate(sessions)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def workload_of(**settings: Any) -> ResolvedWorkload:
    """Of the tables of a scenario."""
    return resolve_workload(Workload(**settings), seed=1)
