"""The store for one model's blocks and one tenant: by token ids instead of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from policies.prefix.keys import Namespace, block_keys, root_key, tenant_tag

if TYPE_CHECKING:
    from runtime.store.found import Found
    from runtime.store.prefix_store import Buffer, PrefixStore, Put

TokenIds = Sequence[int] | NDArray[Any]


class StoreSession:
    """One namespace and salt of a store.

    The salt is the tenant's and is set by the gateway, not by the caller: two salts share no key,
    so neither contents nor timing are shared.
    """

    def __init__(self, store: PrefixStore, namespace: Namespace, salt: str = "") -> None:
        """See ``PrefixStore.session``."""
        self.store, self.namespace = store, namespace
        self._root = root_key(namespace, salt)
        self.tenant = tenant_tag(salt)

    def keys(
        self, token_ids: TokenIds, *, extras: Mapping[int, bytes] | None = None
    ) -> tuple[bytes, ...]:
        """Keys of all full blocks; see ``policies.prefix.keys.block_keys``."""
        return block_keys(self._root, token_ids, self.namespace.block, extras=extras)

    def lookup(self, token_ids: TokenIds, *, deadline_s: float = 1.0) -> int:
        """How many leading full blocks the pool holds."""
        return self.store.lookup(self.keys(token_ids), deadline_s=deadline_s)

    def load(self, token_ids: TokenIds, *, deadline_s: float = 1.0, category: int = 0) -> Found:
        """The valid leading blocks; see ``PrefixStore.load``."""
        return self.store.load(
            self.keys(token_ids), deadline_s=deadline_s, category=category, tenant=self.tenant
        )

    def load_into(
        self, token_ids: TokenIds, destinations: Sequence[Buffer], *, deadline_s: float = 1.0
    ) -> int:
        """Copy the valid leading blocks; see ``PrefixStore.load_into``."""
        keys = self.keys(token_ids)[: len(destinations)]
        return self.store.load_into(keys, destinations, deadline_s=deadline_s, tenant=self.tenant)

    def put(
        self,
        token_ids: TokenIds,
        blocks: Sequence[Buffer],
        *,
        first: int = 0,
        durable: bool = False,
        deadline_s: float = 1.0,
    ) -> Put:
        """Store the full blocks of a prompt; see ``PrefixStore.put``."""
        return self.store.put(
            self.keys(token_ids),
            blocks,
            first=first,
            tenant=self.tenant,
            durable=durable,
            deadline_s=deadline_s,
        )
