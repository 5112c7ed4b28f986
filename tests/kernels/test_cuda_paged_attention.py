"""Attention over pages by the CUDA kernels, emulated, against dense attention in float64."""

from dataclasses import dataclass

import numpy as np
import pytest

from kernels.cuda.paged_attention import AttentionKernels, AttentionShape, PackedTables
from kernels.cuda_emulation import emulator

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
SCHEDULES = (0, 1, 2, 3)
BLOCK_TOKENS = 16
# weights and queries are rounded to the stored type; sums are float32
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.2e-2}


def rounded(x, stored):
    """float32 numbers that the stored type holds exactly."""
    if stored == "float32":
        return x.astype(np.float32)
    if stored == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return nearest.astype(np.uint32).view(np.float32)


def as_stored(x, stored):
    """The array a kernel takes for numbers of the type."""
    if stored == "bfloat16":
        return np.ascontiguousarray(rounded(x, stored).view(np.uint32) >> 16, dtype=np.uint16)
    return x.astype(stored)


def as_float(x, stored):
    if stored == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


@dataclass
class Sequence:
    """One sequence in one layer: [tokens, heads, head_dim] each; the last ``new`` are computed."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    new: int

    @property
    def tokens(self):
        return len(self.keys)


def sequence(seed, tokens, new, heads, kv_heads, head_dim, stored):
    rng = np.random.default_rng([seed, tokens, head_dim])
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim))
    drawn = [rounded(rng.standard_normal((tokens, *shape)), stored) for shape in shapes]
    return Sequence(*drawn, new)


def dense(one, window, scale):
    """[new, heads, head_dim] float64 by one softmax over all keys."""
    heads, kv_heads = one.queries.shape[1], one.keys.shape[1]
    keys = one.keys.astype(np.float64).repeat(heads // kv_heads, axis=1)
    values = one.values.astype(np.float64).repeat(heads // kv_heads, axis=1)
    at = np.arange(one.tokens - one.new, one.tokens)
    scores = np.einsum("qhd,khd->hqk", one.queries[at].astype(np.float64), keys) * scale
    key = np.arange(one.tokens)[None]
    hidden = key > at[:, None]
    if window is not None:
        hidden |= key <= at[:, None] - window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values)


class Layer:
    """Pages of some sequences in one layer, shuffled; what nobody wrote is NaN."""

    def __init__(self, sequences, stored, *, window=None, page_tokens=8, spare=0, **options):
        heads, head_dim = sequences[0].queries.shape[1:]
        kv_heads = sequences[0].keys.shape[1]
        number_bytes = 4 if stored == "float32" else 2
        self.sequences, self.stored, self.window = sequences, stored, window
        used = page_tokens * 2 * kv_heads * head_dim * number_bytes
        page_bytes = max(1024, 1 << (used - 1).bit_length())
        per_block, first_page = BLOCK_TOKENS // page_tokens, 1
        block_pages = per_block + 2  # pages of other layers around
        max_blocks = max(-(-s.tokens // BLOCK_TOKENS) for s in sequences) + spare
        self.tables = np.full((len(sequences), max_blocks, block_pages), -1, np.int32)
        order = np.random.default_rng(3).permutation(len(sequences) * max_blocks * per_block)
        mine = order.reshape(len(sequences), max_blocks, per_block)
        self.tables[:, :, first_page : first_page + per_block] = mine
        for at, s in enumerate(sequences):
            self.tables[at, -(-s.tokens // BLOCK_TOKENS) :] = -1
            if window is not None:  # as the cache leaves blocks behind
                gone = max(s.tokens - s.new + 1 - window, 0) // BLOCK_TOKENS
                self.tables[at, :gone] = -1
        self.num_pages = order.size
        self.arena = np.full(order.size * page_bytes, 0xFF, np.uint8)
        self.shape = AttentionShape(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            stored=stored,
            page_tokens=page_tokens,
            first_page=first_page,
            window_tokens=window,
        )
        pages = PackedTables(
            arena=self.arena,
            page_bytes=page_bytes,
            tables=self.tables,
            max_blocks=max_blocks,
            block_pages=block_pages,
            block_tokens=BLOCK_TOKENS,
        )
        self.kernels = AttentionKernels(
            pages,
            max_heads=heads,
            max_head_dim=head_dim,
            partials=lambda n: np.full(n, np.nan, np.float32),
            target="emulation",
            **options,
        )
        for at, s in enumerate(sequences):  # what is held before, as a step before wrote it
            held = np.arange(s.tokens - s.new)
            seen = held if window is None else held[self.tables[at, held // BLOCK_TOKENS, 1] >= 0]
            if len(seen):
                self.write(at, s, seen)

    def write(self, slot, s, positions, number_type=None):
        number_type = number_type or self.stored
        keys, values = (as_stored(x[positions], number_type) for x in (s.keys, s.values))
        row = s.keys[0].size
        self.kernels.write(
            self.shape, keys, values, positions.astype(np.int32),
            np.full(len(positions), slot, np.int32),
            num_tokens=len(positions), new_type=number_type, strides=(row, row),
        )  # fmt: skip

    def attend(self, chosen, scale, query_type=None, single=None):
        """[new, heads, head_dim] float32 of every chosen sequence, all in one launch."""
        query_type = query_type or self.stored
        single = all(self.sequences[i].new == 1 for i in chosen) if single is None else single
        per_tile = self.shape.tile_tokens(single)
        positions, slots, tiles, queries = [], [], [], []
        for slot in chosen:
            s = self.sequences[slot]
            first = len(positions)
            new = np.arange(s.tokens - s.new, s.tokens)
            self.write(slot, s, new)
            positions += new.tolist()
            slots += [slot] * s.new
            tiles += [(first + at, min(per_tile, s.new - at)) for at in range(0, s.new, per_tile)]
            queries.append(s.queries[new])
        drawn = np.concatenate(queries)
        out = as_stored(np.full(drawn.shape, 7.0, np.float32), query_type)
        self.kernels.attend(
            self.shape, as_stored(drawn, query_type), out,
            np.array(positions, np.int32), np.array(slots, np.int32),
            [(np.array(tiles, np.int32), len(tiles), 0, len(positions))],
            query_type=query_type, query_stride=drawn[0].size, scale=scale, is_single=single,
            chunks=max(positions) // self.kernels.chunk_keys + 1,
        )  # fmt: skip
        cuts = np.cumsum([self.sequences[i].new for i in chosen])[:-1]
        return np.split(as_float(out, query_type), cuts)


def assert_near(found, expected, tolerance):
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_single_tokens_agree_with_dense_attention(stored, head_dim):
    sequences = [sequence(i, n, 1, 4, 2, head_dim, stored) for i, n in enumerate((1, 17, 300))]
    layer = Layer(sequences, stored)
    found = layer.attend([0, 1, 2], head_dim**-0.5, query_type="float32")
    for got, one in zip(found, sequences, strict=True):
        assert_near(got, dense(one, None, head_dim**-0.5), TOLERANCE[stored])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 23, 290])
def test_prompts_and_windows_agree_under_every_schedule(stored, window, schedule):
    sequences = [
        sequence(i, n, new, 6, 2, 64, stored) for i, (n, new) in enumerate([(310, 21), (9, 9)])
    ]
    layer = Layer(sequences, stored, window=window, schedule=schedule)
    for got, one in zip(layer.attend([0, 1], 0.2), sequences, strict=True):
        assert_near(got, dense(one, window, 0.2), TOLERANCE[stored])


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (5, 5), (40, 1), (18, 2)])
def test_every_grouping_of_heads(heads, kv_heads):
    for new in (1, 5):
        one = sequence(heads, 40, new, heads, kv_heads, 32, "float16")
        (got,) = Layer([one], "float16").attend([0], 0.3)
        assert_near(got, dense(one, None, 0.3), TOLERANCE["float16"])


@pytest.mark.parametrize("head_dim", [8, 40, 80, 96, 192, 512])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_heads_of_other_widths(stored, head_dim):
    one = sequence(1, 33, 3, 2, 1, head_dim, stored)
    (got,) = Layer([one], stored, page_tokens=4).attend([0], head_dim**-0.5)
    assert_near(got, dense(one, None, head_dim**-0.5), TOLERANCE[stored])


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("query_type", ["float32", "float16", "bfloat16"])
def test_queries_of_any_type_give_results_of_it(stored, query_type):
    one = sequence(2, 30, 2, 4, 2, 32, "bfloat16")  # which float16 holds as well, near zero
    layer = Layer([one], stored)
    (got,) = layer.attend([0], 0.2, query_type=query_type)
    worst = max(TOLERANCE[stored], TOLERANCE[query_type])
    assert_near(got, dense(one, None, 0.2), worst)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 600])
def test_long_contexts_are_split_and_joined(stored, window):
    sequences = [sequence(i, n, 1, 4, 1, 32, stored) for i, n in enumerate((1300, 257, 512))]
    layer = Layer(sequences, stored, window=window, chunk_keys=512)
    assert layer.kernels.max_chunks == 3
    for got, one in zip(layer.attend([0, 1, 2], 0.5), sequences, strict=True):
        assert_near(got, dense(one, window, 0.5), TOLERANCE[stored])


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_a_query_has_the_same_bits_whatever_is_computed_with_it(stored):
    sequences = [
        sequence(i, n, new, 4, 2, 64, stored)
        for i, (n, new) in enumerate([(530, 1), (700, 12), (3, 3), (256, 1)])
    ]
    layer = Layer(sequences, stored, window=400)
    together = layer.attend([0, 1, 2, 3], 0.25)
    backwards = layer.attend([3, 2, 1, 0], 0.25)[::-1]
    for at, one in enumerate(sequences):
        (alone,) = layer.attend([at], 0.25)
        assert np.array_equal(together[at], alone)
        assert np.array_equal(together[at], backwards[at])
        last = Sequence(one.queries, one.keys, one.values, 1)
        single = Layer([last], stored, window=400, spare=8)
        # blocks that only earlier queries see are gone here, and the launch is another one
        assert np.array_equal(single.attend([0], 0.25)[0], alone[-1:])


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_equal_inputs_give_equal_bits_under_every_schedule(stored):
    one = sequence(5, 600, 7, 4, 2, 32, stored)
    found = [Layer([one], stored, schedule=n).attend([0], 0.25)[0] for n in SCHEDULES]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_tokens_without_a_page_write_nothing_and_harm_nobody():
    one = sequence(6, 20, 1, 2, 1, 32, "bfloat16")
    layer = Layer([one], "bfloat16")
    before = layer.arena.copy()
    for slot, position in ((-1, 3), (0, 40), (0, -1)):
        layer.kernels.write(
            layer.shape, one.keys[:1].copy(), one.values[:1].copy(),
            np.array([position], np.int32), np.array([slot], np.int32),
            num_tokens=1, new_type="float32", strides=(32, 32),
        )  # fmt: skip
    assert np.array_equal(before, layer.arena)


def test_a_number_that_is_none_spoils_its_own_sequence_alone():
    sequences = [sequence(i, 30, 1, 2, 1, 32, "bfloat16") for i in range(2)]
    sequences[0].queries[-1, 0, 0] = np.nan
    layer = Layer(sequences, "bfloat16")
    spoilt, whole = layer.attend([0, 1], 0.2)
    assert np.isnan(spoilt[0, 0]).all()
    assert_near(spoilt[:, 1], dense(sequences[0], None, 0.2)[:, 1], TOLERANCE["bfloat16"])
    assert_near(whole, dense(sequences[1], None, 0.2), TOLERANCE["bfloat16"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stored": "int8"}, "stored must be float32, float16, bfloat16, found 'int8'"),
        ({"head_dim": 20}, "head_dim must be a multiple of 8 up to 512, found 20"),
        ({"head_dim": 520}, "head_dim must be a multiple of 8 up to 512, found 520"),
        ({"heads": 3}, "heads must be a multiple of kv_heads: 3, 2"),
        ({"page_tokens": 3}, "page_tokens must be a power of two, found 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    given = {"heads": 4, "kv_heads": 2, "head_dim": 32, "stored": "float32"}
    with pytest.raises(ValueError, match=message):
        AttentionShape(**({"page_tokens": 8, "first_page": 0} | given | change))
