"""Paged weights on simulated time: closed forms, conservation, rules, and equal bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.kv_bytes import kv_sequence_bytes, kv_sequence_pages
from models.moe_step_time import distinct_experts
from models.plane_bytes import block_bytes
from models.precision_settings import PagedWeightScenario, Planner
from models.scenario_file import parse_paged_weight
from models.streams import stream
from models.weight_memory import other_bytes
from models.workload import OpenLoopRequests, resolve_workload
from policies.catalog import PRECISION
from policies.weight_page_rules import check_history
from traces.decisions import DecisionLog
from twin.paged_weight_engine import PagedWeightEngine, weights_of
from twin.paged_weight_experiment import run_paged_weight
from twin.paged_weight_files import paged_weight_record
from twin.paged_weight_link import CopyLink
from twin.paged_weight_log import PagedWeightRun
from twin.paged_weight_model import PagedWeightModel, build_model
from twin.paged_weight_moving import MovingWeights
from twin.paged_weight_reads import ExpertReads
from twin.paged_weight_weights import DoesNotFitError
from twin.replay import replay_log

CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# All other weights take 0.18 MB, the experts 72 to 424 pages of 1 KiB (2 to 5 bits, every table).
AMPLE, SHORT, SCARCE = 0.0030, 0.00062, 0.00034


def tables(folder: Path, memory_gb: float = SHORT, **changes: dict[str, Any]) -> dict[str, Any]:
    """A model for tests under a burst; ``changes`` are merged into the table of that name."""
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    base: dict[str, dict[str, Any]] = {
        "workload": {
            "num_requests": 80,
            "lengths": {
                "kind": "lognormal",
                "mean_prompt_tokens": 60,
                "mean_output_tokens": 40,
            },
            "arrivals": {
                "kind": "on_off",
                "on_rate_per_s": 500,
                "off_rate_per_s": 5,
                "mean_on_s": 0.05,
                "mean_off_s": 0.3,
            },
        },
        "llm": {"model": str(config)},
        "hardware": {
            "device": "H200",
            "memory_gb": memory_gb,
            "reserve_gb": 0.0,
            "copy_gb_per_s": 1.0,
            "link_gb_per_s": 0.05,
            "copy_latency_us": 1.0,
            "step_overhead_us": 20.0,
        },
        "precision": {
            "parent_bits": 5,
            "page_bytes": 1024,
            "plan_interval_s": 0.02,
            "calm_steps": 4,
            "compare": [],
        },
        "routing": {
            "interval_s": 0.02,
            "drift_time_s": 0.5,
            "half_life_tokens": 512,
            "hot_coverage": 0.0,
        },
        "serving": {"max_running": 12, "prefill_tokens": 64},
        "run": {"seed": 3},
    }
    for name, change in changes.items():
        base[name] = {**base.get(name, {}), **change}
    return base


def scenario(folder: Path, memory_gb: float = SHORT, **changes: Any) -> PagedWeightScenario:
    return parse_paged_weight(tables(folder, memory_gb, **changes))


def model(folder: Path, memory_gb: float = SHORT, **changes: Any) -> PagedWeightModel:
    return build_model(scenario(folder, memory_gb, **changes))


def burst(of: PagedWeightModel) -> OpenLoopRequests:
    """The requests of the model's scenario."""
    workload = resolve_workload(of.scenario.workload, seed=of.scenario.run.seed)
    return workload.open_loop_requests(stream(of.scenario.run.seed, "arrivals"))


def by_hand(arrival_s: list[float], prompts: list[int], outputs: list[int]) -> OpenLoopRequests:
    return OpenLoopRequests(
        arrival_s=np.array(arrival_s, dtype=np.float64),
        prompt_tokens=np.array(prompts, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
    )


def serve(
    of: PagedWeightModel, policy: str | int, given: OpenLoopRequests | None = None, **more: Any
) -> tuple[PagedWeightRun, PagedWeightEngine]:
    """A run, and the engine as it is at the end."""
    weights = weights_of(of, policy, 0, **more)
    requests = burst(of) if given is None else given
    engine = PagedWeightEngine(of, weights, requests, policy=str(policy))
    return engine.run(), engine


def require_conserved(run: PagedWeightRun, engine: PagedWeightEngine) -> None:
    """Nothing is lost: requests, tokens, pages."""
    done = np.isfinite(run.last_token_s)
    assert (done ^ run.is_refused).all()
    generated = run.output_tokens[done].sum()
    assert run.totals.generated_tokens >= generated  # those of refused ones come on top
    if not run.is_refused.any():
        computed = (run.prompt_tokens + run.output_tokens - 1).sum()
        assert run.totals.generated_tokens == generated
        assert run.totals.computed_tokens == computed + run.totals.recomputed_tokens
    assert engine.weights.ledger.held_pages("kv") == 0
    engine.weights.ledger.check()


# --- closed forms -----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_one_request_takes_the_sum_of_the_step_formula(tmp_path, bits):
    of = model(tmp_path, AMPLE, routing={"skew": 0.0, "drift": 0.0})
    prompt, output, chunk = 100, 30, 64
    run, _ = serve(of, bits, by_hand([0.25], [prompt], [output]))
    rates, hardware = of.time.rates, of.scenario.hardware
    share = 0.85 if bits == 16 else 0.75 * of.device.decode_roof[bits]
    gate_up, down = ((256, 64), (64, 128))
    expert = sum(2 * n * k if bits == 16 else block_bytes(n, k, bits) for n, k in (gate_up, down))
    compute = 0.5 * of.device.flops_per_s
    embedding = 256 * 64
    dense = other_bytes(of.shape) / 2 - embedding  # parameters read: all but the input embedding

    def step(tokens: int, held: int, outputs: int) -> float:
        experts = max(
            distinct_experts(4, 2, tokens) * expert / (share * rates.memory_bytes_per_s),
            tokens * 2 * 2 * 3 * 64 * 128 / compute,
        )
        rest = max(
            2 * dense / (0.85 * rates.memory_bytes_per_s),
            2 * ((dense - embedding) * tokens + embedding * outputs) / compute,
        )
        cache = kv_sequence_bytes(of.shape, held + tokens) / (0.8 * rates.memory_bytes_per_s)
        fixed = 1e-6 * (hardware.step_overhead_us + 2 * 8 * hardware.launch_us)
        return fixed + 2 * experts + rest + cache

    prefill = step(chunk, 0, 0) + step(prompt - chunk, chunk, 1)
    decode = sum(step(1, prompt + at, 1) for at in range(output - 1))
    assert run.ttft_s == pytest.approx([prefill], rel=1e-9)
    assert run.e2e_s == pytest.approx([prefill + decode], rel=1e-9)
    assert run.tpot_s == pytest.approx([decode / (output - 1)], rel=1e-9)
    assert run.totals.steps == 2 + output - 1


def test_the_cache_holds_the_pages_that_its_tokens_take(tmp_path):
    of = model(tmp_path, AMPLE)
    run, _ = serve(of, 3, by_hand([0.0], [100], [45]))
    assert run.totals.kv_tokens_peak == 144  # the last token is not cached
    assert run.totals.kv_pages_peak == kv_sequence_pages(of.shape, 144, page_bytes=1024)


def test_two_requests_at_once_share_a_step(tmp_path):
    of = model(tmp_path, AMPLE)
    both, _ = serve(of, 4, by_hand([0.0, 0.0], [20, 20], [50, 50]))
    one, _ = serve(of, 4, by_hand([0.0], [20], [50]))
    assert both.totals.steps == one.totals.steps
    assert one.end_s < both.end_s < 2 * one.end_s


def test_the_arena_is_the_memory_less_reserve_and_other_weights(tmp_path):
    of = model(tmp_path, AMPLE, hardware={"reserve_gb": 0.001})
    left = 0.003e9 - 0.001e9 - other_bytes(of.shape)
    assert of.arena_pages == int(left // 1024)


# --- laws -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["hull", "greedy", "uniform", "uniform_remainder", 2, 4])
def test_requests_tokens_and_pages_are_conserved(tmp_path, policy):
    run, engine = serve(model(tmp_path), policy)
    require_conserved(run, engine)
    assert np.isfinite(run.last_token_s).all()


@pytest.mark.parametrize("policy", ["hull", 3])
def test_littles_law_holds_exactly_for_running_sequences(tmp_path, policy):
    run, _ = serve(model(tmp_path, AMPLE), policy)
    assert run.totals.preemptions == 0
    stays = (run.last_token_s - run.admitted_s).sum()
    assert run.totals.running_s == pytest.approx(stays, rel=1e-9)
    assert (run.admitted_s >= run.arrival_s).all()
    assert (run.first_token_s > run.admitted_s).all()


def test_requests_are_admitted_in_order_of_arrival(tmp_path):
    run, _ = serve(model(tmp_path), "hull")
    assert (np.diff(run.admitted_s) >= 0).all()


def test_with_ample_memory_nothing_moves(tmp_path):
    run, engine = serve(model(tmp_path, AMPLE), "hull")
    assert run.decisions == {} and run.moved_bytes == 0
    assert (engine.weights.table.bits == 5).all()
    assert run.totals.bits_s == pytest.approx(5 * run.totals.busy_s)


def test_moving_and_fixed_widths_tell_the_same_times_where_nothing_moves(tmp_path):
    of = model(tmp_path, AMPLE)
    moving, fixed = serve(of, "hull")[0], serve(of, 5)[0]
    assert (moving.last_token_s == fixed.last_token_s).all()


def test_under_pressure_bits_fall_and_come_back(tmp_path):
    run, _ = serve(model(tmp_path), "hull")
    assert run.decisions["shrink"] > 0 and run.decisions["restore"] > 0
    assert run.totals.least_bits < 3.5 < run.series["mean_bits"].max()
    assert run.moved_bytes > 0
    # the cache outgrew what the widest weights leave
    assert run.totals.kv_pages_peak > run.arena_pages - 424


def test_a_memory_for_floors_only_keeps_all_blocks_there_and_preempts(tmp_path):
    run, engine = serve(model(tmp_path, SCARCE), "hull")
    require_conserved(run, engine)
    assert run.totals.preemptions > 0 and run.totals.recomputed_tokens > 0
    assert run.preemptions.sum() == run.totals.preemptions
    assert run.totals.least_bits == 2.0


def test_a_request_larger_than_the_arena_is_refused_and_the_others_are_served(tmp_path):
    run, engine = serve(model(tmp_path, SCARCE), "hull", by_hand([0, 0, 0], [30, 999, 30], [5] * 3))
    require_conserved(run, engine)
    assert run.is_refused.tolist() == [False, True, False]


@pytest.mark.parametrize("policy", ["hull", 5, 16])
def test_weights_that_do_not_fit_are_refused_with_their_pages(tmp_path, policy):
    others = other_bytes(model(tmp_path, AMPLE).shape)
    of = model(tmp_path, (others + 60 * 1024) / 1e9)
    with pytest.raises(DoesNotFitError, match=r"pages, the arena has \d+"):
        weights_of(of, policy, 0)


def test_fewer_bits_take_less_time_and_plain_weights_have_no_damage(tmp_path):
    of = model(tmp_path, AMPLE)
    runs = {bits: serve(of, bits)[0] for bits in (2, 3, 4, 5, 16)}
    busy = [run.totals.busy_s for bits, run in runs.items() if bits < 16]
    assert busy == sorted(busy)  # tables are so large here that 5 bits read more than 16
    damage = [run.totals.damage_s / run.totals.busy_s for run in runs.values()]
    assert damage == sorted(damage, reverse=True) and damage[-1] == 0.0


def test_only_what_the_policy_may_use_is_used(tmp_path):
    still = serve(model(tmp_path, precision={"use_movement": False}), "hull")[0]
    assert still.moved_bytes == 0 and set(still.decisions) <= {"shrink", "emergency"}
    assert (np.diff(still.series["mean_bits"]) <= 0).all()


def test_hot_experts_keep_their_floor(tmp_path):
    of = model(tmp_path, 0.00045, routing={"hot_coverage": 1.0, "hot_bits": 3})
    run, engine = serve(of, "hull")
    require_conserved(run, engine)
    assert run.totals.least_bits >= 3.0
    loose = serve(model(tmp_path, 0.00045), "hull")[0]
    assert loose.totals.least_bits < 3.0


def test_times_and_damage_are_those_of_the_widths_committed_last(tmp_path):
    of = model(tmp_path)
    fresh, used = ExpertReads(of, 0), ExpertReads(of, 0)
    wide, narrow = np.full(16, 5), np.full(16, 2)
    used.hold(wide)
    before = used.seconds(4, 1.0), used.damage
    used.hold(narrow)
    fresh.hold(narrow)
    assert (used.seconds(4, 1.0), used.damage) == (fresh.seconds(4, 1.0), fresh.damage)
    assert used.seconds(4, 1.0) < before[0] and used.damage > before[1]
    assert used.seconds(4, 1.5) > used.seconds(4, 1.0)


def test_copies_that_are_given_up_leave_the_link(tmp_path, monkeypatch):
    cancelled: list[int] = []
    cancel = CopyLink.cancel

    def noted(link: CopyLink, keys: Any) -> None:
        cancelled.extend(keys.tolist())
        cancel(link, keys)

    monkeypatch.setattr(CopyLink, "cancel", noted)
    history: list[dict[str, Any]] = []
    of = model(tmp_path, hardware={"link_gb_per_s": 0.01})
    serve(of, "hull", history=history.append)
    given_up = [event for event in history if event["ev"] == "cancel"]
    assert len(cancelled) == len(given_up) > 0


# --- page rules, replay, equal bytes ------------------------------------------------------------


@pytest.mark.parametrize("failures", [0.0, 0.2])
@pytest.mark.parametrize("resident", ["all", "active"])
@pytest.mark.parametrize("memory_gb", [SHORT, SCARCE])
def test_the_history_of_a_run_keeps_every_page_rule(tmp_path, failures, resident, memory_gb):
    of = model(
        tmp_path,
        memory_gb,
        hardware={"copy_failure_share": failures},
        precision={"tables": resident},
    )
    history: list[dict[str, Any]] = []
    run, engine = serve(of, "hull", history=history.append)
    require_conserved(run, engine)
    engine.weights.table.check()
    assert check_history(history, at_rest=False) is None
    kinds = {event["ev"] for event in history}
    assert {"launch", "commit", "kv_alloc", "kv_free"} <= kinds
    if memory_gb == SHORT:
        assert "xfer_ok" in kinds and ("xfer_fail" in kinds) == (failures > 0)


@pytest.mark.parametrize("memory_gb", [AMPLE, SHORT, SCARCE])
@pytest.mark.parametrize("failures", [0.0, 0.1])
def test_asking_at_every_boundary_gives_the_same_orders_as_asking_when_it_matters(
    tmp_path, memory_gb, failures
):
    of = model(tmp_path, memory_gb, hardware={"copy_failure_share": failures})

    def moves(every: bool) -> tuple[list[Any], PagedWeightRun]:
        history: list[dict[str, Any]] = []
        weights = MovingWeights(of, "hull", 0, history=history.append, every_boundary=every)
        run = PagedWeightEngine(of, weights, burst(of), policy="hull").run()
        return [event for event in history if event["ev"] != "pages"], run

    (often, often_run), (seldom, seldom_run) = moves(True), moves(False)
    assert often == seldom
    assert np.array_equal(often_run.last_token_s, seldom_run.last_token_s, equal_nan=True)


def test_the_decision_log_replays_to_the_same_orders(tmp_path):
    log = DecisionLog()
    run, _ = serve(model(tmp_path), "hull", log=log)
    file = tmp_path / "decisions.jsonl.gz"
    file.write_bytes(log.to_bytes())
    found = replay_log(file)
    assert found.difference is None
    assert found.num_calls == len(log.decisions) > sum(run.decisions.values()) > 0


def test_the_same_scenario_and_seed_give_the_same_bytes(tmp_path):
    asked = scenario(tmp_path, precision={"compare": ["uniform", 3]})
    first, second = (paged_weight_record(run_paged_weight(asked), plots=True) for _ in range(2))
    assert first.files == second.files
    same = [name for name in first.summary if name != "commit"]  # may move while this runs
    assert [first.summary[name] for name in same] == [second.summary[name] for name in same]
    other = run_paged_weight(scenario(tmp_path, run={"seed": 4}))
    assert other.summary["policies"][0] != first.summary["policies"][0]


def test_a_comparison_serves_the_same_requests_whatever_else_is_compared(tmp_path):
    alone = run_paged_weight(scenario(tmp_path, precision={"policy": 3}))
    among = run_paged_weight(scenario(tmp_path, precision={"compare": [2, 3]}))
    row = next(row for row in among.summary["policies"] if row["policy"] == 3)
    lone = alone.summary["policies"][0]
    assert row == {**lone, "asked_less_this": None}  # one replication tells no difference


def test_replications_meet_other_arrivals_and_give_intervals(tmp_path):
    asked = scenario(tmp_path, precision={"compare": [3]}, run={"replications": 3})
    result = run_paged_weight(asked)
    moving, fixed = result.summary["policies"]
    assert moving["arrived"] == 240
    assert moving["requests_per_s_interval"]["half_width"] > 0
    assert len(set(moving["requests_per_s_by_replication"])) == 3
    assert set(fixed["asked_less_this"]) == {"requests_per_s", "ttft_mean", "damage"}


def test_a_horizon_ends_the_run_and_says_what_is_left(tmp_path):
    result = run_paged_weight(scenario(tmp_path, run={"horizon_s": 0.05}))
    row = result.summary["policies"][0]
    assert row["unfinished"] > 0 and row["arrived"] == row["unfinished"] + row["served"]
    assert any("not finished" in warning for warning in result.summary["warnings"])


def test_scenario_names_of_planners_are_those_of_the_catalog():
    assert set(Planner.__args__) == set(PRECISION)
