"""Runs a decision log through fresh policies and reports the first difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.bundle import Bundle, LatencyCoefficients
from models.streams import stream
from policies.batching.log import ReplayedBatching
from policies.catalog import PROVISIONING, routing_policy
from policies.precision_log import ReplayedPrecision
from policies.prefix.request_routing_log import ReplayedRequestRouting
from policies.prefix.store_log import ReplayedStore
from policies.provisioning import Provisioning, ProvisioningLimits
from policies.routing import RoutingPolicy
from traces.decisions import Decision, plain, read_decisions
from traces.errors import TraceError
from traces.lengths import LengthPairs

Replayed = ReplayedBatching | ReplayedPrecision | ReplayedRequestRouting | ReplayedStore
REPLAYED: Final[dict[str, type[Replayed]]] = {
    "batching": ReplayedBatching,
    "precision": ReplayedPrecision,
    "prefix": ReplayedStore,
    "request_routing": ReplayedRequestRouting,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay found.

    Attributes:
        num_calls: Calls that were repeated, up to and with the first difference.
        num_left_out: Calls of the run that its log does not hold.
        difference: The first call whose orders differ, or None.
        orders: What the fresh policy ordered there.
    """

    num_calls: int
    num_left_out: int
    difference: Decision | None = None
    orders: Any = None


def replay_log(path: str | Path) -> Replay:
    """Repeat every call of the log; stops at the first difference.

    Raises:
        TraceError: If the log cannot be read, or names a policy that does not exist.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "decisions.jsonl.gz"
    header, decisions = read_decisions(file)
    policies: dict[str, Any] = {}
    count = 0
    for decision in decisions:
        if decision.policy not in policies:
            policies[decision.policy] = _fresh(file, header["policies"], decision.policy)
        count += 1
        try:
            orders = _repeat(policies[decision.policy], decision)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise TraceError(
                f"{file}: call {decision.n}: arguments of {decision.call} are damaged: "
                f"{_in_words(error)}"
            ) from error
        if _comparable(orders, decision) != decision.orders:
            return Replay(
                num_calls=count,
                num_left_out=header["calls_left_out"],
                difference=decision,
                orders=_comparable(orders, decision),
            )
    return Replay(num_calls=count, num_left_out=header["calls_left_out"])


def _fresh(file: Path, recipes: Mapping[str, Any], name: str) -> Any:
    recipe = recipes.get(name)
    if not isinstance(recipe, Mapping):
        raise TraceError(f"{file}:1: policies: no recipe for {name!r}")
    kind = recipe.get("kind")
    if kind == "provisioning" and recipe.get("name") in tuple(PROVISIONING):
        return PROVISIONING[recipe["name"]]()
    if kind in REPLAYED:
        try:
            return REPLAYED[kind](recipe)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise TraceError(
                f"{file}:1: policies: recipe of {name!r}: {_in_words(error)}"
            ) from error
    if kind == "routing":
        try:
            rng = stream(recipe["seed"], recipe["stream"], recipe["replication"])
            return routing_policy(recipe["name"], rng)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(
                f"{file}:1: policies: recipe of {name!r}: {_in_words(error)}"
            ) from error
    raise TraceError(f"{file}:1: policies: unknown recipe {dict(recipe)!r:.200}")


def _in_words(error: Exception) -> str:
    """What a damaged log did to a policy; Python's own words say it to nobody else."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        key = error.args[0] if error.args else said
        return f"{key!r} is missing" if isinstance(key, str) else f"{key!r} is unknown"
    if isinstance(error, TypeError | AttributeError):
        return f"a value is of the wrong type: {said}"
    return said


def _repeat(policy: Any, decision: Decision) -> Any:
    if isinstance(policy, Replayed):
        return policy.repeat(decision.call, decision.args, now=decision.now)
    is_provisioning = isinstance(policy, Provisioning)
    call = "decide" if is_provisioning else "assign"
    if decision.call != call:
        raise ValueError(f"{decision.policy} has no call {decision.call!r}, only {call!r}")
    return _provision(policy, decision) if is_provisioning else _assign(policy, decision)


def _comparable(orders: Any, decision: Decision) -> Any:
    """The orders as the log would hold them; older logs know no ``given_r`` and its answer."""
    found = plain(orders)
    if decision.call == "decide" and "lengths" in decision.args and "given_r" not in decision.args:
        found.pop("misses_limit_high", None)
    return found


def _provision(policy: Provisioning, decision: Decision) -> Any:
    args = decision.args
    given = {"given_r": args["given_r"]} if "given_r" in args else {}
    lengths, bundle = dict(args["lengths"]), dict(args["bundle"])
    coefficients = LatencyCoefficients(**bundle.pop("coefficients"))
    return policy.decide(
        LengthPairs(
            prompt_tokens=np.asarray(lengths["prompt_tokens"], dtype=np.int64),
            output_tokens=np.asarray(lengths["output_tokens"], dtype=np.int64),
            weight=np.asarray(lengths["weight"], dtype=np.float64),
            num_requests=lengths["num_requests"],
            name=lengths["name"],
        ),
        Bundle(coefficients=coefficients, **bundle),
        ProvisioningLimits(**args["limits"]),
        choose_batch=args["choose_batch"],
        **given,
        now=decision.now,
    )


def _assign(policy: RoutingPolicy, decision: Decision) -> Any:
    args = {name: _whole_numbers(name, value) for name, value in decision.args.items()}
    prompts, free, loads = (args[n] for n in ("prompt_tokens", "free_slots", "token_loads"))
    if len(free) == 0 or len(free) != len(loads):
        raise ValueError(f"free_slots and token_loads name {len(free)} and {len(loads)} workers")
    return policy.assign(
        prompts,
        free_slots=free,
        token_loads=loads,
        now=decision.now,
    )


def _whole_numbers(name: str, value: Any) -> NDArray[np.int64]:
    if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
        raise ValueError(f"{name} must be a list of whole numbers >= 0")
    return np.asarray(value, dtype=np.int64)
