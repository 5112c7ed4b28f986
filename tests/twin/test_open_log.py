"""What an open-loop run notes down: gaps of any length, also none at all."""

import math

import pytest

from twin.open_log import GapCounter


def test_gaps_that_the_clock_cannot_tell_from_none_are_counted():
    counter = GapCounter()
    counter.add(0.0, 3)  # a step of 1 us at 1e12 s
    counter.add(0.02, 5)
    found = counter.histogram()
    assert found.num_gaps.tolist() == [3, 5]
    assert found.gap_s[0] < 1e-11
    assert found.gap_s[1] == pytest.approx(0.02, rel=1e-3)
    assert found.total_s == pytest.approx(0.1, rel=1e-12)
    assert math.isfinite(found.mean_s)
