"""Short runs with microbatches in flight stay within what their resources can do."""

from typing import Any

import numpy as np
import pytest

from models.bundle import Bundle, LatencyCoefficients
from traces.length_laws import geometric
from traces.lengths import LengthPairs
from twin.bundle import simulate_saturated
from twin.cycle_log import period_series

COEFFICIENTS = LatencyCoefficients(
    alpha_attention=0.00165,
    beta_attention=50,
    alpha_ffn=0.083,
    beta_ffn=100,
    alpha_communication=0.022,
    beta_communication=20,
)


def bundle_with(microbatches: int, num_layers: int) -> Bundle:
    return Bundle(
        coefficients=COEFFICIENTS,
        batch_per_worker=8,
        semantics="pingpong",
        microbatches=microbatches,
        num_layers=num_layers,
    )


@pytest.mark.parametrize("engine", ["simpy", "auto"])
@pytest.mark.parametrize("num_layers", [1, 4, 61])
def test_no_run_is_faster_than_its_ffn_however_short(num_layers: int, engine: Any) -> None:
    law = geometric(10, 20)
    for microbatches in range(2, 9):
        for num_cycles in (1, 5, 20, 43):
            run = simulate_saturated(
                bundle_with(microbatches, num_layers),
                40,
                law,
                seed=3,
                num_cycles=num_cycles,
                engine=engine,
            )
            assert len(run.cycle_s) == num_cycles
            assert run.cycle_s.min() >= run.ffn_s[0] * (1 - 1e-12)
            assert run.ffn_idle >= -1e-12


@pytest.mark.parametrize("num_layers", [1, 4])
def test_constant_loads_have_the_period_of_the_pipeline_from_the_first_cycle_on(
    num_layers: int,
) -> None:
    law = LengthPairs.from_pairs([20_000], [1])  # one token each: the load never changes
    run = simulate_saturated(bundle_with(3, num_layers), 4, law, seed=3, num_cycles=7)
    attention_s = 0.00165 * 8 * 20_000 + 50  # the slowest of attention, link and FFN
    assert run.cycle_s == pytest.approx(np.full(7, attention_s))


def test_periods_count_from_the_step_before_the_first() -> None:
    periods = period_series(np.array([30.0, 40.0, 60.0]), np.array([10.0, 18.0]), 2)
    assert periods.tolist() == [5.0, 5.5, 7.5]
