"""The routing of requests in the decision log: how its calls are written and repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from models.prefix_costs import PrefillCost, PrefixCosts, TierSpeed
from policies.prefix.request_routing import RequestRouting, ServerState
from traces.decisions import DecisionLog

KIND: Final = "request_routing"
ARGUMENTS: Final[Mapping[str, Mapping[str, type]]] = {
    "choose": {
        "number": int,
        "session": int,
        "prompt_tokens": int,
        "draw": float,
        "states": list,
    },
    "assigned": {"server": int, "seconds": float},
    "lost": {"server": int},
    "returned": {"server": int},
    "measured": {"slowdown": float},
}


class LoggedRequestRouting:
    """Passes every call on to ``policy`` and records it until the log is full.

    Attributes:
        policy: The wrapped one.
    """

    def __init__(self, policy: RequestRouting, log: DecisionLog, name: str = KIND) -> None:
        """Write the policy's recipe into the log.

        Args:
            policy: As built, before its first call.
            log: Of the run.
            name: Of this policy within the run.
        """
        self.policy, self._log, self._name = policy, log, name
        log.policies[name] = request_routing_recipe(policy)

    def choose(
        self,
        number: int,
        *,
        session: int,
        prompt_tokens: int,
        draw: float,
        states: Sequence[ServerState],
        now: float,
    ) -> int:
        """The wrapped policy's choice."""
        server = self.policy.choose(
            number, session=session, prompt_tokens=prompt_tokens, draw=draw, states=states
        )
        told = {
            "number": number,
            "session": session,
            "prompt_tokens": prompt_tokens,
            "draw": draw,
            "states": list(states),
        }
        self._record("choose", told, server, now)
        return server

    def assigned(self, server: int, seconds: float, *, now: float) -> None:
        """Work has been given to a server, or (negative) done."""
        self.policy.assigned(server, seconds)
        self._record("assigned", {"server": server, "seconds": seconds}, None, now)

    def lost(self, server: int, *, now: float) -> None:
        """A server has ended."""
        self.policy.lost(server)
        self._record("lost", {"server": server}, None, now)

    def returned(self, server: int, *, now: float) -> None:
        """A lost one is there again."""
        self.policy.returned(server)
        self._record("returned", {"server": server}, None, now)

    def measured(self, slowdown: float, *, now: float) -> None:
        """What computing takes, in multiples of the policy's own costs."""
        self.policy.measured(slowdown)
        self._record("measured", {"slowdown": slowdown}, None, now)

    def _record(self, call: str, told: Mapping[str, Any], orders: int | None, now: float) -> None:
        self._log.record(self._name, call, told, orders, now=now)


class ReplayedRequestRouting:
    """A fresh policy that repeats logged calls."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        """Build the policy.

        Raises:
            LookupError, TypeError, ValueError: If the recipe is damaged.
        """
        self._policy = request_routing_of_recipe(recipe)

    def repeat(self, call: str, args: Mapping[str, Any], *, now: float) -> int | None:
        """The answer of the fresh policy to a logged call.

        Raises:
            LookupError, TypeError, ValueError: If the call or its arguments are damaged.
        """
        if call not in ARGUMENTS:
            raise ValueError(f"{KIND} has no call {call!r}, only {', '.join(ARGUMENTS)}")
        told: dict[str, Any] = {}
        for name, kind in ARGUMENTS[call].items():
            told[name] = args[name]
            if type(told[name]) is not kind:
                raise ValueError(
                    f"{name} must be of type {kind.__name__}, found {told[name]!r:.40}"
                )
        if "states" in told:
            told["states"] = [_state(entry) for entry in told["states"]]
        if not 0 <= told.get("server", 0) < self._policy.num_servers:
            raise ValueError(f"server must be within 0..{self._policy.num_servers - 1}")
        answer: int | None = getattr(self._policy, call)(**told)
        return answer


def request_routing_recipe(policy: RequestRouting) -> dict[str, Any]:
    """What a log must hold to build the policy afresh."""
    return {
        "kind": KIND,
        "name": policy.rule,
        "num_servers": policy.num_servers,
        "prefill": asdict(policy.prefill),
        "costs": asdict(policy.costs),
        "block_bytes": policy.block_bytes,
        "max_sessions": policy.max_sessions,
    }


def request_routing_of_recipe(recipe: Mapping[str, Any]) -> RequestRouting:
    """The policy of a recipe, as at the start of its run.

    Raises:
        LookupError, TypeError, ValueError: If the recipe is damaged.
    """
    costs = dict(recipe["costs"])
    costs["prefill"] = PrefillCost(**costs["prefill"])
    for tier in ("local", "remote", "ssd"):
        costs[tier] = TierSpeed(**costs[tier])
    return RequestRouting(
        recipe["name"],
        num_servers=recipe["num_servers"],
        prefill=PrefillCost(**recipe["prefill"]),
        costs=PrefixCosts(**costs),
        block_bytes=recipe["block_bytes"],
        max_sessions=recipe["max_sessions"],
    )


def _state(entry: Any) -> ServerState:
    if type(entry) is not list or any(type(count) is not int for count in entry):
        raise ValueError(f"states must be lists of whole numbers, found {entry!r:.40}")
    return ServerState(*entry)
