"""From a setting to a prefix cache; a store that another process serves, kills or stops."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.prefix_blocks import PrefixBlocks, PrefixLimits
from runtime.engine.prefix_open import PrefixStoreSettings, open_prefix_blocks
from runtime.model.kv_cache import KvCache
from runtime.store.errors import StoreSetupError
from tests.runtime.engine.prefix_cases import (
    BLOCK_BYTES,
    PATIENCE_S,
    WHOLE,
    chain,
    compute,
    expected,
    held,
    layout,
    loaded,
    namespace,
    new_cache,
    prompt,
    saved,
    until,
)
from tests.runtime.store.conftest import ServerProcess

TOKENS = prompt(100)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose sockets have short names."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def server(short: Path) -> Iterator[ServerProcess]:
    one = ServerProcess(short / "s", "--dram", str(64 * BLOCK_BYTES))
    one.start().close()
    yield one
    assert one.process is not None
    if one.process.poll() is None:
        one.process.send_signal(signal.SIGCONT)
    one.kill(signal.SIGTERM)


def opened(place: Path | str, cache: KvCache, **options: Any) -> PrefixBlocks:
    settings = PrefixStoreSettings(place=str(place), **options)
    prefix = open_prefix_blocks(settings, cache, lambda: namespace(cache.layout))
    assert prefix is not None
    return prefix


def test_none_opens_nothing_and_asks_for_no_digest() -> None:
    def never() -> Any:
        raise AssertionError("asked")

    assert open_prefix_blocks(PrefixStoreSettings(), new_cache(), never) is None


def test_a_folder_keeps_prefixes_on_its_disk_until_the_next_start(tmp_path: Path) -> None:
    cache = new_cache()
    compute(cache, 1, TOKENS)
    prefix = opened(tmp_path / "p", cache, dram="1MiB", ssd="8MiB")
    assert prefix._store.block_bytes == BLOCK_BYTES
    assert saved(prefix, 1, TOKENS) == 6
    prefix.close()
    again = new_cache()
    prefix = opened(tmp_path / "p", again, dram="1MiB", ssd="8MiB")
    assert prefix.lookup(chain(prefix, TOKENS)) == 6
    assert loaded(prefix, again, 1, TOKENS).blocks == 6
    assert np.array_equal(held(again, 1, 6), expected(TOKENS, again.layout))
    prefix.close()


def test_two_engines_of_a_served_store_share_prefixes(server: ServerProcess) -> None:
    first, second = new_cache(), new_cache()
    compute(first, 1, TOKENS)
    one, two = opened(server.socket, first), opened(server.socket, second)
    assert saved(one, 1, TOKENS) == 6
    assert two.lookup(chain(two, TOKENS)) == 6
    assert loaded(two, second, 9, TOKENS).blocks == 6
    assert np.array_equal(held(second, 9, 6), expected(TOKENS, second.layout))
    one.close()
    two.close()


def test_a_store_killed_between_lookup_and_load_costs_recomputation_and_comes_back(
    server: ServerProcess,
) -> None:
    cache = new_cache()
    prefix = opened(server.socket, cache)
    compute(cache, 1, TOKENS)
    assert saved(prefix, 1, TOKENS) == 6
    keys = chain(prefix, TOKENS)
    assert prefix.lookup(keys) == 6
    server.kill()
    end = loaded(prefix, cache, 2, TOKENS)
    assert (end.blocks, end.reason) == (0, "unavailable")
    assert prefix.lookup(keys) == 0
    assert prefix.start_save(1, keys, 0, 6) == 0
    assert prefix.save_now(1, keys, 0, 6, within_s=1) == 0
    assert prefix.counters()["unsaved_paused"] == 12
    assert not held(cache, 2, 6).any()
    server.start().close()  # takes over what was in memory
    until_s = time.monotonic() + PATIENCE_S
    while prefix.lookup(keys) != 6:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert loaded(prefix, cache, 3, TOKENS).blocks == 6
    assert np.array_equal(held(cache, 3, 6), expected(TOKENS, cache.layout))
    for sequence in (1, 2, 3):
        cache.release(sequence)
    cache.check()
    prefix.close()


def test_a_store_killed_during_saves_and_loads_leaves_no_page_held(server: ServerProcess) -> None:
    cache = new_cache()
    prefix = opened(server.socket, cache)
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    for number in range(2, 12):
        tokens = prompt(64, seed=number)
        compute(cache, number, tokens)
        prefix.start_save(number, chain(prefix, tokens), 0, 4)
    cache.add(50)
    cache.grow(50, 96)
    prefix.start_load(50, chain(prefix, TOKENS), 0, 6)
    server.kill()
    (end,) = until(prefix.poll_loads)
    want = expected(TOKENS, cache.layout)[: end.blocks]
    assert np.array_equal(held(cache, 50, end.blocks), want)
    ended = until(prefix.poll_saves, 10)
    assert all(e.blocks == 4 or e.reason for e in ended)
    for number in cache.sequences:
        cache.release(number)
    assert cache.held_pages == 0
    cache.check()
    prefix.close()


def test_a_store_that_is_stopped_is_late_once_and_left_alone_then(server: ServerProcess) -> None:
    cache = new_cache()
    prefix = opened(server.socket, cache, limits=PrefixLimits(load_s=0.2, save_s=0.2))
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    keys = chain(prefix, TOKENS)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    found = [prefix.lookup(keys) for _ in range(20)]
    assert found == [0] * 20
    counts = prefix.counters()
    assert counts["store_failures"] == 1
    assert counts["calls_paused"] == 19
    cache.add(2)
    cache.grow(2, 96)
    prefix.start_load(2, keys, 0, 6)
    (end,) = until(prefix.poll_loads)
    assert end.blocks == 0
    server.process.send_signal(signal.SIGCONT)
    prefix.close()
    cache.release(2)
    cache.check()


def test_a_served_store_of_smaller_blocks_is_refused_with_the_command_that_fits(
    server: ServerProcess,
) -> None:
    cache = new_cache(layout(WHOLE, WHOLE, WHOLE))
    fitting = f"runtime store serve {server.folder} --block-bytes 6144"
    with pytest.raises(StoreSetupError, match=r"at most 4,096 bytes .* have 6,144") as caught:
        opened(server.socket, cache)
    assert str(caught.value).endswith(fitting)


def test_a_socket_that_nobody_serves_is_named_with_the_command_that_does(short: Path) -> None:
    with pytest.raises(StoreSetupError, match="no store answers") as caught:
        opened(short / "x.sock", new_cache())
    command = f"runtime store serve {short} --block-bytes 4096 --socket {short}/x.sock"
    assert str(caught.value).endswith(command)
    assert "\n" not in str(caught.value)


def test_a_folder_that_another_process_serves_is_refused_with_its_socket(
    server: ServerProcess,
) -> None:
    with pytest.raises(StoreSetupError, match="another process") as caught:
        opened(server.folder, new_cache())
    assert str(caught.value).endswith(f"name {server.socket}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dram": "much"}, "dram: must be a size such as 8GiB"),
        ({"dram": "1KiB"}, "must hold at least one block of 4,096 bytes"),
        ({"place": ""}, "must be none, a folder or a socket"),
    ],
)
def test_settings_that_cannot_be_are_named(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    given = {"place": str(tmp_path / "p")} | options
    with pytest.raises(StoreSetupError, match=said):
        open_prefix_blocks(PrefixStoreSettings(**given), new_cache(), lambda: namespace(layout()))


def test_a_store_is_closed_again_if_the_model_cannot_be_named(tmp_path: Path) -> None:
    def fail() -> Any:
        raise StoreSetupError("config.json: cannot be read")

    settings = PrefixStoreSettings(place=str(tmp_path / "p"), dram="1MiB")
    with pytest.raises(StoreSetupError, match=r"config\.json"):
        open_prefix_blocks(settings, new_cache(), fail)
    opened(tmp_path / "p", new_cache(), dram="1MiB").close()  # nobody has it locked
