"""Simulated cycle times against exact laws: the reference cases of the A/F theory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.bundle import Bundle, LatencyCoefficients
from traces.lengths import LengthPairs
from twin.bundle import simulate_saturated
from twin.output_statistics import replications
from twin.saturated_run import SaturatedRun

CASES = [
    case
    for case in json.loads((Path(__file__).parents[1] / "golden" / "afd_cases.json").read_text())
    if case["kind"] == "stochastic bundle"
]
HEAVY = [case for case in CASES if "1/2.5" in case["input"]["workload"]]
LIGHT = [case for case in CASES if case not in HEAVY]
_OUTPUTS = np.arange(1, 20_001)
LAWS = {
    "P=100 fixed; D ~ Geo(1/500) on {1,2,..}": LengthPairs.from_pairs(
        np.full(20_000, 100), _OUTPUTS, (1 - 1 / 500) ** (_OUTPUTS - 1)
    ),
    "P=200; D=100 w.p. .9, 4000 w.p. .1": LengthPairs.from_pairs(
        [200, 200], [100, 4000], [0.9, 0.1]
    ),
    "P=100, D=500, uniform random phases": LengthPairs.from_pairs([100], [500]),
}
_U = (np.arange(400_000) + 0.5) / 400_000
_TAIL = np.floor(300 * (1 - _U) ** (-1 / 2.5)).astype(int)  # never reaches the cap
LAWS["P=200; D=floor(300*(1-u)^(-1/2.5)) capped 200000, u=(i+.5)/400000"] = LengthPairs.from_pairs(
    np.full(len(np.unique(_TAIL)), 200), *np.unique(_TAIL, return_counts=True)
)
# Stationary starts make short runs independent samples: longest output -> steps of a run.
STEPS = {500: 500, 4000: 4000, 20_000: 3000, 68_921: 60}


def simulate(case: dict[str, Any], num_replications: int, **bundle: Any) -> list[SaturatedRun]:
    given, law = case["input"], LAWS[case["input"]["workload"]]
    names = ("attention", "ffn", "communication")
    coefficients = LatencyCoefficients(
        **{f"alpha_{name}": given["hw"][2 * i] for i, name in enumerate(names)},
        **{f"beta_{name}": given["hw"][2 * i + 1] for i, name in enumerate(names)},
        communication="worker" if given["hw"][6] == "B" else "bundle",
    )
    steps = STEPS[int(law.output_tokens.max())]
    return [
        simulate_saturated(
            Bundle(coefficients=coefficients, batch_per_worker=given["B"], **bundle),
            given["r"],
            law,
            seed=2,
            replication=k,
            num_cycles=steps * bundle.get("microbatches", 1),
        )
        for k in range(num_replications)
    ]


def require_close(simulated: list[float], exact: float) -> None:
    """Within 1 %, with a standard error of at most 0.4 % and the truth within four of them.

    Where no noise is left (a stage that never waits), the pipeline's filling shows instead.
    """
    estimate = replications(simulated)
    assert estimate.relative_standard_error <= 0.004
    assert abs(estimate.mean / exact - 1) <= 0.01
    assert abs(estimate.mean - exact) <= 4 * estimate.standard_error + 0.001 * exact


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case["id"])
def test_barrier_cycle_and_throughput_agree_with_the_exact_law(case: dict[str, Any]) -> None:
    runs = simulate(case, 60)
    expected = case["expect"]
    require_close([run.mean_cycle_s for run in runs], expected["tau_exact"])
    require_close([run.throughput_per_instance for run in runs], expected["X_exact"])
    for name, share in (("attention_idle", "idleA"), ("ffn_idle", "idleF")):
        simulated = replications([getattr(run, name) for run in runs])
        error = max(4 * simulated.standard_error, 1e-9)
        assert simulated.mean == pytest.approx(expected[share], abs=error)


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case["id"])
@pytest.mark.parametrize("num_layers", [1, 8])
def test_two_microbatches_in_flight_agree_with_the_exact_law(
    case: dict[str, Any], num_layers: int
) -> None:
    runs = simulate(case, 40, semantics="pingpong", microbatches=2, num_layers=num_layers)
    require_close([run.mean_cycle_s for run in runs], case["expect"]["tau_pingpong2"])


@pytest.mark.slow
@pytest.mark.parametrize("case", HEAVY, ids=lambda case: case["id"])
def test_a_heavy_tail_needs_many_short_runs_and_then_agrees_too(case: dict[str, Any]) -> None:
    runs = simulate(case, 2000)
    require_close([run.mean_cycle_s for run in runs], case["expect"]["tau_exact"])
    runs = simulate(case, 900, semantics="pingpong", microbatches=2, num_layers=8)
    require_close([run.mean_cycle_s for run in runs], case["expect"]["tau_pingpong2"])
