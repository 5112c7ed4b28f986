"""From what the operator says to the settings of an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from policies.catalog import PRECISION
from runtime.engine.settings import EngineSettings, EngineSettingsError, PrefixSettings
from runtime.quantized_manifest import MANIFEST
from runtime.store.errors import StoreSetupError
from runtime.store.sizes import size_bytes

MAX_WIDTH: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of ``runtime serve``, ``replay`` and ``bench`` that concern the engine.

    What is None is taken from the scenario, or else is the engine's default.
    """

    model: Path | None = None
    scenario: Path | None = None
    overrides: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 0
    memory: str | None = None
    context: int | None = None
    max_running: int | None = None
    prefill_tokens: int | None = None
    precision: str | None = None
    preemption: str = "recompute"
    prefix_store: str = "memory"
    prefix_memory: str = "512MiB"
    prefix_ssd: str = "0"
    decisions: Path | None = None
    decision_calls: int = 200_000


def engine_settings(
    options: ServeOptions, *, say: Callable[[str], None] = lambda text: None
) -> EngineSettings:
    """Settings of the engine; without a model, of the demo model, made if it is not there.

    Raises:
        EngineSettingsError: Naming the option.
        ValueError: As making the demo model and reading the scenario do.
    """
    if options.overrides and options.scenario is None:
        raise EngineSettingsError("--set: changes a scenario; give one with --scenario")
    settings: dict[str, Any] = {}
    model = options.model
    if options.scenario is not None:
        from runtime.scenario_engine import has_moving_widths, scenario_settings

        if model is None:
            named = scenario_settings(options.scenario, options.overrides).get("model")
            model = None if named is None else Path(named)
    if model is None:
        from runtime.demo_model import ensure_demo_model

        model = ensure_demo_model(say=say)
    if options.scenario is not None and (model / "config.json").is_file():
        # the scenario's memory is shared out for the model that is served
        served = f"llm.model={json.dumps(str(model.absolute()))}"
        settings.update(scenario_settings(options.scenario, (*options.overrides, served)))
        if "precision" in settings and not has_moving_widths(model):
            say(
                f"{model}: its experts are plain, they stay at 16 bits beside the arena: "
                "[precision] has no part; runtime quantize makes a checkpoint whose widths move"
            )
    settings["model"] = str(model)
    folder = Path(settings["model"])
    if not (folder / "config.json").is_file():
        raise EngineSettingsError(f"{folder}: is no checkpoint folder: it has no config.json")
    settings.update(
        dtype=_one_of("--dtype", options.dtype, ("auto", "float32", "bfloat16")),
        device=options.device,
        threads=_threads(options.threads, say),
        preemption=_preemption(options.preemption, options.prefix_store),
        prefix=PrefixSettings(
            place=options.prefix_store,
            memory_bytes=_size("--prefix-memory", options.prefix_memory),
            ssd_bytes=_size("--prefix-ssd", options.prefix_ssd),
        ),
        decision_log=_file_to_write("--decisions", options.decisions),
        decision_log_calls=options.decision_calls,
    )
    if options.memory is not None:
        settings["memory_bytes"] = _size("--memory", options.memory)
    if options.precision is not None:
        settings["precision"] = _precision(options.precision, folder)
    limits = {
        "context_tokens": options.context,
        "max_running": options.max_running,
        "prefill_tokens": options.prefill_tokens,
    }
    settings.update({name: value for name, value in limits.items() if value is not None})
    return msgspec.convert(settings, EngineSettings)


def precision_of(text: str) -> str | int:
    """A planner's name or a width.

    Raises:
        EngineSettingsError: If it is neither.
    """
    if text in PRECISION:
        return text
    if text.isdigit() and 1 <= int(text) <= MAX_WIDTH:
        return int(text)
    raise EngineSettingsError(
        f"--precision: must be {', '.join(PRECISION)} or a width of 1..{MAX_WIDTH}, found {text!r}"
    )


def _precision(text: str, folder: Path) -> str | int:
    found = precision_of(text)
    if not (folder / MANIFEST).is_file():
        raise EngineSettingsError(
            f"--precision: {folder} holds plain experts or none, whose widths are fixed; "
            "runtime quantize makes a checkpoint whose widths move"
        )
    return found


def _preemption(text: str, prefix_store: str) -> str:
    found = _one_of("--preemption", text, ("recompute", "swap"))
    if found == "swap" and prefix_store == "none":
        raise EngineSettingsError(
            "--preemption: swap saves blocks in the prefix store, and --prefix-store is none"
        )
    return found


def _threads(asked: int, say: Callable[[str], None]) -> int:
    cores = len(os.sched_getaffinity(0))
    if asked > cores:
        say(f"warning: --threads: {asked} threads share {cores} cores, which slows every step")
    return asked or cores


def _one_of(option: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise EngineSettingsError(f"{option}: must be {', '.join(allowed)}, found {text!r}")
    return text


def _file_to_write(option: str, path: Path | None) -> str | None:
    """Known to be possible before a long run, not only at its end."""
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise EngineSettingsError(f"{option}: {path}: there is no folder {folder}")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise EngineSettingsError(f"{option}: {path}: cannot be written")
    return str(path.absolute())


def _size(option: str, text: str) -> int:
    try:
        return size_bytes(text, option)
    except StoreSetupError as error:
        raise EngineSettingsError(str(error)) from error
