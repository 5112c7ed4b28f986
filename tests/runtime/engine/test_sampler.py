"""Tokens by the batch: what one sequence gets depends on nothing but itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from runtime.engine.frames import Sampling
from runtime.engine.logprobs import InvalidLogitsError
from runtime.engine.sampler import Sampled, SequenceSampler, sample

VOCABULARY = 300
EOS = 2


def rows(seed: int, num_rows: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_rows, vocabulary, generator=generator)


def sampler(
    vocabulary: int = VOCABULARY, prompt: tuple[int, ...] = (5, 6, 7), **settings: Any
) -> SequenceSampler:
    settings = {"max_tokens": 10_000, "ignore_eos": True, **settings}
    return SequenceSampler(Sampling(**settings), vocabulary, (EOS,), prompt)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 5, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.3, "seed": 6, "top_k": 20, "presence_penalty": 0.8},
    {"temperature": 1.0, "seed": 7, "min_p": 0.1, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 8, "logit_bias": {4: 3.0, 9: -100.0}},
    {"temperature": 1.0, "min_tokens": 3, "ignore_eos": False, "logit_bias": {EOS: 2.0}},
]


def answer(logits: torch.Tensor, kind: dict[str, Any]) -> list[Sampled]:
    """Of a sequence alone: one row of ``logits`` a step."""
    alone = sampler(**kind)
    return [sample(logits[step : step + 1], [alone])[0] for step in range(logits.shape[0])]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_neighbours_do_not_change_a_row_by_a_bit(kind: dict[str, Any]) -> None:
    steps = 12
    own = rows(1, steps)
    alone = answer(own, kind)
    rng = np.random.default_rng(0)
    mine, others = sampler(**kind), [sampler(**k) for k in KINDS]
    for step in range(steps):
        batch = [others[i] for i in rng.permutation(len(others))[: rng.integers(1, len(others))]]
        place = int(rng.integers(len(batch) + 1))
        logits = rows(100 + step, len(batch) + 1)
        logits[place] = own[step]
        if step % 3 == 1:
            logits[place - 1] = torch.nan
        found = sample(logits, [*batch[:place], mine, *batch[place:]])
        assert found[place] == alone[step]


def test_one_seed_gives_one_answer_and_others_give_others() -> None:
    logits = rows(2, 40)
    answers = {
        seed: [s.token for s in answer(logits, {"temperature": 1.0, "seed": seed})]
        for seed in (1, 2, 3, -4, 2**63 - 1)
    }
    assert answers[1] == [s.token for s in answer(logits, {"temperature": 1.0, "seed": 1})]
    assert len({tuple(a) for a in answers.values()}) == 5


def test_drawing_leaves_the_global_generators_of_torch_and_numpy_alone() -> None:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002, TID251
    before = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    answer(rows(3, 5), {"temperature": 1.0})
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


def test_a_sampler_made_anew_goes_on_where_the_old_one_was() -> None:
    kind = {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    logits = rows(4, 30)
    whole = [s.token for s in answer(logits, kind)]
    anew = sampler(**kind)
    for token in whole[:17]:
        assert token is not None
        anew.advance(token)
    rest = [sample(logits[step : step + 1], [anew])[0].token for step in range(17, 30)]
    assert rest == whole[17:]


def test_draws_over_many_places_have_the_exact_distribution() -> None:
    """Chi-square over the places of one answer, with tokens of tiny probability put together."""
    draws = 20_000
    logits = rows(5, 1, vocabulary=40)
    one = sampler(vocabulary=40, temperature=1.5, seed=1234, max_tokens=draws + 1)
    counts = np.zeros(40)
    for _ in range(draws):
        token = sample(logits, [one])[0].token
        assert token is not None
        counts[token] += 1
    expected = torch.softmax(logits[0].double() / 1.5, dim=0).numpy() * draws
    small = expected < 10
    found = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    assert stats.chisquare(found, wanted).pvalue > 1e-3


def test_draws_over_many_seeds_have_the_exact_distribution() -> None:
    draws = 5_000
    logits = rows(6, 1, vocabulary=12)
    batch = [sampler(vocabulary=12, seed=seed, top_p=0.9) for seed in range(draws)]
    tokens = [s.token for s in sample(logits.expand(draws, -1), batch)]
    probabilities = torch.softmax(logits[0].double(), dim=0).numpy()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[before < 0.9]
    counts = np.bincount(np.array(tokens, dtype=int), minlength=12)
    assert counts.sum() == counts[kept].sum() == draws
    wanted = probabilities[kept] / probabilities[kept].sum() * draws
    assert stats.chisquare(counts[kept], wanted).pvalue > 1e-3


def test_temperature_0_takes_the_lowest_id_of_equals_on_every_path() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[:, [50, 60, 299]] = 7.5
    batch = [
        sampler(temperature=0.0),
        sampler(temperature=0.0, logprobs=2),
        sampler(temperature=0.0, logit_bias={1: 1.0}),
        sampler(temperature=1.0, top_k=1),
    ]
    assert [s.token for s in sample(logits, batch)] == [50, 50, 50, 50]
    assert not any(s.needs_row for s in batch[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_rows_of_any_dtype_and_stride_are_the_arguments_of_the_maximum(
    dtype: torch.dtype,
) -> None:
    logits = rows(7, VOCABULARY, vocabulary=16).to(dtype).t()
    found = [s.token for s in sample(logits, [sampler(temperature=0.0) for _ in range(16)])]
    assert found == [int(np.argmax(row.float().numpy())) for row in logits]


def test_bias_counts_before_the_draw_and_in_greedy_answers() -> None:
    logits = rows(8, 1)
    best = int(logits.argmax())
    assert sample(logits, [sampler(temperature=0.0, logit_bias={best: -100.0})])[0].token == int(
        logits[0].topk(2).indices[1]
    )
    assert sample(logits, [sampler(temperature=0.0, logit_bias={77: 100.0})])[0].token == 77


def test_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logit_bias: token 300 .*0 to 299"):
        sampler(logit_bias={300: 1.0})


def test_logits_are_left_as_they_were() -> None:
    logits = rows(9, len(KINDS))
    before = logits.clone()
    sample(logits, [sampler(**kind) for kind in KINDS])
    assert torch.equal(logits, before)


def test_an_end_token_ends_the_answer_and_is_not_in_it() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[:, EOS] = 9.0
    logits[2, 42] = 10.0
    batch = [
        sampler(temperature=0.0, ignore_eos=False, logprobs=1),
        sampler(temperature=0.0, ignore_eos=True),
        sampler(temperature=0.0, ignore_eos=True, stop_token_ids=(42,)),
        sampler(temperature=0.0, ignore_eos=False, max_tokens=1),
    ]
    found = sample(logits, batch)
    assert (found[0].token, found[0].finish, found[0].stop_token) == (None, "stop", EOS)
    assert found[1] == Sampled(token=EOS)
    assert found[2] == Sampled(finish="stop", stop_token=42)
    assert found[3] == Sampled(finish="stop", stop_token=EOS)


def test_no_end_before_the_least_number_of_tokens() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, EOS], logits[0, 42], logits[0, 7] = 9.0, 8.0, 1.0
    one = sampler(temperature=0.0, ignore_eos=False, stop_token_ids=(42, 5000), min_tokens=3)
    found = [sample(logits, [one])[0] for _ in range(4)]
    assert [s.token for s in found] == [7, 7, 7, None]
    assert found[3].stop_token == EOS


def test_the_answer_ends_at_the_most_tokens_with_its_last_token() -> None:
    one = sampler(temperature=0.0, max_tokens=3)
    found = [sample(rows(10, 1), [one])[0] for _ in range(3)]
    assert [s.finish for s in found] == [None, None, "length"]
    assert found[2].token is not None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS[:5], ids=str)
def test_broken_logits_end_their_own_row_only(bad: float, kind: dict[str, Any]) -> None:
    logits = rows(11, 3)
    logits[1, 8] = bad
    batch = [sampler(**kind) for _ in range(3)]
    found = sample(logits, batch)
    assert [s.finish for s in found] == [None, "error", None]
    assert isinstance(found[1].error, InvalidLogitsError)
    assert found[1].token is None
    alone = sample(logits[2:], [sampler(**kind)])[0]
    assert found[2] == alone


def test_a_model_that_allows_no_token_is_broken() -> None:
    found = sample(torch.full((1, VOCABULARY), -torch.inf), [sampler(temperature=0.0)])
    assert isinstance(found[0].error, InvalidLogitsError)


def test_settings_that_leave_no_token_end_the_answer() -> None:
    logits = torch.full((2, VOCABULARY), -torch.inf)
    logits[:, EOS] = 1.0
    kind: dict[str, Any] = {"min_tokens": 2, "ignore_eos": False}
    batch = [sampler(temperature=0.0, **kind), sampler(temperature=1.0, **kind)]
    assert sample(logits, batch) == [Sampled(finish="stop")] * 2


def test_penalties_that_overflow_are_an_error_of_their_row() -> None:
    logits = torch.full((2, VOCABULARY), 3e38)
    batch = [sampler(repetition_penalty=1e-3), sampler(temperature=0.0)]
    found = sample(logits, batch)
    assert isinstance(found[0].error, InvalidLogitsError)
    assert found[1].token == 0


def test_no_rows_are_no_answers_and_wrong_shapes_are_refused() -> None:
    assert sample(torch.empty(0, VOCABULARY), []) == []
    with pytest.raises(ValueError, match="for 2 sequences"):
        sample(rows(1, 1), [sampler(), sampler()])


def test_more_rows_than_move_at_a_time_keep_their_order() -> None:
    logits = rows(12, 50)
    batch = [sampler(temperature=0.0, logprobs=1 if i % 2 else None) for i in range(50)]
    found = sample(logits, batch)
    assert [s.token for s in found] == logits.argmax(dim=1).tolist()
    assert all((s.logprobs is not None) == bool(i % 2) for i, s in enumerate(found))


def test_threads_share_the_rows_and_change_nothing() -> None:
    batches = [[sampler(**kind) for kind in KINDS * 4] for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        for step in range(8):
            logits = rows(200 + step, len(KINDS) * 4)
            assert sample(logits, batches[0]) == sample(logits, batches[1], threads)


def test_penalties_change_the_next_draw_of_a_running_answer() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 10], logits[0, 11], logits[0, 12] = 2.0, 1.9, 1.8
    one = sampler(temperature=0.0, presence_penalty=1.0)
    assert [sample(logits, [one])[0].token for _ in range(4)] == [10, 11, 12, 10]
    two = sampler(temperature=0.0, frequency_penalty=0.15)
    assert [sample(logits, [two])[0].token for _ in range(5)] == [10, 11, 10, 12, 11]
