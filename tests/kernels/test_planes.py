"""Planes of codes: values worked out elsewhere, exact round trips, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kernels.planes import pack_planes, plane_words, unpack_codes

CASES = json.loads(
    (Path(__file__).parent.parent / "golden" / "pagedweight_cases.json").read_text()
)["planes"]


def test_words_are_those_of_the_worked_case():
    codes = np.array(CASES["codes"], dtype=np.uint8)
    words = np.array([[[int(w, 16) for w in row] for row in p] for p in CASES["words_hex"]])
    assert np.array_equal(pack_planes(codes, CASES["parent_bits"]), words)


@pytest.mark.parametrize("bits", [3, 5])
def test_the_first_planes_hold_the_most_significant_bits(bits):
    codes = np.array(CASES["codes"], dtype=np.uint8)
    planes = pack_planes(codes, 8)[:bits]
    assert np.array_equal(unpack_codes(planes, codes.shape[1]), CASES[f"codes_q{bits}"])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), parent_bits=st.integers(1, 8))
def test_unpacking_any_number_of_planes_gives_the_shifted_codes(data, parent_bits):
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 140)))
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**parent_bits - 1)))
    planes = pack_planes(codes, parent_bits)
    assert planes.dtype == np.uint32
    assert planes.shape == (parent_bits, shape[0], plane_words(shape[1]))
    for bits in range(1, parent_bits + 1):
        expected = codes >> (parent_bits - bits)
        assert np.array_equal(unpack_codes(planes[:bits], shape[1]), expected)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), columns=st.integers(1, 100))
def test_packing_unpacked_planes_gives_them_back_with_zero_padding(data, columns):
    shape = (data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3)), plane_words(columns))
    planes = data.draw(hnp.arrays(np.uint32, shape, elements=st.integers(0, 2**32 - 1)))
    last_word = (1 << (columns % 32 or 32)) - 1
    expected = planes.copy()
    expected[..., -1] &= np.uint32(last_word)
    assert np.array_equal(pack_planes(unpack_codes(planes, columns), shape[0]), expected)


def test_an_element_is_at_the_word_and_bit_of_the_definition():
    codes = np.zeros((3, 77), dtype=np.uint8)
    codes[2, 70] = 0b0100
    planes = pack_planes(codes, 4)
    assert planes[1, 2, 70 // 32] == 1 << (70 % 32)
    assert np.count_nonzero(planes) == 1


def test_planes_that_are_not_contiguous_are_read_right():
    codes = np.random.default_rng(1).integers(0, 256, (6, 100), dtype=np.uint8)
    planes = pack_planes(codes, 8)
    assert np.array_equal(unpack_codes(planes[:, ::2], 100), codes[::2])


@pytest.mark.parametrize(
    ("codes", "parent_bits", "message"),
    [
        (np.zeros((2, 2), np.int64), 8, "uint8"),
        (np.zeros(4, np.uint8), 8, r"\[4\]"),
        (np.zeros((0, 4), np.uint8), 8, "N >= 1"),
        (np.full((1, 4), 8, np.uint8), 3, "< 8: 8"),
        (np.zeros((1, 4), np.uint8), 9, "1..8, found 9"),
        (np.zeros((1, 4), np.uint8), 0, "1..8, found 0"),
    ],
)
def test_codes_outside_the_bounds_are_refused(codes, parent_bits, message):
    with pytest.raises(ValueError, match=message):
        pack_planes(codes, parent_bits)


@pytest.mark.parametrize(
    ("planes", "columns", "message"),
    [
        (np.zeros((2, 2, 2), np.int32), 33, "uint32"),
        (np.zeros((2, 2, 2), np.uint32), 65, r"\[>= 2, N >= 1, 3\]"),
        (np.zeros((2, 2), np.uint32), 33, r"\[2, 2\]"),
        (np.zeros((2, 2, 2), np.uint32), 0, "columns must be >= 1"),
        (np.zeros((9, 2, 2), np.uint32), 33, "1..8, found 9"),
    ],
)
def test_planes_that_do_not_fit_are_refused(planes, columns, message):
    with pytest.raises(ValueError, match=message):
        unpack_codes(planes, columns)
