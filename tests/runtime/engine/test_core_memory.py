"""Pages under pressure: who leaves gives them back, somebody always gets on, nothing grows."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from collections.abc import Sized
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.core import EngineCore
from runtime.engine.settings import EngineSettingsError, PrefixSettings
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

PAGE_BYTES = 4096  # of the tiny model: a block is one page in each of its two layers
BLOCK_BYTES = 2 * PAGE_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2_moe")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("windowed"), "mistral")


# --- who leaves gives pages back ----------------------------------------------------------------


def test_an_abort_in_the_queue_takes_nothing_with_it(folder: Path) -> None:
    with running(folder, max_running=1) as core:
        first, second = ask(prompt(20)), ask(prompt(20))
        core.add(first)
        core.add(second)
        core.step()
        core.abort([second.sequence_id])
        assert core.stats().waiting == 0
        core.abort([first.sequence_id])
        assert not core.has_work


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 9])
def test_an_abort_frees_pages_at_once_before_the_first_token_and_after(
    folder: Path, steps: int
) -> None:
    with running(folder, prefill_tokens=16) as core:
        start = core.parts.arena.use().free_pages
        new = ask(prompt(60), 100)  # speaks in its fourth step
        core.add(new)
        heard = [output for _ in range(steps) for output in core.step()]
        assert len(heard) == max(0, steps - 3)
        assert (core.parts.arena.use().free_pages < start) == (steps > 0)
        core.abort([new.sequence_id])
        assert core.parts.arena.use().free_pages == start
        assert core.step() == []
        assert not core.has_work
        core.abort([new.sequence_id, "never known"])
        assert core.stats().aborted_total == 1


def test_pages_of_an_aborted_sequence_that_are_being_saved_serve_others_at_need(
    folder: Path,
) -> None:
    with running(folder, memory_bytes=8 * BLOCK_BYTES, prefix=STORE) as core:
        for seed in range(10):
            new = ask(prompt(100, seed), 4)
            core.add(new)
            core.step()
            core.abort([new.sequence_id])
        assert one(core, ask(prompt(100, 99), 4)).finish == "length"
        settle(core)
        assert core.parts.arena.use().kv_pages == 0


# --- who can never be served --------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_and_the_next_is_served(folder: Path) -> None:
    with running(folder, memory_bytes=4 * BLOCK_BYTES) as core:
        assert core.parts.info.kv_capacity_tokens == 64
        large, fits, next_one = ask(prompt(60), 5), ask(prompt(60), 4), ask(prompt(3), 4)
        refused, served, other = drive(core, [large, fits, next_one], most_steps=100)
        assert refused.finish == "error"
        assert "64 tokens together, found 60 and max_tokens 5" in refused.error
        assert [served.finish, other.finish] == ["length", "length"]
        assert len(served.tokens) == 4


def test_a_request_longer_than_the_context_is_refused_by_the_context(folder: Path) -> None:
    with running(folder, context_tokens=32) as core:
        assert "32 tokens together" in one(core, ask(prompt(30), 3)).error
        assert one(core, ask(prompt(30), 2)).finish == "length"


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (ask([], 3), "at least one token"),
        (ask([5, 320], 3), "within 0..319"),
        (ask([5, -1], 3), "within 0..319"),
        (ask([5], 0), "max_tokens"),
        (ask([5], 3, logit_bias={320: 1.0}), "logit_bias"),
        (ask([5], 3, salt="\ud800"), "salt"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_with_what_is_wrong(
    folder: Path, new: Any, says: str
) -> None:
    with running(folder, prefix=STORE) as core:
        answer = one(core, new)
        assert answer.finish == "error"
        assert says in answer.error
        assert one(core, ask(prompt(5))).finish == "length"


def test_two_sequences_of_one_name_are_kept_apart(folder: Path) -> None:
    with running(folder) as core:
        new = ask(prompt(5), 5)
        core.add(new)
        core.add(new)
        (refused,) = [output for output in core.step() if output.finish_reason]
        assert "in use" in refused.error
        said = [output.finish_reason for _ in range(5) for output in core.step()]
        assert said == [None, None, None, "length"]


def test_a_prompt_with_windows_longer_than_the_arena_is_computed_in_what_fits(
    windowed: Path,
) -> None:
    with running(windowed) as core:
        expected = one(core, ask(prompt(200), 8)).said
        layout = core.parts.cache.layout
    three_blocks = 3 * layout.block_pages * layout.page_bytes
    with running(windowed, memory_bytes=three_blocks, prefix=STORE) as core:
        assert core.parts.info.kv_capacity_tokens > 200
        assert one(core, ask(prompt(200), 8)).said == expected


# --- too little memory at the start -------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [-1, 0, 1, PAGE_BYTES, BLOCK_BYTES - 1])
def test_memory_for_no_block_is_refused_at_the_start(folder: Path, memory_bytes: int) -> None:
    with pytest.raises(EngineSettingsError, match=r"memory_bytes: .* hold .* 0 tokens; give more"):
        engine(folder, memory_bytes=memory_bytes, prefix=STORE)


def test_memory_for_one_block_serves_what_fits_in_it(folder: Path) -> None:
    with running(folder) as core:
        expected = one(core, ask(prompt(9), 7)).said
    with running(folder, memory_bytes=BLOCK_BYTES) as core:
        answers = drive(core, [ask(prompt(9), 7) for _ in range(3)], most_steps=100)
        assert [answer.said for answer in answers] == [expected] * 3
        assert "16 tokens together" in one(core, ask(prompt(9), 8)).error


@pytest.mark.parametrize("name", ["max_running", "prefill_tokens"])
def test_limits_of_nothing_are_refused_at_the_start(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, found 0"):
        engine(folder, prefix=STORE, **{name: 0})


# --- pressure -----------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("store", [True, False])
def test_under_pressure_every_step_gets_on_and_nothing_is_shouted(
    folder: Path, preemption: str, store: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"prefix": STORE} if store else {}
    sequences, tokens = 12, 40
    with (
        caplog.at_level(logging.DEBUG),
        # Three begin, with a block more than their prompts each, and end with four blocks each.
        running(folder, memory_bytes=9 * BLOCK_BYTES, preemption=preemption, **options) as core,
    ):
        answers = drive(core, [ask(prompt(20, seed=i), tokens) for i in range(sequences)])
        assert {answer.finish for answer in answers} == {"length"}
        stats = core.stats()
        assert stats.preemptions_total == sum(answer.preemptions for answer in answers) > 0
        # Those that hold the arena never wait for pages that nobody gives: the worst is one
        # sequence after the other, each computed again after every preemption.
        busy = [tokens for tokens in stats.step_tokens if tokens]
        assert len(busy) <= sequences * (tokens + 20)
        settle(core)
        assert core.parts.arena.use().kv_pages == 0
    assert len(caplog.records) < 10


def test_the_oldest_is_never_preempted(folder: Path) -> None:
    with running(folder, memory_bytes=6 * BLOCK_BYTES) as core:
        answers = drive(core, [ask(prompt(20, seed=i), 60) for i in range(5)])
        assert answers[0].preemptions == 0
        assert {answer.finish for answer in answers} == {"length"}


# --- nothing grows ------------------------------------------------------------------------------


def sizes(core: EngineCore) -> dict[str, int]:
    """Lengths of everything that an engine holds, by where it is."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    kept = (core.parts.log, core.counts)  # has a limit of its own; numbers

    def walk(name: str, value: Any, depth: int) -> None:
        if name.endswith(".prefix._stats"):
            return  # the store's own numbers: some come up late
        if id(value) in seen or depth > 6 or any(value is one for one in kept):
            return
        seen.add(id(value))
        if isinstance(value, str | bytes | int | float):
            return
        if isinstance(value, Sized) and hasattr(value, "__iter__"):
            found[name] = len(value)
        if isinstance(value, dict):
            return
        module = type(value).__module__
        if module.startswith(("runtime.engine", "runtime.model", "runtime.page", "policies")):
            slots = [s for kind in type(value).__mro__ for s in getattr(kind, "__slots__", ())]
            for key in [*getattr(value, "__dict__", {}), *slots]:
                walk(f"{name}.{key}", getattr(value, key, None), depth + 1)

    walk("core", core, 0)
    return found


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind(folder: Path) -> None:
    small = PrefixSettings(memory_bytes=64 * BLOCK_BYTES)  # full before anything is measured
    with running(
        folder, memory_bytes=64 * BLOCK_BYTES, prefix=small, decision_log_calls=10
    ) as core:

        def serve(count: int, seed: int) -> None:
            new = [
                ask(prompt(1 + i % 40, seed + i % 7), 1 + i % 2, logprobs=None)
                for i in range(count)
            ]
            for i in range(0, count, 50):
                gone = ask(prompt(30, i), 50)
                core.add(gone)

                def leave(step: int, name: str = gone.sequence_id) -> None:
                    if step == 2:
                        core.abort([name])

                drive(core, new[i : i + 50], at_step=leave)
                core.stats()
            settle(core)
            gc.collect()

        serve(200, 0)
        before = sizes(core)
        assert "core.sequences" in before
        assert "core.parts.cache._sequences" in before
        assert "core.parts.prefix._saves" in before
        tracemalloc.start()
        serve(300, 0)
        held_bytes = tracemalloc.get_traced_memory()[0]
        serve(1_500, 0)
        grown_bytes = tracemalloc.get_traced_memory()[0] - held_bytes
        tracemalloc.stop()
        assert sizes(core) == before
        assert grown_bytes < 200_000  # 130 bytes a request: a single list entry each is more
        assert core.parts.arena.use().kv_pages == 0
        stats = core.stats()
        assert (stats.finished_total, stats.aborted_total) == (2_000, 40)
