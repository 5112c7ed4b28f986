"""Reference vectors of namespace digests, roots and block keys."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.prefix.keys import Namespace, block_keys, root_key

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "ptstore_keys.json").read_text(encoding="utf-8")
)
of_case = pytest.mark.parametrize("case", CASES, ids=[f"{c['seed']}-{c['salt']}" for c in CASES])


def tokens(case: dict[str, Any]) -> list[int]:
    assert "x*6364136223846793005+1442695040888963407" in case["token_rule"]
    x, ids = case["seed"], []
    for _ in range(case["tokens"]):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append((x >> 33) % 32000)
    return ids


def hexes(keys: tuple[bytes, ...]) -> list[str]:
    return [key.hex() for key in keys]


@of_case
def test_namespace_and_salt_give_the_digest_and_the_root(case: dict[str, Any]) -> None:
    namespace = Namespace(**case["namespace"])
    assert namespace.digest().hex() == case["ns_digest"]
    assert root_key(namespace, case["salt"]).hex() == case["root"]


@of_case
def test_tokens_give_the_keys_of_all_full_blocks(case: dict[str, Any]) -> None:
    root = root_key(Namespace(**case["namespace"]), case["salt"])
    for ids in (tokens(case), np.array(tokens(case))):
        assert hexes(block_keys(root, ids, case["namespace"]["block"])) == case["keys"]


@of_case
def test_an_extra_changes_its_block_and_all_behind_it(case: dict[str, Any]) -> None:
    root = root_key(Namespace(**case["namespace"]), case["salt"])
    image = f"image-{case['seed']}".encode()  # the bytes beside block 1 in these vectors
    keys = block_keys(root, tokens(case), case["namespace"]["block"], extras={1: image})
    assert hexes(keys) == case["keys_with_extra_on_block_1"]
