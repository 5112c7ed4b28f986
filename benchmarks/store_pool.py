"""Rules for replicas in a pool of eight nodes: how far the priced one is from the best threshold.

    python benchmarks/store_pool.py [--requests 1500] [--seeds 1] [--out FILE]

27 settings: network 3, 12 and 25 GB/s; memory 0.2, 0.6 and 1.2 of the distinct blocks; questions
over documents and the mixed workload with random routing, questions over documents with sticky
routing. Mistral-7B in blocks of 64 tokens, A100 at MFU 0.5, copies to the device at 20 GB/s, no
SSD, nothing queued. Rules: none; static 25 and 50 %, soft 10 and 25 %; every copy priced.
Written to benchmarks/results/store_pool.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from models.prefix_costs import MISTRAL_7B_ON_A100, PrefixCosts, TierSpeed
from models.streams import stream
from traces.environment import versions
from traces.prefix_workloads import PrefixRequest, prefix_workload
from traces.whole_file import write_whole
from twin.store.pool_cost import PoolRule, pool_cost

NODES = 8
NETWORKS_BYTES_PER_S = (3e9, 12e9, 25e9)
MEMORY_SHARES = (0.2, 0.6, 1.2)
TRAFFIC = (("docqa", "random"), ("docqa", "sticky"), ("mixed", "random"))
RULES = (
    PoolRule(replicas="none"),
    PoolRule(replicas="static", share=0.25),
    PoolRule(replicas="static", share=0.5),
    PoolRule(replicas="soft", share=0.1),
    PoolRule(replicas="soft", share=0.25),
    PoolRule(replicas="unified"),
)
BLOCK_TOKENS, TOKEN_BYTES = 64, 131_072
RESULTS = Path(__file__).parent / "results" / "store_pool.json"


def costs(network_bytes_per_s: float) -> PrefixCosts:
    return PrefixCosts(
        prefill=MISTRAL_7B_ON_A100,
        block_tokens=BLOCK_TOKENS,
        local=TierSpeed(bytes_per_s=20e9),
        remote=TierSpeed(bytes_per_s=network_bytes_per_s, request_s=60e-6),
        ssd=TierSpeed(bytes_per_s=3e9),
    )


def nodes_of(requests: tuple[PrefixRequest, ...], routing: str, seed: int) -> list[int]:
    """Random: by a draw of its own. Sticky: a session, or else a prompt's fifth block (the first
    behind a system prompt), stays where it was first."""
    draws = np.minimum((stream(seed, "pool routing").random(len(requests)) * NODES), NODES - 1)
    nodes = draws.astype(int).tolist()
    if routing == "random":
        return nodes
    home: dict[tuple[str, int], int] = {}
    found = []
    for request, node in zip(requests, nodes, strict=True):
        if request.session >= 0:
            found.append(home.setdefault(("session", request.session), node))
        elif len(request.prompt) > 4:
            found.append(home.setdefault(("block", request.prompt[4]), node))
        else:
            found.append(node)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--eviction", default="gdsf")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    settings = []
    total = options.seeds * len(TRAFFIC) * len(MEMORY_SHARES) * len(NETWORKS_BYTES_PER_S)
    for seed in range(1, options.seeds + 1):
        for workload, routing in TRAFFIC:
            drawn = prefix_workload(workload, stream(seed, "prefix workload"))
            requests = drawn.requests[: options.requests]
            distinct = len(dict.fromkeys(b for r in requests for b in r.prompt + r.generated))
            nodes = nodes_of(requests, routing, seed)
            for share in MEMORY_SHARES:
                for network in NETWORKS_BYTES_PER_S:
                    found = {
                        rule.label: pool_cost(
                            requests,
                            nodes,
                            num_nodes=NODES,
                            node_blocks=max(1, round(share * distinct / NODES)),
                            ssd_blocks=0,
                            rule=rule,
                            costs=costs(network),
                            block_bytes=BLOCK_TOKENS * TOKEN_BYTES,
                            eviction=options.eviction,
                        )
                        for rule in RULES
                    }
                    settings.append(
                        {
                            "seed": seed,
                            "workload": workload,
                            "routing": routing,
                            "memory_share": share,
                            "network_bytes_per_s": network,
                            "milliseconds": {k: 1e3 * v.total_s for k, v in found.items()},
                            "rules": {k: asdict(v) for k, v in found.items()},
                        }
                    )
                    _show(settings[-1], len(settings), total)
    summary = {
        "command": f"python benchmarks/store_pool.py --requests {options.requests} "
        f"--seeds {options.seeds} --eviction {options.eviction}",
        "versions": versions(),
        "requests": options.requests,
        "eviction": options.eviction,
        "distance": distances(settings),
        "settings": settings,
    }
    for label, row in summary["distance"].items():
        print(f"{label:26} worst {100 * row['worst']:6.1f} %  mean {100 * row['mean']:5.1f} %")
    write_whole(options.out, (json.dumps(summary, indent=1) + "\n").encode())
    print(f"written: {options.out}")


def distances(settings: list[dict]) -> dict[str, dict[str, float]]:
    """How far a rule's cost lies above that of the best rule of each setting.

    ``unified against thresholds``: of the priced rule above the best static or soft one; it can be
    below. ``X against all``: of each rule above the best of all, no replicas at all included.
    """
    rows: dict[str, list[float]] = {}
    for setting in settings:
        costs_ms = setting["milliseconds"]
        thresholds = [v for label, v in costs_ms.items() if ":" in label]
        over = costs_ms["unified"] / min(thresholds) - 1.0
        rows.setdefault("unified against thresholds", []).append(over)
        for label, value in costs_ms.items():
            rows.setdefault(f"{label} against all", []).append(value / min(costs_ms.values()) - 1.0)
    return {
        label: {"worst": max(values), "mean": statistics.fmean(values)}
        for label, values in rows.items()
    }


def _show(setting: dict, done: int, total: int) -> None:
    costs_ms = setting["milliseconds"]
    line = "  ".join(f"{label} {value:.1f}" for label, value in costs_ms.items())
    print(
        f"{done}/{total} {setting['workload']} {setting['routing']} memory "
        f"{setting['memory_share']:g} network {setting['network_bytes_per_s'] / 1e9:g}: {line}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
