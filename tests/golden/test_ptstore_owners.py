"""Reference vectors of weighted rendezvous, and of what a removed node moves."""

import json
from pathlib import Path
from typing import Any

import pytest

from policies.prefix.owners import rendezvous_order

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "ptstore_owners.json").read_text(encoding="utf-8")
)
of_case = pytest.mark.parametrize("case", CASES, ids=[f"{len(c['nodes'])} nodes" for c in CASES])


@of_case
def test_keys_have_these_first_three_owners(case: dict[str, Any]) -> None:
    found = [list(rendezvous_order(bytes.fromhex(k), case["nodes"])[:3]) for k in case["keys"]]
    assert found == case["owners_top3"]


@of_case
def test_keys_have_these_owners_once_a_node_is_removed(case: dict[str, Any]) -> None:
    left = {node: w for node, w in case["nodes"].items() if node != case["removed"]}
    found = [rendezvous_order(bytes.fromhex(key), left)[0] for key in case["keys"]]
    assert found == case["owner_after_removal"]
