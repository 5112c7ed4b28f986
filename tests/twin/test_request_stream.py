"""Drawing requests: the law is kept exactly, whoever reads."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.streams import stream
from traces.lengths import LengthPairs
from twin.request_stream import RequestLaw, alias_table


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_an_alias_table_holds_exactly_the_law_it_was_made_from(weights: list[float]) -> None:
    weight = np.array(weights)
    accept, other = alias_table(weight)
    assert accept.min() >= 0.0
    assert accept.max() <= 1.0
    drawn = accept.copy()
    np.add.at(drawn, other, 1.0 - accept)
    assert drawn / len(weight) == pytest.approx(weight / weight.sum(), abs=1e-12)


def test_unequal_pairs_come_as_often_as_their_weight_says() -> None:
    law = LengthPairs.from_pairs([1, 2, 3], [10, 20, 30], [0.7, 0.2, 0.1])
    prompts, outputs = RequestLaw(law).draw(stream(5, "requests"), 20_000)
    assert (outputs == 10 * prompts).all()
    share = np.bincount(prompts, minlength=4)[1:] / 20_000
    error = np.sqrt(law.weight * (1 - law.weight) / 20_000)
    assert (np.abs(share - law.weight) < 4 * error).all()


def test_observed_pairs_come_equally_often() -> None:
    law = LengthPairs.from_requests(np.arange(8), np.arange(1, 9))
    prompts, _ = RequestLaw(law).draw(stream(5, "requests"), 20_000)
    share = np.bincount(prompts) / 20_000
    assert share == pytest.approx(1 / 8, abs=4 * np.sqrt(7 / 64 / 20_000))


@pytest.mark.parametrize("weights", [None, [0.7, 0.2, 0.1]])
def test_requests_are_the_same_however_many_are_drawn_at_once(weights: list[float] | None) -> None:
    law = RequestLaw(LengthPairs.from_pairs([1, 2, 3], [10, 20, 30], weights))
    rng = stream(5, "requests")
    pieces = np.concatenate([law.draw(rng, size)[0] for size in (1, 7, 2500, 492)])
    one_by_one = islice(law.endless(stream(5, "requests")), 3000)
    assert [prompt for prompt, _ in one_by_one] == pieces.tolist()
