"""The plain expert layer on the emulated device against the numpy reference."""

import numpy as np
import pytest

from kernels import reference
from kernels.cuda import shared_table
from kernels.cuda.load import load_kernels
from kernels.cuda.shared_table import DevicePages, SharedTableLayer
from kernels.cuda_emulation import emulator
from kernels.cuda_emulation.emulator import EmulationError, RawModule
from kernels.cuda_emulation.source_text import read_source
from kernels.sample_layer import SampleLayer, sample_layer

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
SCHEDULES = [0, 1, 2, 3]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def module():
    return load_kernels(shared_table.SOURCE, target="emulation")


def device_pages(layer: SampleLayer) -> DevicePages:
    return DevicePages(
        layer.arena,
        layer.page_bytes,
        layer.min_bits,
        layer.bits,
        layer.plane_pages,
        layer.table_pages,
    )


def routing(rng, tokens: int, top_k: int, experts: int):
    index = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    return index, rng.random((tokens, top_k)).astype(np.float32)


def as_type(values: np.ndarray, number_type: str) -> np.ndarray:
    if number_type != "bfloat16":
        return values.astype(number_type)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_float(values: np.ndarray, number_type: str) -> np.ndarray:
    if number_type != "bfloat16":
        return values.astype(np.float64)
    return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run(module, layer, x, index, gate, *, schedule=0, number_type="float32", **options):
    hidden, intermediate = x.shape[1], layer.blocks[1].columns
    module.schedule = schedule
    tokens = as_type(x, number_type)
    step = SharedTableLayer(
        module,
        np,
        hidden_size=hidden,
        intermediate=intermediate,
        num_experts=len(layer.blocks) // 2,
        top_k=index.shape[1],
        max_tokens=len(x),
        number_type=number_type,
        activation=options.pop("activation", "silu"),
    )
    out = np.full_like(tokens, 0x7E00 if number_type == "bfloat16" else np.nan)
    step(tokens, index, gate, device_pages(layer), 0, out, **options)
    return as_float(tokens, number_type), as_float(out, number_type)


def expected(layer, x, index, gate, activation="silu", expert_scale=None):
    """The reference; a choice outside the experts counts nothing."""
    known = (index >= 0) & (index < len(layer.blocks) // 2)
    args = (x, np.where(known, index, 0), np.where(known, gate, 0), *layer.weights(), activation)
    return reference.moe_layer(*args, expert_scale=expert_scale)


def relative_error(got, want) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_width_equals_the_reference_under_every_schedule(module, bits, schedule):
    rng = np.random.default_rng(10 * bits + schedule)
    layer = sample_layer(rng, hidden_size=96, intermediate=40, bits=[bits] * 4)
    x = rng.standard_normal((3, 96))
    index, gate = routing(rng, 3, 1, 2)
    tokens, got = run(module, layer, x, index, gate, schedule=schedule)
    assert relative_error(got, expected(layer, tokens, index, gate)) < 2e-6


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(33, 17), (1, 1), (545, 31), (64, 704), (100, 65)]
)
def test_odd_sizes_with_a_mix_of_widths(module, hidden, intermediate):
    """Odd words a row, rows that straddle pages, tiles that end in the middle."""
    rng = np.random.default_rng(hidden)
    bits = [2, 7, 5, 3, 8, 4]
    layer = sample_layer(rng, hidden_size=hidden, intermediate=intermediate, bits=bits)
    x = rng.standard_normal((5, hidden))
    index, gate = routing(rng, 5, 2, 3)
    tokens, got = run(module, layer, x, index, gate, schedule=2)
    assert relative_error(got, expected(layer, tokens, index, gate)) < 4e-6


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 40, 131])
def test_token_counts_on_both_sides_of_every_path(module, tokens):
    rng = np.random.default_rng(tokens)
    layer = sample_layer(rng, hidden_size=72, intermediate=24, bits=[4, 6, 3, 8])
    x = rng.standard_normal((tokens, 72))
    index = np.zeros((tokens, 1), np.int32)
    gate = rng.random((tokens, 1)).astype(np.float32)
    read, got = run(module, layer, x, index, gate, schedule=3)
    assert relative_error(got, expected(layer, read, index, gate)) < 4e-6


@pytest.mark.parametrize("number_type", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [4, 20])
def test_number_types_and_activations(module, number_type, activation, tokens):
    rng = np.random.default_rng(7)
    layer = sample_layer(rng, hidden_size=64, intermediate=48, bits=[3, 4, 5, 2, 6, 8])
    x = rng.standard_normal((tokens, 64))
    index, gate = routing(rng, tokens, 2, 3)
    scale = np.array([0.5, 2.0, 1.25], np.float32)
    options = {"activation": activation, "expert_scale": scale}
    read, got = run(module, layer, x, index, gate, number_type=number_type, **options)
    want = expected(layer, read, index, gate, activation, scale)
    rounding = {"float16": TOLERANCE, "bfloat16": 2.0**-8, "float32": 4e-6}[number_type]
    assert relative_error(got, want) < rounding


def test_experts_without_tokens_and_tokens_without_experts(module):
    rng = np.random.default_rng(3)
    layer = sample_layer(rng, hidden_size=64, intermediate=32, bits=[4] * 16)
    x = rng.standard_normal((4, 64))
    index = np.array([[6, 1], [6, -1], [-1, 8], [1, 6]], np.int32)
    gate = rng.random((4, 2)).astype(np.float32)
    layer.bits[8:10] = 0  # an expert nobody asks for may even be absent
    want = expected(
        sample_layer(np.random.default_rng(3), hidden_size=64, intermediate=32, bits=[4] * 16),
        x,
        index,
        gate,
    )
    for schedule in SCHEDULES:
        tokens, got = run(module, layer, x, index, gate, schedule=schedule)
        assert np.abs(got - want).max() < 4e-6 * np.abs(want).max()
        assert not got[2].any()
        assert tokens.dtype == np.float64


def test_results_do_not_depend_on_the_order_of_execution(module):
    rng = np.random.default_rng(4)
    layer = sample_layer(rng, hidden_size=80, intermediate=36, bits=[2, 3, 4, 5, 6, 7])
    x = rng.standard_normal((20, 80))
    index, gate = routing(rng, 20, 3, 3)
    first, *others = [run(module, layer, x, index, gate, schedule=s)[1] for s in SCHEDULES]
    assert all(np.array_equal(first, other) for other in others)


def test_a_lower_width_is_taken_at_the_next_call_with_nothing_else_changed(module):
    """The bit table alone changes between two calls of one captured step."""
    rng = np.random.default_rng(5)
    layer = sample_layer(
        rng, hidden_size=64, intermediate=32, bits=[6, 6, 6, 6], resident_bits=[6, 6, 6, 6]
    )
    x = rng.standard_normal((3, 64))
    index, gate = routing(rng, 3, 1, 2)
    step = SharedTableLayer(
        module,
        np,
        hidden_size=64,
        intermediate=32,
        num_experts=2,
        top_k=1,
        max_tokens=3,
        number_type="float32",
    )
    tokens, out, pages = x.astype(np.float32), np.zeros((3, 64), np.float32), device_pages(layer)
    for widths in ([6, 6, 6, 6], [2, 6, 3, 4], [5, 5, 6, 2]):
        layer.bits[:] = widths
        step(tokens, index, gate, pages, 0, out)
        assert relative_error(out, expected(layer, tokens, index, gate)) < 4e-6


def test_a_width_without_its_table_is_never_a_quiet_zero(module):
    rng = np.random.default_rng(6)
    layer = sample_layer(rng, hidden_size=64, intermediate=32, bits=[4] * 4)
    layer.bits[0] = 0
    x, index = rng.standard_normal((20, 64)), np.zeros((20, 1), np.int32)
    for count in (2, 20):
        gate = np.ones((count, 1), np.float32)
        assert np.isnan(run(module, layer, x[:count], index[:count], gate)[1]).all()


def test_planes_above_the_width_are_not_read(module):
    """They have no page: the address would lie before the arena, in a page without access."""
    rng = np.random.default_rng(8)
    layer = sample_layer(rng, hidden_size=64, intermediate=32, bits=[4] * 4, page_bytes=4096)
    x, index = rng.standard_normal((2, 64)), np.array([[0], [1]], np.int32)
    gate = np.ones((2, 1), np.float32)
    assert (layer.plane_pages[:, 4:] == -1).all()
    run(module, layer, x, index, gate)
    layer.bits[0] = 5
    layer.table_pages[0, 3] = 0
    with pytest.raises(EmulationError, match="illegal memory access"):
        run(module, layer, x, index, gate)


# name: text of the kernel, the same without what makes it right
PLANTED = {
    "no barrier behind the staged tokens": (
        "stage_few(w, count, column0);\n    __syncthreads();",
        "stage_few(w, count, column0);",
    ),
    "no barrier between the counts of two warps": (
        "= __popc(hits);\n    __syncthreads();",
        "= __popc(hits);",
    ),
    "no barrier between the halves of a sum": (
        "for (int half = 0; half < 2; ++half) {\n    __syncthreads();",
        "for (int half = 0; half < 2; ++half) {",
    ),
    "decoded tile overwritten while it is read": (
        "    __syncthreads();\n    decode_chunk(w, weights, column0);",
        "    decode_chunk(w, weights, column0);",
    ),
    "second word of an odd row taken from the next word of the page": (
        "in_b + ((size_t)__ldg(list_b",
        "in_a + 4 + ((size_t)__ldg(list_a",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name):
    """Removed barriers and wrong addresses show as a wrong answer or an error."""
    text, bug = read_source(shared_table.SOURCE), PLANTED[name]
    assert text.count(bug[0]) == 1
    broken = RawModule(code=text.replace(*bug), options=("-DWIDTHS=16",))  # one width: sooner
    rng = np.random.default_rng(9)
    layer = sample_layer(rng, hidden_size=593, intermediate=34, bits=[4] * 4)
    x = rng.standard_normal((40, 593))
    index, gate = (np.arange(40) % 5 == 0).astype(np.int32)[:, None], np.ones((40, 1), np.float32)
    assert any(_is_wrong(broken, layer, x, index, gate, schedule) for schedule in SCHEDULES)


def _is_wrong(module, layer, x, index, gate, schedule) -> bool:
    try:
        tokens, got = run(module, layer, x, index, gate, schedule=schedule)
    except EmulationError:
        return True
    return not relative_error(got, expected(layer, tokens, index, gate)) < TOLERANCE
