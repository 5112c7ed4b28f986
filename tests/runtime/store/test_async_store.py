"""The store from asyncio code: same answers, and the loop never stands still."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from runtime.store.async_store import AsyncStore
from runtime.store.store import open_store
from tests.runtime.store.conftest import BLOCK, blocks, chain


def opened(folder: Path, **changes: Any) -> AsyncStore:
    given: dict[str, Any] = {"dram": 64 * BLOCK, "block_bytes": BLOCK, "eviction": "lru"}
    return AsyncStore(open_store(folder, **(given | changes)))


def test_many_puts_and_loads_run_side_by_side(tmp_path: Path) -> None:
    async def one(store: AsyncStore, name: str) -> bool:
        keys = chain(name, 4)
        put = await store.put(keys, blocks(keys))
        async with store.load(keys) as found:
            is_right = [bytes(view) for view in found.views] == blocks(keys)
        targets = [bytearray(BLOCK) for _ in keys]
        count = await store.load_into(keys, targets)
        return is_right and put.stored == count == 4 == await store.lookup(keys)

    async def all_of_them() -> list[bool]:
        async with opened(tmp_path / "s") as store:
            results = await asyncio.gather(*(one(store, str(i)) for i in range(12)))
            gauges = (await store.stats())["gauges"]
            assert gauges["leases"] == gauges["pinned_blocks"] == 0
            return results

    assert asyncio.run(all_of_them()) == [True] * 12


def test_a_cancelled_load_leaves_no_pins(tmp_path: Path) -> None:
    async def cancel_some() -> dict[str, Any]:
        async with opened(tmp_path / "s", ssd="4MiB") as store:
            keys = chain("a", 8)
            await store.put(keys, blocks(keys))

            async def read() -> None:
                async with store.load(keys):
                    await asyncio.sleep(10)

            tasks = [asyncio.create_task(read()) for _ in range(20)]
            await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            end = time.monotonic() + 10
            gauges = dict((await store.stats())["gauges"])
            while gauges["leases"] + gauges["pinned_blocks"] and time.monotonic() < end:
                await asyncio.sleep(0.01)
                gauges = dict((await store.stats())["gauges"])
            return gauges

    gauges = asyncio.run(cancel_some())
    assert gauges["leases"] == gauges["pinned_blocks"] == 0
