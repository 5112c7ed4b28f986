"""Work lists and int8 activations made on the (emulated) device, against numpy."""

import numpy as np
import pytest

from kernels.cuda.load import load_kernels
from kernels.cuda.moe_tile import SCHEDULE_SOURCE
from kernels.cuda_emulation import emulator

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")


def launch(index, bits, tokens, *, experts, groups=2, row_groups=3, first_block=0, sched=0):
    """Run moe_schedule; (plan as named arrays, x, scales, out)."""
    count, top_k = index.shape
    columns = tokens.shape[1]
    units = -(-columns // 256)
    slots = count * top_k + 5  # more than needed
    tickets = experts * groups + row_groups
    plan = np.full(3 * experts + 4 + 2 * slots + tickets, -7, np.int32)
    x = np.zeros((count, units, 512), np.int8)
    scales = np.zeros((count, units), np.float32)
    out = np.full((count, columns), np.nan, np.float32)
    kind = {"float32": 0, "uint16": 1, "float16": 2}[str(tokens.dtype)]
    numbers = (first_block, experts, top_k, slots, groups, tickets, count, columns, units, kind)
    kernel = load_kernels(SCHEDULE_SOURCE, target="emulation", schedule=sched).get_function(
        "moe_schedule"
    )
    arguments = (index, np.asarray(bits, np.int32), plan, tokens, x, scales, out)
    kernel((3,), (256,), (*arguments, *map(np.int32, numbers)), shared_mem=4 * 9 * experts)
    parts = np.split(plan, np.cumsum([1, 2, experts + 1, experts, experts, slots, slots]))
    names = ("active", "queue", "first_slot", "gate_up", "down", "source", "slot", "tickets")
    return dict(zip(names, parts, strict=True)), x, scales, out


def whole_numbers(x):
    """[..., 256] integers from the terms of units [..., 512], by the layout's text."""
    terms = x.astype(np.int64).reshape(*x.shape[:-1], 4, 4, 2, 2, 2, 4)
    whole = 128 * terms[..., :, :, 0, :, :, :] + terms[..., :, :, 1, :, :, :]
    # [pair, t, step, upper, i] to columns 64 pair + 32 step + 16 upper + 4 t + i
    return np.moveaxis(whole, -4, -2).reshape(*x.shape[:-1], 256)


@pytest.mark.parametrize("sched", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("count", "experts", "top_k"), [(1, 1, 1), (5, 4, 2), (40, 3, 2), (130, 60, 4), (33, 300, 8)]
)
def test_slots_are_sorted_by_expert_then_token(count, experts, top_k, sched):
    rng = np.random.default_rng(count)
    index = np.argsort(rng.random((count, experts)), axis=1)[:, :top_k].astype(np.int32)
    index[rng.random(index.shape) < 0.1] = rng.choice([-1, experts, 2**30])
    bits = rng.integers(2, 9, 2 * experts + 6)
    tokens = np.zeros((count, 3), np.float32)
    plan, *_ = launch(index, bits, tokens, experts=experts, first_block=6, sched=sched)
    flat = index.reshape(-1)
    valid = (flat >= 0) & (flat < experts)
    counts = np.bincount(flat[valid], minlength=experts)
    order = np.argsort(np.where(valid, flat, experts), kind="stable")[: valid.sum()]
    assert np.array_equal(plan["first_slot"], np.concatenate([[0], np.cumsum(counts)]))
    assert np.array_equal(plan["source"][: len(order)], order)
    slot = np.full(flat.size, -1)
    slot[order] = np.arange(len(order))
    assert np.array_equal(plan["slot"][: flat.size], slot)
    assert not plan["queue"].any() and not plan["tickets"].any()
    active = np.flatnonzero(counts)
    assert plan["active"][0] == len(active)
    for module, name in enumerate(("gate_up", "down")):
        q = bits[6 + 2 * active + module]
        many = counts[active] > 16
        key = np.where(many, 16 + counts[active], q)
        codes = active << 5 | many << 4 | q
        assert np.array_equal(plan[name][: len(active)], codes[np.argsort(-key, kind="stable")]), (
            "most work first, ties by expert"
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
@pytest.mark.parametrize("columns", [1, 255, 256, 700])
def test_activations_hold_fifteen_bits_of_each_unit(dtype, columns):
    rng = np.random.default_rng(columns)
    exact = rng.standard_normal((3, columns)).astype(np.float32)
    exact[0, 0] = 60.0  # an outlier costs its own unit alone
    if dtype == "bfloat16":
        tokens = (exact.view(np.uint32) >> 16).astype(np.uint16)
        exact = (tokens.astype(np.uint32) << 16).view(np.float32)
    else:
        tokens = exact.astype(dtype)
        exact = tokens.astype(np.float32)
    index = np.zeros((3, 1), np.int32)
    _, x, scales, out = launch(index, [2, 2], tokens, experts=1)
    units = x.shape[1]
    padded = np.zeros((3, units * 256), np.float32)
    padded[:, :columns] = exact
    padded = padded.reshape(3, units, 256)
    largest = np.abs(padded).max(axis=2)
    assert np.array_equal(scales, largest * np.float32(1 / 16256))
    inverse = np.float32(16256) / largest
    want = np.rint(padded * inverse[:, :, None])
    assert np.array_equal(whole_numbers(x), want.astype(np.int64))
    assert np.abs(want * scales[:, :, None] - padded).max(axis=2) == pytest.approx(
        0, abs=0.502 * float(scales.max())
    )
    assert not out.any()


def test_half_precision_is_read_exactly():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    tokens = np.zeros((len(finite), 2), np.float16)
    tokens[:, 0] = finite
    _, x, scales, _ = launch(np.zeros((len(finite), 1), np.int32), [2, 2], tokens, experts=1)
    whole = whole_numbers(x)[:, 0, 0]
    value = finite.astype(np.float32)
    assert np.array_equal(whole, np.where(value == 0, 0, 16256 * np.sign(value)))
    assert np.array_equal(scales[:, 0], np.abs(value) * np.float32(1 / 16256))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_that_are_not_finite_are_not_hidden(dtype):
    tokens = np.ones((4, 300), dtype)
    tokens[0, 3], tokens[1, 299], tokens[2, 5] = np.nan, np.inf, -np.inf
    _, _, scales, _ = launch(np.zeros((4, 1), np.int32), [2, 2], tokens, experts=1)
    assert np.array_equal(np.isnan(scales[:3]), [[True, False], [False, True], [True, False]])
    assert np.isfinite(scales[3]).all()


def test_units_of_zeros_and_of_denormals_are_zero():
    tokens = np.zeros((2, 256), np.float32)
    tokens[1] = 1e-40
    _, x, scales, _ = launch(np.zeros((2, 1), np.int32), [2, 2], tokens, experts=1)
    assert not x.any() and not scales.any()
