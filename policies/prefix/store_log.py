"""The store's policy in the decision log: how its calls are written and how they are repeated.

Keys are written as numbers in the order of their first mention: content keys stay out of logs, and
a policy that never looks into keys gives the same orders for numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from models.prefix_costs import PrefillCost, PrefixCosts, TierSpeed
from policies.prefix.eviction.base import Key
from policies.prefix.store_orders import FlushOrders, NewBlock, ReserveOrders, Tier
from policies.prefix.store_policy import StorePolicy
from policies.prefix.store_settings import StoreSettings
from traces.decisions import DecisionLog


class LoggedStore(StorePolicy):
    """A store policy that records every call until the log is full."""

    def __init__(
        self, settings: StoreSettings, costs: PrefixCosts, log: DecisionLog, name: str = "prefix"
    ) -> None:
        """Start with nothing stored, and write the policy's recipe into the log.

        Args:
            settings, costs: As for ``StorePolicy``.
            log: Of the run.
            name: Of this node's policy within the run.
        """
        super().__init__(settings, costs)
        self._log, self._name = log, name
        self._numbers: dict[Key, int] = {}
        log.policies[name] = store_recipe(settings, costs, self._number)

    def read(
        self, chain: Sequence[Key], *, now: float, category: int = 0, tenant: Key | None = None
    ) -> FlushOrders:
        """As ``StorePolicy.read``."""
        orders = super().read(chain, now=now, category=category, tenant=tenant)
        told = {"category": category}
        if tenant in self.settings.quota_bytes:
            told["tenant"] = self._number(tenant)
        self._record("read", orders, now, lambda: self._chain(chain) | told)
        return orders

    def reserve(
        self, blocks: Sequence[NewBlock], *, pinned: Collection[Key], now: float
    ) -> ReserveOrders:
        """As ``StorePolicy.reserve``."""
        told = list(pinned) if not self._log.is_full else []
        orders = super().reserve(blocks, pinned=pinned, now=now)
        self._record("reserve", orders, now, lambda: self._blocks(blocks) | self._pins(told))
        return orders

    def commit(self, keys: Sequence[Key], *, now: float) -> FlushOrders:
        """As ``StorePolicy.commit``."""
        orders = super().commit(keys, now=now)
        self._record("commit", orders, now, lambda: self._chain(keys))
        return orders

    def cancel(self, keys: Iterable[Key], *, now: float) -> None:
        """As ``StorePolicy.cancel``."""
        keys = tuple(keys)
        super().cancel(keys, now=now)
        self._record("cancel", None, now, lambda: self._chain(keys))

    def reserve_ssd(self, keys: Sequence[Key], *, now: float) -> ReserveOrders:
        """As ``StorePolicy.reserve_ssd``."""
        orders = super().reserve_ssd(keys, now=now)
        self._record("reserve_ssd", orders, now, lambda: self._chain(keys))
        return orders

    def flushed(self, keys: Sequence[Key], *, now: float) -> None:
        """As ``StorePolicy.flushed``."""
        super().flushed(keys, now=now)
        self._record("flushed", None, now, lambda: self._chain(keys))

    def flush_failed(self, keys: Iterable[Key], *, now: float) -> None:
        """As ``StorePolicy.flush_failed``."""
        keys = tuple(keys)
        super().flush_failed(keys, now=now)
        self._record("flush_failed", None, now, lambda: self._chain(keys))

    def withhold(self, size_bytes: int, *, now: float) -> None:
        """As ``StorePolicy.withhold``."""
        super().withhold(size_bytes, now=now)
        self._record("withhold", None, now, lambda: {"size_bytes": size_bytes})

    def lost(self, key: Key, tier: Tier, *, now: float) -> None:
        """As ``StorePolicy.lost``."""
        super().lost(key, tier, now=now)
        self._record("lost", None, now, lambda: self._chain([key]) | {"tier": tier})

    def set_elsewhere(self, key: Key, is_elsewhere: bool, *, now: float) -> None:
        """As ``StorePolicy.set_elsewhere``; only what changes something is recorded."""
        resident = self._memory.get(key)
        if resident is None or resident.is_elsewhere == is_elsewhere:
            return
        super().set_elsewhere(key, is_elsewhere, now=now)
        told = {"is_elsewhere": is_elsewhere}
        self._record("set_elsewhere", None, now, lambda: self._chain([key]) | told)

    def own(self, keys: Iterable[Key], *, now: float) -> FlushOrders:
        """As ``StorePolicy.own``."""
        keys = tuple(keys)
        orders = super().own(keys, now=now)
        self._record("own", orders, now, lambda: self._chain(keys))
        return orders

    def recover(self, blocks: Sequence[NewBlock], tier: Tier, *, now: float) -> int:
        """As ``StorePolicy.recover``."""
        count = super().recover(blocks, tier, now=now)
        self._record("recover", count, now, lambda: self._blocks(blocks) | {"tier": tier})
        return count

    def _number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _chain(self, keys: Iterable[Key]) -> dict[str, Any]:
        return {"keys": [self._number(key) for key in keys]}

    def _pins(self, keys: Iterable[Key]) -> dict[str, Any]:
        return {"pinned": [self._number(key) for key in keys]}

    def _blocks(self, blocks: Sequence[NewBlock]) -> dict[str, Any]:
        return {
            "blocks": [
                [
                    self._number(b.key),
                    None if b.parent is None else self._number(b.parent),
                    b.depth,
                    b.size_bytes,
                    b.is_owned,
                    None if b.tenant is None else self._number(b.tenant),
                ]
                for b in blocks
            ]
        }

    def _record(
        self, call: str, orders: Any, now: float, told: Callable[[], Mapping[str, Any]]
    ) -> None:
        if self._log.is_full:
            self._log.calls_left_out += 1
            return
        args = told()
        self._log.record(self._name, call, args, self._plain(orders), now=now)

    def _plain(self, orders: Any) -> Any:
        if isinstance(orders, ReserveOrders):
            victims = [[self._number(v.key), v.is_lost] for v in orders.victims]
            return {"admitted": orders.admitted, "victims": victims, "refusal": orders.refusal}
        if isinstance(orders, FlushOrders):
            return {"flush": [self._number(key) for key in orders.flush]}
        return orders


class ReplayedStore:
    """A fresh store policy that repeats logged calls."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        """Build the policy.

        Raises:
            LookupError, TypeError, ValueError: If the recipe is damaged.
        """
        settings = dict(recipe["settings"])
        settings["quota_bytes"] = {int(tenant): quota for tenant, quota in settings["quota_bytes"]}
        costs = dict(recipe["costs"])
        costs["prefill"] = PrefillCost(**costs["prefill"])
        for tier in ("local", "remote", "ssd"):
            costs[tier] = TierSpeed(**costs[tier])
        self._policy = StorePolicy(StoreSettings(**settings), PrefixCosts(**costs))

    def repeat(self, call: str, args: Mapping[str, Any], *, now: float) -> Any:
        """The answer of the fresh policy to a logged call, as the log writes it.

        Raises:
            LookupError, TypeError, ValueError: If the call or its arguments are damaged.
        """
        policy = self._policy
        match call:
            case "read":
                tenant, category = args.get("tenant"), args["category"]
                orders = policy.read(args["keys"], now=now, category=category, tenant=tenant)
                return _plain(orders)
            case "reserve":
                blocks = [NewBlock(*block) for block in args["blocks"]]
                return _plain(policy.reserve(blocks, pinned=dict.fromkeys(args["pinned"]), now=now))
            case "commit":
                return _plain(policy.commit(args["keys"], now=now))
            case "cancel":
                return policy.cancel(args["keys"], now=now)
            case "reserve_ssd":
                return _plain(policy.reserve_ssd(args["keys"], now=now))
            case "flushed":
                return policy.flushed(args["keys"], now=now)
            case "flush_failed":
                return policy.flush_failed(args["keys"], now=now)
            case "withhold":
                return policy.withhold(args["size_bytes"], now=now)
            case "lost":
                return policy.lost(args["keys"][0], args["tier"], now=now)
            case "set_elsewhere":
                return policy.set_elsewhere(args["keys"][0], args["is_elsewhere"], now=now)
            case "own":
                return _plain(policy.own(args["keys"], now=now))
            case "recover":
                blocks = [NewBlock(*block) for block in args["blocks"]]
                return policy.recover(blocks, args["tier"], now=now)
        raise ValueError(f"the store's policy has no call {call!r}")


def store_recipe(
    settings: StoreSettings, costs: PrefixCosts, number: Callable[[Key], int]
) -> dict[str, Any]:
    """What a log must hold to build the policy afresh.

    Args:
        settings, costs: Of the policy.
        number: Key -> its number in the log.
    """
    plain = asdict(settings)
    plain["quota_bytes"] = [[number(t), quota] for t, quota in settings.quota_bytes.items()]
    return {"kind": "prefix", "settings": plain, "costs": asdict(costs)}


def _plain(orders: ReserveOrders | FlushOrders) -> dict[str, Any]:
    if isinstance(orders, ReserveOrders):
        return {
            "admitted": orders.admitted,
            "victims": [[v.key, v.is_lost] for v in orders.victims],
            "refusal": orders.refusal,
        }
    return {"flush": list(orders.flush)}
