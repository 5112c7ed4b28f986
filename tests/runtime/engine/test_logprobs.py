"""Log probabilities against torch, and their bounds."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
import torch

from runtime.engine.frames import Sampling
from runtime.engine.logprobs import (
    LEAST_LOGPROB,
    InvalidLogitsError,
    prompt_logprobs,
    token_logprobs,
)
from runtime.engine.sampler import SequenceSampler, sample


def rows(seed: int, num_rows: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 5 * torch.randn(num_rows, vocabulary, generator=generator)


@pytest.mark.parametrize("top", [0, 1, 5, 300, 301])
def test_logprobs_ranks_and_tops_equal_torch(top: int) -> None:
    logits = rows(1, 40, 300)
    tokens = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = torch.log_softmax(logits.double(), dim=-1)
    values, order = expected.sort(dim=-1, descending=True)
    found = prompt_logprobs(logits, tokens, top)
    for i, (token, entry) in enumerate(zip(tokens, found, strict=True)):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(expected[i, token]), abs=1e-5)
        assert entry.rank == 1 + order[i].tolist().index(token)
        assert [t for t, _ in entry.top] == order[i, :top].tolist()
        np.testing.assert_allclose([p for _, p in entry.top], values[i, :top], atol=1e-5)
        assert (entry.rank <= top) == (token in [t for t, _ in entry.top])


def test_of_equal_logits_the_lowest_id_ranks_first() -> None:
    row = np.array([0, 2, 1, 2, 2], dtype=np.float32)
    assert [token_logprobs(row, t, 0).rank for t in range(5)] == [5, 1, 4, 2, 3]
    assert [t for t, _ in token_logprobs(row, 4, 2).top] == [1, 3]


def test_an_impossible_token_has_a_number_that_json_knows() -> None:
    row = np.array([1.0, -np.inf, -np.inf, 0.0], dtype=np.float32)
    found = token_logprobs(row, 2, 4)
    assert found.logprob == LEAST_LOGPROB == -9999.0
    assert found.top[2:] == ((1, -9999.0), (2, -9999.0))
    assert json.loads(json.dumps(found.top, allow_nan=False))


def test_extreme_logits_lose_no_precision() -> None:
    row = np.array([1e30, 1e30, -1e30], dtype=np.float32)
    assert token_logprobs(row, 1, 0).logprob == pytest.approx(-np.log(2), abs=1e-6)
    assert token_logprobs(row, 2, 0).logprob == -9999.0
    assert token_logprobs(np.float32([-3e38, 3e38]), 1, 0).logprob == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_rows_are_an_error(bad: float) -> None:
    logits = rows(3, 4, 10)
    logits[2, 3] = bad
    with pytest.raises(InvalidLogitsError):
        prompt_logprobs(logits, [1, 2, 3, 4], 2)


def test_rows_and_tokens_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="4 rows of logits for 3 tokens"):
        prompt_logprobs(rows(3, 4, 10), [1, 2, 3], 0)


def test_a_row_has_the_same_numbers_whatever_is_beside_it() -> None:
    logits = rows(4, 35, 5000)
    together = prompt_logprobs(logits, list(range(35)), 3)
    for i in (0, 15, 16, 34):
        assert prompt_logprobs(logits[i : i + 1], [i], 3) == together[i : i + 1]


def test_memory_stays_at_a_few_rows_for_a_long_prompt() -> None:
    vocabulary, num_rows = 20_000, 200
    logits = rows(5, num_rows, vocabulary).to(torch.bfloat16)
    tracemalloc.start()
    try:
        prompt_logprobs(logits, [0] * num_rows, 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * vocabulary * 4


def test_sampled_logprobs_are_those_of_the_raw_logits() -> None:
    logits = rows(6, 1, 300)
    settings = Sampling(
        max_tokens=9,
        temperature=0.2,
        top_k=4,
        seed=3,
        logit_bias={17: 50.0},
        repetition_penalty=1.5,
        logprobs=2,
    )
    one = SequenceSampler(settings, 300, (), (1, 2))
    found = sample(logits, [one])[0]
    expected = torch.log_softmax(logits[0], dim=0)
    assert found.token == 17
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    assert [t for t, _ in found.logprobs.top] == expected.topk(2).indices.tolist()
