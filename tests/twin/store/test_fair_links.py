"""Transfers over shared links against closed forms and brute force."""

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from twin.store.fair_links import FairLinks, Link, max_min_rates


def _ends(starts, sizes, paths):
    """Seconds at which each transfer ends."""
    env = simpy.Environment()
    fair = FairLinks(env)
    ends = [0.0] * len(sizes)

    def run(i):
        yield env.timeout(starts[i])
        yield fair.transfer(paths[i], sizes[i])
        ends[i] = env.now

    for i in range(len(sizes)):
        env.process(run(i))
    env.run()
    assert fair.num_transfers == 0
    return ends


def test_a_transfer_alone_takes_its_bytes_over_the_slowest_link():
    fast, slow = Link("fast", 100.0), Link("slow", 20.0)
    assert _ends([1.0], [60.0], [(fast, slow)]) == pytest.approx([4.0])
    assert slow.carried_bytes == pytest.approx(60.0)
    assert slow.busy_s == pytest.approx(3.0)
    assert slow.utilization(4.0) == pytest.approx(0.75)


def test_two_transfers_on_one_link_get_half_each_and_the_rest_when_one_is_done():
    link = Link("wire", 10.0)
    # both at 5/s until the small one ends at 2 s; the other has 30 left at 10/s
    assert _ends([0.0, 0.0], [10.0, 40.0], [(link,), (link,)]) == pytest.approx([2.0, 5.0])


def test_a_transfer_that_comes_later_slows_the_first_one_down():
    link = Link("wire", 10.0)
    # 10 moved by 1 s; 5/s each until 3 s, when 10 more have arrived of both
    assert _ends([0.0, 1.0], [30.0, 10.0], [(link,), (link,)]) == pytest.approx([4.0, 3.0])


def test_who_is_held_up_elsewhere_leaves_the_rest_to_others():
    shared, narrow = Link("shared", 12.0), Link("narrow", 2.0)
    # the first gets 2, so the second gets 10 and not 6
    assert _ends([0, 0], [20.0, 100.0], [(shared, narrow), (shared,)]) == pytest.approx(
        [10.0, 10.0]
    )


def test_nothing_to_move_is_done_at_once():
    env = simpy.Environment()
    assert FairLinks(env).transfer((Link("wire", 1.0),), 0).triggered


def test_a_link_without_capacity_is_refused():
    with pytest.raises(ValueError, match="wire: bytes_per_s must be > 0"):
        Link("wire", 0.0)


class _Flow:
    def __init__(self, path):
        self.path, self.rate, self.remaining = path, 0.0, 1.0


@settings(max_examples=200, deadline=None)
@given(
    capacities=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    routes=st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=8),
)
def test_rates_are_max_min_fair(capacities, routes):
    """Every transfer crosses a full link on which nobody is faster: that defines max-min."""
    links = [Link(str(i), float(c)) for i, c in enumerate(capacities)]
    paths = [
        tuple(links[i % len(links)] for i in sorted({r % len(links) for r in route}))
        for route in routes
    ]
    flows = [_Flow(path) for path in paths]
    max_min_rates(flows)
    load = {link.name: sum(f.rate for f in flows if link in f.path) for link in links}
    for link in links:
        assert load[link.name] <= link.bytes_per_s * (1 + 1e-9)
    for flow in flows:
        assert any(
            load[link.name] >= link.bytes_per_s * (1 - 1e-9)
            and flow.rate >= max(f.rate for f in flows if link in f.path) * (1 - 1e-9)
            for link in flow.path
        )


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.floats(0, 10), st.floats(0.5, 50), st.integers(0, 2)), min_size=1, max_size=6
    )
)
def test_what_links_carried_is_what_was_sent_and_nobody_ends_before_time(jobs):
    links = [Link("a", 7.0), Link("b", 3.0)]
    paths = [((links[0],), (links[1],), tuple(links))[kind] for _, _, kind in jobs]
    ends = _ends([j[0] for j in jobs], [j[1] for j in jobs], paths)
    for link in links:
        sent = sum(j[1] for j, path in zip(jobs, paths, strict=True) if link in path)
        assert link.carried_bytes == pytest.approx(sent)
        assert link.busy_s >= sent / link.bytes_per_s * (1 - 1e-9)
    for (start, size, _), end, path in zip(jobs, ends, paths, strict=True):
        assert end >= start + size / min(link.bytes_per_s for link in path) - 1e-6


def test_processor_sharing_of_poisson_arrivals_has_the_mean_of_theory():
    """M/M/1-PS: mean time in system = mean size / (capacity (1 - load))."""
    rng = np.random.default_rng(5)
    count, load = 6000, 0.5
    starts = np.cumsum(rng.exponential(1.0, count))
    sizes = rng.exponential(load, count)
    link = Link("wire", 1.0)
    ends = _ends(starts.tolist(), sizes.tolist(), [(link,)] * count)
    assert np.mean(np.array(ends) - starts) == pytest.approx(load / (1 - load), rel=0.08)
