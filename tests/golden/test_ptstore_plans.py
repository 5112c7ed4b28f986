"""Reference histories of puts, loads and a lost owner on small clusters."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.prefix_costs import PrefillCost, PrefixCosts, TierSpeed
from policies.catalog import owner_rule
from policies.prefix.directory import Directory, Held
from policies.prefix.load_plan import plan_load
from policies.prefix.put_plan import plan_put

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "ptstore_plans.json").read_text(encoding="utf-8")
)
# A device so slow that loading always pays: the plan with costs has to be the plan without.
SLOW_DEVICE = PrefixCosts(
    prefill=PrefillCost(
        parameters=7e9, layers=32, heads=32, head_dim=128, weight_bytes=14e9, flops_per_s=1e12,
        mfu=0.5, memory_bytes_per_s=1e12,
    ),
    block_tokens=16,
    local=TierSpeed(bytes_per_s=2e10),
    remote=TierSpeed(bytes_per_s=1e10, request_s=1e-4),
    ssd=TierSpeed(bytes_per_s=3e9, request_s=1e-4),
)  # fmt: skip


class Cluster:
    def __init__(self, nodes: dict[str, float], block_bytes: int) -> None:
        self.weights, self.block_bytes = dict(nodes), block_bytes
        self.directory = Directory()

    def put(self, keys: list[bytes]) -> dict[str, Any]:
        plan = plan_put(
            keys,
            self.directory,
            block_bytes=self.block_bytes,
            rule=owner_rule("rendezvous"),
            writer="",
            weights=self.weights,
        )
        for i, key in enumerate(keys[plan.lcp :]):
            held = Held(plan.region, i, plan.lcp + i, self.block_bytes)
            assert self.directory.add(plan.owner, 1, key, held, tier="memory", is_owned=True)
        region = None if plan.region is None else plan.region.hex()
        return {"lcp": plan.lcp, "region": region, "bytes": plan.size_bytes, "owner": plan.owner}

    def load(self, keys: list[bytes], local: str, costs: PrefixCosts | None) -> dict[str, Any]:
        plan = plan_load(keys, self.directory, local=local, costs=costs)
        assert plan.wanted == plan.leading
        requests = {
            node: [
                {"region": s.region.hex(), "src": s.src, "dst": s.dst, "len": s.length}
                for s in segments
            ]
            for node, segments in plan.remote.items()
        }
        local_bytes = sum(s.length for s in plan.local)
        return {
            "lcp": plan.leading,
            "local_bytes": local_bytes,
            "rpcs": len(requests),
            "requests": requests,
        }

    def lose(self, node: str) -> None:
        self.directory.forget_node(node)
        del self.weights[node]


@pytest.mark.parametrize("costs", [None, SLOW_DEVICE], ids=["without costs", "slow device"])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_step_is_planned_as_expected(case: dict[str, Any], costs: PrefixCosts | None) -> None:
    cluster = Cluster(case["nodes"], case["block_bytes"])
    for number, step in enumerate(case["steps"]):
        if step["op"] == "owner_lost":
            cluster.lose(step["node"])
            continue
        keys = [bytes.fromhex(key) for key in step["keys"]]
        found = (
            cluster.put(keys) if step["op"] == "put" else cluster.load(keys, step["local"], costs)
        )
        assert found == step["expect"], f"step {number}"
