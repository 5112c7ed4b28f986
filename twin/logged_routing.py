"""A routing policy that writes down what it was told and what it ordered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.orders import AssignWorkers
from policies.routing import RoutingPolicy
from traces.decisions import DecisionLog


class LoggedRouting:
    """Passes every call on to ``policy`` and records it until the log is full."""

    def __init__(self, policy: RoutingPolicy, log: DecisionLog, name: str = "routing") -> None:
        self._policy, self._log, self._name = policy, log, name

    def assign(
        self,
        prompt_tokens: NDArray[np.int64],
        *,
        free_slots: NDArray[np.int64],
        token_loads: NDArray[np.int64],
        now: float,
    ) -> AssignWorkers:
        """The wrapped policy's order."""
        orders = self._policy.assign(
            prompt_tokens, free_slots=free_slots, token_loads=token_loads, now=now
        )
        if self._log.is_full:
            self._log.calls_left_out += 1
        else:
            self._log.record(
                self._name,
                "assign",
                {
                    "prompt_tokens": prompt_tokens,
                    "free_slots": free_slots,
                    "token_loads": token_loads,
                },
                orders,
                now=now,
            )
        return orders
