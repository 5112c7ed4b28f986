"""Weights and keys share memory: under pressure bits fall before anybody is preempted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.core import EngineCore
from runtime.engine.process import write_decisions
from runtime.engine.settings import EngineSettingsError
from runtime.quantize import QuantizeSettings, quantize_checkpoint
from tests.runtime.engine.core_cases import (
    STORE,
    ask,
    drive,
    engine,
    make_checkpoint,
    one,
    prompt,
    running,
    settle,
)
from traces.decisions import read_decisions
from twin.replay import replay_log

PAGE_BYTES = 1024  # of 64 numbers a row: planes and tables fill several
PATIENCE_S = 30.0
QUICK: dict[str, Any] = {"plan_interval_s": 0.01, "calm_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized")
    source = make_checkpoint(path / "source", "qwen2_moe")
    settings = QuantizeSettings(parent_bits=6, seed_bits=2, min_bits=2)
    quantize_checkpoint(source, path / "quantized", settings)
    return path / "quantized"


@pytest.fixture(scope="module")
def widest_bytes(folder: Path) -> int:
    """Bytes of all experts at six bits."""
    with running(folder, precision=6, page_bytes=PAGE_BYTES) as core:
        return core.parts.arena.use().weight_pages * PAGE_BYTES


@pytest.fixture
def moving(folder: Path, widest_bytes: int, tmp_path: Path) -> Iterator[EngineCore]:
    """An arena that holds the widest experts and the keys of 400 tokens."""
    with running(
        folder,
        page_bytes=PAGE_BYTES,
        memory_bytes=int(widest_bytes * 1.1) + 25 * 8 * PAGE_BYTES,
        precision_settings=QUICK,
        prefix=STORE,
        decision_log=str(tmp_path / "log.jsonl.gz"),
    ) as core:
        yield core


def abort_at(core: EngineCore, sequence_id: str, step: int) -> None:
    if step == 20:
        core.abort([sequence_id])


def rest(core: EngineCore, bits: float) -> None:
    """Idle until the weights have so many bits on average again."""
    end_s = time.monotonic() + PATIENCE_S
    while core.stats().mean_bits < bits:
        core.idle()
        assert time.monotonic() < end_s, f"{core.stats().mean_bits} bits, not {bits}"
        time.sleep(0.002)
    settle(core)


def test_bits_fall_before_anybody_is_preempted_and_come_back_afterwards(
    moving: EngineCore,
) -> None:
    core = moving
    settle(core)
    start = core.stats()
    assert start.mean_bits > 4.5
    lowest, damage = start.mean_bits, [start.damage]

    def look(step: int) -> None:
        nonlocal lowest
        stats = core.stats()
        if stats.mean_bits < lowest:
            damage.append(stats.damage)
            assert stats.preemptions_total == 0
        lowest = min(lowest, stats.mean_bits)

    answers = drive(core, [ask(prompt(30, seed), 30) for seed in range(14)], at_step=look)
    loaded = core.stats()
    assert {answer.finish for answer in answers} == {"length"}
    assert lowest < start.mean_bits
    assert damage == sorted(damage)
    assert damage[-1] > damage[0]
    assert loaded.weight_drops_total > 0
    assert sum(loaded.planner_moves_total.values()) > 0
    rest(core, start.mean_bits)
    after = core.stats()
    assert after.weight_raises_total > 0
    assert after.moved_bytes_total > 0
    assert after.damage <= start.damage
    assert after.kv_pages == 0


def test_preemption_begins_where_bits_end_and_everybody_is_served(moving: EngineCore) -> None:
    core = moving
    assert core.parts.control is not None
    control = core.parts.control
    floors: list[np.ndarray] = [np.zeros(0)]  # of the step before; hot experts keep four bits
    at_preemption: list[np.ndarray] = []

    def look(step: int) -> None:
        state = control.state(step, 0)
        if core.stats().preemptions_total and not at_preemption:
            at_preemption.extend([state.bits.copy(), floors[0]])
        floors[0] = np.maximum(state.hot_floor_bits, 2)

    answers = drive(core, [ask(prompt(40, seed), 60) for seed in range(40)], at_step=look)
    assert {answer.finish for answer in answers} == {"length"}
    bits, lowest = at_preemption
    assert (bits <= lowest).all()
    assert (bits == 2).mean() > 0.5
    rest(core, 4.5)
    core.parts.cache.check()


def test_the_longest_sequence_that_is_promised_gets_its_pages_from_the_weights(
    folder: Path, widest_bytes: int
) -> None:
    with running(
        folder, page_bytes=PAGE_BYTES, memory_bytes=int(widest_bytes * 1.05),
        precision_settings=QUICK,
    ) as core:  # fmt: skip
        capacity = min(core.parts.info.kv_capacity_tokens, core.parts.info.context_tokens)
        assert capacity > core.parts.arena.use().free_pages // 8 * 16
        drive(core, [ask(prompt(30), 30)])  # so that some experts are hot
        answer = one(core, ask(prompt(capacity - 10), 10))
        assert (answer.finish, len(answer.tokens)) == ("length", 10)
        assert "together" in one(core, ask(prompt(capacity - 10), 11)).error


@pytest.mark.parametrize("store", [True, False])
def test_the_log_of_a_run_under_pressure_replays_without_difference(
    moving: EngineCore, tmp_path: Path, store: bool
) -> None:
    core = moving
    for _ in range(2):
        asks = [ask(prompt(30, seed), 40, salt="" if store else str(seed)) for seed in range(20)]
        gone = asks[7].sequence_id
        core.add(asks[7])
        drive(
            core,
            [new for new in asks if new.sequence_id != gone],
            every=1,
            at_step=partial(abort_at, core, gone),
        )
        write_decisions(core.parts)
        found = replay_log(tmp_path / "log.jsonl.gz")
        assert found.difference is None
        assert found.num_left_out == 0
        assert found.num_calls == core.stats().decisions_logged
        rest(core, 4.0)
    _, decisions = read_decisions(tmp_path / "log.jsonl.gz")
    policies = {decision.policy for decision in decisions}
    assert policies == {"batching", "precision"}


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_a_fixed_width_never_moves(folder: Path, widest_bytes: int, bits: int) -> None:
    with running(
        folder, precision=bits, page_bytes=PAGE_BYTES, memory_bytes=widest_bytes + 80 * PAGE_BYTES
    ) as core:
        pages = core.parts.arena.use().weight_pages
        drive(core, [ask(prompt(30, seed), 30) for seed in range(8)])
        core.idle()
        stats = core.stats()
        assert stats.weight_pages == pages
        assert (stats.weight_drops_total, stats.weight_raises_total) == (0, 0)
        assert stats.moved_bytes_total == 0
        assert stats.planner_moves_total == {}


def test_answers_at_a_fixed_width_do_not_depend_on_neighbours_or_preemption(
    folder: Path, widest_bytes: int
) -> None:
    prompts = [prompt(length) for length in (5, 16, 33)]
    with running(folder, precision=3, page_bytes=PAGE_BYTES) as core:
        expected = [one(core, ask(tokens, 40)).said for tokens in prompts]
        weight_pages = core.parts.arena.use().weight_pages
    # All begin, with 2, 2 and 4 blocks in sight, and would end with 3, 4 and 5.
    tight = (weight_pages + 8 * core.parts.cache.layout.block_pages) * PAGE_BYTES
    with running(folder, precision=3, page_bytes=PAGE_BYTES, memory_bytes=tight) as core:
        answers = drive(core, [ask(tokens, 40) for tokens in prompts])
        assert [answer.said for answer in answers] == expected
        assert core.stats().preemptions_total > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precision": 7}, r"precision: must be a planner or one of \[2, 3, 4, 5, 6\], found 7"),
        ({"precision": "sideways"}, "sideways"),
        ({"precision_settings": {"low_share": 0.9}}, "precision_settings: low_share"),
        ({"precision_settings": {"colour": 1}}, "precision_settings: .*colour"),
        ({"memory_bytes": 20 * PAGE_BYTES}, "memory_bytes: expert weights alone need"),
    ],
)
def test_settings_that_do_not_fit_the_weights_are_refused_at_the_start(
    folder: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineSettingsError, match=says):
        engine(folder, page_bytes=PAGE_BYTES, **changes)
