"""KV capacity and time per token: the largest that fits, and nothing larger."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.bundle import Bundle, LatencyCoefficients
from models.constraints import kv_tokens_needed, largest_batch, ratios_within, tpot_s
from models.slot_load import slot_moments
from models.streams import stream
from traces import length_laws
from traces.lengths import LengthPairs


def bundle(batch: int, microbatches: int = 1, num_layers: int = 1) -> Bundle:
    return Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=1.0, beta_attention=1.0, alpha_ffn=1.0, beta_ffn=1.0
        ),
        batch_per_worker=batch,
        microbatches=microbatches,
        num_layers=num_layers,
    )


@given(
    st.floats(0.0, 1e8),
    st.integers(1, 5),
    st.floats(0.0, 6.0),
    st.integers(0, 5000),
    st.integers(1, 3000),
)
@settings(max_examples=200, deadline=None)
def test_largest_batch_fits_and_one_more_does_not(
    capacity: float, microbatches: int, z: float, prompt: int, output: int
) -> None:
    moments = slot_moments(LengthPairs.from_pairs([prompt, prompt + 9], [output, output + 3]))
    best = largest_batch(capacity, moments, microbatches, z)
    assert best is not None
    if best > 0:
        assert kv_tokens_needed(bundle(best, microbatches), moments, z) <= capacity
    assert kv_tokens_needed(bundle(best + 1, microbatches), moments, z) > capacity


def test_exact_capacity_fits() -> None:
    """Ten slots of exactly 40 tokens in 400."""
    moments = slot_moments(LengthPairs.from_pairs([40], [1]))
    assert largest_batch(400, moments, 1) == 10
    assert largest_batch(399.9, moments, 1) == 9
    assert largest_batch(400, moments, 3) == 3


def test_empty_slots_have_no_limit() -> None:
    moments = slot_moments(LengthPairs.from_pairs([0], [1]))
    assert largest_batch(400, moments, 1) is None


def test_three_standard_deviations_are_rarely_exceeded() -> None:
    lengths = length_laws.geometric(100, 500)
    moments = slot_moments(lengths)
    prompt, _, age = lengths.sample_in_service(stream(6, "kv"), 4000 * 128)
    held = (prompt + age).reshape(4000, 128).sum(axis=1)
    share = np.mean(held > kv_tokens_needed(bundle(64, 2), moments, 3.0))
    assert share < 0.006


def test_a_token_needs_m_cycles_in_each_layer() -> None:
    assert tpot_s(bundle(4, 3, 61), [0.5, 2.0]).tolist() == [91.5, 366.0]


def test_ratios_within_a_limit_keep_their_order() -> None:
    ratios = np.array([4, 1, 3, 2])
    assert ratios_within(ratios, np.array([0.4, 0.1, 0.3, 0.2]), 0.3).tolist() == [1, 3, 2]


def test_impossible_capacities_are_errors() -> None:
    moments = slot_moments(LengthPairs.from_pairs([40], [1]))
    for capacity, microbatches in ((-1.0, 1), (float("nan"), 1), (10.0, 0)):
        with pytest.raises(ValueError, match="capacity_tokens must be >= 0"):
            largest_batch(capacity, moments, microbatches)
