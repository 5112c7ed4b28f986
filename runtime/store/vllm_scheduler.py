"""The scheduler's half: which blocks of which request to load and to save.

It never waits for the store: lookups run on a thread of their own and a request whose lookup is
late is computed. A load is ordered only for blocks that every worker's part was found of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from policies.prefix.keys import Namespace
from runtime.store.kv_blocks import ABSENT
from runtime.store.vllm_chain import ChainNamer, ExtraKeys, RequestChain
from runtime.store.vllm_counts import Counts
from runtime.store.vllm_guard import GuardedStore
from runtime.store.vllm_orders import ChainPart, LoadOrder, RankIdentity, SaveOrder
from runtime.store.vllm_orders import StepOrders as Orders
from runtime.store.vllm_settings import ConnectorSettings

SHORT_WAIT_S = 0.002  # most lookups are answered sooner, and asking again costs a step
FRESH_S = 2.0  # a lookup older than this is made again


@dataclass(slots=True)
class _Pending:
    """Orders that wait for the next step."""

    loads: dict[str, int] = field(default_factory=dict)  # request -> tokens from the store
    last_saves: list[tuple[ChainPart | None, SaveOrder]] = field(default_factory=list)


class StoreScheduler:
    """Follows requests, block by block.

    Args:
        settings: Of the connector.
        store: Asked for lookups only.
        counts: Told what happens.
        page_tokens: Tokens of an engine block.
        namespace: Of a rank identity and an adapter's digest.
        extra_keys: What shapes tokens ``start..end`` of a request besides its tokens, and the next
            media position.
        pages_of: The engine's block ids of a request.
        may_load: Whether this engine takes blocks from the store.
        may_save: Whether it gives blocks to the store.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        store: GuardedStore,
        counts: Counts,
        *,
        page_tokens: int,
        namespace: Callable[[RankIdentity, str], Namespace],
        extra_keys: ExtraKeys,
        pages_of: Callable[[str], Sequence[int]],
        may_load: bool = True,
        may_save: bool = True,
    ) -> None:
        self._settings = settings
        self._store = store
        self._counts = counts
        self._pages_per_block = settings.pages_per_block(page_tokens)
        self._page_tokens = page_tokens
        self._block_tokens = page_tokens * self._pages_per_block
        self._pages_of = pages_of
        self._may_load = may_load
        self._may_save = may_save
        self._chains: dict[str, RequestChain] = {}
        self._pending = _Pending()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="ptstore-lookup")
        self._namer = ChainNamer(
            settings.salt,
            self._block_tokens,
            counts,
            namespace=namespace,
            extra_keys=extra_keys,
            threads=self._threads,
        )

    def set_identities(self, identities: Iterable[RankIdentity]) -> None:
        """Learn what each worker holds; before any request."""
        self._namer.identities = tuple(dict.fromkeys(identities))

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the engine's own ``local_tokens``, and whether any are.

        Returns:
            (None, False) while the lookup runs.
        """
        chain = self._chain_of(request)
        if chain is None:
            return None, False
        chain.local_tokens = local_tokens
        self._look_up(chain)
        # One token at least is computed, since the next one is sampled from its output.
        most = (len(request.all_token_ids) - 1) // self._block_tokens
        if (
            chain.lookup is None
            or not chain.may_load
            or not self._may_load
            or getattr(request, "skip_reading_prefix_cache", False)
            or most * self._block_tokens <= local_tokens
        ):
            return 0, False
        stored = self._looked_up(chain, SHORT_WAIT_S)
        if stored is None:
            return None, False
        tokens = min(stored, most) * self._block_tokens - local_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def allocated(self, request: Any, external_tokens: int) -> None:
        """Pages were allocated; that many tokens of them are to be loaded."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            return
        chain.is_fresh = True
        if chain.lookup is not None:
            chain.ordered = None
        if external_tokens > 0:
            self._pending.loads[request.request_id] = external_tokens
            self._counts.add("lookup_hit_tokens", external_tokens)

    def step(self, ends: Mapping[str, int], *, is_idle: bool) -> Orders:
        """Orders of one engine step.

        Args:
            ends: Scheduled request -> tokens whose keys and values are there after this step.
            is_idle: Whether the step runs no forward.
        """
        orders = Orders(identities=self._namer.identities, is_idle=is_idle)
        pending, self._pending = self._pending, _Pending()
        for request_id, tokens in pending.loads.items():
            self._order_load(orders, self._chains[request_id], tokens)
        for part, last in pending.last_saves:
            if part is not None:
                orders.chains.append(part)
            orders.saves.append(last)
        for request_id, end in ends.items():
            chain = self._chains.get(request_id)
            if chain is not None and chain.loading is None:
                save = self._save_order(chain, end, self._pages_of(request_id))
                if save is not None:
                    self._send_keys(orders, chain)
                    orders.saves.append(save)
        return orders

    def received(self, finished: Iterable[str], failed_pages: Iterable[int]) -> None:
        """Loads ended; those pages hold nothing and the engine computes them."""
        failed = frozenset(failed_pages)
        for request_id in finished:
            chain = self._chains.get(request_id)
            if chain is None or chain.loading is None:
                continue
            first, pages = chain.loading
            chain.loading = None
            for i, block in enumerate(pages):
                if not failed.isdisjoint(block):
                    # Asked again, the store might promise and fail again, for ever.
                    chain.may_load = False
                    chain.ordered, chain.lookup = first + i, None
                    break

    def finished(self, request: Any, pages: Sequence[int]) -> bool:
        """The request ended. Whether its pages are to be kept until the workers report it sent."""
        chain = self._chains.pop(request.request_id, None)
        self._namer.end(request.request_id)
        self._pending.loads.pop(request.request_id, None)
        if chain is None or chain.loading is not None:
            return False
        if chain.ordered is None:
            self._looked_up(chain, SHORT_WAIT_S)
        save = self._save_order(chain, request.num_computed_tokens, pages, is_last=True)
        if save is None:
            return False
        self._pending.last_saves.append((chain.unsent(), save))
        return True

    def forget(self) -> None:
        """Name requests from now on anew; those that run are stored no more."""
        for chain in self._chains.values():
            chain.roots, chain.may_load = None, False

    def close(self) -> None:
        """Stop looking up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _chain_of(self, request: Any) -> RequestChain | None:
        """The request's chain; None while its adapter is being read."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._namer.begin(request)
            if chain is not None:
                self._chains[request.request_id] = chain
        return chain

    def _look_up(self, chain: RequestChain) -> None:
        """Start a lookup unless one runs or its answer is young."""
        now_s = time.monotonic()
        if chain.lookup is not None:
            if not chain.lookup.done() or now_s - chain.lookup_at_s <= FRESH_S:
                return
            chain.lookup = None
        if not self._namer.extend(chain, len(chain.request.all_token_ids) // self._block_tokens):
            return
        if self._store.is_suspended:
            self._counts.add("store_suspended")
            return
        self._counts.add("lookups")
        chain.lookup_at_s = now_s
        chain.lookup = self._threads.submit(self._lookup, [tuple(keys) for keys in chain.keys])

    def _looked_up(self, chain: RequestChain, wait_s: float) -> int | None:
        """Leading stored blocks; None while the lookup runs, 0 if there was none or it is late."""
        if chain.lookup is None:
            return 0
        try:
            return chain.lookup.result(timeout=wait_s)
        except FutureTimeoutError:
            if time.monotonic() - chain.lookup_at_s < self._settings.lookup_deadline_s:
                return None
        self._counts.add("lookups_late")
        self._store.suspend("look up", "out of time")
        chain.lookup, chain.may_load = None, False
        return 0

    def _lookup(self, keys: Sequence[Sequence[bytes]]) -> int:
        """What all workers' parts are stored of: a part alone is of no use."""
        left_s = self._settings.lookup_deadline_s
        try:
            return min(self._store.lookup(part, left_s) for part in keys)
        except Exception as error:  # it would end the engine's scheduler
            self._store.suspend("look up", type(error).__name__)
            return 0

    def _order_load(self, orders: Orders, chain: RequestChain, tokens: int) -> None:
        size, per_block = self._block_tokens, self._pages_per_block
        first = chain.local_tokens // size
        end = (chain.local_tokens + tokens) // size
        pages = self._pages_of(chain.request.request_id)
        held = chain.local_tokens // self._page_tokens  # pages that others may be reading
        blocks = tuple(
            tuple(
                ABSENT if i < held else pages[i] for i in range(b * per_block, (b + 1) * per_block)
            )
            for b in range(first, end)
        )
        chain.loading = (first, blocks)
        self._send_keys(orders, chain)
        orders.loads.append(LoadOrder(chain.request.request_id, first, blocks))

    def _save_order(
        self, chain: RequestChain, end: int, pages: Sequence[int], *, is_last: bool = False
    ) -> SaveOrder | None:
        """The order for full blocks that are not stored yet, or None.

        Tokens that are scheduled but not known yet, such as drafts, are no part of a block.
        """
        request, per_block = chain.request, self._pages_per_block
        if chain.ordered is None:
            # Saving what is stored already would be wasted; a later step will know.
            stored = self._looked_up(chain, 0.0)
            if stored is None:
                return None
            chain.ordered, chain.lookup = stored, None
        tokens = min(end, len(request.all_token_ids))
        if not self._settings.stores_generated:
            tokens = min(tokens, request.num_prompt_tokens)
        full = min(tokens // self._block_tokens, len(pages) // per_block)
        first = chain.ordered
        if (
            not self._may_save
            or full <= first
            or self._store.is_suspended
            or not self._namer.extend(chain, full)
        ):
            return None
        chain.ordered = full
        is_fresh, chain.is_fresh = chain.is_fresh, False
        return SaveOrder(
            request.request_id,
            first,
            tuple(tuple(pages[b * per_block : (b + 1) * per_block]) for b in range(first, full)),
            is_fresh=is_fresh,
            is_last=is_last,
        )

    def _send_keys(self, orders: Orders, chain: RequestChain) -> None:
        part = chain.unsent()
        if part is not None:
            orders.chains.append(part)
