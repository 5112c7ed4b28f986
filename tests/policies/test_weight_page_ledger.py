"""The ledger of pages against a model of sets: nothing is lost, doubled or half reserved."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.weight_page_ledger import PageLedger
from policies.weight_page_rules import check_history

HOLDERS = st.sampled_from(["weights", "kv"])


@given(
    num_pages=st.integers(1, 40),
    moves=st.lists(st.tuples(HOLDERS, st.integers(-20, 20)), max_size=40),
)
def test_pages_are_where_a_model_of_sets_says(num_pages, moves):
    history = []
    ledger = PageLedger(num_pages, history=history.append)
    held = {"weights": [], "kv": []}
    for holder, count in moves:
        if count >= 0:
            free = num_pages - len(held["weights"]) - len(held["kv"])
            pages = ledger.take(count, holder)
            assert (pages is None) == (count > free)
            held[holder] += [] if pages is None else pages.tolist()
        else:
            back, held[holder] = held[holder][:-count], held[holder][-count:]
            ledger.give(np.array(back, np.int32), holder)
        taken = held["weights"] + held["kv"]
        assert len(set(taken)) == len(taken)
        assert all(0 <= page < num_pages for page in taken)
        assert ledger.free_pages == num_pages - len(taken)
        for name in ("weights", "kv"):
            assert ledger.held_pages(name) == len(held[name])
            assert all(ledger.holder_of(page) == name for page in held[name])
        ledger.check()
    kv_only = [event for event in history if event["ev"] != "pages"]
    assert check_history(kv_only) is None


def test_a_reservation_that_does_not_fit_changes_nothing():
    ledger = PageLedger(4)
    ledger.take(3, "kv")
    assert ledger.take(2, "weights") is None
    assert (ledger.free_pages, ledger.refused) == (1, {"weights": 1, "kv": 0})
    assert ledger.take(1, "weights").tolist() == [3]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([2], "page 2 is given back by kv, held by free"),
        ([1], "page 1 is given back by kv, held by weights"),
        ([0, 0], "twice in one call"),
        ([9], "outside the arena of 4 pages"),
    ],
)
def test_pages_that_are_not_held_cannot_be_given_back(pages, message):
    ledger = PageLedger(4)
    ledger.take(1, "kv")
    ledger.take(1, "weights")
    with pytest.raises(RuntimeError, match=message):
        ledger.give(np.array(pages, np.int32), "kv")
    ledger.check()
    assert ledger.free_pages == 2


def test_the_page_returned_last_is_taken_first():
    ledger = PageLedger(8)
    pages = ledger.take(6, "kv")
    ledger.give(pages[[4, 1]], "kv")
    assert ledger.take(2, "weights").tolist() == [1, 4]


@pytest.mark.parametrize("number", [0, -3])
def test_an_arena_has_a_page(number):
    with pytest.raises(ValueError, match=f"num_pages must be >= 1, not {number}"):
        PageLedger(number)
