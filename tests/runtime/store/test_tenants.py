"""Tenants share neither blocks, nor room, nor time; and nothing tells what they wrote."""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix.keys import Namespace, root_key, tenant_tag
from runtime.store.config import StoreConfig
from runtime.store.errors import StoreError, StoreUnavailableError
from runtime.store.local_link import LocalLink
from runtime.store.logs import log_as_json
from runtime.store.metrics import StoreCollector
from runtime.store.node_stats import node_stats
from runtime.store.store import PrefixStore, connect, open_store
from runtime.store.store_server import ServerConfig, StoreServer
from tests.runtime.store.conftest import BLOCK, blocks, chain
from tests.runtime.store.faults.accounts import counter, right, settled

NAMESPACE = Namespace(
    model="m", revision="r", dtype="bf16", layout="v1", layers="0-1", kv_heads="0-1", block=16
)
Open = Callable[..., PrefixStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    stores: list[PrefixStore] = []

    def open_one(**changes: Any) -> PrefixStore:
        given_settings: dict[str, Any] = {
            "directory": tmp_path / "s",
            "dram": 64 * BLOCK,
            "block_bytes": BLOCK,
            "eviction": "lru",
        }
        stores.append(open_store(**(given_settings | changes)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


# --- keys ----------------------------------------------------------------------------------

_TEXT = st.text(max_size=8)
_NAMESPACES = st.builds(
    Namespace,
    model=_TEXT,
    revision=_TEXT,
    dtype=_TEXT,
    layout=_TEXT,
    layers=_TEXT,
    kv_heads=_TEXT,
    block=st.sampled_from([1, 2, 16]),
    adapter=_TEXT,
)


@given(
    pair=st.tuples(st.tuples(_NAMESPACES, _TEXT), st.tuples(_NAMESPACES, _TEXT)),
    mixed=st.sampled_from(["both", "salt", "model", "layout", "adapter"]),
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=32, max_size=64),
)
@settings(max_examples=120, deadline=None)
def test_two_salts_or_namespaces_share_no_key(
    pair: tuple[tuple[Namespace, str], tuple[Namespace, str]], mixed: str, tokens: list[int]
) -> None:
    """Target 10; rows 4, 32. Also texts that differ only in where one field ends."""
    from policies.prefix.keys import block_keys

    (first, salt), (second, other) = pair
    if mixed == "salt":
        second = first
    elif mixed != "both":
        second, other = replace(first, **{mixed: getattr(second, mixed)}), salt
    one = block_keys(root_key(first, salt), tokens, first.block)
    two = block_keys(root_key(second, other), tokens, second.block)
    if (first, salt) == (second, other):
        assert one == two
    else:
        assert not set(one) & set(two)
    assert (tenant_tag(salt) == tenant_tag(other)) == (salt == other)


# --- quotas --------------------------------------------------------------------------------


def test_a_tenant_at_its_quota_pushes_out_only_its_own_blocks(opened: Open) -> None:
    tag = tenant_tag("greedy")
    store = opened(quota_bytes={tag: 8 * BLOCK})
    others = [chain(f"o{i}", 5) for i in range(8)]
    for keys in others:
        assert store.put(keys, blocks(keys)).stored == 5
    for number in range(50):
        keys = chain(f"g{number}", 4)
        assert store.put(keys, blocks(keys), tenant=tag).stored == 4
    for keys in others:
        assert right(store, keys) == 5
    assert sum(store.lookup(chain(f"g{n}", 4)) for n in range(50)) == 8
    settled(store)


def test_blocks_that_a_tenant_loads_from_ssd_count_against_its_quota(opened: Open) -> None:
    """What was put once and is read again may not push others out of memory either."""
    tag = tenant_tag("greedy")
    store = opened(quota_bytes={tag: 8 * BLOCK}, ssd="8MiB")
    greedy = [chain(f"g{i}", 4) for i in range(30)]
    for keys in greedy:
        assert store.put(keys, blocks(keys), tenant=tag, durable=True, deadline_s=10).stored == 4
    others = [chain(f"o{i}", 5) for i in range(9)]
    for keys in others:
        assert store.put(keys, blocks(keys)).stored == 5
    before = counter(store, "blocks_hit_memory")
    for keys in greedy:
        with store.load(keys, deadline_s=10, tenant=tag) as found:
            assert [bytes(view) for view in found.views] == blocks(keys)
    for keys in others:
        assert right(store, keys) == 5
    assert counter(store, "blocks_hit_memory") >= before + 45
    settled(store)


def test_a_session_names_its_tenant_in_loads_and_puts(opened: Open) -> None:
    tag = tenant_tag("salt")
    store = opened(quota_bytes={tag: 4 * BLOCK}, ssd="8MiB")
    session = store.session(NAMESPACE, "salt")
    others = chain("o", 40)
    assert store.put(others, blocks(others)).stored == 40
    for number in range(12):
        tokens = list(range(number * 1000, number * 1000 + 64))
        data = [bytes([number, i]) * (BLOCK // 2) for i in range(4)]
        assert session.put(tokens, data, durable=True, deadline_s=10).stored == 4
    for number in range(12):
        tokens = list(range(number * 1000, number * 1000 + 64))
        with session.load(tokens, deadline_s=10) as found:
            assert [view[0] for view in found.views] == [number] * 4
    assert right(store, others) == 40


# --- guessing ------------------------------------------------------------------------------


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Chance that a guess that was stored is faster than one that was not; ties count half."""
    fast, slow = np.asarray(hits)[:, None], np.asarray(misses)[None, :]
    return float(np.mean((fast < slow) + 0.5 * (fast == slow)))


def time_to_first_token(store: PrefixStore, salt: str, tokens: list[int], repeats: int) -> float:
    """Seconds as an attacker sees them: load what is there, compute the rest.

    A block costs 2 ms to compute, far less than any model takes; the store's own time is real. The
    least of several tries, which is the attacker's best means against a busy machine.
    """
    session = store.session(NAMESPACE, salt)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        with session.load(tokens, deadline_s=5) as found:
            leading = found.leading
        best = min(best, time.perf_counter() - start + 2e-3 * (len(tokens) // 16 - leading))
    return best


def guess(store: PrefixStore, salt: str, seed: int, trials: int) -> float:
    """How well an attacker with that salt tells prompts of the tenant "victim" from others."""
    rng = np.random.default_rng(seed)
    victim = store.session(NAMESPACE, "victim")
    prompts = [[int(t) for t in rng.integers(0, 50_000, 64)] for _ in range(2 * trials)]
    stored, absent = prompts[:trials], prompts[trials:]
    for tokens in stored:
        assert victim.put(tokens, [bytes(64)] * 4, deadline_s=10).stored == 4
    times: dict[bool, list[float]] = {True: [], False: []}
    # Interleaved, so that a slow moment of the machine meets both kinds alike.
    for hit, miss in zip(stored, absent, strict=True):
        order = [(True, hit), (False, miss)]
        for is_stored, tokens in order if rng.random() < 0.5 else order[::-1]:
            times[is_stored].append(time_to_first_token(store, salt, tokens, 3))
    return auc(times[True], times[False])


def test_timing_tells_nothing_across_salts_and_everything_within_one(opened: Open) -> None:
    """Row 32 (CVE-2025-46570), target 10: the second half shows that the test can fail."""
    store = opened(dram=10_000 * 64, block_bytes=64)
    # Chance alone gives 0.5 with a standard error of 0.013 (Hanley and McNeil 1982, 1000 a side);
    # far below 0.5 would tell as much as far above.
    across = guess(store, "attacker", 1, 1000)
    assert 0.45 <= across <= 0.55, f"AUC {across:.3f}"
    within = guess(store, "victim", 2, 100)
    assert within >= 0.95, f"AUC {within:.3f}"
    unsalted = guess(store, "", 3, 1000)
    assert 0.45 <= unsalted <= 0.55, f"AUC {unsalted:.3f}"


# --- what is written down ------------------------------------------------------------------

SALT, TOKEN = "s3cr3t-of-the-tenant", 918_273_645


def test_salts_tokens_keys_and_contents_are_written_down_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Logs, metrics, errors, statistics and the decision log, after hits, misses and faults."""
    log_as_json("debug")
    caplog.set_level(logging.DEBUG)
    decisions = tmp_path / "decisions.jsonl.gz"
    secret = b"the-content-of-a-block-" * (BLOCK // 23)
    config = StoreConfig(
        folder=tmp_path / "s",
        dram_bytes=16 * BLOCK,
        ssd_bytes=4 << 20,
        block_bytes=BLOCK,
        node="n",
        quota_bytes={tenant_tag(SALT): 8 * BLOCK},
        log_calls=10_000,
    )
    server = StoreServer(
        ServerConfig(store=config, socket=tmp_path / "sock", decision_log=decisions)
    )
    said: list[str] = []
    try:
        store = connect(tmp_path / "sock")
        session = store.session(NAMESPACE, SALT)
        tokens = [TOKEN + i for i in range(64)]
        keys = session.keys(tokens)
        assert session.put(tokens, [secret] * 4, durable=True, deadline_s=10).stored == 4
        session.load(tokens).close()
        session.load([TOKEN * 2] * 64).close()
        state = server.node.state
        room = state.memory.get(keys[1])
        assert room is not None
        state.memory.view(room)[5] ^= 1
        session.load(tokens).close()
        for wrong in (
            lambda: session.put(tokens, [secret]),
            lambda: store.put(keys, [b""] * 4),
            lambda: store.lookup([b"short"]),
            lambda: store.load_into(keys, [bytearray(3)] * 4),
            lambda: connect(tmp_path / "nowhere"),
            lambda: store._link.commit(7, [1], False, None),  # type: ignore[arg-type]
        ):
            with pytest.raises((ValueError, StoreError, AttributeError)) as error:
                wrong()  # type: ignore[no-untyped-call]
            said.append(str(error.value))
        server.node._failed(StoreUnavailableError("injected"))
        said.append(json.dumps(store.stats()))
        said.append(repr(list(StoreCollector(lambda: node_stats(server.node)).collect())))
        said.append(repr(session.store) + repr(store.load(keys).infos[:0]))
        store.close()
    finally:
        server.stop()
        structlog.reset_defaults()
    captured = capsys.readouterr()
    said += [
        captured.out,
        captured.err,
        caplog.text,
        gzip.decompress(decisions.read_bytes()).decode(),
    ]
    text = "\n".join(said)
    assert "serving" in text
    assert '"reserve"' in text
    forbidden = [SALT, str(TOKEN), "the-content-of-a-block", tenant_tag(SALT).hex()]
    forbidden += [part for key in keys for part in (key.hex()[:9], repr(key)[2:-1][:12])]
    forbidden += [root_key(NAMESPACE, SALT).hex()[:9]]
    for word in forbidden:
        assert word not in text, word


def test_a_link_shows_no_keys_when_it_is_printed(opened: Open) -> None:
    store = opened()
    keys = chain("a", 2)
    store.put(keys, blocks(keys))
    assert isinstance(store._link, LocalLink)
    text = repr(store) + repr(store._link) + repr(store.put(keys, blocks(keys)))
    assert keys[0].hex()[:8] not in text
    assert repr(keys[0])[2:10] not in text
