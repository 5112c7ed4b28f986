"""The chain of one request: what its blocks are called, and how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from policies.prefix.keys import Namespace, block_keys, root_key, tenant_tag
from runtime.store.vllm_counts import Counts
from runtime.store.vllm_identity import adapter_digest, extra_bytes, joined_salt
from runtime.store.vllm_orders import ChainPart, Pages, RankIdentity

ADAPTER_WAIT_S = 5.0  # for the digest of an adapter that is seen for the first time

ExtraKeys = Callable[[Any, int, int, int], tuple[Iterable[Any] | None, int]]


@dataclass(slots=True, eq=False)
class RequestChain:
    """What is known of one request's blocks.

    Attributes:
        request: Of the engine.
        roots: By rank identity; None if its blocks cannot be named.
        tenant: Tag of its salt.
        keys: By rank identity: of the blocks so far.
        media: Where the engine's walk through images and sounds stands.
        lookup: Running or done; None: to be made.
        lookup_at_s: When it was made.
        ordered: Leading blocks that are stored or were ordered to be saved; None: the lookup tells.
        sent: Keys the workers know.
        local_tokens: Tokens the engine had itself when it last asked.
        loading: First block and pages of a load under way.
        may_load: False once a load or a lookup of it failed.
        is_fresh: Whether its pages were allocated anew since the last save.
    """

    request: Any
    roots: tuple[bytes, ...] | None
    tenant: bytes
    keys: list[list[bytes]]
    media: int = 0
    lookup: Future[int] | None = None
    lookup_at_s: float = 0.0
    ordered: int | None = None
    sent: int = 0
    local_tokens: int = 0
    loading: tuple[int, tuple[Pages, ...]] | None = None
    may_load: bool = True
    is_fresh: bool = True

    def unsent(self) -> ChainPart | None:
        """Keys the workers do not know yet; they do from now on."""
        start, self.sent = self.sent, len(self.keys[0])
        if start == self.sent:
            return None
        keys = tuple(tuple(keys[start:]) for keys in self.keys)
        return ChainPart(self.request.request_id, start, keys, self.tenant)


class ChainNamer:
    """Names the blocks of requests, for every worker's part.

    Args:
        salt: Of the engine; joined with each request's.
        block_tokens: Tokens of a store block.
        counts: Told of requests that cannot be named.
        namespace: Of a rank identity and an adapter's digest.
        extra_keys: What shapes tokens ``start..end`` of a request besides its tokens, and the next
            media position.
        threads: Read adapters.

    Attributes:
        identities: Of all workers, without repetition; without any no request is named.
    """

    def __init__(
        self,
        salt: str,
        block_tokens: int,
        counts: Counts,
        *,
        namespace: Callable[[RankIdentity, str], Namespace],
        extra_keys: ExtraKeys,
        threads: Executor,
    ) -> None:
        self.identities: tuple[RankIdentity, ...] = ()
        self._salt = salt
        self._block_tokens = block_tokens
        self._counts = counts
        self._namespace = namespace
        self._extra_keys = extra_keys
        self._threads = threads
        self._adapters: dict[tuple[Any, ...], Future[str | None]] = {}
        self._waiting_since_s: dict[str, float] = {}

    def begin(self, request: Any) -> RequestChain | None:
        """A request's chain, without blocks; None while its adapter is being read."""
        # A session that takes more input may drop tokens it has computed.
        adapter: str | None = None if getattr(request, "resumable", False) else ""
        if adapter is not None and request.lora_request is not None:
            digest = self._adapter(request.lora_request)
            since_s = self._waiting_since_s.setdefault(request.request_id, time.monotonic())
            if not digest.done() and time.monotonic() - since_s < ADAPTER_WAIT_S:
                return None
            adapter = digest.result() if digest.done() else None
        if adapter is None or not self.identities:
            self._counts.add("requests_not_stored")
            return RequestChain(request, None, b"", [[]])
        salt = joined_salt(self._salt, request.cache_salt)
        roots = tuple(root_key(self._namespace(i, adapter), salt) for i in self.identities)
        return RequestChain(request, roots, tenant_tag(salt), [[] for _ in roots])

    def end(self, request_id: str) -> None:
        """The request is over."""
        self._waiting_since_s.pop(request_id, None)

    def extend(self, chain: RequestChain, blocks: int) -> bool:
        """Name the request's blocks up to a number; False if one cannot be named."""
        if chain.roots is None:
            return False
        known = len(chain.keys[0])
        if blocks <= known:
            return True
        size = self._block_tokens
        tokens = chain.request.all_token_ids[known * size : blocks * size]
        extras: dict[int, bytes] = {}
        try:
            for i in range(known, blocks):
                found, chain.media = self._extra_keys(
                    chain.request, i * size, (i + 1) * size, chain.media
                )
                extra = extra_bytes(found)
                if extra:
                    extras[i - known] = extra
            for root, keys in zip(chain.roots, chain.keys, strict=True):
                keys.extend(block_keys(keys[-1] if keys else root, tokens, size, extras=extras))
        except (TypeError, ValueError):
            self._counts.add("requests_not_stored")
            chain.roots = None
            return False
        return True

    def _adapter(self, lora: Any) -> Future[str | None]:
        """Digest of an adapter's files as they were when it was first used."""
        known = (lora.lora_int_id, lora.lora_name, lora.lora_path, lora.load_inplace)
        if known not in self._adapters:
            self._adapters[known] = self._threads.submit(adapter_digest, lora)
        return self._adapters[known]
