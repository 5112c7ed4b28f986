"""Attention over pages: right to the last bits but a few, and the same bits in any company."""

import numpy as np
import pytest

from kernels.cpu import AttentionLayer, TokenPages, backend, paged_attention

COMPILED = [name for name in ("avx512", "avx2", "portable") if name in backend().available]
BLOCK_TOKENS, PAGE_BYTES = 16, 4096
pytestmark = pytest.mark.skipif(not COMPILED, reason="needs a C++ compiler")


@pytest.fixture(params=COMPILED)
def path(request):
    return request.param


def stored_bits(numbers, stored):
    """float32 numbers as their stored bits, rounded by numpy or by adding half a last place."""
    if stored == "float32":
        return numbers.view(np.uint32)
    if stored == "float16":
        return numbers.astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(numbers, stored):
    """What is left of float32 numbers after they were stored."""
    bits = stored_bits(numbers, stored)
    if stored == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32 if stored == "float32" else np.float16).astype(np.float32)


class Text:
    """Sequences with queries, keys and values of one layer, and pages for them in any order."""

    def __init__(self, seed, lengths, layer, *, spare_pages=5):
        rng = np.random.default_rng(seed)
        self.layer, self.lengths = layer, lengths
        self.shapes = (layer.heads, layer.kv_heads, layer.kv_heads)
        self.parts = [
            [rng.standard_normal((n, h, layer.head_dim), np.float32) for h in self.shapes]
            for n in lengths
        ]
        self.place(seed, spare_pages)

    def place(self, seed, spare_pages=5):
        own = BLOCK_TOKENS // self.layer.tokens_per_page
        blocks = [-(-n // BLOCK_TOKENS) for n in self.lengths]
        count = sum(blocks) * (own + 1) + spare_pages
        ids = np.random.default_rng(seed + 99).permutation(count).astype(np.int32)
        self.arena = np.full((count, PAGE_BYTES), 0xFF, np.uint8)  # NaN wherever nothing is written
        self.tables, used = [], 0
        for n in blocks:  # a block begins with a page of some other layer
            self.tables.append(ids[used : used + n * (own + 1)].reshape(n, own + 1))
            used += n * (own + 1)

    def step(self, counts, starts, **options):
        """New tokens counts[s] after starts[s] of every sequence s of ``counts``."""
        first = np.cumsum([0, *counts.values()])
        pages = TokenPages(
            self.arena,
            block_tokens=BLOCK_TOKENS,
            tables=[self.tables[s] for s in counts],
            first=first,
            starts=np.array([starts[s] for s in counts], np.int64),
        )
        queries, keys, values = (
            np.concatenate([self.parts[s][i][starts[s] : starts[s] + n] for s, n in counts.items()])
            for i in range(3)
        )
        found = paged_attention(
            queries, self.layer, pages, scale=0.2, keys=keys, values=values, **options
        )
        return dict(zip(counts, np.split(found, first[1:-1]), strict=True))

    def in_steps(self, steps, **options):
        """All results of every sequence, fed in steps of {sequence: count}."""
        starts, found = dict.fromkeys(range(len(self.lengths)), 0), {}
        for counts in steps:
            for s, part in self.step(counts, starts, **options).items():
                found.setdefault(s, []).append(part)
                starts[s] += counts[s]
        return {s: np.concatenate(parts) for s, parts in found.items()}

    def expected(self, s):
        layer, (queries, keys, values) = self.layer, self.parts[s]
        group = layer.heads // layer.kv_heads
        keys, values = (
            np.repeat(widened(x, layer.stored).astype(np.float64), group, 1) for x in (keys, values)
        )
        scores = 0.2 * np.einsum("qhd,khd->hqk", queries.astype(np.float64), keys)
        at = np.arange(len(queries))
        hidden = at[None] > at[:, None]
        if layer.window_tokens is not None:
            hidden |= at[None] <= at[:, None] - layer.window_tokens
        weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
        sums = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
        return sums.reshape(len(queries), -1)


def layer_of(heads=6, kv_heads=2, head_dim=32, tokens_per_page=4, **options):
    return AttentionLayer(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tokens_per_page=tokens_per_page,
        first_page=1,
        **options,
    )


LAYERS = [
    layer_of(),
    layer_of(window_tokens=40),
    layer_of(heads=4, kv_heads=1, head_dim=80, window_tokens=64, stored="bfloat16"),
    layer_of(heads=3, kv_heads=3, head_dim=24, stored="float16"),
    layer_of(heads=28, kv_heads=2, head_dim=64, stored="bfloat16"),
    layer_of(heads=2, kv_heads=1, head_dim=128, window_tokens=1),
    layer_of(heads=5, kv_heads=1, head_dim=7, tokens_per_page=16),
]


@pytest.mark.parametrize("layer", LAYERS, ids=range(len(LAYERS)))
def test_results_agree_with_float64(path, layer):
    text = Text(1, [150, 67], layer)
    found = text.in_steps([{0: 149, 1: 1}, {1: 66, 0: 1}], path=path)
    for s in (0, 1):
        expected = text.expected(s)
        assert np.abs(found[s] - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("layer", LAYERS, ids=range(len(LAYERS)))
def test_a_query_has_the_same_bits_in_any_company_chunk_thread_and_page(path, layer):
    lengths = [230, 64, 131]
    text = Text(2, lengths, layer)
    whole = text.in_steps([{0: 230}, {1: 64}, {2: 131}], path=path)
    mixed = [{0: 100, 1: 63}, {0: 1, 1: 1, 2: 1}, {2: 100, 0: 3}, {2: 30, 0: 1}]
    mixed += [{0: 1}] * 60 + [{0: 65}]
    for threads in (1, 2, 5):
        text.place(threads)
        found = text.in_steps(mixed, path=path, threads=threads)
        for s in range(3):
            assert np.array_equal(found[s].view(np.uint32), whole[s].view(np.uint32))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_numbers_are_stored_rounded_to_the_nearest(path, stored):
    layer = layer_of(heads=1, kv_heads=1, head_dim=48, tokens_per_page=8, stored=stored)
    text = Text(3, [64], layer)
    keys, values = text.parts[0][1:]
    rng = np.random.default_rng(0)
    keys *= np.exp2(rng.integers(-30, 18, keys.shape)).astype(np.float32)
    values.view(np.uint32)[:] &= 0xFFFF8000  # half of them ties between two bfloat16
    keys[0, 0, :6] = [0, -0.0, 65519, 65520, 2.0**-24, 2.0**-25]
    with np.errstate(over="ignore"):
        expected = np.stack([stored_bits(keys, stored), stored_bits(values, stored)], 1)
    text.in_steps([{0: 64}], path=path)
    pages = text.arena[text.tables[0][:, 1:].ravel()]
    tokens = pages[:, : layer.used_page_bytes].reshape(64, -1).view(expected.dtype)
    assert np.array_equal(tokens, expected.reshape(64, -1))


def test_a_layer_without_keys_of_its_own_reads_those_in_the_pages(path):
    text = Text(4, [90], layer_of())
    first = text.in_steps([{0: 90}], path=path)[0]
    pages = TokenPages(
        text.arena,
        block_tokens=BLOCK_TOKENS,
        tables=text.tables,
        first=np.array([0, 3]),
        starts=np.array([87]),
    )
    before = text.arena.copy()
    again = paged_attention(text.parts[0][0][87:], text.layer, pages, scale=0.2, path=path)
    assert np.array_equal(again, first[87:])
    assert np.array_equal(text.arena, before)


@pytest.mark.parametrize(("largest", "tolerance"), [(1, 3e-7), (20, 3e-6), (120, 2e-5)])
def test_weights_are_right_to_the_last_bits_of_the_scores(path, largest, tolerance):
    """Values are one-hot, so a result is the weights themselves."""
    layer = layer_of(heads=1, kv_heads=1, head_dim=64, tokens_per_page=8)
    text = Text(5, [64], layer)
    queries, keys, values = text.parts[0]
    queries[:], keys[:] = 0, 0
    queries[:, 0, 0] = 5.0
    keys[:, 0, 0] = -np.linspace(0, largest, 64)
    keys[3, 0, 0] = -1e30
    values[:, 0] = np.eye(64)
    found = text.in_steps([{0: 64}], path=path)[0][63]
    exact = np.exp(keys[:, 0, 0].astype(np.float64) * 5.0 * 0.2)
    exact /= exact.sum()
    normal = exact > 1e-37
    assert np.abs(found[normal] / exact[normal] - 1).max() <= tolerance
    assert (np.abs(found[~normal]) <= 1e-37).all()
    assert found[3] == 0


def test_a_sequence_of_infinite_scores_leaves_the_others_alone(path):
    text = Text(6, [40, 40], layer_of())
    alone = text.in_steps([{1: 40}], path=path)[1]
    text.parts[0][0][:] = np.nan
    found = text.in_steps([{0: 40, 1: 40}], path=path)
    assert np.isnan(found[0]).all()
    assert np.array_equal(found[1], alone)


def test_pages_left_behind_are_not_needed_and_missing_ones_are_named(path):
    text = Text(7, [100], layer_of(window_tokens=20))
    starts = {0: 0}
    text.step({0: 99}, starts, path=path)
    text.tables[0][:5] = -1
    starts[0] = 99
    found = text.step({0: 1}, starts, path=path)[0]
    expected = text.expected(0)[99]
    assert np.abs(found[0] - expected).max() <= 1e-6 * np.abs(expected).max()
    text.tables[0][5, 2] = len(text.arena)
    with pytest.raises(ValueError, match=rf"token 84 .* \[0, {len(text.arena)}\)"):
        text.step({0: 1}, starts, path=path)
    text.tables[0] = text.tables[0][:6]
    text.tables[0][5, 2] = 0
    with pytest.raises(ValueError, match=r"token 96 .* found -1"):
        text.step({0: 1}, starts, path=path)


def test_no_tokens_give_no_results(path):
    text = Text(8, [10], layer_of())
    pages = TokenPages(
        text.arena,
        block_tokens=16,
        tables=[],
        first=np.zeros(1, np.int64),
        starts=np.zeros(0, np.int64),
    )
    empty = np.zeros((0, 6, 32), np.float32)
    assert paged_attention(empty, text.layer, pages, scale=1.0, path=path).shape == (0, 192)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="heads must be a multiple"):
        layer_of(heads=5)
    with pytest.raises(ValueError, match="stored must be one of"):
        layer_of(stored="float64")
    with pytest.raises(ValueError, match="tokens_per_page must be a power of two"):
        layer_of(tokens_per_page=3)
    text = Text(9, [20], layer_of())
    with pytest.raises(ValueError, match="threads"):
        text.in_steps([{0: 20}], threads=0)
    with pytest.raises(ValueError, match="compiled path"):
        text.in_steps([{0: 20}], path="numpy")
    text.parts[0][1] = text.parts[0][1][:, :1]
    with pytest.raises(ValueError, match=r"keys must be float32 \[20, 2, 32\]"):
        text.in_steps([{0: 20}])
    wide = AttentionLayer(heads=4, kv_heads=4, head_dim=64, tokens_per_page=16)
    text.layer = wide
    text.parts[0] = [np.zeros((20, 4, 64), np.float32)] * 3
    with pytest.raises(ValueError, match="16 tokens take 32768 bytes, a page has 4096"):
        text.in_steps([{0: 20}])
