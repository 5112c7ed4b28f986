"""``/metrics``: names, labels, forms; histograms against prometheus_client's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference
from prometheus_client.parser import text_string_to_metric_families

from runtime.engine.frames import EngineStats
from runtime.server.app import App, make_app
from runtime.server.metric_counts import TTFT_EDGES_S, Histogram, one_two_five
from runtime.server.settings import ServerSettings
from tests.runtime.server.scripted import ScriptedEngine, client_of

VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "lora_requests_info",
    "cache_config_info",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prompt_tokens_cached_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "request_success_total",
    "admission_rejections_total",
    "num_requests_waiting_by_reason",
]
VLLM_HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_num_preemptions",
]


@given(st.lists(st.floats(0, 3000), max_size=50))
def test_a_histogram_counts_as_prometheus_client_does(values: list[float]) -> None:
    ours = Histogram(TTFT_EDGES_S)
    registry = CollectorRegistry()
    theirs = Reference("x", "x", buckets=TTFT_EDGES_S, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    for edge, count in ours.buckets():
        assert registry.get_sample_value("x_bucket", {"le": edge}) == count
    assert registry.get_sample_value("x_sum") == pytest.approx(ours.sum)
    assert registry.get_sample_value("x_count") == ours.count


def test_token_buckets_go_up_in_ones_twos_and_fives() -> None:
    assert one_two_five(120) == (1, 2, 5, 10, 20, 50, 100)


@pytest.mark.anyio
async def test_names_that_dashboards_know_are_there_with_their_labels(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    engine.stats = EngineStats(
        running=2,
        waiting=3,
        loading=1,
        kv_usage=0.25,
        mean_bits=4.5,
        damage=0.125,
        kv_pages=7,
        weight_pages=8,
        free_pages=9,
        planner_moves_total={"kv_pressure": 4},
        moved_bytes_total=1024,
        prefix_hits_total=5,
        store={"memory_hits": 6.0},
        preemptions_total=2,
    )
    app = build(max_queued_requests=1)
    async with client_of(app) as client:
        await client.post("/v1/completions", json={"prompt": "abc"})
        app.front.admission.rejected["queued_requests"] += 1
        scraped = (await client.get("/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
    }
    names = {key[0] for key in samples}
    for name in VLLM_NAMES:
        assert f"vllm:{name}" in names, name
    for prefix in ("vllm:", "serving_twin_"):
        for name in VLLM_HISTOGRAMS:
            assert {f"{prefix}{name}_{part}" for part in ("bucket", "sum", "count")} <= names
    assert not any(name.endswith("_created") for name in names)
    assert scraped.count("# TYPE vllm:num_requests_running gauge") == 1
    labels = (("engine", "0"), ("model_name", "tiny"))
    assert samples["vllm:num_requests_running", *labels] == 2
    assert samples["vllm:num_requests_waiting", *labels] == 4
    assert samples["vllm:kv_cache_usage_perc", *labels] == 0.25
    assert samples["serving_twin_mean_bits", *labels] == 4.5
    assert samples["serving_twin_damage", *labels] == 0.125
    assert samples["serving_twin_moved_bytes_total", *labels] == 1024
    assert samples["serving_twin_planner_moves_total", *labels, ("reason", "kv_pressure")] == 4
    assert samples["serving_twin_store", *labels, ("name", "memory_hits")] == 6
    for use, pages in (("kv", 7), ("weight", 8), ("free", 9)):
        assert samples["serving_twin_pages", *labels, ("use", use)] == pages
    edges = [key for key in samples if key[0] == "vllm:time_to_first_token_seconds_bucket"]
    assert len(edges) == 23
    assert samples["vllm:request_queue_time_seconds_sum", *labels] == 0.25
    assert samples["vllm:request_prefill_time_seconds_sum", *labels] == 0.5


@pytest.mark.anyio
async def test_every_report_s_steps_are_counted_once(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    import asyncio

    app = build()
    histogram = app.front.metrics.histograms["iteration_tokens_total"]
    async with client_of(app):
        for number in (1, 2, 3):
            engine.stats = EngineStats(step_tokens=(number, 100))
            while histogram.count < 2 * number:
                await asyncio.sleep(0.01)
    assert (histogram.count, histogram.sum) == (6, 306)


@pytest.mark.anyio
async def test_several_engines_are_told_apart(engine: ScriptedEngine) -> None:
    other = ScriptedEngine(engine.script)
    engine.stats, other.stats = EngineStats(running=1), EngineStats(running=5)
    app = make_app(ServerSettings(), engine, instances=(engine, other))
    async with client_of(app) as client:
        scraped = (await client.get("/metrics")).text
    assert 'vllm:num_requests_running{engine="0",model_name="default"} 1.0' in scraped
    assert 'vllm:num_requests_running{engine="1",model_name="default"} 5.0' in scraped


@pytest.mark.anyio
async def test_metrics_can_be_scraped_while_loading() -> None:
    async with client_of(make_app(ServerSettings())) as client:
        assert (await client.get("/metrics")).status_code == 200
