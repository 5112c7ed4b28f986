"""The precision policy in the decision log: how its calls are written and how they are repeated.

Both engines log through ``LoggedPrecision``; a replay builds the policy afresh from its recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from policies.orders import PrecisionDecision
from policies.precision import PrecisionPolicy
from policies.precision_state import ARRAYS, PrecisionSettings, PrecisionState
from policies.precision_tables import block_tables
from traces.array_deltas import ArrayDeltas
from traces.decisions import DecisionLog

COUNTS = ("step", "kv_pages", "forecast_pages", "copying_bytes")


class LoggedPrecision:
    """Passes every call on to ``policy`` and records it until the log is full."""

    def __init__(self, policy: PrecisionPolicy, log: DecisionLog, name: str = "precision") -> None:
        """Write the policy's recipe into the log.

        Args:
            policy: As built, before its first call.
            log: Of the run.
            name: Of this policy within the run.
        """
        self._policy, self._log, self._name = policy, log, name
        log.policies[name] = precision_recipe(policy)

    def decide(self, state: PrecisionState, *, now: float) -> PrecisionDecision:
        """The wrapped policy's answer."""
        decision = self._policy.decide(state, now=now)
        self._record("decide", state, {}, decision, now)
        return decision

    def on_allocation_failed(
        self, state: PrecisionState, pages_needed: int, *, now: float
    ) -> PrecisionDecision:
        """The wrapped policy's answer."""
        decision = self._policy.on_allocation_failed(state, pages_needed, now=now)
        told = {"pages_needed": pages_needed}
        self._record("on_allocation_failed", state, told, decision, now)
        return decision

    def next_wakeup(self) -> float | None:
        """The wrapped policy's next due time."""
        return self._policy.next_wakeup()

    def _record(
        self,
        call: str,
        state: PrecisionState,
        told: Mapping[str, int],
        decision: PrecisionDecision,
        now: float,
    ) -> None:
        if self._log.is_full:
            self._log.calls_left_out += 1
            return
        self._log.record(
            self._name,
            call,
            {name: getattr(state, name) for name in COUNTS} | dict(told),
            decision,
            now=now,
            arrays={name: _as_logged(name, getattr(state, name)) for name in ARRAYS},
        )


class ReplayedPrecision:
    """A fresh policy that repeats logged calls."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        """Build the policy.

        Raises:
            LookupError, TypeError, ValueError: If the recipe is damaged.
        """
        self._policy = policy_of_recipe(recipe)
        self._deltas = ArrayDeltas()

    def repeat(self, call: str, args: Mapping[str, Any], *, now: float) -> PrecisionDecision:
        """The answer of the fresh policy to a logged call.

        Raises:
            LookupError, TypeError, ValueError: If the call or its arguments are damaged.
        """
        calls = {"decide": COUNTS, "on_allocation_failed": (*COUNTS, "pages_needed")}
        if call not in calls:
            raise ValueError(f"precision has no call {call!r}, only {', '.join(calls)}")
        counts = {name: args[name] for name in calls[call]}
        for name, count in counts.items():
            if type(count) is not int:
                raise ValueError(f"{name} must be a whole number, found {count!r:.40}")
        arrays: dict[str, Any] = {name: self._deltas.decode(name, args[name]) for name in ARRAYS}
        pages_needed = counts.pop("pages_needed", None)
        state = PrecisionState(**counts, **arrays)
        if pages_needed is None:
            return self._policy.decide(state, now=now)
        return self._policy.on_allocation_failed(state, pages_needed, now=now)


def precision_recipe(policy: PrecisionPolicy) -> dict[str, Any]:
    """What a log must hold to build the policy afresh: tables, arena, settings."""
    sizes, kind = np.unique(policy.tables.bytes_, axis=0, return_inverse=True)
    return {
        "kind": "precision",
        "settings": asdict(policy.settings),
        "arena_pages": policy.arena_pages,
        "page_bytes": policy.page_bytes,
        "bits": list(policy.tables.bits),
        "block_sizes": sizes.tolist(),
        "size_of_block": kind.ravel().tolist(),
        "damage": policy.tables.damage.tolist(),
    }


def policy_of_recipe(recipe: Mapping[str, Any]) -> PrecisionPolicy:
    """The policy of a recipe, as at the start of its run.

    Raises:
        LookupError, TypeError, ValueError: If the recipe is damaged.
    """
    settings = dict(recipe["settings"])
    known = {field.name for field in fields(PrecisionSettings)}
    if set(settings) != known:
        raise ValueError(
            f"settings: {', '.join(sorted(set(settings) ^ known))}: missing or unknown"
        )
    sizes = np.asarray(recipe["block_sizes"])[np.asarray(recipe["size_of_block"], dtype=np.int64)]
    return PrecisionPolicy(
        block_tables(sizes, np.asarray(recipe["damage"], dtype=np.float64), recipe["bits"]),
        arena_pages=recipe["arena_pages"],
        page_bytes=recipe["page_bytes"],
        settings=PrecisionSettings(**settings),
    )


def _as_logged(name: str, array: Any) -> Any:
    kind = {"pinned": np.bool_, "mass_multiplier": np.float64, "prompt_multiplier": np.float64}
    return np.asarray(array, dtype=kind.get(name, np.int64))
