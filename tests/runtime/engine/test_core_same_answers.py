"""An answer depends on its request alone: not on neighbours, chunks, prefixes or preemptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.core import EngineCore
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

FAMILIES = ("qwen2_moe", "mixtral", "olmoe", "qwen3", "mistral", "gemma4-moe")
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


def tight_bytes(core: EngineCore) -> int:
    """Of an arena with two blocks beside the longest answer: the short ones outgrow it together."""
    layout = core.parts.cache.layout
    blocks = -(-(max(LENGTHS) + MAX_TOKENS) // layout.block_tokens)
    return (blocks + 2) * layout.block_pages * layout.page_bytes


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


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("store", [True, False])
def test_preemption_changes_no_bit(folder: Path, alone: Any, preemption: str, store: bool) -> None:
    with running(folder) as core:
        memory_bytes = tight_bytes(core)
    options = {"prefix": STORE} if store else {}
    with running(folder, memory_bytes=memory_bytes, preemption=preemption, **options) as core:
        for asks in (greedy, sampled):
            answers = drive(core, asks())
            assert said(answers) == alone[asks]
        assert core.stats().preemptions_total > 0


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
