"""The compiled loops give SimPy's numbers to the last bit."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.bundle import Bundle, LatencyCoefficients
from traces.lengths import LengthPairs
from twin import kernel
from twin.bundle import simulate_saturated

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="numba is not installed"
)

COEFFICIENTS = LatencyCoefficients(
    alpha_attention=0.00165,
    beta_attention=50,
    alpha_ffn=0.083,
    beta_ffn=100,
    alpha_communication=0.022,
    beta_communication=20,
)
RNG = np.random.default_rng(8)
OBSERVED = LengthPairs.from_requests(RNG.integers(0, 90_000, 300), RNG.integers(1, 60, 300))
WEIGHTED = LengthPairs.from_pairs([9, 0, 70_000], [1, 30, 12], [0.6, 0.3, 0.1])
SERIES = (
    "cycle_end_s",
    "cycle_s",
    "max_load_tokens",
    "mean_load_tokens",
    "attention_max_s",
    "attention_mean_s",
    "ffn_s",
    "transfer_s",
    "completed",
    "live_slots",
    "load_samples",
)


@pytest.mark.parametrize("routing", ["random", "round_robin", "least_token_load", "power_of_two"])
@pytest.mark.parametrize(
    ("semantics", "m", "layers"),
    [
        ("barrier", 1, 1),
        ("barrier", 3, 5),
        ("pingpong", 1, 1),
        ("pingpong", 2, 9),
        ("pingpong", 3, 3),
    ],
)
def test_both_engines_give_identical_series(
    routing: str, semantics: Any, m: int, layers: int
) -> None:
    for law, start, r, b in (
        (OBSERVED, "stationary", 5, 16),
        (WEIGHTED, "cold", 3, 130),
        (WEIGHTED, "stationary", 2, 1),
    ):
        bundle = Bundle(
            coefficients=COEFFICIENTS,
            batch_per_worker=b,
            semantics=semantics,
            microbatches=m,
            num_layers=layers,
        )
        simpy, compiled = (
            simulate_saturated(
                bundle, r, law, seed=4, num_cycles=302, routing=routing, start=start, engine=engine
            )
            for engine in ("simpy", "compiled")
        )
        assert (simpy.engine, compiled.engine) == ("simpy", "compiled")
        for name in SERIES:
            left, right = getattr(simpy, name), getattr(compiled, name)
            assert left.dtype == right.dtype, name
            assert np.array_equal(left, right), name
        assert simpy.in_flight == compiled.in_flight


def test_blocks_of_requests_end_at_the_same_place_in_both_engines() -> None:
    # 4 x 3000 slots of one token use 12,000 requests a step: more than a block in two steps.
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=3000)
    law = LengthPairs.from_requests(np.arange(100), np.ones(100))
    runs = [
        simulate_saturated(bundle, 4, law, seed=4, num_cycles=8, routing="power_of_two", engine=e)
        for e in ("simpy", "compiled")
    ]
    assert np.array_equal(runs[0].load_samples, runs[1].load_samples)
    assert runs[0].completed.tolist() == [12_000] * 8


def test_the_notes_say_which_engine_ran_and_why() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=2)

    def notes(engine: Any) -> str:
        run = simulate_saturated(bundle, 2, WEIGHTED, seed=1, num_cycles=3, engine=engine)
        return " ".join(run.notes)

    assert "compiled" in notes("auto")
    assert "as asked" in notes("simpy")


def test_without_numba_the_simpy_engine_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=2)
    monkeypatch.setattr("twin.bundle.missing_because", lambda: "numba is not installed")
    run = simulate_saturated(bundle, 2, WEIGHTED, seed=1, num_cycles=3)
    assert run.engine == "simpy"
    assert "Ran on SimPy's clock: numba is not installed." in run.notes
    with pytest.raises(ValueError, match="engine 'compiled' needs numba"):
        simulate_saturated(bundle, 2, WEIGHTED, seed=1, num_cycles=3, engine="compiled")


def test_a_numba_that_cannot_be_imported_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "numba.py").write_text("raise SystemError('built for another numpy')\n")
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    kernel.missing_because.cache_clear()
    try:
        assert not kernel.is_available()
        bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=2)
        run = simulate_saturated(bundle, 2, WEIGHTED, seed=1, num_cycles=3)
    finally:
        kernel.missing_because.cache_clear()
    assert run.engine == "simpy"
    assert "numba cannot be imported (built for another numpy)" in " ".join(run.notes)


def test_where_machine_code_cannot_be_kept_the_loops_are_compiled_anew() -> None:
    from twin.compiled_steps import compiled

    namespace: dict[str, Any] = {}
    exec("def add(a, b):\n    return a + b", namespace)  # no file, so nowhere to keep a cache
    assert compiled(namespace["add"])(2, 3) == 5
