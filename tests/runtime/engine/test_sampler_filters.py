"""Filters and draw against brute-force definitions and transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.engine.penalties import Penalties
from runtime.engine.sampling_filters import choose, draw, largest, nucleus, scaled, uniform


def row(seed: int, size: int = 200, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=size) * scale).astype(np.float32)


def grid(steps: int = 1001) -> np.ndarray:
    """Shares in the middle of equal steps: what a draw does to them is its distribution."""
    return (np.arange(steps) + 0.5) / steps


def brute_nucleus(weights: np.ndarray, top_p: float) -> set[int]:
    kept: set[int] = set()
    mass = 0.0
    for place in sorted(range(weights.size), key=lambda i: (-weights[i], i)):
        if kept and mass >= top_p * weights.sum():
            break
        kept.add(place)
        mass += weights[place]
    return kept


@pytest.mark.parametrize("count", [1, 2, 7, 199, 200, 1_000_000])
def test_the_largest_are_those_of_a_full_sort(count: int) -> None:
    logits = row(1)
    expected = sorted(sorted(range(200), key=lambda i: (-logits[i], i))[:count])
    assert largest(logits, count).tolist() == expected


@pytest.mark.parametrize("count", range(1, 13))
def test_of_equal_logits_the_lowest_ids_stay(count: int) -> None:
    logits = np.array([1, 3, 2, 3, 2, 2, -np.inf, 3, 1, 2, -np.inf, 1], dtype=np.float32)
    expected = sorted(sorted(range(12), key=lambda i: (-logits[i], i))[:count])
    assert largest(logits, count).tolist() == expected


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.99, 0.999999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_the_nucleus_is_the_smallest_likeliest_set_with_its_mass(
    top_p: float, scale: float
) -> None:
    for seed in range(10):
        weights = np.exp(scaled(row(seed, scale=scale), 1.0))
        assert set(np.flatnonzero(nucleus(weights, top_p))) == brute_nucleus(weights, top_p)


@pytest.mark.parametrize("scale", [0.0, 0.001, 1.0, 3.0, 200.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999, float(np.nextafter(1.0, 0.0))])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(
    scale: float, top_p: float
) -> None:
    # Rounded logits: many equals, as of models in bfloat16.
    logits = np.round(row(9, size=50_000, scale=scale), 1)
    for temperature in (1.0, 1.7):
        weights = np.exp(scaled(logits, temperature))
        order = np.lexsort((np.arange(weights.size), -weights))
        before = np.cumsum(weights[order]) - weights[order]
        expected = np.zeros(weights.size, dtype=bool)
        expected[order[before < top_p * weights.sum()]] = True
        found = nucleus(weights, top_p)
        # Sums in another order differ in the last bits: one token at most, and only among the
        # lightest.
        assert np.count_nonzero(found != expected) <= (1 if 1e-6 < top_p < 0.99999 else 30)
        assert found.sum() >= 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.987654321, float(np.nextafter(1.0, 0.0))])
def test_draw_of_many_is_that_of_one_running_sum(share: float) -> None:
    for seed in range(20):
        weights = np.exp(scaled(row(seed, size=3000 + seed), 1.0))
        weights[row(seed + 50, size=weights.size) > 1.0] = 0.0
        place = draw(weights, share)
        running = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()
        assert weights[place] > 0
        assert running[place] - 1e-12 <= share <= running[place + 1] + 1e-12


def test_a_nucleus_that_cuts_through_equals_keeps_the_lowest_ids() -> None:
    weights = np.array([1.0, 4.0, 1.0, 1.0, 1.0])
    assert np.flatnonzero(nucleus(weights, 0.6)).tolist() == [0, 1]
    assert np.flatnonzero(nucleus(np.ones(10), 0.45)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("place", range(5))
def test_draw_inverts_the_running_sum(place: int) -> None:
    weights = np.array([0.1, 0.0, 0.4, 0.5, 0.0])
    edges = np.concatenate([[0.0], np.cumsum(weights)])
    inside = grid()[(grid() > edges[place] + 1e-9) & (grid() < edges[place + 1] - 1e-9)]
    assert {draw(weights, share) for share in inside} == ({place} if weights[place] else set())


def test_a_token_without_weight_is_never_drawn_not_even_at_the_ends() -> None:
    weights = np.array([0.0, 0.3, 0.1, 0.0])
    assert draw(weights, 0.0) == 1
    assert draw(weights, float(np.nextafter(1.0, 0.0))) == 2


def test_uniform_numbers_are_uniform_and_do_not_hang_together() -> None:
    by_index = np.array([uniform(7, i) for i in range(20_000)])
    by_seed = np.array([uniform(i, 7) for i in range(20_000)])
    for numbers in (by_index, by_seed):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(by_index, by_seed)[0, 1]) < 0.03
    assert by_index.min() >= 0.0
    assert by_index.max() < 1.0


def test_the_number_of_a_seed_and_a_place_is_always_the_same() -> None:
    # Known answers: answers may be repeated by other versions, on other machines.
    assert [round(uniform(*pair), 12) for pair in [(0, 0), (0, 1), (1, 0), (-1, 2**40)]] == [
        0.08854898442,
        0.996172448519,
        0.516650298563,
        0.891085237308,
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [
        (0.0, 0, 1.0),
        (0.05, 0, 1.0),
        (0.0, 10, 1.0),
        (0.0, 0, 0.8),
        (0.02, 30, 0.95),
        (0.0, 5, 0.5),
        (0.3, 500, 0.999),
    ],
)
def test_the_draw_has_the_distribution_of_the_processors_of_transformers(
    seed: int, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    logits = row(seed, size=60)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    scores = processors(None, torch.from_numpy(logits)[None].double())
    expected = torch.softmax(scores[0], dim=0).numpy()

    shares = grid()
    drawn = [
        choose(logits, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p, share=share)
        for share in shares
    ]
    found = np.bincount(drawn, minlength=60) / shares.size

    # On an even grid each token is off by one step at most.
    assert np.abs(found - expected).max() <= 1.01 / shares.size
    assert not found[expected == 0].any()


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    logits = row(3)
    logits[5] = 1e30
    for share in (0.0, 0.5, float(np.nextafter(1.0, 0.0))):
        token = choose(logits, temperature=temperature, min_p=0.1, top_k=0, top_p=0.9, share=share)
        assert token == 5


def test_a_huge_temperature_is_uniform_over_what_is_allowed() -> None:
    logits = row(3, size=10)
    logits[[2, 7]] = -np.inf
    drawn = [
        choose(logits, temperature=1e30, min_p=0.0, top_k=0, top_p=1.0, share=share)
        for share in grid(800)
    ]
    assert np.bincount(drawn, minlength=10).tolist() == [100, 100, 0] + [100] * 4 + [0, 100, 100]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    for seed in range(5):
        logits = row(seed)
        rng = np.random.default_rng(seed)
        prompt, answer = rng.integers(200, size=50).tolist(), rng.integers(200, size=70).tolist()
        penalties = Penalties(
            200, repetition=penalty, frequency=0.0, presence=0.0, prompt_tokens=prompt
        )
        for token in answer:
            penalties.add(token)
        changed = logits.copy()
        penalties.apply(changed)
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(
            torch.tensor([prompt + answer]), torch.from_numpy(logits)[None].clone()
        )
        np.testing.assert_allclose(changed, expected[0].numpy(), rtol=3e-7)


def test_frequency_and_presence_count_the_answer_and_not_the_prompt() -> None:
    logits = row(4, size=20)
    answer = [3, 3, 3, 8, 19, 8]
    penalties = Penalties(
        20, repetition=1.25, frequency=0.5, presence=-0.25, prompt_tokens=[1, 3, 1, 999, -1]
    )
    for token in answer:
        penalties.add(token)
    changed = logits.copy()
    penalties.apply(changed)
    for token in range(20):
        expected = float(logits[token])
        if token in {1, 3, 8, 19}:
            expected = expected / 1.25 if expected > 0 else expected * 1.25
        expected -= 0.5 * answer.count(token) - 0.25 * (token in answer)
        assert changed[token] == pytest.approx(expected, rel=1e-6)


def test_penalties_leave_impossible_tokens_impossible() -> None:
    logits = np.full(4, -np.inf, dtype=np.float32)
    penalties = Penalties(4, repetition=2.0, frequency=1.0, presence=1.0, prompt_tokens=[0, 1])
    penalties.add(1)
    penalties.apply(logits)
    assert (logits == -np.inf).all()
