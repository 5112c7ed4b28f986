"""The cache on a GPU against the prefix cache that hit rates are counted with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import EVICTION
from policies.prefix.cache import PrefixCache
from twin.store.gpu_tier import GpuTier


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=40),
    capacity=st.integers(1, 12),
)
def test_it_is_least_recently_used_with_the_tail_first(prompts, capacity):
    tier, cache = GpuTier(capacity), PrefixCache(EVICTION["lru"](capacity), capacity)
    for now, (document, length) in enumerate(prompts):
        keys = tuple(10 * document + i for i in range(length))
        assert tier.leading(keys) == cache.request(keys, now=float(now)).hits
        tier.keep(keys)
        assert len(tier) <= capacity


def test_a_cache_of_no_blocks_keeps_nothing():
    tier = GpuTier(0)
    tier.keep((1, 2))
    assert tier.leading((1,)) == 0
    with pytest.raises(ValueError, match=">= 0"):
        GpuTier(-1)
