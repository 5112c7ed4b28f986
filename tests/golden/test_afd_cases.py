"""Reference cases of the A/F theory, by kind; any further case of these kinds runs as well."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.attention_ffn import (
    exact_law,
    fixed_period,
    geometric_horizon_load,
    kappa,
    optimum,
    predict,
    predict_all,
    regret,
    slot_moments,
)
from models.barrier import gaussian_cycle_s, gaussian_expected_maximum, plug_in_cycle_s
from models.bundle import Bundle, LatencyCoefficients
from models.constraints import tpot_s
from traces import length_laws
from traces.lengths import LengthPairs

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "afd_cases.json").read_text(encoding="utf-8")
)
R_MAX = 32
SIMULATED = 1e-3  # printed ping-pong values were sampled


def of_kind(kind: str) -> pytest.MarkDecorator:
    found = [case for case in CASES if case["kind"] == kind]
    return pytest.mark.parametrize("case", found, ids=[case["id"] for case in found])


def coefficients(hw: list[Any]) -> LatencyCoefficients:
    return LatencyCoefficients(
        alpha_attention=hw[0],
        beta_attention=hw[1],
        alpha_ffn=hw[2],
        beta_ffn=hw[3],
        alpha_communication=hw[4],
        beta_communication=hw[5],
        communication={"B": "worker", "rB": "bundle"}[hw[6]],
    )


def pairs(case_input: dict[str, Any]) -> LengthPairs:
    return LengthPairs.from_pairs(case_input["P"], case_input["D"], case_input["w"])


def workload(text: str) -> LengthPairs:
    """The law a case describes in words."""
    prompt = int(re.match(r"P=(\d+)", text)[1])
    if found := re.search(r"Geo\(1/([\d.]+)\)", text):
        return length_laws.geometric(prompt, float(found[1]))
    if found := re.search(r"floor\((\d+)\*\(1-u\)\^\(-1/([\d.]+)\)\) capped (\d+).*/(\d+)", text):
        return length_laws.pareto(
            prompt, int(found[1]), float(found[2]), int(found[3]), num_quantiles=int(found[4])
        )
    if found := re.findall(r"(\d+) w\.p\. ([\d.]+)", text):
        outputs = [int(d) for d, _ in found]
        return LengthPairs.from_pairs(
            [prompt] * len(outputs), outputs, [float(w) for _, w in found]
        )
    return length_laws.fixed(prompt, int(re.search(r"D=(\d+)", text)[1]))


def test_every_kind_of_case_is_tested() -> None:
    tested = {
        "slot moments from pairs",
        "geometric closed form",
        "v1 finite horizon",
        "kappa_r",
        "mean-field r*",
        "Gaussian barrier",
        "exact order statistic (small lattice)",
        "stochastic bundle",
        "fixed-time ping-pong",
    }
    assert {case["kind"] for case in CASES} == tested


@of_kind("slot moments from pairs")
def test_moments_follow_from_pairs(case: dict[str, Any]) -> None:
    moments = slot_moments(pairs(case["input"]))
    expect = case["expect"]
    assert moments.theta_tokens == pytest.approx(expect["theta"], rel=1e-9)
    assert moments.nu2 == pytest.approx(expect["nu2"], rel=1e-9)
    assert moments.skew == pytest.approx(expect["skew"], rel=1e-9, abs=1e-12)
    assert moments.theta_if_independent == pytest.approx(expect["theta_if_independent"], rel=1e-9)


@of_kind("geometric closed form")
def test_geometric_outputs_have_the_closed_form_moments(case: dict[str, Any]) -> None:
    """P takes three values with the wanted mean and variance; D is cut at 60 mean lengths."""
    mean_p, var_p, p = (case["input"][name] for name in ("muP", "varP", "p"))
    reach = max(1, math.ceil(math.sqrt(var_p)))
    side = var_p / (2 * reach**2)
    prompts = np.array([mean_p - reach, mean_p, mean_p + reach])
    shares = np.array([side, 1.0 - 2.0 * side, side])
    outputs = np.arange(1, int(60 / p))
    weight = np.outer(shares, (1 - p) ** (outputs - 1)).ravel()
    kept = weight > 0.0
    law = LengthPairs.from_pairs(
        np.repeat(prompts, len(outputs))[kept], np.tile(outputs, 3)[kept], weight[kept]
    )
    moments = slot_moments(law)
    assert moments.theta_tokens == pytest.approx(case["expect"]["theta"], rel=1e-9)
    assert moments.nu2 == pytest.approx(case["expect"]["nu2"], rel=1e-9)


@of_kind("v1 finite horizon")
def test_horizon_load_is_the_one_of_the_papers_first_version(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    steps, load = geometric_horizon_load(given["muP"], given["p"], given["N"], given["B"])
    assert steps == pytest.approx(expect["K"], rel=1e-9)
    assert load == pytest.approx(expect["theta_K"], rel=1e-9)


@of_kind("kappa_r")
def test_kappa_is_the_expected_maximum_of_normals(case: dict[str, Any]) -> None:
    found = [kappa(r) for r in case["input"]["r"]]
    assert found == pytest.approx(case["expect"]["kappa"], abs=1e-9)


@of_kind("mean-field r*")
def test_mean_field_optimum_is_the_closed_form(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    bundle = Bundle(coefficients=coefficients(given["hw"]), batch_per_worker=given["B"])
    best = optimum(bundle, given["theta"], r_max=given.get("rmax", R_MAX))
    assert best.r_real == pytest.approx(expect["rstar"], rel=1e-9)
    assert best.r == expect["r_int"]
    assert best.cycle_s == pytest.approx(expect["tau_int"], rel=1e-9)
    assert best.throughput_per_instance == pytest.approx(expect["X_int"], rel=1e-9)
    for name, value in (
        ("rA", best.r_attention),
        ("rC", best.r_communication),
        ("rpeak", best.r_peak),
    ):
        if name in expect:
            assert value == pytest.approx(expect[name], rel=1e-9)
    if "regime" in expect:
        assert best.regime == expect["regime"]


@of_kind("Gaussian barrier")
def test_gaussian_barrier_is_the_papers_integral(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    bundle = Bundle(coefficients=coefficients(given["hw"]), batch_per_worker=given["B"])
    theta, nu, r = given["theta"], math.sqrt(given["nu2"]), given["r"]
    largest = gaussian_expected_maximum(theta, nu, given["B"], r)
    assert largest == pytest.approx(expect["EmaxT"], rel=1e-9)
    assert gaussian_cycle_s(bundle, theta, nu, [r])[0] == pytest.approx(expect["tau"], rel=1e-9)
    plug_in = plug_in_cycle_s(bundle, theta, nu, [r])[0]
    assert plug_in == pytest.approx(expect["tau_plugin"], rel=1e-9)


@of_kind("exact order statistic (small lattice)")
def test_exact_order_statistics_of_a_small_lattice(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    law = exact_law(pairs(given), given["B"])
    assert law.mean_tokens == pytest.approx(expect["ET"], rel=1e-9)
    assert law.sd_tokens**2 == pytest.approx(expect["VarT"], rel=1e-9)
    assert law.expected_maximum([given["r"]])[0] == pytest.approx(expect["EmaxT"], rel=1e-9)
    assert law.maximum_variance(given["r"]) == pytest.approx(expect["VarmaxT"], rel=1e-9)


@of_kind("stochastic bundle")
def test_stochastic_bundle_at_every_level(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    lengths = workload(given["workload"])
    moments = slot_moments(lengths)
    assert moments.theta_tokens == pytest.approx(expect["theta"], rel=1e-6)
    assert moments.nu_tokens == pytest.approx(expect["nu"], rel=1e-6)
    assert moments.skew == pytest.approx(expect["skew"], rel=1e-5, abs=1e-9)
    load = exact_law(lengths, given["B"])
    assert load.expected_maximum([given["r"]])[0] == pytest.approx(expect["EmaxT_exact"], rel=1e-5)
    bundle = Bundle(coefficients=coefficients(given["hw"]), batch_per_worker=given["B"])
    ratios = np.arange(1, max(R_MAX, given["r"]) + 1)
    found = predict_all(lengths, bundle, ratios, load=load)
    at = given["r"] - 1
    for level, key in (
        ("mean_field", "tau_meanfield"),
        ("gaussian", "tau_gauss"),
        ("pearson3", "tau_pearson3"),
        ("exact", "tau_exact"),
    ):
        assert found[level].cycle_s[at] == pytest.approx(expect[key], rel=1e-5), level
    exact = found["exact"]
    assert exact.throughput_per_instance[at] == pytest.approx(expect["X_exact"], rel=1e-5)
    assert exact.attention_idle[at] == pytest.approx(expect["idleA"], abs=1e-5)
    assert exact.ffn_idle[at] == pytest.approx(expect["idleF"], abs=1e-5)
    for level, key in (("mean_field", "mf"), ("gaussian", "gauss"), ("exact", "exact")):
        assert abs(regret(exact, found[level].r) - regret(exact, expect["r_int"][key])) <= 0.005
    assert found["exact"].r == expect["r_int"]["exact"]


@of_kind("stochastic bundle")
def test_stochastic_bundle_with_two_microbatches_in_flight(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    bundle = Bundle(
        coefficients=coefficients(given["hw"]),
        batch_per_worker=given["B"],
        semantics="pingpong",
        microbatches=2,
        num_layers=61,
    )
    ratios = np.arange(1, max(R_MAX, given["r"]) + 1)
    found = predict(workload(given["workload"]), bundle, ratios, level="exact")
    at = given["r"] - 1
    assert found.cycle_s[at] == pytest.approx(expect["tau_pingpong2"], rel=SIMULATED)
    assert regret(found, expect["r_int"]["pingpong2"]) <= 0.005
    assert found.tpot_s[at] == pytest.approx(61 * 2 * found.cycle_s[at])
    assert np.array_equal(found.tpot_s, tpot_s(bundle, found.cycle_s))


@of_kind("fixed-time ping-pong")
def test_fixed_time_ping_pong_period(case: dict[str, Any]) -> None:
    given = case["input"]
    assert np.shape(given["A"])[1] == given["m"]
    period = fixed_period(given["A"], given["F"], given["c_oneway"])
    assert period == pytest.approx(case["expect"]["period_per_microbatch"], rel=1e-9)


def test_workload_texts_are_read_as_meant() -> None:
    assert workload("P=7, D=5, uniform random phases").output_tokens.tolist() == [5]
    two = workload("P=200; D=100 w.p. .9, 4000 w.p. .1")
    assert two.weight == pytest.approx([0.9, 0.1])
    assert two.output_tokens.tolist() == [100, 4000]
    assert two.prompt_tokens.tolist() == [200, 200]
