"""Offline throughput of an engine in this process: prompts of one length, answers of one length.

Every repeat measures two loads on new prompts: answers of one token, which is prefill, and whole
answers; decoding is what the second took beyond the first. CPU seconds are those of all threads of
this process, so that other load on the machine counts little.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models.streams import stream
from runtime.engine.core import EngineCore
from runtime.engine.frames import NewSequence, Sampling

Show = Callable[[float, float], None]


class BenchError(ValueError):
    """A benchmark that cannot be run as asked; names the option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """What is asked of the engine.

    Attributes:
        prompt_tokens, output_tokens: Of every request; outputs >= 2, so that something is decoded.
        num_prompts: Requests of one measurement.
        concurrency: Requests at a time.
    """

    prompt_tokens: int
    output_tokens: int
    num_prompts: int
    concurrency: int

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--prompt-tokens", self.prompt_tokens, 1),
            ("--output-tokens", self.output_tokens, 2),
            ("--num-prompts", self.num_prompts, 1),
            ("--concurrency", self.concurrency, 1),
        ):
            if value < least:
                raise BenchError(f"{option}: must be >= {least}, found {value}")
        if self.num_prompts < self.concurrency:
            raise BenchError(
                f"--num-prompts: must be >= the concurrency {self.concurrency}, "
                f"found {self.num_prompts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of one measurement: of the wall clock, of all CPUs together."""

    wall_s: float
    cpu_s: float


def check_fits(core: EngineCore, load: BenchLoad) -> None:
    """Refuse a load that the model or its memory cannot hold.

    Raises:
        BenchError: Naming the limit.
    """
    info = core.parts.info
    limit = min(info.context_tokens, info.kv_capacity_tokens)
    if load.prompt_tokens + load.output_tokens > limit:
        raise BenchError(
            f"--prompt-tokens: with --output-tokens at most {limit:,} tokens, found "
            f"{load.prompt_tokens:,} and {load.output_tokens:,}"
        )
    if load.concurrency > core.parts.settings.max_running:
        raise BenchError(
            f"--concurrency: the engine runs at most {core.parts.settings.max_running} at a time, "
            f"found {load.concurrency}"
        )


def measure(
    core: EngineCore,
    load: BenchLoad,
    *,
    repeats: int,
    seed: int,
    show: Show = lambda done, total: None,
) -> dict[str, Any]:
    """Medians over the repeats, each with its smallest and largest; JSON-ready.

    A first, short round of the same shapes is not counted.

    Args:
        core: Of an engine with nothing to do.
        load: What is asked.
        repeats: Rounds, >= 1.
        seed: Of the prompts.
        show: Told rounds done and in all.

    Raises:
        BenchError: If the load does not fit, or an answer fails.
    """
    check_fits(core, load)
    runner = _Runner(core, load, seed)
    warm = min(load.num_prompts, load.concurrency)
    runner.run("warm", warm, load.output_tokens)
    rows = []
    for repeat in range(repeats):
        prefill = runner.run(f"prefill {repeat}", load.num_prompts, 1)
        whole = runner.run(f"whole {repeat}", load.num_prompts, load.output_tokens)
        rows.append(_rates(load, prefill, whole))
        show(repeat + 1, repeats)
    return {
        **asdict(load),
        "repeats": repeats,
        "load_average": os.getloadavg()[0],
        **{
            name: {
                "median": statistics.median(row[name] for row in rows),
                "min": min(row[name] for row in rows),
                "max": max(row[name] for row in rows),
            }
            for name in rows[0]
        },
    }


class _Runner:
    def __init__(self, core: EngineCore, load: BenchLoad, seed: int) -> None:
        self._core, self._load, self._seed = core, load, seed

    def run(self, name: str, count: int, output_tokens: int) -> Spent:
        """So many requests, in a closed loop."""
        core, load = self._core, self._load
        rng = stream(self._seed, f"bench {load.concurrency} {name}")
        info = core.parts.info
        drawn = rng.integers(0, info.vocabulary, (count, load.prompt_tokens)).tolist()
        sampling = Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        left = [
            NewSequence(sequence_id=f"{name} {i}", prompt=tuple(prompt), sampling=sampling)
            for i, prompt in enumerate(drawn)
        ]
        left.reverse()
        under_way = generated = 0
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        while left or under_way:
            while left and under_way < load.concurrency:
                core.add(left.pop())
                under_way += 1
            for output in core.step():
                generated += len(output.tokens)
                if output.finish_reason == "error":
                    raise BenchError(f"bench: an answer failed: {output.error}")
                under_way -= output.finish_reason is not None
        spent = Spent(wall_s=time.perf_counter() - began_s, cpu_s=time.process_time() - began_cpu_s)
        if generated != count * output_tokens:
            raise BenchError(f"bench: {generated} tokens came instead of {count * output_tokens}")
        return spent


def _rates(load: BenchLoad, prefill: Spent, whole: Spent) -> dict[str, float]:
    prompts = load.num_prompts * load.prompt_tokens
    outputs = load.num_prompts * load.output_tokens
    decoded = load.num_prompts * (load.output_tokens - 1)
    row: dict[str, float] = {}
    for unit in ("wall_s", "cpu_s"):
        first_s, whole_s = getattr(prefill, unit), getattr(whole, unit)
        row[f"prefill_tokens_per_{unit}"] = prompts / first_s
        # on a busy machine the whole may seem to take no longer than its prefill
        row[f"decode_tokens_per_{unit}"] = decoded / max(whole_s - first_s, 1e-3 * whole_s)
        row[f"output_tokens_per_{unit}"] = outputs / whole_s
        row[f"total_tokens_per_{unit}"] = (prompts + outputs) / whole_s
    row["requests_per_wall_s"] = load.num_prompts / whole.wall_s
    return row


def concurrencies(text: str) -> Sequence[int]:
    """Numbers of a list such as ``1,8``.

    Raises:
        BenchError: If one is none or below 1.
    """
    found = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            raise BenchError(
                f"--concurrency: must be whole numbers >= 1 such as 1,8, found {text!r}"
            )
        found.append(int(part))
    return tuple(dict.fromkeys(found))
