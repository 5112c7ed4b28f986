"""Pages of keys and values: how many, whose, and until when."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.kv_bytes import kv_block_pages
from runtime.model.kv_cache import LEFT_BEHIND, KvCache
from runtime.model.kv_layout import KvLayout, LayerKv, default_page_bytes
from runtime.page_arena import PageArena

WHOLE = LayerKv(kv_heads=2, head_dim=32)
NARROW = LayerKv(kv_heads=1, head_dim=24, window_tokens=20)
SLIDING = LayerKv(kv_heads=2, head_dim=32, window_tokens=7)


def layout_of(*layers, dtype=torch.float32, page_bytes=1024):
    return KvLayout(layers, dtype, page_bytes)


def test_a_page_holds_the_largest_power_of_two_of_tokens_that_fits():
    layout = layout_of(WHOLE, NARROW, 0, LayerKv(kv_heads=1, head_dim=8))
    assert [WHOLE.token_bytes(torch.float32), NARROW.token_bytes(torch.float32)] == [512, 192]
    assert layout.tokens_per_page == (2, 4, 2, 16)
    assert layout.pages_per_block == (8, 4, 0, 1)
    assert layout.first_page == (0, 8, 0, 12)
    assert layout.block_pages == 13
    assert layout.used_page_bytes(1) == 4 * 192


def test_the_policies_count_the_same_pages_per_block():
    layout = layout_of(WHOLE, NARROW, 0, SLIDING, NARROW)
    pages = {}
    for group in layout.kv_layers():
        window = pages.setdefault(group.window_tokens, 0)
        pages[group.window_tokens] = window + group.num_layers * kv_block_pages(
            group, page_bytes=1024, block_tokens=16
        )
    assert pages == {None: 8, 20: 8, 7: 8}
    assert layout.paging.whole_pages == 8
    assert layout.paging.windows == ((7, 8), (20, 8))


@pytest.mark.parametrize(
    ("layers", "dtype", "page_bytes", "message"),
    [
        ((WHOLE,), torch.float64, 1024, "float32, bfloat16, float16"),
        ((WHOLE,), torch.float32, 1000, "page_bytes must be a power of two, found 1000"),
        ((LayerKv(kv_heads=8, head_dim=64),), torch.float32, 1024, "4096 bytes"),
        ((WHOLE, 1), torch.float32, 1024, "layer 1 uses keys and values of layer 1"),
        ((WHOLE, 0, 1), torch.float32, 1024, "layer 2 uses keys and values of layer 1"),
        ((), torch.float32, 1024, "none keeps"),
    ],
)
def test_a_layout_that_cannot_be_names_what_is_wrong(layers, dtype, page_bytes, message):
    with pytest.raises(ValueError, match=message):
        KvLayout(layers, dtype, page_bytes)


def test_default_pages_hold_a_block_of_the_widest_layer_within_limits():
    assert default_page_bytes([WHOLE, 0], torch.float32) == 8192
    assert default_page_bytes([WHOLE, NARROW], torch.bfloat16) == 4096
    assert default_page_bytes([NARROW], torch.float32) == 4096
    assert default_page_bytes([LayerKv(kv_heads=1, head_dim=1)], torch.float32) == 1024
    assert default_page_bytes([LayerKv(kv_heads=32, head_dim=128)], torch.float32) == 32768


def test_the_signature_tells_types_and_layers_apart_but_not_page_sizes():
    layers = (WHOLE, NARROW, 0)
    base = layout_of(*layers).signature
    assert base == "k:v;float32;16;2x32;1x24w20;=0"
    assert layout_of(*layers, page_bytes=4096).signature == base
    assert layout_of(*layers, dtype=torch.bfloat16).signature != base
    assert layout_of(WHOLE, NARROW, 1).signature != base


def test_growth_is_all_or_nothing():
    layout = layout_of(WHOLE)
    cache = KvCache(PageArena(20, page_bytes=1024), layout)
    cache.add(1)
    assert not cache.grow(1, 33)
    assert cache.held_pages == 0
    assert cache.grow(1, 32)
    cache.advance(1, 32)
    assert not cache.grow(1, 1)
    assert cache.held_pages == 16
    assert cache.tokens(1) == 32
    cache.check()


def test_more_tokens_than_pages_are_refused():
    cache = KvCache(PageArena(64, page_bytes=1024), layout_of(WHOLE))
    cache.add(3)
    with pytest.raises(ValueError, match="3 is in the cache"):
        cache.add(3)
    assert cache.grow(3, 5)
    with pytest.raises(ValueError, match="pages for 16 tokens, not for 17"):
        cache.advance(3, 17)
    cache.set_tokens(3, 16)
    with pytest.raises(IndexError, match="1 blocks"):
        cache.block_pages(3, 1)
    with pytest.raises(IndexError):
        cache.hold(3, 0, 2)


def test_arena_and_layout_must_agree_on_the_page():
    with pytest.raises(ValueError, match="2048"):
        KvCache(PageArena(4, page_bytes=2048), layout_of(WHOLE))


def test_windows_leave_blocks_behind_when_a_sequence_grows():
    layout = layout_of(SLIDING, WHOLE)
    cache = KvCache(PageArena(200, page_bytes=1024), layout)
    cache.add(0)
    assert cache.grow(0, 40)
    cache.advance(0, 40)
    assert cache.held_pages == 3 * 16
    assert cache.grow(0, 1)
    assert cache.held_pages == 3 * 16 - 2 * 8
    assert (cache.page_table(0, 0)[:16] == LEFT_BEHIND).all()
    assert (cache.page_table(0, 0)[16:] != LEFT_BEHIND).all()
    assert (cache.page_table(1, 0) != LEFT_BEHIND).all()
    assert (cache.block_pages(0, 0)[:8] == LEFT_BEHIND).all()
    cache.set_tokens(0, 38)
    with pytest.raises(ValueError, match="left the blocks before 2 behind"):
        cache.set_tokens(0, 37)
    cache.check()


def test_held_pages_outlive_their_sequence_and_go_with_the_last_hold():
    cache = KvCache(PageArena(64, page_bytes=1024), layout_of(WHOLE))
    cache.add(0)
    assert cache.grow(0, 48)
    first, both = cache.hold(0, 0, 1), cache.hold(0, 0, 2)
    cache.release(0)
    assert cache.held_pages == 16
    cache.check()
    first.end()
    first.end()
    assert cache.held_pages == 16
    both.end()
    assert cache.held_pages == 0
    assert cache.arena.ledger.free_pages == 64
    cache.check()


class BruteForce:
    """What a cache should do, with a set of page ids per (sequence, block, layer)."""

    def __init__(self, layout):
        self.layout = layout
        self.tokens, self.blocks, self.kept = {}, {}, {}

    def sequence_pages(self, sequence):
        return sum(self.layout.pages_per_block[layer] for layer, _ in self.kept[sequence])

    def leave_behind(self, sequence):
        query = self.tokens[sequence]
        for layer, block in list(self.kept[sequence]):
            window = self.layout.kv(layer).window_tokens
            last = (block + 1) * self.layout.block_tokens - 1
            if window is not None and last <= query - window:
                self.kept[sequence].remove((layer, block))

    def needed(self, sequence, added):
        want = -(-(self.tokens[sequence] + added) // self.layout.block_tokens)
        return max(want - self.blocks[sequence], 0)

    def grow(self, sequence, more):
        for block in range(self.blocks[sequence], self.blocks[sequence] + more):
            for layer, own in enumerate(self.layout.pages_per_block):
                if own:
                    self.kept[sequence].add((layer, block))
        self.blocks[sequence] += more


LAYOUTS = [
    layout_of(WHOLE),
    layout_of(SLIDING, NARROW),
    layout_of(WHOLE, SLIDING, 0, NARROW, 1, SLIDING),
    layout_of(NARROW, LayerKv(kv_heads=1, head_dim=8, window_tokens=1)),
]


@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    num_pages=st.integers(20, 400),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["grow", "grow", "grow", "grow_only", "hold", "end", "release", "set"]),
            st.integers(0, 3),
            st.integers(0, 60),
        ),
        max_size=40,
    ),
)
def test_pages_are_those_of_a_brute_force_model_after_every_step(layout, num_pages, steps):
    cache, model = KvCache(PageArena(num_pages, page_bytes=1024), layout), BruteForce(layout)
    holds, held = [], {}
    for step, sequence, amount in steps:
        if sequence not in model.tokens:
            cache.add(sequence)
            model.tokens[sequence] = model.blocks[sequence] = 0
            model.kept[sequence] = set()
        tokens, blocks = model.tokens[sequence], model.blocks[sequence]
        if step in ("grow", "grow_only"):
            model.leave_behind(sequence)
            more = model.needed(sequence, amount)
            needed = cache.pages_needed(sequence, amount)
            assert needed == more * layout.block_pages
            if blocks == -(-tokens // 16):
                assert needed == layout.paging.grown(np.array([tokens]), np.array([amount]))[0]
            fits = needed <= num_pages - pages_once_left_behind(cache, model, sequence, held)
            assert cache.grow(sequence, amount) == fits
            if fits:
                model.grow(sequence, more)
                if step == "grow":
                    cache.advance(sequence, amount)
                    model.tokens[sequence] += amount
                    if blocks == -(-tokens // 16):
                        pages = layout.paging.held(np.array([tokens + amount]), np.array([tokens]))[
                            0
                        ]
                        assert pages == model.sequence_pages(sequence)
        elif step == "set":
            model.tokens[sequence] = min(tokens + amount, 16 * blocks)
            cache.set_tokens(sequence, model.tokens[sequence])
        elif step == "hold":
            first = amount % (blocks + 1)
            hold = cache.hold(sequence, first, blocks)
            holds.append(hold)
            for page in hold.pages.tolist():
                held[page] = held.get(page, 0) + 1
        elif step == "end" and holds:
            hold = holds.pop(amount % len(holds))
            for page in hold.pages.tolist():
                held[page] -= 1
                if not held[page]:
                    del held[page]
            hold.end()
        elif step == "release":
            cache.release(sequence)
            for table in (model.tokens, model.blocks, model.kept):
                del table[sequence]
        cache.check()
        compare(cache, model, held)
    for sequence in list(model.tokens):
        cache.release(sequence)
    for hold in holds:
        hold.end()
    cache.check()
    assert cache.held_pages == 0
    assert cache.arena.ledger.free_pages == num_pages


def pages_once_left_behind(cache, model, sequence, held):
    """Pages in use when a sequence has given back what the model says."""
    used = set(held)
    for other in cache.sequences:
        for layer, own in enumerate(cache.layout.pages_per_block):
            pages = cache.page_table(layer, other).reshape(-1, own) if own else []
            for block, ids in enumerate(pages):
                if other != sequence or (layer, block) in model.kept[sequence]:
                    used |= set(ids.tolist()) - {LEFT_BEHIND}
    return len(used)


def compare(cache, model, held):
    layout = cache.layout
    owners = {}
    for sequence in model.tokens:
        assert cache.tokens(sequence) == model.tokens[sequence]
        for layer, source in enumerate(layout.source_layer):
            own = layout.pages_per_block[source]
            pages = cache.page_table(layer, sequence).reshape(-1, own)
            assert len(pages) == model.blocks[sequence]
            for block, ids in enumerate(pages):
                if (source, block) in model.kept[sequence]:
                    assert (ids >= 0).all()
                    if layer == source:
                        for page in ids.tolist():
                            assert page not in owners
                            owners[page] = sequence
                else:
                    assert (ids == LEFT_BEHIND).all()
        rows = [cache.block_pages(sequence, block) for block in range(model.blocks[sequence])]
        assert np.array_equal(np.reshape(rows, cache.table(sequence).shape), cache.table(sequence))
    assert len(owners) == sum(model.sequence_pages(sequence) for sequence in model.tokens)
    assert cache.held_pages == len(owners.keys() | held.keys())
    assert all(cache.arena.ledger.holder_of(page) == "kv" for page in owners.keys() | held.keys())
