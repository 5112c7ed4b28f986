"""Cold starts against a slot-by-slot simulation and the geometric closed form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.cold_start import (
    cold_start_load,
    geometric_horizon_load,
    horizon_load,
    settling_steps,
)
from models.slot_load import slot_moments
from models.streams import stream
from traces import length_laws
from traces.lengths import LengthPairs


def by_recursion(lengths: LengthPairs, num_steps: int) -> list[float]:
    """y_k = E[(P + k) 1{D > k}] + sum_d P(D = d) y_(k-d), term by term."""
    load: list[float] = []
    for k in range(num_steps):
        value = 0.0
        for p, d, w in zip(
            lengths.prompt_tokens, lengths.output_tokens, lengths.weight, strict=True
        ):
            value += w * (p + k) if d > k else w * load[k - d]
        load.append(value)
    return load


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), min_size=1, max_size=5),
    st.integers(1, 70),
)
@settings(max_examples=50, deadline=None)
def test_power_series_solves_the_renewal_equation(rows: list[tuple[int, int]], steps: int) -> None:
    prompts, outputs = zip(*rows, strict=True)
    lengths = LengthPairs.from_pairs(prompts, outputs)
    assert cold_start_load(lengths, steps) == pytest.approx(by_recursion(lengths, steps), abs=1e-9)


def test_geometric_outputs_settle_exponentially() -> None:
    p = 0.01
    outputs = np.arange(1, 6000)
    lengths = LengthPairs.from_pairs(np.full(5999, 40), outputs, (1 - p) ** (outputs - 1))
    load = cold_start_load(lengths, 2000)
    expected = 40 + (1 - p) / p * (1 - (1 - p) ** np.arange(2000))
    assert load == pytest.approx(expected, rel=1e-9)
    steps, mean = geometric_horizon_load(40, p, 2000 * 8 * p, 8)
    assert steps == 2000
    assert horizon_load(lengths, 2000) == pytest.approx(mean, rel=1e-9)


def test_fixed_outputs_run_in_phase_for_ever() -> None:
    lengths = length_laws.fixed(10, 4)
    assert cold_start_load(lengths, 9) == pytest.approx([10, 11, 12, 13, 10, 11, 12, 13, 10])
    assert settling_steps(lengths, 0.01, 4000) is None


def test_mean_load_equals_that_of_simulated_slots() -> None:
    """20,000 slots with correlated lengths; the mean within four standard errors at every step."""
    rng = stream(2, "cold")
    prompts, outputs = np.array([5, 60, 200]), np.array([3, 17, 40])
    share = np.array([0.5, 0.3, 0.2])
    lengths = LengthPairs.from_pairs(prompts, outputs, share)
    kind = rng.choice(3, 20_000, p=share)
    age = np.zeros(20_000, dtype=np.int64)
    load = cold_start_load(lengths, 120)
    for k in range(120):
        held = prompts[kind] + age
        assert abs(held.mean() - load[k]) <= 4.5 * held.std() / 20_000**0.5 + 1e-9
        age += 1
        done = age == outputs[kind]
        kind[done] = rng.choice(3, int(done.sum()), p=share)
        age[done] = 0


def test_cold_load_tends_to_theta() -> None:
    lengths = LengthPairs.from_pairs([3, 9], [7, 4])
    theta = slot_moments(lengths).theta_tokens
    assert cold_start_load(lengths, 3000)[-1] == pytest.approx(theta, rel=1e-9)
    settled = settling_steps(lengths, 0.01, 3000)
    assert settled is not None
    load = cold_start_load(lengths, 3000)
    assert np.all(np.abs(load[settled:] / theta - 1) <= 0.01)
    assert abs(load[settled - 1] / theta - 1) > 0.01


@pytest.mark.parametrize(("p", "n", "b"), [(0.0, 5, 2), (1.2, 5, 2), (0.5, 0, 2), (0.5, 5, 0)])
def test_impossible_horizons_are_errors(p: float, n: int, b: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        geometric_horizon_load(100, p, n, b)


def test_no_steps_are_an_error() -> None:
    with pytest.raises(ValueError, match="num_steps must be >= 1"):
        cold_start_load(length_laws.fixed(1, 1), 0)
