"""The stream of requests: what a documents experiment is, and that it is the same for all."""

import numpy as np
import pytest

from models.prefix_settings import (
    DocumentsWorkload,
    GeneratedWorkload,
    PoissonRequests,
    PrefixQuestion,
    PrefixRun,
    PrefixScenario,
    SpreadRequests,
    TracedWorkload,
)
from models.strict_tables import ScenarioError
from traces.errors import TraceError
from twin.store.requests import document_requests, read_workload_trace, request_streams


def _documents(**changes):
    defaults = {"documents": 3, "questions": 5, "question_tokens": 64, "prompt_tokens": (1024,)}
    return DocumentsWorkload(**(defaults | changes))


def _stream(settings, tokens=1024, block_tokens=64, seed=1, replication=0):
    return document_requests(
        settings, tokens, block_tokens=block_tokens, seed=seed, replication=replication
    )


@pytest.mark.parametrize(
    ("tokens", "block", "question"), [(1024, 64, 64), (1000, 16, 50), (200, 64, 199)]
)
def test_questions_about_one_document_share_its_full_blocks_and_no_others(tokens, block, question):
    settings = _documents(question_tokens=question, prompt_tokens=(tokens,))
    stream = _stream(settings, tokens, block)
    shared = (tokens - question) // block
    for one in stream.requests:
        assert len(one.prompt) == tokens // block
        for other in stream.requests:
            common = len(set(one.prompt) & set(other.prompt))
            if one is other:
                assert common == tokens // block
            else:
                assert common == (shared if one.session == other.session else 0)
    assert np.bincount([r.session for r in stream.requests]).tolist() == [5, 5, 5]


def test_order_arrivals_and_draws_are_the_same_at_every_length():
    settings = _documents(arrivals=PoissonRequests(rate_per_s=2.0), prompt_tokens=(512, 4096))
    short, long = (_stream(settings, tokens) for tokens in settings.prompt_tokens)
    assert [r.session for r in short.requests] == [r.session for r in long.requests]
    assert [r.time_s for r in short.requests] == [r.time_s for r in long.requests]
    assert short.draws == long.draws
    other = _stream(settings, 512, replication=1)
    assert [r.session for r in other.requests] != [r.session for r in short.requests]


def test_arrivals_are_even_or_poisson_from_time_zero():
    even = _stream(_documents(arrivals=SpreadRequests(gap_s=0.5)))
    assert [r.time_s for r in even.requests] == pytest.approx(np.arange(15) * 0.5)
    many = _stream(_documents(questions=2000, arrivals=PoissonRequests(rate_per_s=10.0)))
    gaps = np.diff([r.time_s for r in many.requests])
    assert many.requests[0].time_s == 0.0
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.07)


def test_a_generated_workload_is_cut_and_sped_up_as_asked():
    def streams(**changes):
        settings = GeneratedWorkload(generator="docqa", **changes)
        scenario = PrefixScenario(prefix=PrefixQuestion(), workload=settings, run=PrefixRun(seed=3))
        return request_streams(scenario, 0)

    (plain,), (fast,) = streams(num_requests=50), streams(num_requests=50, rate_scale=4.0)
    assert len(plain.requests) == len(fast.requests) == 50
    assert [r.prompt for r in plain.requests] == [r.prompt for r in fast.requests]
    assert [r.time_s for r in fast.requests] == pytest.approx(
        [r.time_s / 4.0 for r in plain.requests]
    )


def test_a_generator_has_its_own_block_size():
    scenario = PrefixScenario(
        prefix=PrefixQuestion(block_tokens=16), workload=GeneratedWorkload(generator="docqa")
    )
    with pytest.raises(ScenarioError, match="docqa has blocks of 64 tokens, found 16"):
        request_streams(scenario, 0)


def test_more_blocks_than_a_machine_holds_are_refused():
    with pytest.raises(ScenarioError, match="different blocks are more than"):
        _stream(_documents(documents=1_000_000), tokens=8192, block_tokens=16)


def test_a_trace_without_blocks_is_refused_by_name(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,10,5\n1.0,20,5\n")
    with pytest.raises(TraceError, match=r"lengths\.csv: has no ids of prompt blocks"):
        read_workload_trace(TracedWorkload(trace=str(file)))
