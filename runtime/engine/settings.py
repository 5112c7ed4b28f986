"""What an engine is told when it starts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class EngineSettingsError(ValueError):
    """A setting is out of range or contradicts another or the model; names it."""


class PrefixSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where prefixes are kept.

    Attributes:
        place: ``memory`` (in this process), a folder for an in-process store that may have an SSD
            tier, the socket of ``runtime store serve``, or ``none``.
        memory_bytes: Of an in-process store.
        ssd_bytes: Of an in-process store in a folder.
    """

    place: str = "memory"
    memory_bytes: int = 512 << 20
    ssd_bytes: int = 0


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Model, memory, limits and policies of one engine.

    Attributes:
        model: Folder of a checkpoint, plain or quantized.
        dtype: Of weights, keys and values; ``auto``: as in the checkpoint.
        device: ``cpu``, ``cuda:N``, or, for tests, ``emulation``: the path of a GPU with its
            kernels on the CPU.
        threads: Of CPU kernels.
        memory_bytes: Arena for expert weights (if quantized) and KV; None: chosen by the machine.
        page_bytes: Of the arena; None: by the model.
        context_tokens: Most tokens of a prompt with its answer; None: the model's.
        max_running: Most sequences with pages.
        prefill_tokens: Most prompt tokens in a step.
        precision: Planner of moving widths, or one fixed width; for quantized checkpoints.
        precision_settings: Further fields of ``policies.precision_state.PrecisionSettings``.
        hot_coverage, hot_bits: Floor of experts that get much traffic.
        preemption: Whether a preempted sequence is computed again, or its blocks are saved first.
        prefix: Where prefixes are kept.
        decision_log: File that the log of policy calls is written to; None: nowhere.
        decision_log_calls: Calls kept at most; later ones are counted.
        report_interval_s: Seconds between two reports of numbers.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    threads: int = 1
    memory_bytes: int | None = None
    page_bytes: int | None = None
    context_tokens: int | None = None
    max_running: int = 64
    prefill_tokens: int = 512
    precision: str | int = "hull"
    precision_settings: dict[str, Any] = {}
    hot_coverage: float = 0.5
    hot_bits: int = 4
    preemption: Literal["recompute", "swap"] = "recompute"
    prefix: PrefixSettings = PrefixSettings()
    decision_log: str | None = None
    decision_log_calls: int = 20_000
    report_interval_s: float = 0.5
