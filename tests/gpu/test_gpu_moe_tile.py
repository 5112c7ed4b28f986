"""The tensor-core expert kernels on a GPU against the reference and under a captured graph."""

import numpy as np
import pytest

from kernels import reference
from kernels.cuda import moe_tile
from kernels.cuda.decode_tables import device_table, rounded_table
from kernels.cuda.moe_tile import DevicePages, MoeShape, MoeTileLayer
from kernels.cuda.tile_layout import tile_planes
from kernels.sample_layer import SampleLayer, sample_layer

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-3


def tiled_sample(rng, shape: MoeShape, bits, resident_bits=None) -> SampleLayer:
    tiles = (shape.gate_up, shape.down)
    return sample_layer(
        rng,
        hidden_size=shape.hidden,
        intermediate=shape.intermediate,
        bits=bits,
        resident_bits=resident_bits,
        page_bytes=4096,
        plane_stream=lambda module, planes: tile_planes(planes, tiles[module]),
        table_stream=lambda module, table, q: device_table(table, q, tiles[module]),
    )


def uploaded(cupy, sample: SampleLayer) -> DevicePages:
    arrays = (sample.bits, sample.plane_pages, sample.table_pages)
    return DevicePages(
        cupy.asarray(sample.arena), sample.page_bytes, sample.min_bits, *map(cupy.asarray, arrays)
    )


def expected(sample: SampleLayer, x, index, gate):
    weights = []
    for block, q in zip(sample.blocks, sample.bits.tolist(), strict=True):
        table = rounded_table(block.tables[q], q)
        weights.append(reference.dequantize(block.planes, table, q, block.columns))
    return reference.moe_layer(x, index, gate, weights[0::2], weights[1::2], "silu")


def routing(rng, tokens, shape: MoeShape):
    order = np.argsort(rng.random((tokens, shape.experts)), axis=1)
    gate = rng.random((tokens, shape.top_k)).astype(np.float32)
    return order[:, : shape.top_k].astype(np.int32), gate


def relative_error(got, want) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("tokens", [1, 4, 7, 16, 40, 150])
def test_every_width_equals_the_reference(cupy, rng, bits, tokens):
    shape = MoeShape(experts=4, hidden=1000, intermediate=352, top_k=2)
    sample = tiled_sample(rng, shape, [bits] * 8)
    step = MoeTileLayer(shape, uploaded(cupy, sample), max_tokens=tokens, target="gpu")
    x = rng.standard_normal((tokens, 1000)).astype(np.float32)
    index, gate = routing(rng, tokens, shape)
    out = cupy.full(x.shape, np.nan, np.float32)
    step(0, *map(cupy.asarray, (x, index, gate)), out)
    assert relative_error(cupy.asnumpy(out), expected(sample, x, index, gate)) < TOLERANCE


@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (1, 1), (545, 31), (2816, 704)])
def test_odd_sizes_and_mixed_widths(cupy, rng, hidden, intermediate):
    shape = MoeShape(experts=3, hidden=hidden, intermediate=intermediate, top_k=2)
    sample = tiled_sample(rng, shape, [2, 7, 5, 3, 8, 4])
    step = MoeTileLayer(shape, uploaded(cupy, sample), max_tokens=24, target="gpu")
    x = rng.standard_normal((24, hidden)).astype(np.float32)
    index, gate = routing(rng, 24, shape)
    out = cupy.zeros(x.shape, np.float32)
    step(0, *map(cupy.asarray, (x, index, gate)), out)
    assert relative_error(cupy.asnumpy(out), expected(sample, x, index, gate)) < TOLERANCE


def test_a_captured_graph_follows_widths_routing_and_tokens(cupy, rng):
    shape = MoeShape(experts=8, hidden=512, intermediate=96, top_k=2)
    sample = tiled_sample(rng, shape, [6] * 16, resident_bits=[8] * 16)
    pages = uploaded(cupy, sample)
    step = MoeTileLayer(shape, pages, max_tokens=4, target="gpu")
    x, out = cupy.zeros((4, 512), np.float32), cupy.zeros((4, 512), np.float32)
    index, gate = cupy.zeros((4, 2), np.int32), cupy.zeros((4, 2), np.float32)
    index[:, 1] = 1
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        step(0, x, index, gate, out)  # kernels are loaded before the capture
        stream.synchronize()
        stream.begin_capture()
        step(0, x, index, gate, out)
        graph = stream.end_capture()
    for _ in range(6):
        sample.bits[:] = rng.integers(2, 9, 16)
        host_x = rng.standard_normal((4, 512)).astype(np.float32)
        host_index, host_gate = routing(rng, 4, shape)
        pages.bits.set(sample.bits)
        x.set(host_x)
        index.set(host_index)
        gate.set(host_gate)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = expected(sample, host_x, host_index, host_gate)
        assert relative_error(cupy.asnumpy(out), want) < TOLERANCE


def test_equal_inputs_give_equal_bits(cupy, rng):
    shape = MoeShape(experts=4, hidden=512, intermediate=96, top_k=3)
    sample = tiled_sample(rng, shape, [3, 5] * 4)
    step = MoeTileLayer(shape, uploaded(cupy, sample), max_tokens=64, target="gpu")
    x = cupy.asarray(rng.standard_normal((64, 512)).astype(np.float32))
    index, gate = map(cupy.asarray, routing(rng, 64, shape))
    results = []
    for _ in range(5):
        out = cupy.zeros(x.shape, np.float32)
        step(0, x, index, gate, out)
        results.append(cupy.asnumpy(out))
    assert all(np.array_equal(results[0], r) for r in results)


def test_every_variant_is_one_that_the_launcher_asks_for():
    names = {
        expression for *_, expressions in moe_tile.kernel_variants() for expression in expressions
    }
    for tokens in (1, 4, 5, 8, 9, 16, 17, 64, 65, 500):
        for module in ("gate_up", "down"):
            assert moe_tile.tile_expression(module, tokens) in names
