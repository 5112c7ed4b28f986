"""An answer depends on its request alone: not on neighbours, chunks, prefixes or preemptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.engine.core_cases import (
    STORE,
    Answer,
    ask,
    drive,
    generated,
    make_checkpoint,
    one,
    prompt,
    running,
    settle,
)

FAMILIES = (
    "qwen2_moe",
    "mixtral",
    pytest.param("olmoe", marks=pytest.mark.long),
    pytest.param("qwen3", marks=pytest.mark.long),
    "mistral",
    "gemma4-moe",
)
LENGTHS = (1, 15, 16, 17, 50)
PROMPTS = [prompt(length) for length in LENGTHS]
MAX_TOKENS = 12
SAMPLED: dict[str, Any] = {
    "temperature": 1.1,
    "top_p": 0.95,
    "top_k": 40,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
}


def greedy() -> list[Any]:
    return [ask(tokens, MAX_TOKENS) for tokens in PROMPTS]


def sampled() -> list[Any]:
    return [ask(tokens, MAX_TOKENS, seed=7 + i, **SAMPLED) for i, tokens in enumerate(PROMPTS)]


def said(answers: list[Answer]) -> list[Any]:
    return [answer.said for answer in answers]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[Callable[[], list[Any]], list[Any]]:
    """What each request is answered by an engine that has nothing else to do."""
    with running(folder) as core:
        return {asks: said([one(core, new) for new in asks()]) for asks in (greedy, sampled)}


def test_greedy_answers_are_those_of_transformers(folder: Path, alone: Any) -> None:
    for (tokens, *_), given in zip(alone[greedy], PROMPTS, strict=True):
        assert tokens == generated(folder, given, MAX_TOKENS)


@pytest.mark.parametrize("prefill_tokens", [1, 7, 64])
def test_neither_neighbours_nor_arrival_nor_chunks_change_a_bit(
    folder: Path, alone: Any, prefill_tokens: int
) -> None:
    with running(folder, prefill_tokens=prefill_tokens) as core:
        assert said(drive(core, greedy())) == alone[greedy]
        assert said(drive(core, reversed(sampled()), every=3)) == alone[sampled][::-1]


def test_a_seed_holds_beside_neighbours_that_have_others(folder: Path, alone: Any) -> None:
    with running(folder) as core:
        mixed = [new for pair in zip(greedy(), sampled(), strict=True) for new in pair]
        answers = said(drive(core, mixed))
        assert answers[::2] == alone[greedy]
        assert answers[1::2] == alone[sampled]
    with running(folder, max_running=2) as core:
        assert said(drive(core, mixed)) == answers


@pytest.mark.parametrize("prefill_tokens", [7, 512])
def test_a_prefix_from_the_store_changes_no_bit(
    folder: Path, alone: Any, prefill_tokens: int
) -> None:
    with running(folder, prefix=STORE, prefill_tokens=prefill_tokens) as core:
        first = drive(core, greedy())
        settle(core)
        again = drive(core, greedy())
        assert said(first) == said(again) == alone[greedy]
        assert [answer.cached_tokens for answer in first] == [0] * len(LENGTHS)
        hits = [(length - 1) // 16 * 16 for length in LENGTHS]
        assert [answer.cached_tokens for answer in again] == hits
        assert said(drive(core, sampled())) == alone[sampled]


GROWING = (5, 20, 33)
GROWN_TOKENS = 40


def growing(how: Mapping[str, Any]) -> list[Any]:
    return [ask(prompt(n), GROWN_TOKENS, **({"seed": n} | how if how else {})) for n in GROWING]


@pytest.fixture(scope="module")
def grown_alone(folder: Path) -> list[list[Any]]:
    with running(folder) as core:
        return [said([one(core, new) for new in growing(how)]) for how in ({}, SAMPLED)]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("store", [True, False])
def test_preemption_changes_no_bit(
    folder: Path, grown_alone: Any, preemption: str, store: bool
) -> None:
    with running(folder) as core:  # they have 3, 4 and 5 blocks in the end, 2 and 3 at first
        layout = core.parts.cache.layout
        memory_bytes = 6 * layout.block_pages * layout.page_bytes
    options = {"prefix": STORE} if store else {}
    with running(folder, memory_bytes=memory_bytes, preemption=preemption, **options) as core:
        for how, alone in zip(({}, SAMPLED), grown_alone, strict=True):
            assert said(drive(core, growing(how))) == alone
        # a window gives pages back, so that all of them may get by
        assert core.stats().preemptions_total > 0 or layout.paging.windows


def test_neighbours_that_are_given_up_change_no_bit(folder: Path, alone: Any) -> None:
    with running(folder, prefill_tokens=16) as core:
        gone = [ask(prompt(40, seed=i), 40) for i in range(1, 5)]

        def give_up(step: int) -> None:
            if step == 0:
                for new in gone:
                    core.add(new)
            if step in (1, 3, 6, 9):
                core.abort([gone[(1, 3, 6, 9).index(step)].sequence_id])

        assert said(drive(core, greedy(), at_step=give_up)) == alone[greedy]
        assert core.stats().aborted_total == 4
