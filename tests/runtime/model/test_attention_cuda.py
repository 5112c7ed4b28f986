"""Attention over pages of a tensor by emulated CUDA kernels: packed tables, padded steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cuda_emulation import emulator
from runtime.model.attention_cpu import attention_for
from runtime.model.attention_cuda import CudaAttention, CudaAttentionError, CudaLimits
from runtime.model.kv_cache import LEFT_BEHIND, KvCache
from runtime.model.kv_layout import KvLayout, LayerKv
from runtime.model.step_upload import StepUpload
from runtime.model.table_slots import TableSlots
from runtime.page_arena import PageArena
from tests.runtime.model.test_attention import assert_close, batch_of, dense, run, text

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
HEADS = 4
LAYERS: list[LayerKv | int] = [
    LayerKv(kv_heads=2, head_dim=32),
    LayerKv(kv_heads=1, head_dim=32, window_tokens=19),
    0,
]


def cache_of(dtype=torch.float32, num_pages=600, layers=LAYERS):
    """A cache in a tensor; what was not written is no number in any type."""
    page_bytes = 2048
    arena = PageArena(num_pages, page_bytes=page_bytes, device="cpu:0")
    arena.buffer.array.fill_(0xFF)
    return KvCache(arena, KvLayout(layers, dtype, page_bytes))


def attention_of(cache, *, rows=64, context=128, sequences=4, **options):
    limits = CudaLimits(
        max_sequences=sequences,
        max_rows=rows,
        context_tokens=context,
        heads=(HEADS,) * len(cache.layout.layers),
    )
    return CudaAttention(cache, limits, **options)


def texts_of(tokens, seed=0, dtype=torch.float32):
    kv = [LAYERS[0], LAYERS[1], LAYERS[0]]
    found = [text(seed + i, tokens, HEADS, one, dtype) for i, one in enumerate(kv)]
    found[2].keys, found[2].values = found[0].keys, found[0].values
    return found


def test_layers_windows_and_shared_keys_agree_with_dense_attention():
    texts = {7: texts_of(60), 3: texts_of(21, seed=10)}
    steps = [{7: 40}, {7: 1, 3: 18}, {3: 1, 7: 1}, {7: 18}, {3: 2}]
    found = run(attention_of, cache_of(), steps, texts, 0.3)
    for sequence, layers in texts.items():
        for number, one in enumerate(layers):
            kv = LAYERS[number] if number < 2 else LAYERS[0]
            assert_close(found[sequence][number], dense(one, kv, 0.3), 2e-6)


def test_bfloat16_pages_take_queries_of_the_residual_stream():
    rounded = [
        type(one)(one.queries, one.keys.bfloat16().float(), one.values.bfloat16().float())
        for one in texts_of(50)
    ]
    found = run(
        attention_of, cache_of(torch.bfloat16), [{0: 48}, {0: 1}, {0: 1}], {0: rounded}, 0.3
    )
    for number, one in enumerate(rounded):
        kv = LAYERS[number] if number < 2 else LAYERS[0]
        assert_close(found[0][number], dense(one, kv, 0.3), 1.2e-2)


def test_a_launch_cut_for_its_partial_results_gives_the_same_bits():
    kv = LayerKv(kv_heads=2, head_dim=32)
    one = {0: [text(4, 340, HEADS, kv)]}
    steps = [{0: 300}, {0: 39}, {0: 1}]

    def whole(cache):
        return attention_of(cache, rows=320, context=400)

    def cut(cache):
        return attention_of(cache, rows=320, context=400, partial_bytes=1)

    found = [run(make, cache_of(layers=[kv]), steps, one, 0.3)[0][0] for make in (whole, cut)]
    assert torch.equal(*found)
    assert_close(found[0], dense(one[0][0], kv, 0.3), 2e-6)


def step(attention, cache, counts, texts, rows=None):
    """[T, heads * head_dim] of the first layer; rows of no sequence get large numbers."""
    batch = batch_of(cache, counts)
    parts = [(texts[s][0], cache.tokens(s), count) for s, count in counts.items()]
    joined = [
        torch.cat([getattr(one, name)[start : start + count] for one, start, count in parts])
        for name in ("queries", "keys", "values")
    ]
    if rows is None:
        attention.begin(batch)
    else:
        attention.begin_padded(batch, rows)
        fill = rows - len(joined[0])
        joined = [torch.cat([x, torch.full((fill, *x.shape[1:]), 9.0)]) for x in joined]
    found = attention(0, *joined, scale=0.3)
    for sequence, count in counts.items():
        cache.advance(sequence, count)
    return found


def test_rows_of_no_sequence_change_nothing_but_the_spare_block():
    texts = {s: texts_of(30, seed=5 * s) for s in (1, 2, 3)}
    found = []
    for rows in (None, 4):
        cache = cache_of()
        cache.add(-1)
        assert cache.grow(-1, 1)
        attention = attention_of(cache, spare_pages=cache.table(-1)[0])
        for s in texts:
            cache.add(s)
        for s in texts:
            step(attention, cache, {s: 20 + s}, texts)
        arena = cache.arena.buffer.array
        for s in texts:
            assert cache.grow(s, 1)
        before, spare = arena.clone(), torch.from_numpy(cache.table(-1)[0].astype(np.int64))
        found.append(step(attention, cache, dict.fromkeys(texts, 1), texts, rows)[:3])
        changed = set((arena != before).any(1).nonzero()[:, 0].tolist())
        mine = {int(page) for s in texts for page in cache.table(s)[-1]}
        assert changed - mine <= set(spare.tolist())
        assert (changed & set(spare.tolist()) == set()) == (rows is None)
    assert torch.equal(*found)


def slots_of(cache, slots=2):
    return TableSlots(cache, slots=slots, max_blocks=8, device=torch.device("cpu"))


def rows_of(placed, cache, sequence, slot):
    return placed.tables[slot, : len(cache.table(sequence))].numpy()


def test_only_new_blocks_are_copied_and_tables_keep_their_place(monkeypatch):
    cache = cache_of()
    copied = []
    write = StepUpload.write

    def counted(self, numbers):
        copied.append(len(numbers) // (1 + cache.layout.block_pages))
        return write(self, numbers)

    monkeypatch.setattr(StepUpload, "write", counted)
    placed = slots_of(cache)
    address = placed.tables.data_ptr()
    for sequence, tokens in ((4, 40), (9, 16)):
        cache.add(sequence)
        assert cache.grow(sequence, tokens)
    slots = placed.place([4, 9])
    assert copied == [4]
    assert placed.place([9, 4]) == slots[::-1]
    assert copied == [4]
    cache.set_tokens(9, 16)
    assert cache.grow(9, 1)
    placed.place([4, 9])
    assert copied == [4, 1]
    for sequence, slot in zip((4, 9), slots, strict=True):
        assert np.array_equal(rows_of(placed, cache, sequence, slot), cache.table(sequence))
    assert placed.tables.data_ptr() == address


def test_a_sequence_that_was_released_and_added_again_gets_its_new_pages():
    cache = cache_of()
    placed = slots_of(cache)
    cache.add(4)
    assert cache.grow(4, 40)
    (slot,) = placed.place([4])
    before = cache.table(4).copy()
    cache.release(4)
    cache.add(5)
    assert cache.grow(5, 16)
    cache.add(4)
    assert cache.grow(4, 40)
    assert not np.array_equal(cache.table(4), before)
    (slot,) = placed.place([4])
    assert np.array_equal(rows_of(placed, cache, 4, slot), cache.table(4))


def test_slots_of_those_who_left_or_wait_are_taken_over():
    cache = cache_of()
    placed = slots_of(cache)
    for sequence in range(4):
        cache.add(sequence)
        assert cache.grow(sequence, 16 * (sequence + 1))
    placed.place([0, 1])
    cache.release(0)
    assert sorted(placed.place([1, 2])) == [0, 1]
    for pair in ([3, 2], [1, 3], [2, 1]):
        for sequence, slot in zip(pair, placed.place(pair), strict=True):
            assert np.array_equal(rows_of(placed, cache, sequence, slot), cache.table(sequence))
    with pytest.raises(ValueError, match="3 sequences in a step, at most 2 may be"):
        placed.place([1, 2, 3])
    assert (placed.tables[placed.spare] == LEFT_BEHIND).all()


def test_what_does_not_fit_is_refused():
    cache = cache_of()
    attention = attention_of(cache, rows=8)
    cache.add(0)
    with pytest.raises(ValueError, match="9 new tokens in a step, at most 8 may be"):
        attention.begin(batch_of(cache, {0: 9}))
    with pytest.raises(CudaAttentionError, match="layer 0: head_dim must be a multiple of 8"):
        attention_of(cache_of(layers=[LayerKv(kv_heads=1, head_dim=20)]))
    on_host = KvCache(PageArena(8, page_bytes=2048), KvLayout(LAYERS, torch.float32, 2048))
    with pytest.raises(CudaAttentionError, match="reads pages in device memory"):
        attention_of(on_host)


def test_the_kernels_are_chosen_for_an_arena_that_is_a_tensor():
    limits = CudaLimits(max_sequences=1, max_rows=4, context_tokens=32, heads=(HEADS,) * 3)
    assert isinstance(attention_for(cache_of(), limits=limits), CudaAttention)
    assert not isinstance(attention_for(cache_of()), CudaAttention)
