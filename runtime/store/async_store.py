"""The store's verbs for asyncio: the same answers, off the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from runtime.store.forks import on_fork
from runtime.store.found import Found
from runtime.store.prefix_store import DEADLINE_S, Buffer, PrefixStore, Put

Answer = TypeVar("Answer")


class AsyncStore:
    """A store whose verbs can be awaited.

    A verb that is cancelled goes on to its deadline in its thread; blocks that a cancelled load
    has found are let go.
    """

    def __init__(self, store: PrefixStore, *, threads: int = 8) -> None:
        """Wrap a store.

        Args:
            store: Open; closed with this object.
            threads: Verbs under way at the same time.
        """
        self.store = store
        self._threads = threads
        self._start_threads()
        on_fork(self, AsyncStore._start_threads)

    def _start_threads(self) -> None:
        """Also in a forked child, which has none of its parent's."""
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="store-async")

    async def lookup(self, keys: Sequence[bytes], *, deadline_s: float = DEADLINE_S) -> int:
        """See ``PrefixStore.lookup``."""
        return await self._run(partial(self.store.lookup, keys, deadline_s=deadline_s))

    @asynccontextmanager
    async def load(
        self,
        keys: Sequence[bytes],
        *,
        deadline_s: float = DEADLINE_S,
        category: int = 0,
        tenant: bytes = b"",
    ) -> AsyncIterator[Found]:
        """See ``PrefixStore.load``: ``async with store.load(keys) as found``."""
        call = partial(
            self.store.load, keys, deadline_s=deadline_s, category=category, tenant=tenant
        )
        loading = self._start(call)
        try:
            found = await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_let_go)
            raise
        try:
            yield found
        finally:
            await self._run(found.close)

    async def load_into(
        self,
        keys: Sequence[bytes],
        destinations: Sequence[Buffer],
        *,
        deadline_s: float = DEADLINE_S,
        category: int = 0,
        tenant: bytes = b"",
    ) -> int:
        """See ``PrefixStore.load_into``; the buffers must not be touched before the answer."""
        call = partial(
            self.store.load_into,
            keys,
            destinations,
            deadline_s=deadline_s,
            category=category,
            tenant=tenant,
        )
        return await self._run(call)

    async def put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Buffer],
        *,
        first: int = 0,
        tenant: bytes = b"",
        durable: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> Put:
        """See ``PrefixStore.put``."""
        call = partial(
            self.store.put,
            keys,
            blocks,
            first=first,
            tenant=tenant,
            durable=durable,
            deadline_s=deadline_s,
        )
        return await self._run(call)

    async def flush(self, *, deadline_s: float = 10.0) -> bool:
        """See ``PrefixStore.flush``."""
        return await self._run(partial(self.store.flush, deadline_s=deadline_s))

    async def stats(self) -> Mapping[str, Any]:
        """See ``PrefixStore.stats``."""
        return await self._run(self.store.stats)

    async def close(self) -> None:
        """Close the store."""
        await self._run(self.store.close)
        self._executor.shutdown()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, call: Callable[[], Answer]) -> Answer:
        return await self._start(call)

    def _start(self, call: Callable[[], Answer]) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._executor, call)
        except RuntimeError:  # no more threads: closed, so that the store answers at once
            return _answered(loop, call)


def _answered(
    loop: asyncio.AbstractEventLoop, call: Callable[[], Answer]
) -> asyncio.Future[Answer]:
    answer: asyncio.Future[Answer] = loop.create_future()
    try:
        answer.set_result(call())
    except Exception as error:
        answer.set_exception(error)
    return answer


def _let_go(loading: asyncio.Future[Found]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()
