"""The prefix store in the engine: hits are right, counted once, and never a wrong token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.core import EngineCore
from runtime.engine.frames import EngineStats
from runtime.engine.settings import PrefixSettings
from runtime.store.prefix_store import PrefixStore
from tests.runtime.engine.core_cases import (
    NO_STORE,
    STORE,
    Answer,
    ask,
    drive,
    engine,
    make_checkpoint,
    one,
    prompt,
    prompt_scores,
    running,
    settle,
)

BLOCK = 16
BLOCK_BYTES = 8192
LONG = prompt(70, 3)
SHARE = "qwen2_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), SHARE)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[..., Any]:
    """``expected(tokens)``: what an engine without a store answers."""
    core = engine(folder)
    known: dict[Any, Any] = {}

    def get(tokens: tuple[int, ...], max_tokens: int = 8) -> Any:
        if (tokens, max_tokens) not in known:
            known[tokens, max_tokens] = one(core, ask(tokens, max_tokens)).said
        return known[tokens, max_tokens]

    return get


@pytest.fixture
def core(folder: Path) -> Iterator[EngineCore]:
    with running(folder, prefix=STORE) as core:
        yield core


# --- hits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill_tokens", [5, 16, 512])
def test_chunks_are_saved_under_the_prefix_that_they_end(
    folder: Path, expected: Any, prefill_tokens: int
) -> None:
    with running(folder, prefix=STORE, prefill_tokens=prefill_tokens) as core:
        one(core, ask(LONG))
        settle(core)
        for length in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 70):
            answer = one(core, ask(LONG[:length]))
            assert answer.said == expected(LONG[:length])
            assert answer.cached_tokens == (length - 1) // BLOCK * BLOCK
        for at in (0, 15, 16, 33):  # another token there: what stands behind is another prefix
            other = (*LONG[:at], (LONG[at] + 1) % 90 + 4, *LONG[at + 1 :])
            answer = one(core, ask(other, salt=""))
            assert answer.said == expected(other)
            assert answer.cached_tokens == at // BLOCK * BLOCK


def test_the_answer_is_a_prefix_of_the_next_turn(core: EngineCore, expected: Any) -> None:
    first = one(core, ask(LONG[:20], 30))
    settle(core)
    turn = (*LONG[:20], *first.tokens, *LONG[20:25])
    second = one(core, ask(turn))
    assert second.cached_tokens == 48  # of 50 tokens, the last of which was never computed
    assert second.said == expected(turn)


def test_salts_share_nothing(core: EngineCore, expected: Any) -> None:
    for salt in ("", "a", "b"):
        for cached in (0, 64):
            answer = one(core, ask(LONG, salt=salt))
            settle(core)
            assert answer.cached_tokens == cached
            assert answer.said == expected(LONG)


def test_a_salt_is_no_prefix_of_the_tokens(core: EngineCore) -> None:
    one(core, ask(LONG, salt="a"))
    settle(core)
    for salt in ("A", "a ", "a\0", "\0a"):
        assert one(core, ask(LONG, salt=salt)).cached_tokens == 0


def test_another_model_layout_or_type_in_the_same_folder_finds_nothing(
    folder: Path, tmp_path: Path
) -> None:
    store = PrefixSettings(place=str(tmp_path / "store"), ssd_bytes=1 << 24)
    other = make_checkpoint(tmp_path / "other", "mixtral")

    def cached(model: Path, **how: Any) -> int:
        with running(model, prefix=store, **how) as core:
            answer = one(core, ask(LONG))
            settle(core)
            return answer.cached_tokens

    assert cached(folder) == 0
    assert cached(folder, dtype="bfloat16") == 0
    assert cached(folder, page_bytes=8192) == 0
    assert cached(other) == 0
    assert cached(folder) == 64  # after a restart, from the disk


# --- what goes wrong between lookup and load ----------------------------------------------------


def between(core: EngineCore, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], Any]) -> None:
    """Have ``spoil`` look at what every load finds, before it is copied into pages."""
    found = PrefixStore.load

    def load(self: PrefixStore, *args: Any, **how: Any) -> Any:
        return spoil(found(self, *args, **how))

    monkeypatch.setattr(PrefixStore, "load", load)


def test_blocks_that_vanish_before_the_load_are_computed(
    core: EngineCore, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(core, ask(LONG))
    settle(core)
    asked: list[int] = []
    true_load = PrefixStore.load

    def load(self: PrefixStore, keys: Any, **how: Any) -> Any:
        asked.append(len(keys))
        gone = [bytes(32)] * len(keys)
        return true_load(self, [*keys[:1], *gone[1:]], **how)

    monkeypatch.setattr(PrefixStore, "load", load)
    answer = one(core, ask(LONG))
    assert asked == [4]
    assert answer.said == expected(LONG)
    assert answer.cached_tokens == BLOCK


@pytest.mark.parametrize("block", [0, 2])
def test_a_broken_block_is_computed(
    core: EngineCore, expected: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.engine.prefix_pages import block_copies

    one(core, ask(LONG))
    settle(core)
    copies = type(block_copies(core.parts.arena))
    write = copies.write
    written: list[int] = []

    def spoiled(self: Any, view: memoryview, pages: Any) -> int:
        written.append(len(written))
        if written[-1] != block:
            return write(self, view, pages)
        broken = bytearray(view)
        broken[100] ^= 1
        return write(self, memoryview(broken), pages)

    monkeypatch.setattr(copies, "write", spoiled)
    answer = one(core, ask(LONG))
    assert len(written) > block
    assert answer.cached_tokens == block * BLOCK
    assert answer.said == expected(LONG)


def test_a_load_that_fails_costs_recomputation(
    core: EngineCore, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(core, ask(LONG))
    settle(core)

    def load(*args: Any, **how: Any) -> Any:
        raise OSError("the disk has gone")

    monkeypatch.setattr(PrefixStore, "load", load)
    answer = one(core, ask(LONG))
    assert answer.cached_tokens == 0
    assert answer.said == expected(LONG)


def test_blocks_evicted_under_pressure_of_the_store_cost_no_wrong_token(
    folder: Path, expected: Any
) -> None:
    small = PrefixSettings(memory_bytes=20 * BLOCK_BYTES)
    prompts = [prompt(50, seed) for seed in range(12)]
    with running(folder, prefix=small) as core:
        for _ in range(2):
            for tokens, answer in zip(
                prompts, drive(core, [ask(tokens) for tokens in prompts], every=2), strict=True
            ):
                assert answer.said == expected(tokens)
                assert answer.cached_tokens in (0, 16, 32, 48)
            settle(core)


def test_an_abort_during_a_load_leaves_no_page_behind(core: EngineCore, expected: Any) -> None:
    one(core, ask(LONG))
    settle(core)
    free = core.parts.arena.use().free_pages
    new = ask(LONG)
    core.add(new)
    core.step()  # admitted: its blocks are on their way
    assert core.stats().loading in (0, 1)
    core.abort([new.sequence_id])
    assert core.parts.arena.use().free_pages == free
    assert one(core, ask(LONG)).said == expected(LONG)


# --- forgetting ---------------------------------------------------------------------------------


def test_after_a_reset_nothing_is_found_and_then_what_came_since(core: EngineCore) -> None:
    one(core, ask(LONG))
    settle(core)
    core.reset_prefix_cache()
    assert one(core, ask(LONG)).cached_tokens == 0
    settle(core)
    assert one(core, ask(LONG)).cached_tokens == 64


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8])
def test_a_reset_amidst_requests_changes_no_token(folder: Path, expected: Any, steps: int) -> None:
    with running(folder, prefix=STORE, max_running=2, prefill_tokens=32) as core:
        one(core, ask(LONG))
        settle(core)

        def reset(step: int) -> None:
            if step == steps:
                core.idle()  # those that wait have been looked up
                core.reset_prefix_cache()

        answers = drive(core, [ask(LONG[:length]) for length in (70, 60, 50, 40)], at_step=reset)
        for answer, length in zip(answers, (70, 60, 50, 40), strict=True):
            assert answer.said == expected(LONG[:length])


# --- numbers ------------------------------------------------------------------------------------

COUNTERS = [name for name in EngineStats.__struct_fields__ if name.endswith("_total")]


def numbers(stats: EngineStats) -> dict[str, int]:
    return {name: value for name in COUNTERS if isinstance(value := getattr(stats, name), int)}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_counters_are_true_under_preemption_and_never_fall(folder: Path, preemption: str) -> None:
    asks = [ask(prompt(20 + seed, seed), 30) for seed in range(8)]
    gone = ask(prompt(40, 99), 60)
    with running(folder, prefix=STORE, memory_bytes=9 * BLOCK_BYTES, preemption=preemption) as core:
        drive(core, [ask(new.prompt, 1) for new in asks[:3]])  # three prompts are known
        settle(core)
        before = last = core.stats()

        def look(step: int) -> None:
            nonlocal last
            if step == 2:
                core.add(gone)
            if step == 12:
                core.abort([gone.sequence_id])
            stats = core.stats()
            use = core.parts.arena.use()
            assert stats.kv_pages + stats.weight_pages + stats.free_pages == use.num_pages
            assert stats.kv_usage == use.kv_pages / use.num_pages
            assert 0.0 <= stats.kv_usage <= 1.0
            assert min(stats.running, stats.waiting, stats.loading, stats.waiting_tokens) >= 0
            assert stats.running + stats.waiting + stats.loading == len(core.sequences)
            for name, value in numbers(stats).items():
                assert value >= numbers(last)[name], name
            assert all(value >= 0 for value in stats.store.values())
            last = stats

        answers = drive(core, asks, at_step=look)
        now = core.stats()
        told = {name: value - numbers(before)[name] for name, value in numbers(now).items()}
        assert told["preemptions_total"] > 0
        # A preempted sequence finds its own blocks again: no hit of its prompt, and not counted.
        assert [answer.cached_tokens for answer in answers] == [16] * 3 + [0] * 5
        assert told["cached_tokens_total"] == told["prefix_hits_total"] == 48
        prompts = sum(len(new.prompt) for new in (*asks, gone))
        assert told["prompt_tokens_total"] == prompts
        assert told["prefix_queries_total"] <= prompts
        assert told["prefix_queries_total"] >= prompts - len(gone.prompt)
        assert told["finished_total"] == len(asks)
        assert told["aborted_total"] == 1
        assert told["generated_tokens_total"] >= 30 * len(asks)
        generated = 30 * len(asks)
        assert told["generated_tokens_total"] - generated <= 60
        computed = sum(len(new.prompt) + 29 for new in asks) - 48
        assert told["computed_tokens_total"] >= computed


def test_a_hit_is_counted_once_however_often_it_is_tried(folder: Path) -> None:
    with running(folder, prefix=STORE, memory_bytes=6 * BLOCK_BYTES) as core:
        one(core, ask(LONG[:40], 1))
        settle(core)
        before = core.stats()
        # The first one holds the arena, so the second is looked up and has to wait for long.
        first, second = drive(core, [ask(prompt(60, 1), 30), ask(LONG[:40], 1)])
        after = core.stats()
        assert (first.cached_tokens, second.cached_tokens) == (0, 32)
        assert after.prefix_queries_total - before.prefix_queries_total == 100
        assert after.prefix_hits_total - before.prefix_hits_total == 32


def test_usage_follows_the_pages(folder: Path) -> None:
    with running(folder, memory_bytes=10 * BLOCK_BYTES) as core:
        assert core.stats().kv_usage == 0.0
        core.add(ask(prompt(33), 40))
        core.step()
        assert core.stats().kv_usage == pytest.approx(0.3)
        for _ in range(15):
            core.step()
        assert core.stats().kv_usage == pytest.approx(0.3)  # 48 tokens held
        core.step()
        assert core.stats().kv_usage == pytest.approx(0.4)


# --- prompt log probabilities -------------------------------------------------------------------


@pytest.mark.parametrize("prefill_tokens", [7, 512])
def test_prompt_logprobs_are_right_and_the_same_with_a_cached_prefix(
    folder: Path, prefill_tokens: int
) -> None:
    def scored() -> Any:
        return ask(LONG, 4, prompt_logprobs=3)

    with running(folder, prefix=NO_STORE) as core:
        expected = one(core, scored())
    with running(folder, prefix=STORE, prefill_tokens=prefill_tokens) as core:
        cold = one(core, scored())
        settle(core)
        one(core, ask(LONG))
        settle(core)
        warm = one(core, scored())
    assert cold.said == warm.said == expected.said
    assert warm.cached_tokens == 0
    assert len(warm.prompt_logprobs) == len(LONG) - 1
    assert [entry.token for entry in warm.prompt_logprobs] == list(LONG[1:])
    found = np.array([entry.logprob for entry in warm.prompt_logprobs])
    np.testing.assert_allclose(found, prompt_scores(folder, LONG), atol=1e-4)
    for entry in warm.prompt_logprobs:
        assert len(entry.top) == 3
        assert (entry.rank == 1) == (entry.top[0][0] == entry.token)
        assert math.isfinite(entry.logprob)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "prefill_tokens", "blocks", "is_half_way"),
    [
        ((40, 40, 40, 40), 40, 24, 8, False),  # two begin with four blocks, and end with five
        ((20, 20, 100), 60, 2, 14, True),  # the answers outgrow a block beside the long prompt
    ],
)
def test_prompt_logprobs_outlast_preemption(
    folder: Path,
    lengths: tuple[int, ...],
    max_tokens: int,
    prefill_tokens: int,
    blocks: int,
    is_half_way: bool,
) -> None:
    def scored() -> list[Any]:
        return [
            ask(prompt(length, seed), max_tokens, prompt_logprobs=0)
            for seed, length in enumerate(lengths)
        ]

    with running(folder) as core:
        expected: list[Answer] = [one(core, new) for new in scored()]
    with running(
        folder, memory_bytes=blocks * BLOCK_BYTES, prefill_tokens=prefill_tokens, prefix=STORE
    ) as core:
        known: dict[int, int] = {}  # log probabilities that there were of each prompt
        found: set[bool] = set()  # whether some were missing when its sequence was preempted

        def look(step: int) -> None:
            for number, sequence in core.sequences.items():
                if sequence.preemptions and number in known:
                    found.add(known.pop(number) < len(sequence.new.prompt) - 1)
                elif not sequence.preemptions:
                    known[number] = len(sequence.prompt_logprobs)

        answers = drive(core, scored(), at_step=look)
        assert is_half_way in found
        assert core.stats().preemptions_total > 0
    assert [answer.said for answer in answers] == [answer.said for answer in expected]


@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_prompt_logprobs_of_short_prompts(folder: Path, length: int) -> None:
    with running(folder, prefix=STORE) as core:
        for _ in range(2):
            answer = one(core, ask(LONG[:length], 2, prompt_logprobs=0))
            settle(core)
            assert [entry.token for entry in answer.prompt_logprobs] == list(LONG[1:length])
