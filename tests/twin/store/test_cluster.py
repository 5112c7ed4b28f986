"""A cluster in simulated time against closed forms, conservation, and its own other systems."""

import dataclasses

import numpy as np
import pytest

from models.prefix_settings import (
    ClusterLinks,
    ClusterNodes,
    DocumentsWorkload,
    GeneratedWorkload,
    PoissonRequests,
    PooledStore,
    PrefillGpu,
    PrefixQuestion,
    PrefixRun,
    PrefixScenario,
    ProductStore,
    SpreadRequests,
)
from traces.decisions import DecisionLog
from twin.store.cluster import PrefixCluster
from twin.store.deployment import build_deployment
from twin.store.modes import build_mode
from twin.store.requests import request_streams


def _scenario(**tables):
    defaults = {
        "prefix": PrefixQuestion(),
        "workload": DocumentsWorkload(documents=4, questions=10, prompt_tokens=(1024,)),
        "cluster": ClusterNodes(nodes=2, gpus_per_node=2),
        "product": ProductStore(eviction="lru"),
    }
    return PrefixScenario(**(defaults | tables))


def _run(scenario, mode, replication=0, log=None):
    stream = request_streams(scenario, replication)[0]
    return PrefixCluster(
        build_deployment(scenario), build_mode(mode, scenario), stream, log=log
    ).run()


def _tight(**changes):
    """A pool under pressure, with SSD, short of memory, whose requests overlap."""
    return _scenario(
        workload=GeneratedWorkload(generator="docqa", num_requests=80, rate_scale=4.0),
        cluster=ClusterNodes(
            nodes=2, gpus_per_node=2, memory_bytes=1_500_000_000, ssd_bytes=3_000_000_000
        ),
        gpu=PrefillGpu(cache_tokens=9_000),
        **changes,
    )


@pytest.mark.parametrize("mode", ["vanilla", "local_prefix", "evostore", "ptstore", "product"])
def test_every_token_has_one_source_and_every_request_an_end(mode):
    run = _run(_tight(), mode)
    r = run.requests
    tokens = sum(values for name, values in r.items() if name.startswith("tokens_"))
    assert (tokens == r["prompt_tokens"]).all()
    assert (r["tokens_computed"] >= 1).all()
    assert (np.diff(r["arrival_s"]) >= 0).all()
    for earlier, later in (
        ("arrival_s", "ready_s"),
        ("ready_s", "start_s"),
        ("start_s", "first_token_s"),
    ):
        assert (r[later] >= r[earlier]).all()
    assert (r["node"] == r["gpu"] // 2).all()
    assert run.series["num_requests_waiting"][-1] == run.series["num_requests_running"][-1] == 0
    assert run.series["prefix_cache_queries"][-1] == r["prompt_tokens"].sum()
    hits = r["prompt_tokens"].sum() - r["tokens_computed"].sum()
    assert run.series["prefix_cache_hits"][-1] == hits
    assert run.duration_s >= r["first_token_s"].max()


@pytest.mark.parametrize("mode", ["evostore", "ptstore", "product"])
def test_bytes_to_devices_are_those_of_the_blocks_that_were_loaded(mode):
    scenario = _tight()
    run = _run(scenario, mode)
    loaded = sum(
        int(run.requests[f"tokens_{tier}"].sum()) for tier in ("memory", "replica", "remote", "ssd")
    )
    token_bytes = build_deployment(scenario).token_bytes
    if mode == "product":
        # what was loaded counts as the GPU's own if a request before brought it there meanwhile
        assert run.links["to device"]["bytes"] >= loaded * token_bytes * (1 - 1e-9)
    else:
        assert run.links["to device"]["bytes"] == pytest.approx(loaded * token_bytes)
    assert run.links["network in"]["bytes"] == pytest.approx(run.links["network out"]["bytes"])
    assert run.counts["dropped"] > 0
    assert run.counts["flushed"] > 0


@pytest.mark.parametrize("mode", ["ptstore", "product"])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(mode):
    first, second = _run(_tight(), mode), _run(_tight(), mode)
    other = _run(_tight(run=PrefixRun(seed=2)), mode)
    for name, values in first.requests.items():
        assert (values == second.requests[name]).all()
    assert first.links == second.links
    assert len(other.requests["ttft_s"]) == len(first.requests["ttft_s"])
    assert (other.requests["ttft_s"] != first.requests["ttft_s"]).any()


def test_all_systems_meet_the_same_requests_on_the_same_gpus():
    runs = [_run(_scenario(), mode) for mode in ("vanilla", "local_prefix", "ptstore", "product")]
    for run in runs[1:]:
        for name in ("arrival_s", "gpu", "prompt_tokens"):
            assert (run.requests[name] == runs[0].requests[name]).all()


def test_without_reuse_every_prompt_takes_its_prefill():
    scenario = _scenario()
    run = _run(scenario, "vanilla")
    seconds = build_deployment(scenario).prefill.seconds(1024)
    assert run.requests["ttft_s"] == pytest.approx(seconds)


def test_a_gpu_under_poisson_arrivals_waits_as_m_d_1_says():
    """Mean wait = load x service / (2 (1 - load)), Pollaczek and Khinchine."""
    scenario = _scenario(
        workload=DocumentsWorkload(
            documents=60,
            questions=100,
            prompt_tokens=(1024,),
            arrivals=PoissonRequests(rate_per_s=20.0),
        ),
    )
    service_s = build_deployment(scenario).prefill.seconds(1024)
    load = 20.0 / 4 * service_s
    assert 0.4 < load < 0.7
    run = _run(scenario, "vanilla")
    waits = run.requests["start_s"] - run.requests["ready_s"]
    assert waits.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)


def test_a_load_takes_lookup_request_network_copy_and_tail():
    """Two nodes, one document: the second question, on the other node, reads all of it remotely."""
    scenario = _scenario(
        prefix=PrefixQuestion(routing="round_robin", owners="writer"),
        workload=DocumentsWorkload(documents=1, questions=2, prompt_tokens=(2048,)),
        cluster=ClusterNodes(nodes=2, gpus_per_node=1),
        links=ClusterLinks(client_bytes_per_s=10e9, host_to_device_bytes_per_s=20e9, rpc_s=0.001),
        store=PooledStore(lookup_s=0.004),
    )
    deployment = build_deployment(scenario)
    size = (2048 - 64) * deployment.token_bytes
    tail_s = deployment.prefill.seconds(64, 2048 - 64)
    for mode, overlap in (("evostore", 0.0), ("ptstore", 0.0)):
        ttft = _run(scenario, mode).requests["ttft_s"]
        assert ttft[0] == pytest.approx(0.004 + deployment.prefill.seconds(2048))
        expected = 0.004 + 0.001 + (1 - overlap) * size / 10e9 + size / 20e9 + tail_s
        assert ttft[1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overlap", "network", "shown_s_per_byte"),
    [(0.8, 25e9, 0.2 / 25e9), (0.8, 2e9, 1 / 2e9 - 1 / 20e9), (0.0, 10e9, 1 / 10e9)],
)
def test_what_the_network_hides_is_bounded_by_the_copy_beside_it(
    overlap, network, shown_s_per_byte
):
    scenario = _scenario(
        prefix=PrefixQuestion(routing="round_robin", owners="writer"),
        workload=DocumentsWorkload(documents=1, questions=2, prompt_tokens=(2048,)),
        cluster=ClusterNodes(nodes=2, gpus_per_node=1),
        links=ClusterLinks(client_bytes_per_s=network, host_to_device_bytes_per_s=20e9, rpc_s=0.0),
        product=ProductStore(lookup_s=0.0, overlap=overlap, eviction="lru"),
    )
    deployment = build_deployment(scenario)
    run = _run(scenario, "product")
    assert run.requests["tokens_remote"][1] == 2048 - 64
    size = (2048 - 64) * deployment.token_bytes
    load_s = run.requests["ready_s"][1] - run.requests["arrival_s"][1]
    assert load_s == pytest.approx(size * (shown_s_per_byte + 1 / 20e9), rel=1e-6)
    costs = deployment.costs(64, overlap=overlap)
    assert size / costs.remote.bytes_per_s == pytest.approx(size * shown_s_per_byte)


def test_what_is_dearer_to_fetch_than_to_compute_is_computed():
    slow = ClusterLinks(client_bytes_per_s=0.5e9, host_to_device_bytes_per_s=20e9)
    base = {
        "prefix": PrefixQuestion(routing="round_robin", owners="writer"),
        "workload": DocumentsWorkload(documents=1, questions=2, prompt_tokens=(2048,)),
        "cluster": ClusterNodes(nodes=2, gpus_per_node=1),
        "links": slow,
    }
    scenario = _scenario(**base)
    product, ptstore = _run(scenario, "product"), _run(scenario, "ptstore")
    assert product.requests["tokens_remote"].sum() == 0
    assert ptstore.requests["tokens_remote"][1] == 2048 - 64
    assert product.requests["ttft_s"][1] < ptstore.requests["ttft_s"][1]


def test_this_store_is_never_slower_than_gpu_caches_by_more_than_its_lookup():
    for scenario in (
        _scenario(workload=DocumentsWorkload(documents=6, questions=12, prompt_tokens=(512,))),
        _scenario(
            workload=GeneratedWorkload(generator="chat", num_requests=120, rate_scale=0.2),
            cluster=ClusterNodes(
                nodes=2, gpus_per_node=2, memory_bytes=2_000_000_000, ssd_bytes=2_000_000_000
            ),
            gpu=PrefillGpu(cache_tokens=20_000),
        ),
    ):
        alone = _run(scenario, "local_prefix").requests["ttft_s"]
        mine = _run(scenario, "product").requests["ttft_s"]
        assert (mine <= alone + scenario.product.lookup_s + 1e-9).all()
        assert mine.mean() < alone.mean()


def test_replicas_make_remote_reads_rare_and_no_replicas_keep_them():
    scenario = _scenario(
        workload=DocumentsWorkload(documents=5, questions=40, prompt_tokens=(1024,)),
        cluster=ClusterNodes(nodes=4, gpus_per_node=1),
    )
    with_replicas, without = _run(scenario, "ptstore"), _run(scenario, "evostore")
    total = with_replicas.requests["prompt_tokens"].sum()
    r_evostore = without.requests["tokens_remote"].sum() / total
    r_ptstore = with_replicas.requests["tokens_remote"].sum() / total
    # of what is read, 1 - 1/n is remote; with replicas only a node's first read can be
    hits = without.requests["tokens_computed"].sum()
    share = r_evostore * total / (total - hits)
    assert share == pytest.approx(0.75, abs=0.12)
    assert r_ptstore < 0.15
    assert (
        with_replicas.requests["tokens_computed"].sum() == without.requests["tokens_computed"].sum()
    )


def test_sticky_routing_keeps_a_session_on_its_gpu_and_prefix_aware_routing_finds_its_blocks():
    workload = DocumentsWorkload(documents=8, questions=10, prompt_tokens=(1024,))
    hit_share = {}
    for routing in ("random", "round_robin", "sticky", "prefix_aware"):
        scenario = _scenario(prefix=PrefixQuestion(routing=routing), workload=workload)
        run = _run(scenario, "local_prefix")
        hit_share[routing] = run.requests["tokens_gpu"].sum() / run.requests["prompt_tokens"].sum()
        stream = request_streams(scenario, 0)[0]
        places = {}
        for request, gpu in zip(stream.requests, run.requests["gpu"], strict=True):
            places.setdefault(request.session, set()).add(int(gpu))
        if routing == "sticky":
            assert all(len(gpus) == 1 for gpus in places.values())
        if routing == "round_robin":
            assert (np.bincount(run.requests["gpu"]) == 20).all()
    ideal = 0.9 * 960 / 1024
    assert hit_share["sticky"] == pytest.approx(ideal)
    assert hit_share["prefix_aware"] == pytest.approx(ideal)
    assert hit_share["random"] < 0.85 * ideal


def test_more_traffic_on_one_adapter_makes_loads_longer():
    """Eight GPUs of one node read at once what the other node owns: they share its adapter."""

    def ttft(nic):
        scenario = _scenario(
            prefix=PrefixQuestion(routing="round_robin", owners="anchor"),
            workload=DocumentsWorkload(
                documents=1,
                questions=64,
                prompt_tokens=(4096,),
                arrivals=SpreadRequests(gap_s=0.02),
            ),
            cluster=ClusterNodes(nodes=4, gpus_per_node=4),
            links=ClusterLinks(nic_bytes_per_s=nic, client_bytes_per_s=20e9),
        )
        return _run(scenario, "evostore").requests["ready_s"].mean()

    assert ttft(10e9) > ttft(100e9)


def test_the_decision_log_of_a_run_is_that_of_an_unlogged_run():
    log = DecisionLog(max_calls=10_000)
    logged, plain = _run(_tight(), "product", log=log), _run(_tight(), "product")
    assert (logged.requests["ttft_s"] == plain.requests["ttft_s"]).all()
    assert {d.call for d in log.decisions} >= {"read", "reserve", "commit", "reserve_ssd"}
    assert list(log.policies) == ["prefix-node-000", "prefix-node-001"]


def test_generated_blocks_are_stored_and_found_by_the_next_turn():
    scenario = _scenario(
        workload=GeneratedWorkload(generator="chat", num_requests=200, rate_scale=0.05)
    )
    run = _run(scenario, "product")
    without = dataclasses.replace(
        request_streams(scenario, 0)[0],
        requests=tuple(
            dataclasses.replace(r, generated=()) for r in request_streams(scenario, 0)[0].requests
        ),
    )
    bare = PrefixCluster(build_deployment(scenario), build_mode("product", scenario), without).run()
    assert run.requests["tokens_computed"].sum() < bare.requests["tokens_computed"].sum()
