"""Attention over pages on a GPU: against float64, the emulation, and itself in other launches."""

import numpy as np
import pytest

from kernels.cuda.paged_attention import AttentionKernels, PackedTables
from tests.kernels.test_cuda_paged_attention import (
    BLOCK_TOKENS,
    TOLERANCE,
    Layer,
    assert_near,
    dense,
    sequence,
)

pytestmark = pytest.mark.gpu


class GpuLayer(Layer):
    """The same pages, in device memory."""

    def __init__(self, cupy, sequences, stored, **options):
        super().__init__(sequences, stored, **options)
        self._cupy = cupy
        shape = self.tables.shape
        pages = PackedTables(
            arena=cupy.asarray(self.arena),
            page_bytes=self.arena.size // self.num_pages,
            tables=cupy.asarray(self.tables),
            max_blocks=shape[1],
            block_pages=shape[2],
            block_tokens=BLOCK_TOKENS,
        )
        emulated = self.kernels
        self.kernels = _OnGpu(
            cupy,
            AttentionKernels(
                pages,
                max_heads=self.shape.heads,
                max_head_dim=self.shape.head_dim,
                partials=lambda n: cupy.full(n, np.nan, np.float32),
                target="gpu",
                chunk_keys=emulated.chunk_keys,
            ),
        )


class _OnGpu:
    """Launches with numpy arrays, which are taken there and back."""

    def __init__(self, cupy, kernels):
        self._cupy, self._kernels = cupy, kernels
        self.chunk_keys, self.max_chunks = kernels.chunk_keys, kernels.max_chunks

    def write(self, shape, keys, values, positions, slots, **how):
        self._kernels.write(
            shape, *map(self._cupy.asarray, (keys, values, positions, slots)), **how
        )

    def attend(self, shape, queries, out, positions, slots, tiles, **how):
        there = self._cupy.asarray(out)
        sent = [(self._cupy.asarray(listed), *numbers) for listed, *numbers in tiles]
        given = map(self._cupy.asarray, (positions, slots))
        self._kernels.attend(shape, self._cupy.asarray(queries), there, *given, sent, **how)
        out[...] = self._cupy.asnumpy(there)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("window", [None, 23, 600])
def test_prompts_and_single_tokens_agree_with_dense_attention(cupy, stored, head_dim, window):
    sequences = [
        sequence(i, n, new, 8, 2, head_dim, stored)
        for i, (n, new) in enumerate([(1300, 1), (310, 45), (9, 9)])
    ]
    layer = GpuLayer(cupy, sequences, stored, window=window)
    scale = head_dim**-0.5
    for chosen in ([0, 1, 2], [0]):
        for got, at in zip(layer.attend(chosen, scale), chosen, strict=True):
            assert_near(got, dense(sequences[at], window, scale), TOLERANCE[stored])


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_a_query_has_the_same_bits_whatever_is_computed_with_it(cupy, stored):
    sequences = [
        sequence(i, n, new, 4, 2, 128, stored)
        for i, (n, new) in enumerate([(530, 1), (700, 12), (3, 3), (256, 1)])
    ]
    layer = GpuLayer(cupy, sequences, stored)
    together = layer.attend([0, 1, 2, 3], 0.25)
    for at in range(4):
        assert np.array_equal(layer.attend([at], 0.25)[0], together[at])
    # single tokens are another kernel of fewer rows
    single = GpuLayer(cupy, [type(s)(s.queries, s.keys, s.values, 1) for s in sequences], stored)
    for got, want in zip(single.attend([0, 1, 2, 3], 0.25), together, strict=True):
        assert np.array_equal(got, want[-1:])


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_the_emulation_agrees_to_rounding(cupy, stored):
    sequences = [sequence(i, n, 1, 4, 2, 64, stored) for i, n in enumerate((17, 300))]
    gpu = GpuLayer(cupy, sequences, stored).attend([0, 1], 0.125, query_type="float32")
    cpu = Layer(sequences, stored).attend([0, 1], 0.125, query_type="float32")
    for got, want in zip(gpu, cpu, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 if stored == "float32" else 4e-3)
