"""Arrays in a log: what is read is what was written, and as small as what has changed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.array_deltas import ArrayDeltas

floats = st.floats(allow_nan=True, width=64)
arrays = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8).map(lambda v: np.array(v, np.int64)),
    st.lists(floats, max_size=8).map(lambda v: np.array(v, np.float64)),
    st.lists(st.booleans(), max_size=8).map(lambda v: np.array(v, np.bool_)),
)


@settings(max_examples=200, deadline=None)
@given(written=st.lists(st.tuples(st.sampled_from(["a", "b"]), arrays), max_size=8))
def test_every_array_is_read_back_bit_for_bit_whatever_came_before(written):
    writer, reader = ArrayDeltas(), ArrayDeltas()
    for name, array in written:
        read = reader.decode(name, writer.encode(name, array))
        assert (read.dtype, read.tobytes()) == (array.dtype, array.tobytes())


def test_only_changed_entries_are_written_unless_most_have_changed():
    writer = ArrayDeltas()
    array = np.zeros(1000)
    array[3] = 0.5
    assert writer.encode("x", array)["changed"] == [3]
    assert writer.encode("x", array)["changed"] == []
    array[[3, 7]] = 2.0
    entry = writer.encode("x", array)
    assert (entry["changed"], entry["values"]) == ([3, 7], [2.0, 2.0])
    assert writer.encode("x", array + 1.0)["changed"] is None


def test_what_the_writer_was_given_may_be_changed_afterwards():
    writer, reader = ArrayDeltas(), ArrayDeltas()
    array = np.arange(5)
    reader.decode("x", writer.encode("x", array))
    array[2] = 9
    assert reader.decode("x", writer.encode("x", array)).tolist() == [0, 1, 9, 3, 4]


@pytest.mark.parametrize("array", [np.zeros((2, 2)), np.array(["a"]), np.zeros(3, np.int32)])
def test_other_arrays_are_refused(array):
    with pytest.raises(ValueError, match="x must be one-dimensional of int64, float64, bool"):
        ArrayDeltas().encode("x", array)
