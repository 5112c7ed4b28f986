"""The recursion of microbatches in flight, against its max-plus eigenvalue."""

import json
from pathlib import Path

import numpy as np
import pytest

from twin.pipeline import PingPongPipeline

CASES = [
    case
    for case in json.loads((Path(__file__).parents[1] / "golden" / "afd_cases.json").read_text())
    if case["kind"] == "fixed-time ping-pong"
]


def period_s(
    attention_s: list[list[float]], ffn_s: float, one_way_s: float, link_s: float = 0.0
) -> float:
    """Seconds per microbatch, from two instants of a pipeline that has long settled."""
    num_workers, microbatches = len(attention_s), len(attention_s[0])
    pipeline = PingPongPipeline(num_workers)
    arrived = [0.0] * microbatches
    settled, rounds = 200, 840  # 840: periods repeat after 1, 2, .. 8 rounds at the latest
    marks = []
    for done in range(settled + rounds):
        if done == settled:
            marks = list(arrived)
        for u in range(microbatches):
            times = [attention_s[j][u] for j in range(num_workers)]
            ready_s = pipeline.attend(arrived[u], times, u).ready_s
            arrived[u] = pipeline.serve(ready_s, one_way_s, link_s, ffn_s, u)
    return (arrived[0] - marks[0]) / (rounds * microbatches)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_fixed_times_have_the_period_of_the_reference_case(case: dict[str, dict]) -> None:
    given = case["input"]
    assert len(given["A"][0]) == given["m"]
    period = period_s(given["A"], given["F"], given["c_oneway"])
    assert period == pytest.approx(case["expect"]["period_per_microbatch"], rel=1e-9)


def test_fixed_times_have_the_closed_form_period_for_any_bundle() -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        r, m = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        attention = rng.uniform(50, 400, (r, m))
        ffn, one_way, link = rng.uniform(50, 400), rng.uniform(0, 80), rng.uniform(0, 400)
        longest_chain = attention.max(axis=0) + ffn + 2 * one_way
        expected = max(attention.mean(axis=1).max(), ffn, link, longest_chain.max() / m)
        assert period_s(attention.tolist(), ffn, one_way, link) == pytest.approx(expected, rel=1e-9)


def test_a_worker_without_slots_is_not_awaited() -> None:
    pipeline = PingPongPipeline(2)
    assert pipeline.attend(0.0, [5.0, 100.0], 0).ready_s == 100.0
    assert pipeline.attend(0.0, [5.0, 0.0], 1).ready_s == 10.0
