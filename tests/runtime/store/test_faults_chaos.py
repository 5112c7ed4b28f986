"""Everything at once on three nodes, then the books are checked to the last block."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.store.deadline import Deadline
from tests.runtime.store.conftest import BLOCK, blocks, chain
from tests.runtime.store.faults.accounts import settled
from tests.runtime.store.test_pool import Member, free_ports, wait_until

NAMES = ("n0", "n1", "n2")
ROUNDS = 120


def disturb(members: Sequence[Member], seed: int) -> list[str]:
    """One engine's life: short deadlines, long holds, late writers, flipped bits, compaction."""
    rng, held, wrong = np.random.default_rng(seed), [], []
    for _ in range(ROUNDS):
        member = members[int(rng.integers(3))]
        store, state = member.store, member.node.state
        keys = chain(f"c{int(rng.integers(40))}", 1 + int(rng.integers(8)))
        seconds = float(rng.choice([0.001, 0.05, 1.0]))
        what = rng.random()
        if what < 0.4:
            found = store.load(keys, deadline_s=seconds)
            data = [bytes(view) for view in found.views]
            valid = found.still_valid()
            if data[:valid] != blocks(keys[:valid]):
                wrong.append("in place")
            held.append(found)
            if len(held) > 3 or rng.random() < 0.8:
                held.pop(int(rng.integers(len(held)))).close()
        elif what < 0.8:
            store.put(keys, blocks(keys), deadline_s=seconds, durable=bool(rng.random() < 0.1))
        elif what < 0.84:
            with store.reserve(keys, [BLOCK] * len(keys)):
                time.sleep(rng.random() * 0.3)
        elif what < 0.9:
            targets = [bytearray(BLOCK) for _ in keys]
            count = store.load_into(keys, targets, deadline_s=0.1)
            if [bytes(one) for one in targets[:count]] != blocks(keys[:count]):
                wrong.append("copied")
        elif what < 0.93:
            with state.lock:
                rooms = list(state.memory.rooms())
                if rooms:
                    state.memory.view(rooms[int(rng.integers(len(rooms)))])[3] ^= 1
        elif what < 0.96 and state.ssd is not None:
            state.ssd.compact(Deadline.after(0.1), 0.05)
        else:
            store.lookup(keys)
    for found in held:
        found.close()
    return wrong


@pytest.mark.parametrize(
    "settings",
    [
        {"eviction": "lru", "replicas": "unified", "flush": "on_commit"},
        {"eviction": "tree_hd", "replicas": "none", "flush": "on_reuse"},
        {"eviction": "gdsf", "replicas": "static", "flush": "on_commit"},
    ],
    ids=["unified", "none", "static"],
)
def test_after_chaos_no_byte_was_wrong_and_all_books_agree(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Rows 2, 3, 6, 7, 13, 14, 16, 20, 25, 30."""
    peers = ",".join(f"{n}=127.0.0.1:{p}" for n, p in zip(NAMES, free_ports(3), strict=True))
    given = settings | {
        "ssd_bytes": 1 << 20,
        "dram_bytes": 24 * BLOCK,
        "segment_bytes": 128 << 10,
        "lease_s": 0.3,
        "reservation_s": 0.2,
    }
    members = [Member(tmp_path, name, peers, **given) for name in NAMES]
    try:
        wait_until(lambda: all(len(m.node.state.weights) == 3 for m in members), "all live")
        with ThreadPoolExecutor(6) as threads:
            done = [threads.submit(disturb, members, seed) for seed in range(6)]
            assert [one.result(120) for one in done] == [[]] * 6
        for member in members:
            assert member.store.flush(deadline_s=30)
        for member in members:
            settled(member.store)
            books(member)
        wait_until(lambda: len({holdings(m, members) for m in members}) == 1, "equal directories")
        assert sum(m.counters["blocks_hit"] for m in members) > 100
        assert sum(m.counters["background_errors"] for m in members) == 0
    finally:
        for member in members:
            member.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith(("store-", "peer-"))]


def books(member: Member) -> None:
    """Policy, memory, SSD and directory of a node say the same."""
    state = member.node.state
    assert state.ssd is not None
    in_memory = {room.info.key for room in state.memory.rooms()}
    on_ssd = {info.key for info in state.ssd.entries()}
    held = {(one.key, one.tier) for one in state.directory.holdings(member.name)}
    assert held == {(k, "memory") for k in in_memory} | {(k, "ssd") for k in on_ssd}
    assert all(state.policy.in_memory(key) for key in in_memory)
    assert all(state.policy.on_ssd(key) for key in on_ssd)
    assert len(state.policy) == len(in_memory | on_ssd)
    for room in state.memory.rooms():
        owned = "owned" if room.is_owned else "replica"
        assert state.policy.in_memory(room.info.key) == owned
    state.directory.check()


def holdings(member: Member, members: Sequence[Member]) -> frozenset[Any]:
    directory = member.node.state.directory
    return frozenset(
        (one.name, h.key, h.tier, h.is_owned)
        for one in members
        for h in directory.holdings(one.name)
    )
