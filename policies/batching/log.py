"""The batching policy in the decision log: how its calls are written and how they are repeated.

Both engines log through ``LoggedBatching``; a replay builds the policy afresh from its recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

from models.kv_paging import KvPaging
from policies.batching.first_come import FirstComeBatching
from policies.batching.orders import BatchOrders
from policies.batching.settings import BatchingSettings
from traces.decisions import DecisionLog

ARGUMENTS: Final[Mapping[str, Mapping[str, type]]] = {
    "add": {"sequence": int, "prompt_tokens": int, "max_tokens": int},
    "cached": {"sequence": int, "tokens": int},
    "loaded": {"sequence": int, "tokens": int},
    "cancel": {"sequence": int},
    "schedule": {"free_pages": int},
    "room": {"is_coming": bool, "free_pages": int},
    "step_done": {"ended": list},
}


class LoggedBatching:
    """Passes every call on to ``policy`` and records it until the log is full."""

    def __init__(self, policy: FirstComeBatching, log: DecisionLog, name: str = "batching") -> None:
        """Write the policy's recipe into the log.

        Args:
            policy: As built, before its first call.
            log: Of the run.
            name: Of this policy within the run.
        """
        self._policy, self._log, self._name = policy, log, name
        log.policies[name] = batching_recipe(policy)

    def add(self, sequence: int, prompt_tokens: int, max_tokens: int, *, now: float) -> None:
        """A sequence arrives."""
        self._policy.add(sequence, prompt_tokens, max_tokens, now=now)
        told = {"sequence": sequence, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
        self._record("add", told, None, now)

    def cached(self, sequence: int, tokens: int, *, now: float) -> None:
        """So many leading tokens of a waiting one could be loaded."""
        self._policy.cached(sequence, tokens, now=now)
        self._record("cached", {"sequence": sequence, "tokens": tokens}, None, now)

    def loaded(self, sequence: int, tokens: int, *, now: float) -> None:
        """A load has ended."""
        self._policy.loaded(sequence, tokens, now=now)
        self._record("loaded", {"sequence": sequence, "tokens": tokens}, None, now)

    def cancel(self, sequence: int, *, now: float) -> None:
        """Nobody waits for it any more."""
        self._policy.cancel(sequence, now=now)
        self._record("cancel", {"sequence": sequence}, None, now)

    def schedule(self, free_pages: int, *, now: float) -> BatchOrders:
        """The wrapped policy's orders."""
        orders = self._policy.schedule(free_pages, now=now)
        self._record("schedule", {"free_pages": free_pages}, orders, now)
        return orders

    def room(self, is_coming: bool, free_pages: int, *, now: float) -> BatchOrders:
        """The wrapped policy's orders."""
        orders = self._policy.room(is_coming, free_pages, now=now)
        self._record("room", {"is_coming": is_coming, "free_pages": free_pages}, orders, now)
        return orders

    def step_done(self, ended: Sequence[int], *, now: float) -> None:
        """The step is over."""
        self._policy.step_done(ended, now=now)
        self._record("step_done", {"ended": list(ended)}, None, now)

    def _record(
        self, call: str, told: Mapping[str, Any], orders: BatchOrders | None, now: float
    ) -> None:
        self._log.record(self._name, call, told, orders, now=now)


class ReplayedBatching:
    """A fresh policy that repeats logged calls."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        """Build the policy.

        Raises:
            LookupError, TypeError, ValueError: If the recipe is damaged.
        """
        self._policy = batching_of_recipe(recipe)

    def repeat(self, call: str, args: Mapping[str, Any], *, now: float) -> BatchOrders | None:
        """The answer of the fresh policy to a logged call.

        Raises:
            LookupError, TypeError, ValueError: If the call or its arguments are damaged.
        """
        if call not in ARGUMENTS:
            raise ValueError(f"batching has no call {call!r}, only {', '.join(ARGUMENTS)}")
        told = {}
        for name, kind in ARGUMENTS[call].items():
            told[name] = args[name]
            if type(told[name]) is not kind:
                raise ValueError(
                    f"{name} must be of type {kind.__name__}, found {told[name]!r:.40}"
                )
        if any(type(entry) is not int for entry in told.get("ended", [])):
            raise ValueError("ended must be a list of whole numbers")
        try:
            answer: BatchOrders | None = getattr(self._policy, call)(**told, now=now)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return answer


def batching_recipe(policy: FirstComeBatching) -> dict[str, Any]:
    """What a log must hold to build the policy afresh: paging and limits."""
    return {
        "kind": "batching",
        "name": "first_come",
        "settings": asdict(policy.settings),
        "paging": asdict(policy.paging),
    }


def batching_of_recipe(recipe: Mapping[str, Any]) -> FirstComeBatching:
    """The policy of a recipe, as at the start of its run.

    Raises:
        LookupError, TypeError, ValueError: If the recipe is damaged.
    """
    if recipe["name"] != "first_come":
        raise ValueError(f"name: no batching policy {recipe['name']!r}")
    paging, settings = dict(recipe["paging"]), dict(recipe["settings"])
    for table, told, kind in (
        ("paging", paging, KvPaging),
        ("settings", settings, BatchingSettings),
    ):
        known = {field.name for field in fields(kind)}
        if odd := sorted(set(told) ^ known):
            raise ValueError(f"{table}: {', '.join(odd)}: missing or unknown")
        for name in sorted(known - {"windows"}):
            if type(told[name]) is not int:
                raise ValueError(
                    f"{table}: {name}: must be a whole number, found {told[name]!r:.40}"
                )
    paging["windows"] = tuple((int(window), int(pages)) for window, pages in paging["windows"])
    return FirstComeBatching(KvPaging(**paging), BatchingSettings(**settings))
