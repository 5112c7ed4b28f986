"""A made-up machine whose rates are known is measured, and its rates come out again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.calibration import CalibrationError, load_calibration, save_calibration
from models.calibration_file import Calibration
from models.engine_profile import Provenance
from models.llm_catalog import load_llm
from models.moe_step_time import distinct_experts
from models.prefix_settings import PrefillGpu
from models.scenario_file import parse_paged_weight, parse_prefix, parse_scenario, scenario_tables
from models.step_counts import StepCounts
from models.strict_tables import ScenarioError
from runtime.profile_fit import Measured, calibration_of
from runtime.profile_quality import problems
from runtime.profile_rounds import measure_steps
from runtime.profile_run import ProfilePlan
from runtime.profile_steps import StepPoint, StepSeconds
from runtime.profile_tiers import TierTimes
from twin.paged_weight_model import build_model

MODEL = "Qwen1.5-MoE-A2.7B"
WIDTHS = (2, 3, 4)
COPY, FLOPS = 1e12, 100e12
DENSE, ATTENTION, EXPERTS = 0.8 * COPY, 0.5 * COPY, {2: 0.2 * COPY, 3: 0.3 * COPY, 4: 0.35 * COPY}
DENSE_FLOPS, ATTENTION_FLOPS, EXPERT_FLOPS = 0.6 * FLOPS, 0.3 * FLOPS, 0.4 * FLOPS
LAYER_S, OVERHEAD_S = 30e-6, 500e-6
PLAN = ProfilePlan(contexts=(64, 2048, 4000), prompts=(64, 512, 2048), cached=(0, 1024, 4000))


class MadeUpMachine:
    """Costs of a step by the twin's own formula, with noise."""

    def __init__(self, noise: float, seed: int = 0) -> None:
        self.shape = load_llm(MODEL)
        self.counts = StepCounts(self.shape)
        self.noise, self.random = noise, np.random.default_rng(seed)
        self.calls = 0

    def __call__(self, point: StepPoint) -> StepSeconds:
        self.calls += 1
        moe, layers = self.shape.moe_layers[0], len(self.shape.layers)
        held = np.full(point.sequences, point.held)
        added = np.full(point.sequences, point.added)
        reads = distinct_experts(moe.num_experts, moe.experts_per_token, point.tokens)
        size = 3 * moe.intermediate_size * self.shape.hidden_size * point.bits / 8
        expert_bytes = layers * reads * size
        attention = max(
            self.counts.kv_read_bytes(held, added) / ATTENTION,
            point.sequences
            * self.counts.attention_flops(point.held, point.added)
            / ATTENTION_FLOPS,
        )
        dense = max(
            self.counts.dense_bytes / DENSE,
            (self.counts.token_flops * point.tokens + self.counts.output_flops * point.sequences)
            / DENSE_FLOPS,
        )
        experts = max(
            expert_bytes / EXPERTS[point.bits],
            self.counts.expert_flops * point.tokens / EXPERT_FLOPS,
        )
        dense += LAYER_S * layers
        by = np.exp(self.random.normal(0.0, self.noise, 3)).tolist() if self.noise else (1, 1, 1)
        attention, dense, experts = attention * by[0], dense * by[1], experts * by[2]
        return StepSeconds(
            seconds=attention + dense + experts,
            attention_s=attention,
            experts_s=experts,
            attention_block_s=attention + 0.4 * dense,
            ffn_s=experts + 0.4 * dense,
            expert_bytes=expert_bytes,
        )


def _measured(noise: float = 0.0, seed: int = 0) -> Measured:
    machine = MadeUpMachine(noise, seed)
    points = PLAN.points(WIDTHS, 8192)
    steps, rounds = measure_steps(points, machine, budget_s=0.0)
    assert machine.calls == (rounds + 1) * len(points)
    size = np.array([65536.0, 524288.0, 4194304.0])
    tier = TierTimes((1e5, 1e6, 4e6), (1.1e-3, 2e-3, 5e-3), (1.05e-3, 1.5e-3, 3e-3), 2e-4)
    return Measured(
        shape=machine.shape,
        kv_value_bytes=2,
        steps=steps,
        overhead=[(1, OVERHEAD_S), (8, OVERHEAD_S)],
        copy_bytes_per_s=COPY,
        flops_per_s=FLOPS,
        memory_bytes=80e9,
        job_bytes=size,
        job_s=20e-6 + size / 40e9,
        tiers={"memory": tier, "ssd": tier, "served": tier},
        provenance=Provenance(
            cpu="made up",
            threads=1,
            clock="wall",
            versions={"python": "3"},
            experts="quantized",
            dtype="bfloat16",
            rounds=rounds,
        ),
        name="made-up",
    )


@pytest.fixture(scope="module")
def exact() -> Calibration:
    return calibration_of(_measured())


def test_the_rates_of_a_noiseless_machine_come_out_again(exact: Calibration) -> None:
    assert exact.engine is not None
    rates, device = exact.engine.rates, exact.engine.device
    assert device.copy_bytes_per_s == COPY
    assert device.flops_per_s == FLOPS
    assert device.link_bytes_per_s == pytest.approx(40e9, rel=1e-6)
    assert rates.copy_latency_us == pytest.approx(20.0, rel=1e-6)
    assert rates.dense_share == pytest.approx(0.8, rel=0.05)
    assert rates.attention_share == pytest.approx(0.5, rel=0.05)
    assert rates.compute_share == pytest.approx(0.6, rel=0.05)
    assert rates.expert_compute_share == pytest.approx(0.4, rel=0.05)
    assert rates.launch_us == pytest.approx(1e6 * LAYER_S, rel=0.05)
    assert rates.step_overhead_us == pytest.approx(1e6 * OVERHEAD_S)
    for bits in WIDTHS:
        assert rates.bandwidth_share[str(bits)] == pytest.approx(EXPERTS[bits] / COPY, rel=0.05)
    assert problems(exact) == []


def test_the_tiers_are_lines_with_a_fixed_part(exact: Calibration) -> None:
    assert exact.engine is not None
    tier = exact.engine.tiers["served"]
    assert tier.load_bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert tier.load_request_s == pytest.approx(1e-3, rel=1e-6)
    assert tier.save_bytes_per_s == pytest.approx(2e9, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_ten_percent_leaves_whole_steps_within_twelve(seed: int) -> None:
    measured = _measured(0.10, seed)
    found = calibration_of(measured)
    assert found.engine is not None
    clean = {point: MadeUpMachine(0.0)(point).seconds for point in PLAN.points(WIDTHS, 8192)}
    for bits in (2, 4):
        point = StepPoint(4, 1, 64, bits)
        assert _twin_step_s(found, point) == pytest.approx(clean[point], rel=0.12)


def _twin_step_s(calibration: Calibration, point: StepPoint) -> float:
    """What the twin makes of the calibration, for a decode step; experts all alike."""
    assert calibration.engine is not None
    table = calibration.engine.hardware_table()
    tables = {"llm": {"model": MODEL}, "hardware": table, "precision": {"damage_noise": 0.0}}
    time = build_model(parse_paged_weight(tables)).time
    held, added = np.full(point.sequences, point.held), np.full(point.sequences, point.added)
    reads = distinct_experts(time.moe.num_experts, time.moe.experts_per_token, point.tokens)
    moe = time.moe
    size = 3 * moe.intermediate_size * load_llm(MODEL).hidden_size * point.bits / 8
    each = time.read_seconds(np.array([size]), np.array([point.bits]))[0]
    flops = sum(time.attention_flops(point.held, point.added) for _ in range(point.sequences))
    return (
        time.fixed_seconds
        - time.rates.overhead_seconds
        + time.dense_seconds(point.tokens, point.sequences)
        + time.attention_seconds(time.kv_read_bytes(held, added), flops)
        + time.num_moe_layers * reads * each
    )


def test_a_machine_of_pure_noise_is_refused() -> None:
    measured = _measured()
    random = np.random.default_rng(1)
    steps = [
        replace(step, **{name: random.uniform(1e-4, 1e-1) for name in ("attention_s", "experts_s")})
        for step in measured.steps
    ]
    steps = [replace(s, seconds=s.attention_s + s.experts_s + s.seconds) for s in steps]
    found = calibration_of(replace(measured, steps=steps))
    assert any(problem.startswith("attention: the fit is off") for problem in problems(found))


def test_the_file_reads_back_equal(exact: Calibration, tmp_path: Path) -> None:
    save_calibration(exact, tmp_path / "c.json")
    again = load_calibration(tmp_path / "c.json")
    assert again == exact
    save_calibration(again, tmp_path / "d.json")
    assert (tmp_path / "c.json").read_bytes() == (tmp_path / "d.json").read_bytes()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("engine", "rates", "dense_share"), 2.0, "dense_share"),
        (("engine", "rates", "bandwidth_share"), {"9": 0.5}, "bandwidth_share"),
        (("engine", "rates", "speed"), 2.0, "speed: unknown key"),
        (("engine", "device", "memory_bytes"), -1, "memory_bytes"),
        (("engine", "tiers", "ssd", "lookup_s"), "soon", "lookup_s: must be a number"),
        (("engine", "prefill", "mfu"), 7.0, "mfu"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(
    exact: Calibration, tmp_path: Path, path: tuple[str, ...], value: object, words: str
) -> None:
    file = tmp_path / "c.json"
    save_calibration(exact, file)
    content = json.loads(file.read_text())
    del content["content_hash"]
    node = content
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(CalibrationError) as caught:
        load_calibration(file)
    assert str(file) in str(caught.value)
    assert words in str(caught.value)


def test_a_number_changed_by_hand_is_noticed(exact: Calibration, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    save_calibration(exact, file)
    content = json.loads(file.read_text())
    content["engine"]["rates"]["dense_share"] = 0.123
    file.write_text(json.dumps(content))
    with pytest.raises(CalibrationError, match="content_hash"):
        load_calibration(file)


@pytest.fixture
def file(exact: Calibration, tmp_path: Path) -> str:
    save_calibration(exact, tmp_path / "c.json")
    return str(tmp_path / "c.json")


def test_a_paged_weight_scenario_takes_device_and_rates_from_the_file(file: str) -> None:
    tables = {"llm": {"model": MODEL}, "hardware": {"calibration": file, "dense_share": 0.33}}
    tables["hardware"]["bandwidth_share"] = {"3": 0.77}
    scenario = parse_paged_weight(tables)
    hardware = scenario.hardware
    assert hardware.found_device.name == "made up, 1 thread(s)"
    assert hardware.dense_share == 0.33
    assert hardware.bandwidth_share["3"] == 0.77
    assert hardware.bandwidth_share["2"] == pytest.approx(0.2, rel=0.05)
    assert build_model(scenario).time.rates.overhead_seconds == pytest.approx(OVERHEAD_S)
    assert parse_paged_weight(scenario_tables(scenario)) == scenario


def test_an_attention_ffn_scenario_takes_the_coefficients(file: str, exact: Calibration) -> None:
    scenario = parse_scenario({"attention_ffn": {"calibration": file, "batch_per_worker": 4}})
    assert scenario.attention_ffn.calibration == file
    assert load_calibration(file).coefficients == exact.coefficients


def test_a_prefix_scenario_takes_gpu_links_and_lookup(file: str, exact: Calibration) -> None:
    scenario = parse_prefix({"prefix": {"calibration": file}, "gpu": {"forward_s": 0.5}})
    assert exact.engine is not None
    assert exact.engine.prefill is not None
    assert scenario.gpu.mfu == exact.engine.prefill.mfu
    assert scenario.gpu.forward_s == 0.5
    assert scenario.gpu.memory_share == PrefillGpu().memory_share
    assert scenario.links.ssd_bytes_per_s == pytest.approx(1e9)
    assert scenario.links.rpc_s == pytest.approx(1e-3)
    assert scenario.product.lookup_s == 2e-4


def test_a_file_without_an_engine_is_refused_by_hardware(
    exact: Calibration, tmp_path: Path
) -> None:
    save_calibration(replace(exact, engine=None), tmp_path / "plain.json")
    path = str(tmp_path / "plain.json")
    with pytest.raises(ScenarioError, match=r"\[hardware\] calibration: .*runtime profile"):
        parse_paged_weight({"llm": {"model": MODEL}, "hardware": {"calibration": path}})
    missing = str(tmp_path / "none.json")
    with pytest.raises(ScenarioError, match=r"\[prefix\] calibration: .*none\.json"):
        parse_prefix({"prefix": {"calibration": missing}})
