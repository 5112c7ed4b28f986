"""Attention over pages against dense attention in float64."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import backend
from runtime.model.attention_cpu import CpuAttention, attention_for
from runtime.model.attention_torch import TorchAttention
from runtime.model.kv_cache import KvCache
from runtime.model.kv_layout import KvLayout, LayerKv
from runtime.model.step import StepBatch
from runtime.page_arena import PageArena

COMPILED = [name for name in ("avx512", "avx2", "portable") if name in backend().available]
MAKERS = {"torch": TorchAttention} | {name: partial(CpuAttention, path=name) for name in COMPILED}


@pytest.fixture(params=sorted(MAKERS))
def make(request):
    return MAKERS[request.param]


@dataclass
class Text:
    """Queries, keys and values of one sequence in one layer, [tokens, heads, head_dim]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def text(seed, tokens, heads, kv, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(seed)
    shapes = ((heads, kv.head_dim), (kv.kv_heads, kv.head_dim), (kv.kv_heads, kv.head_dim))
    return Text(*(torch.randn(tokens, *shape, generator=numbers).to(dtype) for shape in shapes))


def dense(one, kv, scale):
    """[tokens, heads * head_dim] float64: softmax over all keys, those unseen at -inf."""
    tokens, heads, _ = one.queries.shape
    groups = heads // kv.kv_heads
    keys = one.keys.double().repeat_interleave(groups, 1)
    values = one.values.double().repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", one.queries.double(), keys) * scale
    at = torch.arange(tokens)
    hidden = at[None] > at[:, None]
    if kv.window_tokens is not None:
        hidden |= at[None] <= at[:, None] - kv.window_tokens
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def batch_of(cache, counts):
    """A step of ``counts[sequence]`` new tokens; pages are taken for them."""
    for sequence, count in counts.items():
        assert cache.grow(sequence, count)
    first = np.cumsum([0, *counts.values()])
    starts = np.array([cache.tokens(sequence) for sequence in counts])
    return StepBatch(
        tuple(counts), np.zeros(first[-1], np.int64), first, starts, np.array([first[-1] - 1])
    )


def cache_of(layers, dtype=torch.float32, page_bytes=None, num_pages=3000):
    if page_bytes is None:
        page_bytes = 1024
        while page_bytes < 2 * max(e.token_bytes(dtype) for e in layers if not isinstance(e, int)):
            page_bytes *= 2
    cache = KvCache(
        PageArena(num_pages, page_bytes=page_bytes), KvLayout(layers, dtype, page_bytes)
    )
    for page in cache.arena.buffer.array:
        page[:] = 0xFF  # NaN in every type: what was not written must not be read
    return cache


def run(make, cache, steps, texts, scale):
    """Results of ``texts[sequence][layer]``, fed in ``steps`` of {sequence: count}."""
    attention = make(cache)
    layers = range(len(cache.layout.layers))
    found = {sequence: [[] for _ in layers] for sequence in texts}
    for sequence in texts:
        cache.add(sequence)
    for counts in steps:
        batch = batch_of(cache, counts)
        attention.begin(batch)
        for layer in layers:
            own = cache.layout.source_layer[layer] == layer
            parts = [
                (texts[sequence][layer], cache.tokens(sequence), count)
                for sequence, count in counts.items()
            ]
            joined = [
                torch.cat(
                    [getattr(one, name)[start : start + count] for one, start, count in parts]
                )
                for name in ("queries", "keys", "values")
            ]
            result = attention(
                layer, joined[0], *(joined[1:] if own else (None, None)), scale=scale
            )
            assert result.dtype == joined[0].dtype
            assert result.shape == (len(joined[0]), joined[0].shape[1] * joined[0].shape[2])
            for part, sequence in zip(result.split(list(counts.values())), counts, strict=True):
                found[sequence][layer].append(part)
        for sequence, count in counts.items():
            cache.advance(sequence, count)
    return {s: [torch.cat(parts) for parts in of] for s, of in found.items()}


def assert_close(found, expected, tolerance):
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4), (6, 1), (10, 2)])
@pytest.mark.parametrize("window", [None, 1, 23, 100])
def test_chunks_and_single_tokens_agree_with_dense_attention(
    make, head_dim, heads, kv_heads, window
):
    kv = LayerKv(kv_heads=kv_heads, head_dim=head_dim, window_tokens=window)
    one = text(head_dim + heads, 90, heads, kv)
    steps = [{5: 37}, {5: 1}, {5: 1}, {5: 40}, {5: 11}]
    found = run(make, cache_of([kv]), steps, {5: [one]}, 0.2)
    assert_close(found[5][0], dense(one, kv, 0.2), 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 19])
def test_keys_and_values_are_stored_rounded_and_used_exactly(make, dtype, window):
    kv = LayerKv(kv_heads=2, head_dim=64, window_tokens=window)
    one = text(3, 70, 4, kv)
    found = run(make, cache_of([kv], dtype), [{0: 30}, {0: 39}, {0: 1}], {0: [one]}, 0.125)
    rounded = Text(one.queries, one.keys.to(dtype), one.values.to(dtype))
    assert_close(found[0][0], dense(rounded, kv, 0.125), 2e-6)


def test_queries_of_bfloat16_give_results_of_bfloat16(make):
    kv = LayerKv(kv_heads=2, head_dim=32)
    one = text(4, 50, 4, kv, torch.bfloat16)
    found = run(make, cache_of([kv], torch.bfloat16), [{0: 49}, {0: 1}], {0: [one]}, 0.2)
    assert_close(found[0][0], dense(one, kv, 0.2), 1e-2)


def test_layers_of_different_shapes_share_pages_and_keys(make):
    layers = [
        LayerKv(kv_heads=2, head_dim=32),
        LayerKv(kv_heads=1, head_dim=80, window_tokens=20),
        0,
        LayerKv(kv_heads=4, head_dim=16, window_tokens=5),
        1,
    ]
    cache = cache_of(layers)
    texts = {}
    for sequence in (7, 2, 9):
        texts[sequence] = [text(sequence * 10 + i, 60, 4, cache.layout.kv(i)) for i in range(5)]
        for layer in (2, 4):
            source = texts[sequence][cache.layout.source_layer[layer]]
            texts[sequence][layer].keys = source.keys
            texts[sequence][layer].values = source.values
    steps = [{7: 20}, {7: 1, 2: 33}, {2: 1, 9: 60, 7: 39}, {2: 26}]
    found = run(make, cache, steps, texts, 0.17)
    for sequence, of in texts.items():
        for layer, one in enumerate(of):
            assert_close(found[sequence][layer], dense(one, cache.layout.kv(layer), 0.17), 2e-6)
    cache.check()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    counts=st.lists(
        st.dictionaries(st.integers(0, 3), st.integers(1, 30), min_size=1), min_size=1, max_size=6
    ),
    window=st.sampled_from([None, 2, 16, 17, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    maker=st.sampled_from(sorted(MAKERS)),
)
def test_any_mixture_of_prompts_and_decoding_is_right(seed, counts, window, dtype, maker):
    kv = LayerKv(kv_heads=2, head_dim=16, window_tokens=window)
    lengths = {s: sum(step.get(s, 0) for step in counts) for step in counts for s in step}
    texts = {s: [text(seed + s, length, 6, kv)] for s, length in lengths.items()}
    found = run(MAKERS[maker], cache_of([kv], dtype), counts, texts, 0.25)
    for sequence, (one,) in texts.items():
        rounded = Text(one.queries, one.keys.to(dtype), one.values.to(dtype))
        assert_close(found[sequence][0], dense(rounded, kv, 0.25), 2e-6)


def test_huge_scores_do_not_overflow(make):
    kv = LayerKv(kv_heads=1, head_dim=32)
    one = text(8, 40, 2, kv)
    one.queries *= 300
    found = run(make, cache_of([kv]), [{0: 40}], {0: [one]}, 1.0)
    assert_close(found[0][0], dense(one, kv, 1.0), 1e-3)


def test_tokens_without_pages_are_refused(make):
    cache = cache_of([LayerKv(kv_heads=1, head_dim=32)])
    cache.add(4)
    batch = batch_of(cache, {4: 16})
    longer = StepBatch((4,), np.zeros(17, np.int64), np.array([0, 17]), batch.starts, batch.starts)
    attention = make(cache)
    with pytest.raises(ValueError, match=r"sequence 4: .* 0 to 16, 0 are held .* for 16"):
        attention.begin(longer)
    with pytest.raises(RuntimeError, match="not begun"):
        attention(0, torch.zeros(16, 1, 32), None, None, scale=1.0)


def test_the_compiled_attention_is_taken_where_there_is_one():
    cache = cache_of([LayerKv(kv_heads=1, head_dim=32)])
    assert isinstance(attention_for(cache), CpuAttention) == bool(COMPILED)
    assert isinstance(attention_for(cache, path="numpy"), TorchAttention)
    with pytest.raises(ValueError, match="compiled path, found numpy"):
        CpuAttention(cache, path="numpy")


@pytest.mark.skipif(not COMPILED, reason="needs a C++ compiler")
def test_results_of_a_sequence_are_the_same_bits_alone_and_in_company():
    layers = [LayerKv(kv_heads=2, head_dim=64), LayerKv(kv_heads=2, head_dim=64, window_tokens=50)]
    texts = {s: [text(s * 2 + i, 150, 6, kv) for i, kv in enumerate(layers)] for s in range(3)}
    make = partial(CpuAttention, threads=2)
    steps = [{0: 100}, {0: 1, 1: 77}, {0: 1, 1: 73, 2: 120}, {0: 48, 2: 30}]
    together = run(make, cache_of(layers), steps, texts, 0.2)
    for sequence, of in texts.items():
        alone = run(CpuAttention, cache_of(layers), [{sequence: 150}], {sequence: of}, 0.2)
        for layer in range(2):
            assert torch.equal(alone[sequence][layer], together[sequence][layer])
