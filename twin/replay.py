"""Runs a decision log through fresh policies and reports the first difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.bundle import Bundle, LatencyCoefficients
from models.streams import stream
from policies.catalog import PROVISIONING, routing_policy
from policies.provisioning import Provisioning, ProvisioningLimits
from policies.routing import RoutingPolicy
from traces.decisions import Decision, plain, read_decisions
from traces.errors import TraceError
from traces.lengths import LengthPairs


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
        except (KeyError, TypeError) as error:
            raise TraceError(
                f"{file}: call {decision.n}: arguments of {decision.call} are damaged: {error}"
            ) from error
        if plain(orders) != decision.orders:
            return Replay(
                num_calls=count,
                num_left_out=header["calls_left_out"],
                difference=decision,
                orders=plain(orders),
            )
    return Replay(num_calls=count, num_left_out=header["calls_left_out"])


def _fresh(file: Path, recipes: Mapping[str, Any], name: str) -> Any:
    recipe = recipes.get(name)
    if not isinstance(recipe, Mapping):
        raise TraceError(f"{file}:1: policies: no recipe for {name!r}")
    kind = recipe.get("kind")
    if kind == "provisioning" and recipe.get("name") in PROVISIONING:
        return PROVISIONING[recipe["name"]]()
    if kind == "routing":
        try:
            rng = stream(recipe["seed"], recipe["stream"], recipe["replication"])
            return routing_policy(recipe["name"], rng)
        except (KeyError, ValueError) as error:
            raise TraceError(f"{file}:1: policies: recipe of {name!r}: {error}") from error
    raise TraceError(f"{file}:1: policies: unknown recipe {dict(recipe)!r}")


def _repeat(policy: Any, decision: Decision) -> Any:
    if isinstance(policy, Provisioning):
        return _provision(policy, decision)
    return _assign(policy, decision)


def _provision(policy: Provisioning, decision: Decision) -> Any:
    args = decision.args
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
        now=decision.now,
    )


def _assign(policy: RoutingPolicy, decision: Decision) -> Any:
    args = {name: np.asarray(value, dtype=np.int64) for name, value in decision.args.items()}
    return policy.assign(
        args["prompt_tokens"],
        free_slots=args["free_slots"],
        token_loads=args["token_loads"],
        now=decision.now,
    )
