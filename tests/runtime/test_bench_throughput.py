"""Offline throughput: what is measured, and what is refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.bench_throughput import BenchError, BenchLoad, concurrencies, measure
from runtime.demo_model_tiny import make_tiny_checkpoint
from runtime.engine.build import build_engine
from runtime.engine.core import EngineCore
from tests.runtime.replay_cases import engine_of

LOAD = BenchLoad(prompt_tokens=20, output_tokens=4, num_prompts=6, concurrency=3)


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield make_tiny_checkpoint(Path(folder) / "tiny")


@pytest.fixture
def core(model: Path) -> Iterator[EngineCore]:
    parts = build_engine(engine_of(model, max_running=8))
    try:
        yield EngineCore(parts)
    finally:
        parts.close()


def test_every_token_that_rates_are_made_of_was_computed(core: EngineCore) -> None:
    shown: list[tuple[float, float]] = []
    row = measure(core, LOAD, repeats=2, seed=1, show=lambda done, of: shown.append((done, of)))
    stats = core.stats()
    warm, prefill, whole = 3, 2 * 6, 2 * 6
    assert stats.prompt_tokens_total == 20 * (warm + prefill + whole)
    assert stats.generated_tokens_total == 4 * warm + prefill + 4 * whole
    assert stats.cached_tokens_total == 0
    assert shown == [(1, 2), (2, 2)]
    assert not core.has_work
    for unit in ("wall_s", "cpu_s"):
        prompts, outputs, total = (
            row[f"{what}_tokens_per_{unit}"] for what in ("prefill", "output", "total")
        )
        assert 0 < prompts["min"] <= prompts["median"] <= prompts["max"]
        # 24 of the 144 tokens of a round of whole answers are generated
        assert total["median"] == pytest.approx(6 * outputs["median"], rel=1e-9)


def test_decoding_is_what_whole_answers_take_beyond_their_prefill(core: EngineCore) -> None:
    row = measure(core, LOAD, repeats=1, seed=1)
    for unit in ("wall_s", "cpu_s"):
        prefill_s = 6 * 20 / row[f"prefill_tokens_per_{unit}"]["median"]
        whole_s = 6 * 4 / row[f"output_tokens_per_{unit}"]["median"]
        decode_s = 6 * 3 / row[f"decode_tokens_per_{unit}"]["median"]
        assert decode_s == pytest.approx(max(whole_s - prefill_s, 1e-3 * whole_s), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": 1}, "--output-tokens: must be >= 2, found 1"),
        ({"prompt_tokens": 0}, "--prompt-tokens: must be >= 1, found 0"),
        ({"concurrency": 7}, "--num-prompts: must be >= the concurrency 7, found 6"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(changes: dict[str, int], message: str) -> None:
    settings = {"prompt_tokens": 20, "output_tokens": 4, "num_prompts": 6, "concurrency": 3}
    with pytest.raises(BenchError, match=message):
        BenchLoad(**{**settings, **changes})


def test_a_load_that_the_engine_cannot_hold_is_refused(core: EngineCore) -> None:
    context = core.parts.info.context_tokens
    long = BenchLoad(prompt_tokens=context, output_tokens=2, num_prompts=1, concurrency=1)
    wide = BenchLoad(prompt_tokens=2, output_tokens=2, num_prompts=9, concurrency=9)
    with pytest.raises(BenchError, match=rf"at most [\d,]+ tokens, found {context:,} and 2"):
        measure(core, long, repeats=1, seed=1)
    with pytest.raises(BenchError, match="the engine runs at most 8 at a time, found 9"):
        measure(core, wide, repeats=1, seed=1)


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,,2", "-1"])
def test_concurrencies_are_whole_numbers(text: str) -> None:
    assert concurrencies("1, 8,1") == (1, 8)
    with pytest.raises(BenchError, match="--concurrency: must be whole numbers"):
        concurrencies(text)


def test_the_command_prints_json(model: Path, run_command: Callable[..., Any]) -> None:
    done = run_command(
        *("bench", model, "--prompt-tokens", 16, "--output-tokens", 3, "--num-prompts", 2),
        *("--concurrency", "1,2", "--repeats", 1, "--threads", 1, "--memory", "4MiB", "--json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["concurrency"] for row in result["loads"]] == [1, 2]
    assert all(row["decode_tokens_per_cpu_s"]["median"] > 0 for row in result["loads"])
    assert result["deployment"]["experts"] == "plain"
