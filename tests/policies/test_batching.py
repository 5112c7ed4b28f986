import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.kv_paging import KvPaging
from policies.batching.first_come import FirstComeBatching
from policies.batching.log import LoggedBatching, ReplayedBatching
from policies.batching.settings import BatchingSettings
from traces.decisions import DecisionLog, plain


class Pages:
    """A driver's accounts, block by block, without the policy's formulas."""

    def __init__(self, paging, total):
        self.paging, self.free = paging, total
        self.tokens, self.blocks = {}, {}

    def add(self, sequence):
        self.tokens[sequence], self.blocks[sequence] = 0, {}

    def grow(self, sequence, added):
        size = self.paging.block_tokens
        held = self.tokens[sequence]
        groups = [(None, self.paging.whole_pages), *self.paging.windows]
        for window, pages in groups:
            first = 0 if window is None else max(held + 1 - window, 0) // size
            mine = self.blocks[sequence].setdefault(window, set())
            left = {block for block in mine if block < first}
            self.free += pages * len(left)
            mine -= left
            wanted = set(range(first, -(-(held + added) // size)))
            have_been = -(-held // size)
            new = {block for block in wanted - mine if block >= have_been or not held}
            self.free -= pages * len(new)
            mine |= new
        assert self.free >= 0, "more pages were ordered than there are"

    def trim(self, sequence, tokens):
        size = self.paging.block_tokens
        for window, pages in [(None, self.paging.whole_pages), *self.paging.windows]:
            mine = self.blocks[sequence].get(window, set())
            gone = {block for block in mine if block >= -(-tokens // size)}
            self.free += pages * len(gone)
            mine -= gone
        self.tokens[sequence] = tokens

    def release(self, sequence):
        for window, pages in [(None, self.paging.whole_pages), *self.paging.windows]:
            self.free += pages * len(self.blocks[sequence].get(window, set()))
        del self.tokens[sequence], self.blocks[sequence]

    def held(self, sequence):
        return sum(
            pages * len(self.blocks[sequence].get(window, set()))
            for window, pages in [(None, self.paging.whole_pages), *self.paging.windows]
        )


class Driver:
    def __init__(self, paging, total, limits, rng, *, coming_chance=0.0, load_chance=0.0):
        self.policy = FirstComeBatching(paging, limits)
        self.log = DecisionLog(max_calls=10**9)
        self.logged = LoggedBatching(self.policy, self.log)
        self.pages, self.total, self.rng = Pages(paging, total), total, rng
        self.coming_chance, self.load_chance = coming_chance, load_chance
        self.limits, self.now = limits, 0.0
        self.loads, self.done, self.refused, self.order = {}, set(), set(), []
        self.wanted = {}

    def add(self, sequence, prompt, most):
        self.logged.add(sequence, prompt, most, now=self.now)
        self.wanted[sequence] = (prompt, most)
        if self.rng.random() < self.load_chance:
            size = self.pages.paging.block_tokens
            tokens = int(self.rng.integers(0, (prompt - 1) // size + 1)) * size
            self.logged.cached(sequence, tokens, now=self.now)

    def carry_out(self, orders):
        for sequence in orders.preempted:
            assert sequence not in self.loads
            self.pages.release(sequence)
        for sequence in orders.refused:
            if sequence in self.pages.tokens:
                self.pages.release(sequence)
            self.refused.add(sequence)
        for sequence, load in orders.admitted:
            self.pages.add(sequence)
            self.order.append(sequence)
            if load:
                self.loads[sequence] = load
        for sequence, added in zip(orders.growing.tolist(), orders.growth.tolist(), strict=True):
            self.pages.grow(sequence, added)

    def step(self):
        self.now += 1.0
        for sequence in list(self.loads):
            if self.rng.random() < 0.5:
                load = self.loads.pop(sequence)
                size = self.pages.paging.block_tokens
                tokens = int(self.rng.integers(0, load // size + 1)) * size
                self.pages.trim(sequence, tokens)
                self.logged.loaded(sequence, tokens, now=self.now)
        orders = self.logged.schedule(self.pages.free, now=self.now)
        self.carry_out(orders)
        asked = 0
        while orders.pages_needed:
            asked += 1
            assert asked < 1000
            assert orders.pages_needed > self.pages.free
            coming = bool(self.rng.random() < self.coming_chance)
            orders = self.logged.room(coming, self.pages.free, now=self.now)
            self.carry_out(orders)
        counts = orders.counts.tolist()
        lefts = [
            self.policy.known[self.policy.ids == s][0] - self.pages.tokens[s]
            for s in orders.sequences.tolist()
        ]
        assert all(1 <= c <= left for c, left in zip(counts, lefts, strict=True))
        prefill = sum(c for c, left in zip(counts, lefts, strict=True) if left > 1)
        assert prefill <= self.limits.prefill_tokens
        assert len(self.policy.ids) <= self.limits.max_running
        for sequence in self.policy.ids.tolist():
            if sequence in self.pages.tokens:
                at = self.policy.ids.tolist().index(sequence)
                assert self.policy.pages[at] == self.pages.held(sequence)
        for sequence, count in zip(orders.sequences.tolist(), counts, strict=True):
            self.pages.tokens[sequence] += count
        speakers = orders.sequences[orders.speaks].tolist()
        before = set(self.policy.ids.tolist())
        early = [s for s in speakers if self.rng.random() < 0.02]
        self.logged.step_done(early, now=self.now)
        for sequence in before - set(self.policy.ids.tolist()):
            self.pages.release(sequence)
            self.done.add(sequence)
        return len(counts)


PAGINGS = [
    KvPaging(block_tokens=4, whole_pages=3),
    KvPaging(block_tokens=4, whole_pages=2, windows=((9, 5),)),
    KvPaging(block_tokens=2, whole_pages=0, windows=((3, 1), (8, 2))),
]


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    paging=st.sampled_from(PAGINGS),
    total=st.integers(10, 120),
    coming=st.sampled_from([0.0, 0.5, 0.9]),
    loads=st.sampled_from([0.0, 0.7]),
)
def test_all_sequences_end_on_pages_that_are_there_and_the_log_replays(
    seed, paging, total, coming, loads
):
    rng = np.random.default_rng(seed)
    limits = BatchingSettings(
        max_running=int(rng.integers(1, 8)), prefill_tokens=int(rng.integers(1, 30))
    )
    driver = Driver(paging, total, limits, rng, coming_chance=coming, load_chance=loads)
    count = 12
    for sequence in range(count):
        driver.add(sequence, int(rng.integers(1, 40)), int(rng.integers(1, 12)))
    steps = 0
    while not driver.policy.is_empty:
        steps += 1
        assert steps < 20_000, "somebody waits for ever"
        driver.step()
        if rng.random() < 0.02:
            sequence = int(rng.integers(0, count))
            driver.logged.cancel(sequence, now=driver.now)
            driver.loads.pop(sequence, None)
            if sequence in driver.pages.tokens:
                driver.pages.release(sequence)
            driver.done.add(sequence)
    assert driver.done | driver.refused == set(range(count))
    assert driver.pages.free == total
    fresh = ReplayedBatching(driver.log.policies["batching"])
    for call in driver.log.decisions:
        again = fresh.repeat(call.call, call.args, now=call.now)
        assert plain(again) == call.orders


def orders_of(policy, free=10**6):
    return policy.schedule(free, now=0.0)


def test_decoding_goes_on_beside_prompts_in_chunks():
    policy = FirstComeBatching(PAGINGS[0], BatchingSettings(max_running=4, prefill_tokens=10))
    policy.add(0, 4, 5, now=0.0)
    policy.add(1, 25, 5, now=0.0)
    seen = []
    for _ in range(4):
        orders = orders_of(policy)
        seen.append(dict(zip(orders.sequences.tolist(), orders.counts.tolist(), strict=True)))
        policy.step_done([], now=0.0)
    assert seen == [{0: 4, 1: 6}, {0: 1, 1: 10}, {0: 1, 1: 9}, {0: 1, 1: 1}]


def test_the_youngest_gives_way_and_comes_back_first():
    policy = FirstComeBatching(KvPaging(block_tokens=1, whole_pages=1))
    for sequence in range(3):
        policy.add(sequence, 3, 10, now=0.0)
    assert orders_of(policy, 9).pages_needed == 6  # all of the third, one block more for each
    orders = policy.room(False, 3, now=0.0)
    assert orders.sequences.tolist() == [0, 1]
    assert orders.preempted == ()  # it had nothing yet
    policy.step_done([], now=0.0)
    assert orders_of(policy, 1).pages_needed == 1
    orders = policy.room(False, 0, now=0.0)
    assert orders.preempted == (1,)
    assert policy.next_waiting(2) == (1, 2)


def test_a_sequence_that_lacks_pages_even_alone_is_refused():
    policy = FirstComeBatching(KvPaging(block_tokens=1, whole_pages=1))
    policy.add(0, 8, 1, now=0.0)
    assert orders_of(policy, 5).pages_needed == 8
    assert policy.room(False, 5, now=0.0).refused == (0,)
    assert policy.is_empty


def test_a_prompt_waits_until_there_are_pages_for_all_of_it():
    policy = FirstComeBatching(
        KvPaging(block_tokens=1, whole_pages=1), BatchingSettings(prefill_tokens=4)
    )
    policy.add(0, 4, 1, now=0.0)
    policy.add(1, 12, 1, now=0.0)
    computed = free = 16
    for _ in range(40):
        orders = policy.schedule(free, now=0.0)
        if orders.pages_needed:
            free -= int(orders.growth.sum())
            orders = policy.room(False, free, now=0.0)
        free -= int(orders.growth.sum())
        computed += int(orders.counts.sum())
        before = dict(zip(policy.ids.tolist(), policy.pages.tolist(), strict=True))
        policy.step_done([], now=0.0)
        free += sum(pages for i, pages in before.items() if i not in policy.ids)
    assert policy.is_empty
    assert computed - 16 == 16, "tokens were computed twice"


def test_pages_that_are_coming_hold_a_sequence_back_without_preempting():
    policy = FirstComeBatching(KvPaging(block_tokens=1, whole_pages=1))
    policy.add(0, 4, 4, now=0.0)
    policy.add(1, 4, 4, now=0.0)
    assert orders_of(policy, 20).pages_needed == 0
    policy.step_done([], now=0.0)
    orders = orders_of(policy, 1)
    assert (orders.growing.tolist(), orders.pages_needed) == ([0], 1)
    orders = policy.room(True, 0, now=0.0)
    assert (orders.held_back, orders.preempted) == ((1,), ())
    assert orders.sequences.tolist() == [0]


def test_a_loading_sequence_computes_nothing_until_its_prefix_is_there():
    policy = FirstComeBatching(KvPaging(block_tokens=4, whole_pages=1))
    policy.add(0, 20, 4, now=0.0)
    policy.cached(0, 16, now=0.0)
    orders = orders_of(policy)
    assert orders.admitted == ((0, 16),)
    assert (orders.growing.tolist(), orders.growth.tolist()) == ([0], [16])
    assert len(orders.sequences) == 0
    policy.step_done([], now=0.0)
    policy.loaded(0, 8, now=0.0)
    orders = orders_of(policy)
    assert orders.counts.tolist() == [12]
    assert orders.speaks.tolist() == [True]


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("fly", {}),
        ("add", {"sequence": "1", "prompt_tokens": 1, "max_tokens": 1}),
        ("room", {"is_coming": 1, "free_pages": 1}),
        ("room", {"is_coming": True, "free_pages": 1}),
        ("step_done", {"ended": ["a"]}),
    ],
)
def test_a_damaged_log_is_refused(call, args):
    policy = FirstComeBatching(PAGINGS[0])
    log = DecisionLog()
    LoggedBatching(policy, log)
    with pytest.raises(ValueError, match=r"must|no call|nobody"):
        ReplayedBatching(log.policies["batching"]).repeat(call, args, now=0.0)
