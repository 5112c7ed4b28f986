"""The tensor-core expert kernels, emulated: whole numbers exact, sums near the reference."""

import numpy as np
import pytest

from kernels import reference
from kernels.cuda.decode_tables import device_table, round_table, rounded_table
from kernels.cuda.moe_tile import DevicePages, MoeShape, MoeTileLayer, Tiling
from kernels.cuda.tile_layout import tile_planes
from kernels.cuda_emulation import emulator
from kernels.planes import unpack_codes
from kernels.sample_layer import SampleLayer, sample_layer

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
TOLERANCE = 1e-3


def tiled_sample(rng, shape: MoeShape, bits, *, page_bytes=1024, resident_bits=None):
    tiles = (shape.gate_up, shape.down)
    return sample_layer(
        rng,
        hidden_size=shape.hidden,
        intermediate=shape.intermediate,
        bits=bits,
        resident_bits=resident_bits,
        page_bytes=page_bytes,
        plane_stream=lambda module, planes: tile_planes(planes, tiles[module]),
        table_stream=lambda module, table, q: device_table(table, q, tiles[module]),
    )


def device_pages(sample: SampleLayer) -> DevicePages:
    return DevicePages(
        sample.arena,
        sample.page_bytes,
        sample.min_bits,
        sample.bits,
        sample.plane_pages,
        sample.table_pages,
    )


def routing(rng, tokens, shape: MoeShape):
    order = np.argsort(rng.random((tokens, shape.experts)), axis=1)
    gate = rng.random((tokens, shape.top_k)).astype(np.float32)
    return order[:, : shape.top_k].astype(np.int32), gate


def weights_of(sample: SampleLayer):
    """Reference weights with the tables the device holds."""
    weights = []
    for block, q in zip(sample.blocks, sample.bits.tolist(), strict=True):
        table = rounded_table(block.tables[q], q)
        weights.append(reference.dequantize(block.planes, table, q, block.columns))
    return weights[0::2], weights[1::2]


def expected(sample, x, index, gate, activation="silu", **kwargs):
    """The reference; choices outside the experts count as weight 0."""
    known = (index >= 0) & (index < len(sample.blocks) // 2)
    return reference.moe_layer(
        x, np.where(known, index, 0), np.where(known, gate, 0), *weights_of(sample), activation,
        **kwargs,
    )  # fmt: skip


def relative_error(got, want) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def run(sample, shape, tokens, *, seed=1, index=None, max_tokens=None, **options):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, shape.hidden)).astype(np.float32)
    chosen, gate = routing(rng, tokens, shape)
    index = chosen if index is None else index
    step = MoeTileLayer(
        shape, device_pages(sample), max_tokens=max_tokens or tokens, target="emulation", **options
    )
    out = np.full(x.shape, np.nan, np.float32)
    step(0, x, index, gate, out)
    return out, expected(sample, x, index, gate, shape.activation), step


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_width_equals_the_reference(bits):
    shape = MoeShape(experts=2, hidden=300, intermediate=150, top_k=1)
    sample = tiled_sample(np.random.default_rng(bits), shape, [bits] * 4)
    for tokens in (2, 7, 40):
        got, want, _ = run(sample, shape, tokens)
        assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize("schedule", [0, 1, 2, 3])
@pytest.mark.parametrize("tokens", [3, 6, 14, 37])
def test_mixed_widths_in_one_launch(tokens, schedule):
    shape = MoeShape(experts=4, hidden=272, intermediate=100, top_k=2)
    sample = tiled_sample(np.random.default_rng(7), shape, [2, 8, 3, 7, 4, 6, 5, 2])
    got, want, _ = run(sample, shape, tokens, schedule=schedule)
    assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 9, 12, 16, 17, 33, 40])
def test_all_tokens_may_choose_one_expert(tokens):
    shape = MoeShape(experts=3, hidden=140, intermediate=40, top_k=1)
    sample = tiled_sample(np.random.default_rng(tokens), shape, [4, 6, 3, 2, 8, 5])
    index = np.full((tokens, 1), tokens % 3, np.int32)
    got, want, _ = run(sample, shape, tokens, index=index)
    assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [(1, 1), (33, 17), (128, 16), (129, 31), (545, 9), (704, 24), (40, 520)],
)
def test_odd_sizes(hidden, intermediate):
    shape = MoeShape(3, hidden, intermediate, top_k=2, activation="gelu_tanh")
    sample = tiled_sample(np.random.default_rng(hidden), shape, [2, 7, 5, 3, 8, 4])
    for tokens in (3, 20):
        got, want, _ = run(sample, shape, tokens)
        assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize("page_bytes", [1024, 2048, 32768])
@pytest.mark.parametrize("tiling", [(2, 2), (4, 1), (8, 0), (2, 3), (8, 3)])
def test_page_sizes_and_tilings(page_bytes, tiling):
    shape = MoeShape(experts=2, hidden=1300, intermediate=90, top_k=2)
    sample = tiled_sample(np.random.default_rng(5), shape, [3, 8, 5, 7], page_bytes=page_bytes)
    got, want, _ = run(sample, shape, 2, tilings=(Tiling(*tiling), Tiling(*tiling)))
    assert relative_error(got, want) < TOLERANCE


def test_several_rounds_of_sixty_four_tokens():
    shape = MoeShape(experts=2, hidden=390, intermediate=140, top_k=1)
    sample = tiled_sample(np.random.default_rng(5), shape, [4, 7, 2, 5])
    index = (np.arange(150) % 10 == 0).astype(np.int32)[:, None]  # 135 and 15 tokens
    got, want, _ = run(sample, shape, 150, index=index)
    assert relative_error(got, want) < TOLERANCE


# ---------------------------------------------------------------- whole numbers


def whole_numbers(x):
    """[..., U, 256] integers from the int8 terms [..., U, 512] of the device."""
    terms = x.astype(np.int64).reshape(*x.shape[:-1], 4, 4, 2, 2, 2, 4)
    whole = 128 * terms[..., :, :, 0, :, :, :] + terms[..., :, :, 1, :, :, :]
    return np.moveaxis(whole, -4, -2).reshape(*x.shape[:-1], 256)


def device_sums(x, x_scales, block, bits, split):
    """[slots, N], float32: the device's own sums, from exact whole numbers, operation by operation.

    int64 within a unit of 256 columns, one conversion, then float32 in the order of the units of
    each warp's share, the row's scale, and the shares in order.
    """
    values, scales = round_table(block.tables[bits], bits)
    codes = unpack_codes(block.planes[:bits], block.columns).astype(np.intp)
    weights = np.take_along_axis(values.astype(np.int64), codes, axis=1)
    units = x.shape[1]
    padded = np.zeros((len(weights), units * 256), np.int64)
    padded[:, : block.columns] = weights
    whole = whole_numbers(x)
    total = np.zeros((len(x), len(weights)), np.float32)
    for part in range(split):
        share = np.zeros_like(total)
        for unit in range(units * part // split, units * (part + 1) // split):
            w = padded[:, 256 * unit : 256 * (unit + 1)]
            if bits <= 5:
                exact = (whole[:, unit] @ w.T).astype(np.float32)
            else:
                low = ((w + 64) & 127) - 64
                high = (whole[:, unit] @ ((w - low) >> 7).T).astype(np.float32)
                exact = np.float32(128) * high + (whole[:, unit] @ low.T).astype(np.float32)
            share += x_scales[:, unit, None] * exact
        total = total + scales * share if part else scales * share
    return total


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("tokens", [4, 8, 15, 50])
def test_the_integer_part_is_exact(bits, tokens):
    shape = MoeShape(experts=1, hidden=60, intermediate=900, top_k=1)
    sample = tiled_sample(np.random.default_rng(bits), shape, [2, bits])
    x = np.random.default_rng(0).standard_normal((tokens, 60)).astype(np.float32)
    tilings = (Tiling(8, 0), Tiling(8, 2))
    step = MoeTileLayer(
        shape, device_pages(sample), max_tokens=tokens, target="emulation", tilings=tilings
    )
    out = np.zeros_like(x)
    step(0, x, np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32), out)
    least_split = {6: 2, 7: 4, 8: 8}.get(bits, 1)
    split = 1 if tokens > 16 else max(4, least_split)
    want = device_sums(step._h, step._h_scales, sample.blocks[1], bits, split)
    assert np.array_equal(out, want), "to the last bit"


# ---------------------------------------------------------------- routing, determinism, replay


def test_experts_without_tokens_and_tokens_without_experts():
    shape = MoeShape(experts=6, hidden=130, intermediate=40, top_k=2)
    sample = tiled_sample(np.random.default_rng(3), shape, [3, 5] * 6)
    index = np.array([[5, -1], [-1, 6], [5, 2]], np.int32)
    got, want, _ = run(sample, shape, 3, index=index)
    assert relative_error(got, want) < TOLERANCE
    assert not got[1].any()
    none, _, _ = run(sample, shape, 3, index=np.full((3, 2), -1, np.int32))
    assert not none.any()


@pytest.mark.parametrize("tokens", [6, 20])
def test_grids_and_schedules_give_the_same_bits(tokens):
    shape = MoeShape(experts=4, hidden=330, intermediate=100, top_k=3)
    sample = tiled_sample(np.random.default_rng(9), shape, [2, 5, 8, 3, 4, 6, 7, 4])
    first, want, _ = run(sample, shape, tokens, grid=1)
    assert relative_error(first, want) < TOLERANCE
    for grid, schedule in [(2, 1), (5, 2), (40, 3), (3, 4)]:
        again, _, _ = run(sample, shape, tokens, grid=grid, schedule=schedule)
        assert np.array_equal(first, again)


def test_widths_pages_and_routing_may_change_between_calls():
    # as under a captured graph: the same launcher, buffers and addresses, new contents
    shape = MoeShape(experts=3, hidden=150, intermediate=40, top_k=2)
    sample = tiled_sample(np.random.default_rng(2), shape, [8] * 6, resident_bits=[8] * 6)
    step = MoeTileLayer(shape, device_pages(sample), max_tokens=7, target="emulation")
    rng = np.random.default_rng(4)
    for tokens in (7, 1, 4):
        sample.bits[:] = rng.integers(2, 9, 6)
        x = rng.standard_normal((tokens, 150)).astype(np.float32)
        index, gate = routing(rng, tokens, shape)
        out = np.full_like(x, np.nan)
        step(0, x, index, gate, out)
        assert relative_error(out, expected(sample, x, index, gate)) < TOLERANCE


def test_planes_above_the_width_are_not_read():
    shape = MoeShape(experts=2, hidden=150, intermediate=40, top_k=2)
    sample = tiled_sample(np.random.default_rng(2), shape, [3, 6, 4, 2])  # nothing else resident
    for block, q in enumerate(sample.bits):
        assert (sample.plane_pages[block, q:] == -1).all()
    sample.plane_pages[sample.plane_pages == -1] = 2**30  # an access would end the test
    sample.table_pages[sample.table_pages == -1] = 2**30
    got, want, _ = run(sample, shape, 5)
    assert relative_error(got, want) < TOLERANCE


def test_layers_token_types_and_expert_scales():
    shape = MoeShape(experts=2, hidden=150, intermediate=40, top_k=2)
    rng = np.random.default_rng(8)
    sample = tiled_sample(rng, shape, [3, 6, 4, 2, 5, 8, 7, 3])  # two layers
    step = MoeTileLayer(shape, device_pages(sample), max_tokens=4, target="emulation")
    assert step.layers == 2
    scale = np.array([0.5, 3], np.float32)
    gate_up, down = weights_of(sample)
    index, gate = routing(rng, 3, shape)
    exact = rng.standard_normal((3, 150)).astype(np.float32)
    rounded = (exact.view(np.uint32) >> 16).astype(np.uint16)
    for tokens, x in [
        (exact, exact),
        (exact.astype(np.float16), exact.astype(np.float16)),
        (rounded, (rounded.astype(np.uint32) << 16).view(np.float32)),
    ]:
        for layer in (0, 1):
            out = np.full((3, 150), np.nan, np.float32)
            step(layer, tokens, index, gate, out, expert_scale=scale)
            of = slice(2 * layer, 2 * layer + 2)
            want = reference.moe_layer(
                x, index, gate, gate_up[of], down[of], "silu", expert_scale=scale
            )
            assert relative_error(out, want) < TOLERANCE


def test_nan_of_one_token_stays_with_it():
    shape = MoeShape(experts=2, hidden=300, intermediate=40, top_k=1)
    sample = tiled_sample(np.random.default_rng(3), shape, [3, 6, 4, 2])
    x = np.random.default_rng(1).standard_normal((3, 300)).astype(np.float32)
    x[1, 299] = np.nan
    step = MoeTileLayer(shape, device_pages(sample), max_tokens=3, target="emulation")
    out = np.zeros_like(x)
    step(0, x, np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32), out)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


def test_no_undefined_behaviour():
    shape = MoeShape(experts=3, hidden=140, intermediate=40, top_k=2)
    sample = tiled_sample(np.random.default_rng(6), shape, [2, 8, 3, 7, 4, 5])
    got, want, _ = run(sample, shape, 3, ubsan=True)
    assert relative_error(got, want) < TOLERANCE


# ---------------------------------------------------------------- arguments


def test_wrong_arguments_are_one_clear_line():
    shape = MoeShape(experts=2, hidden=64, intermediate=16, top_k=2)
    sample = tiled_sample(np.random.default_rng(1), shape, [3, 3, 3, 3])
    pages = device_pages(sample)
    step = MoeTileLayer(shape, pages, max_tokens=4, target="emulation")
    x, index = np.zeros((3, 64), np.float32), np.zeros((3, 2), np.int32)
    gate, out = np.zeros((3, 2), np.float32), np.zeros((3, 64), np.float32)
    bad = [
        ((0, x[:, :60], index, gate, out), r"tokens must be contiguous float32 \[3, 64\]"),
        ((0, x.astype(np.float64), index, gate, out), "tokens must be float32, float16"),
        ((0, x, index.astype(np.int64), gate, out), r"expert_index must be contiguous int32"),
        ((0, x, index, gate[:, :1], out), r"gate_weight .* \[3, 2\]"),
        ((0, x, index, gate, out[::-1]), "out must be contiguous"),
        ((1, x, index, gate, out), r"layer must be 0\.\.0, found 1"),
        ((0, np.zeros((5, 64), np.float32), index, gate, out), r"tokens must be \[1\.\.4, 64\]"),
    ]
    for arguments, message in bad:
        with pytest.raises(ValueError, match=message):
            step(*arguments)
    for problem, message in [
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"max_tokens": 20, "tilings": (Tiling(4, 1), Tiling(8, 0))}, "more than 16 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            MoeTileLayer(shape, pages, target="emulation", **{"max_tokens": 4, **problem})
    with pytest.raises(ValueError, match="whole layers of 6 blocks: 4"):
        MoeTileLayer(MoeShape(3, 64, 16, 2), pages, max_tokens=4, target="emulation")
    with pytest.raises(ValueError, match="plane_pages needs"):
        MoeTileLayer(MoeShape(2, 5000, 160, 2), pages, max_tokens=4, target="emulation")
    with pytest.raises(ValueError, match="8 >> split_log2 must divide"):
        Tiling(2, 1)
    with pytest.raises(ValueError, match=r"experts must be 1\.\.2048"):
        MoeShape(0, 1, 1, 1)
    with pytest.raises(ValueError, match="top_k must be"):
        MoeShape(2, 1, 1, 3)
