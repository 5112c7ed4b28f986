"""Reference hits of eviction policies on chains; any further case of the kind runs as well."""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from models.prefix_costs import MISTRAL_7B_ON_A100
from policies.catalog import eviction_policy
from policies.prefix.bound import bound_hits
from policies.prefix.cache import PrefixCache

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "ptstore_policies.json").read_text(encoding="utf-8")
)
EXACT = {
    "LRU": "lru",
    "LRU-front": "lru_front",
    "FIFO": "fifo",
    "LFU": "lfu",
    "SIEVE": "sieve",
    "ARC": "arc",
    "GDSF": "gdsf",
    "GDSF-pos": "gdsf_pos",
    "Tree-LRU": "tree_lru",
    "Tree-SLRU": "tree_slru",
    "Tree-GDSF": "tree_gdsf",
}
CLOSE = {"S3-FIFO": "s3_fifo"}
TOLERANCE = 0.015  # of the hits

every_case = pytest.mark.parametrize(
    ("case", "blocks"),
    [(case, int(blocks)) for case in CASES for blocks in case["expected_hits"]],
    ids=[f"{c['workload']}-{c['seed']}-{n}" for c in CASES for n in c["expected_hits"]],
)


def recompute_s(block_tokens: int) -> Callable[[int], float]:
    return lambda depth: MISTRAL_7B_ON_A100.compute_s(block_tokens, depth * block_tokens)


def hits_of(name: str, case: dict[str, Any], blocks: int) -> list[int]:
    cache = PrefixCache(eviction_policy(name, blocks), blocks)
    cost_of_depth = recompute_s(case["block"])
    return [
        cache.request(
            prompt, generated, now=time_s, category=category, cost_of_depth=cost_of_depth
        ).hits
        for time_s, category, _session, prompt, generated, *_rest in case["requests"]
    ]


@every_case
@pytest.mark.parametrize("label", EXACT)
def test_every_request_hits_what_the_reference_hits(
    case: dict[str, Any], blocks: int, label: str
) -> None:
    assert hits_of(EXACT[label], case, blocks) == case["expected_hits"][str(blocks)][label]


@every_case
@pytest.mark.parametrize("label", CLOSE)
def test_all_requests_together_hit_what_the_reference_hits(
    case: dict[str, Any], blocks: int, label: str
) -> None:
    expected = sum(case["expected_hits"][str(blocks)][label])
    assert sum(hits_of(CLOSE[label], case, blocks)) == pytest.approx(expected, rel=TOLERANCE)


@every_case
def test_the_bound_is_the_optimum_of_the_reference(case: dict[str, Any], blocks: int) -> None:
    chains = [(request[3], request[4]) for request in case["requests"]]
    assert bound_hits(chains, blocks) == case["expected_hits"][str(blocks)]["bound"]


@every_case
@pytest.mark.parametrize("name", [*EXACT.values(), *CLOSE.values(), "tree_hd"])
def test_no_policy_is_above_the_bound_at_the_end(
    case: dict[str, Any], blocks: int, name: str
) -> None:
    bound = case["expected_hits"][str(blocks)]["bound"]
    reached = list(accumulate(hits_of(name, case, blocks)))
    assert reached[-1] <= sum(bound)
