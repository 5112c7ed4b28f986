"""The plain expert layer on a GPU against the reference; graphs replayed over other widths."""

import numpy as np
import pytest

from kernels import reference
from kernels.cuda import shared_table
from kernels.cuda.load import load_kernels
from kernels.cuda.shared_table import SharedTableLayer
from kernels.sample_layer import sample_layer

pytestmark = pytest.mark.gpu


def layer_of(cupy, sample, *, hidden, intermediate, top_k, max_tokens, number_type="float32"):
    return SharedTableLayer(
        load_kernels(shared_table.SOURCE, target="gpu"),
        cupy,
        hidden_size=hidden,
        intermediate=intermediate,
        num_experts=len(sample.blocks) // 2,
        top_k=top_k,
        max_tokens=max_tokens,
        number_type=number_type,
    )


def routing(rng, tokens, top_k, experts):
    index = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    return index, rng.random((tokens, top_k)).astype(np.float32)


def relative_error(got, want) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("tokens", [1, 16, 40, 200])
def test_every_width_equals_the_reference(cupy, on_device, rng, bits, tokens):
    sample = sample_layer(rng, hidden_size=1000, intermediate=352, bits=[bits] * 8, page_bytes=4096)
    step = layer_of(cupy, sample, hidden=1000, intermediate=352, top_k=2, max_tokens=tokens)
    x = rng.standard_normal((tokens, 1000)).astype(np.float32)
    index, gate = routing(rng, tokens, 2, 4)
    out = cupy.full(x.shape, np.nan, np.float32)
    step(*map(cupy.asarray, (x, index, gate)), on_device(sample), 0, out)
    want = reference.moe_layer(x, index, gate, *sample.weights(), "silu")
    assert relative_error(cupy.asnumpy(out), want) < 1e-5


@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (1, 1), (545, 31), (2048, 1408)])
def test_odd_sizes_and_mixed_widths_in_half_precision(cupy, on_device, rng, hidden, intermediate):
    sample = sample_layer(
        rng, hidden_size=hidden, intermediate=intermediate, bits=[2, 7, 5, 3, 8, 4]
    )
    step = layer_of(
        cupy,
        sample,
        hidden=hidden,
        intermediate=intermediate,
        top_k=2,
        max_tokens=24,
        number_type="float16",
    )
    x = rng.standard_normal((24, hidden)).astype(np.float16)
    index, gate = routing(rng, 24, 2, 3)
    out = cupy.zeros(x.shape, np.float16)
    step(*map(cupy.asarray, (x, index, gate)), on_device(sample), 0, out)
    want = reference.moe_layer(x, index, gate, *sample.weights(), "silu")
    assert relative_error(cupy.asnumpy(out).astype(np.float64), want) < 1e-3


def test_a_captured_graph_follows_widths_routing_and_tokens(cupy, on_device, rng):
    """Captured once; between replays only the contents of device arrays change."""
    sample = sample_layer(
        rng,
        hidden_size=512,
        intermediate=96,
        bits=[6] * 16,
        resident_bits=[8] * 16,
        page_bytes=4096,
    )
    step = layer_of(cupy, sample, hidden=512, intermediate=96, top_k=2, max_tokens=4)
    pages = on_device(sample)
    x, out = cupy.zeros((4, 512), np.float32), cupy.zeros((4, 512), np.float32)
    index, gate = cupy.zeros((4, 2), np.int32), cupy.zeros((4, 2), np.float32)
    index[:, 1] = 1
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step(x, index, gate, pages, 0, out)  # kernels are loaded before the capture
        stream.synchronize()
        stream.begin_capture()
        step(x, index, gate, pages, 0, out)
        graph = stream.end_capture()
    for _ in range(6):
        sample.bits[:] = rng.integers(2, 9, 16)
        host_x = rng.standard_normal((4, 512)).astype(np.float32)
        host_index, host_gate = routing(rng, 4, 2, 8)
        pages.bits.set(sample.bits)
        x.set(host_x)
        index.set(host_index)
        gate.set(host_gate)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = reference.moe_layer(host_x, host_index, host_gate, *sample.weights(), "silu")
        assert relative_error(cupy.asnumpy(out), want) < 1e-5


def test_equal_inputs_give_equal_bits(cupy, on_device, rng):
    sample = sample_layer(rng, hidden_size=512, intermediate=96, bits=[3, 5] * 4)
    step = layer_of(cupy, sample, hidden=512, intermediate=96, top_k=3, max_tokens=64)
    x = cupy.asarray(rng.standard_normal((64, 512)).astype(np.float32))
    index, gate = map(cupy.asarray, routing(rng, 64, 3, 4))
    results = []
    pages = on_device(sample)
    for _ in range(5):
        out = cupy.zeros(x.shape, np.float32)
        step(x, index, gate, pages, 0, out)
        results.append(cupy.asnumpy(out))
    assert all(np.array_equal(results[0], r) for r in results)


def test_the_gpu_and_the_emulation_agree(cupy, on_device, rng):
    sample = sample_layer(rng, hidden_size=96, intermediate=40, bits=[2, 8, 4, 6])
    x = rng.standard_normal((5, 96)).astype(np.float32)
    index, gate = routing(rng, 5, 2, 2)
    results = []
    for xp, target, pages in (
        (cupy, "gpu", on_device(sample)),
        (
            np,
            "emulation",
            shared_table.DevicePages(
                sample.arena,
                sample.page_bytes,
                sample.min_bits,
                sample.bits,
                sample.plane_pages,
                sample.table_pages,
            ),
        ),
    ):
        step = SharedTableLayer(
            load_kernels(shared_table.SOURCE, target=target),
            xp,
            hidden_size=96,
            intermediate=40,
            num_experts=2,
            top_k=2,
            max_tokens=5,
            number_type="float32",
        )
        out = xp.zeros((5, 96), np.float32)
        step(xp.asarray(x), xp.asarray(index), xp.asarray(gate), pages, 0, out)
        results.append(out if xp is np else cupy.asnumpy(out))
    assert relative_error(*results) < 1e-5
