"""First-order seconds to the first token: reference cases, published rows, counted shares."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import prefix_ttft as ttft
from models.prefix_ttft import TtftParameters, ratios, search_parameters

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "ptstore_ttft.json").read_text(encoding="utf-8")
)
of_case = pytest.mark.parametrize("case", CASES, ids=[f"{c['params']['gpus']}" for c in CASES])
SYSTEMS = {
    "vanilla": ttft.vanilla_s,
    "prefix": ttft.prefix_s,
    "evostore": ttft.evostore_s,
    "ptstore": ttft.ptstore_s,
}
NAMES = {
    "params": "parameters", "layers": "layers", "heads": "heads", "kv_heads": "kv_heads",
    "head_dim": "head_dim", "dtype": "bytes_per_value", "flops": "flops_per_s", "mfu": "mfu",
    "hbm_bw": "gpu_memory_bytes_per_s", "hbm": "gpu_memory_bytes", "util": "gpu_memory_share",
    "act": "activation_bytes", "t_fwd": "forward_s", "gpus_per_node": "gpus_per_node",
    "h2d": "host_to_device_bytes_per_s", "net": "network_bytes_per_s", "rpc": "rpc_s",
    "lookup": "lookup_s", "host": "host_bytes_per_node", "overlap": "network_overlap",
    "gpus": "gpus", "docs": "documents", "m": "questions_per_document", "q": "question_tokens",
    "rep_keep": "replicas_kept",
}  # fmt: skip


def told(case: dict[str, Any]) -> TtftParameters:
    return TtftParameters(**{NAMES[short]: value for short, value in case["params"].items()})


@of_case
def test_the_four_systems_take_the_reference_seconds_at_every_length(case: dict[str, Any]) -> None:
    p = told(case)
    assert p.kv_bytes_per_token == case["kv_bytes_per_token"]
    for length, seconds in case["seconds"].items():
        for name, expected in seconds.items():
            assert SYSTEMS[name](p, int(length)) == pytest.approx(expected, rel=1e-12)
    for length, expected in case["prefill"].items():
        assert p.prefill.seconds(int(length)) == pytest.approx(expected, rel=1e-12)


@of_case
def test_hit_shares_remote_shares_and_ratios_are_the_reference_ones(case: dict[str, Any]) -> None:
    p = told(case)
    assert ttft.local_hit_share(p, 8192) == pytest.approx(case["hit_local_8k"], rel=1e-12)
    shares = [ttft.evostore_remote_share(p), ttft.ptstore_remote_share(p)]
    assert shares == pytest.approx(case["remote_share"], rel=1e-12)
    expected = [case["ratios"][k] for k in ("prefix_8k", "evo_8k", "vanilla_8k", "prefix_1k")]
    assert list(ratios(p)) == pytest.approx(expected, rel=1e-12)


# gpus, m, D, mfu, GB/s network and host to device, lookup ms, replicas kept; R1 R2 R3 1k; ms at 8k
ROWS = [
    ((8, 20, 10, 0.45, 6, 20, 20, 0.5), (2.07, 1.21, 5.41, 1.00), (976, 373, 218, 181)),
    ((8, 20, 10, 0.55, 12, 14, 20, 1.0), (2.03, 1.25, 5.29, 0.92), (800, 307, 189, 151)),
    ((16, 50, 10, 0.35, 12, 8, 20, 0.8), (1.89, 1.23, 5.98, 0.99), (1253, 397, 258, 210)),
    ((16, 50, 10, 0.65, 20, 14, 8, 0.8), (1.80, 1.24, 5.58, 1.02), (678, 219, 150, 122)),
    ((32, 100, 10, 0.45, 12, 14, 20, 0.5), (1.92, 1.22, 6.03, 0.91), (976, 310, 197, 162)),
    ((32, 100, 10, 0.65, 20, 14, 8, 0.8), (1.86, 1.29, 5.77, 1.03), (678, 218, 151, 117)),
]


def of_row(row: tuple[float, ...]) -> TtftParameters:
    gpus, m, documents, mfu, network, to_device, lookup_ms, kept = row
    return TtftParameters(
        gpus=int(gpus),
        questions_per_document=int(m),
        documents=int(documents),
        mfu=mfu,
        network_bytes_per_s=network * 1e9,
        host_to_device_bytes_per_s=to_device * 1e9,
        lookup_s=lookup_ms / 1e3,
        replicas_kept=kept,
    )


def printed(numbers: tuple[float, ...], digits: int) -> list[float]:
    return [float(f"{x:.{digits}f}") for x in numbers]


@pytest.mark.parametrize(("row", "expected", "milliseconds"), ROWS)
def test_the_six_published_rows_come_out_to_the_last_digit(
    row: tuple[float, ...], expected: tuple[float, ...], milliseconds: tuple[int, ...]
) -> None:
    p = of_row(row)
    assert printed(ratios(p), 2) == list(expected)
    assert printed([f(p, 8192) * 1e3 for f in SYSTEMS.values()], 0) == list(milliseconds)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"documents": 20}, (2.06, 1.24, 5.58, 1.02)),
        ({"documents": 40}, (3.82, 1.24, 5.58, 1.02)),
        ({"documents": 200}, (5.22, 1.24, 5.58, 1.35)),
        ({"questions_per_document": 10}, (2.93, 1.10, 3.83, 1.61)),
        ({"questions_per_document": 200}, (0.62, 1.28, 6.11, 0.61)),
        ({"network_bytes_per_s": 5e9}, (1.43, 1.75, 4.44, 0.92)),
        ({"network_bytes_per_s": 10e9}, (1.66, 1.44, 5.14, 0.98)),
        ({"mfu": 0.4}, (2.67, 1.22, 8.43, 1.39)),
        ({"lookup_s": 0.03}, (1.52, 1.20, 4.72, 0.62)),
        ({"replicas_kept": 0.0}, (1.46, 1.00, 4.51, 0.93)),
        ({"replicas_kept": 1.0}, (1.91, 1.31, 5.93, 1.05)),
        ({"gpus": 8}, (1.03, 1.17, 5.78, 0.75)),
        ({"gpus": 32}, (2.79, 1.24, 5.37, 1.38)),
        ({"network_overlap": 0.8}, (1.93, 1.05, 5.99, 1.05)),
    ],
)
def test_one_change_at_a_time_gives_the_published_ratios(
    change: dict[str, Any], expected: tuple[float, ...]
) -> None:
    assert printed(ratios(replace(of_row(ROWS[3][0]), **change)), 2) == list(expected)


GRID = {
    "gpus": (8, 16, 32),
    "questions_per_document": (5, 20, 50, 100),
    "documents": (10, 25, 50, 200),
    "mfu": (0.35, 0.45, 0.55, 0.65),
    "network_bytes_per_s": (3e9, 6e9, 12e9, 20e9),
    "host_to_device_bytes_per_s": (8e9, 14e9, 20e9),
    "lookup_s": (0.002, 0.008, 0.02),
    "replicas_kept": (0.5, 0.8, 1.0),
}


def test_the_search_finds_just_what_satisfies_all_claims_and_the_published_rows_are_among_it() -> (
    None
):
    found = list(search_parameters(TtftParameters(), GRID))
    for p, r in found:
        assert r == ratios(p)
        assert 1.8 <= r.prefix_long <= 2.2
        assert 1.15 <= r.evostore_long <= 1.3
        assert 4.8 <= r.vanilla_long <= 6.2
        assert 0.7 <= r.prefix_short <= 1.25
    # What is said of all that match: few documents, many questions, no slow network.
    assert max(p.documents for p, _ in found) <= 25
    assert min(p.questions_per_document for p, _ in found) >= 20
    assert min(p.network_bytes_per_s for p, _ in found) > 3e9
    matches = [p for p, _ in found]
    assert all(of_row(row) in matches for row, _, _ in ROWS)
    # Nothing is missed: the same question put to every 7th combination.
    every = list(itertools.product(*GRID.values()))[::7]
    for values in every:
        p = TtftParameters(**dict(zip(GRID, values, strict=True)))
        assert (p in matches) == ttft.satisfies_claims(ratios(p))


def test_the_search_names_what_is_no_parameter() -> None:
    with pytest.raises(ValueError, match=r"grid must name parameters .* found 'net'"):
        next(search_parameters(TtftParameters(), {"net": [1.0]}))


LENGTHS = (65, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


def corners() -> list[TtftParameters]:
    """From the best to the worst that a store can meet."""
    grid = {
        "gpus": (4, 8, 32),
        "questions_per_document": (1, 2, 20, 200),
        "documents": (1, 25, 1000),
        "mfu": (0.35, 1.0),
        "network_bytes_per_s": (1e8, 20e9),
        "host_to_device_bytes_per_s": (1e9, 50e9),
        "lookup_s": (0.0, 0.02, 0.5),
        "replicas_kept": (0.0, 1.0),
        "host_bytes_per_node": (0.0, 256e9),
    }
    return [
        TtftParameters(**dict(zip(grid, v, strict=True))) for v in itertools.product(*grid.values())
    ]


def test_the_product_is_never_slower_than_a_local_cache_nor_than_ptstore_at_any_length() -> None:
    strictly = 0
    for p in corners()[::3]:
        for length in LENGTHS:
            product = ttft.product_s(p, length)
            local = ttft.prefix_s(p, length)
            assert product <= local * (1 + 1e-12)
            assert product <= ttft.ptstore_s(p, length) * (1 + 1e-12)
            strictly += product < 0.99 * local
    assert strictly > 1000


def test_the_product_beats_the_pool_without_replicas_in_its_own_experiment() -> None:
    for row, _, _ in ROWS:
        p = of_row(row)
        assert ttft.evostore_s(p, 8192) / ttft.product_s(p, 8192) > 1.2
        hidden = ttft.product_s(p, 8192, network_overlap=0.8)
        assert hidden < ttft.product_s(p, 8192)
        assert hidden == ttft.product_s(replace(p, network_overlap=0.8), 8192)


def test_questions_that_reach_gpus_by_chance_hit_and_fetch_as_often_as_the_shares_say() -> None:
    p = TtftParameters(gpus=8, questions_per_document=4, replicas_kept=1.0)
    chance = np.random.default_rng(11)
    documents = 4000
    counts = {"gpu": 0, "remote": 0, "missed": 0, "missed_remote": 0}
    for _ in range(documents):
        gpus = chance.integers(p.gpus, size=p.questions_per_document)
        seen, nodes = {gpus[0]}, {gpus[0] // p.gpus_per_node}
        for gpu in gpus[1:]:
            is_remote = gpu // p.gpus_per_node not in nodes
            counts["remote"] += is_remote
            counts["gpu"] += gpu in seen
            counts["missed"] += gpu not in seen
            counts["missed_remote"] += is_remote
            seen.add(gpu)
            nodes.add(gpu // p.gpus_per_node)
    m = p.questions_per_document
    # Five standard errors; a document's count of either kind varies by less than 1.
    tolerance = 5.0 / math.sqrt(documents)
    local = ttft.local_hit_share(p, 1024) * m
    remote = ttft.ptstore_remote_share(p) * (m - 1)
    assert counts["gpu"] / documents == pytest.approx(local, abs=tolerance)
    assert counts["remote"] / documents == pytest.approx(remote, abs=tolerance)
    assert counts["missed_remote"] / counts["missed"] == pytest.approx(
        ttft.product_remote_share(p, 1024), rel=0.03
    )
    assert counts["gpu"] + counts["missed"] + documents == documents * m


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("network_overlap", 1.5, "network_overlap must be a share in 0..1, found 1.5"),
        ("gpus", 6, "gpus must be a multiple of gpus_per_node, found 6 and 4"),
        ("documents", 0, "documents must be finite and > 0, found 0"),
        ("lookup_s", math.nan, "lookup_s must be finite and >= 0, found nan"),
        ("gpu_memory_bytes", 8e9, "gpu_memory_bytes leaves no room for a cache"),
    ],
)
def test_impossible_experiments_are_named(field: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(TtftParameters(), **{field: value})


def test_a_prompt_has_to_be_longer_than_its_question() -> None:
    with pytest.raises(ValueError, match=r"more than question_tokens \(64\), found 64"):
        ttft.product_s(TtftParameters(), 64)
