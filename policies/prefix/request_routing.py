"""Which model server gets a request, when some of them have its prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from models.prefix_costs import PrefillCost, PrefixCosts

RoutingRule = Literal["random", "round_robin", "sticky", "prefix_aware"]


class ServerState(NamedTuple):
    """What is known of one server when a request arrives.

    Attributes:
        device_blocks: Leading blocks of the prompt in the server's own device memory.
        memory_blocks: Leading blocks in the host memory of its node.
        pooled_blocks: Leading blocks that the pool holds anywhere.
    """

    device_blocks: int
    memory_blocks: int
    pooled_blocks: int


class RequestRouting:
    """One rule over all servers.

    ``random``: by the request's draw; ``round_robin``: in turn; ``sticky``: where the session was
    before, a new one by its draw; ``prefix_aware``: where the first token is expected soonest,
    given what waits there and what is there of the prompt.
    """

    def __init__(
        self,
        rule: RoutingRule,
        *,
        num_servers: int,
        prefill: PrefillCost,
        costs: PrefixCosts,
        block_bytes: int,
    ) -> None:
        """Fix the rule.

        Args:
            rule: Its name.
            num_servers: Servers, numbered from 0.
            prefill: Seconds of computing a prompt.
            costs: Of blocks, and their size in tokens.
            block_bytes: Size of a block.

        Raises:
            ValueError: If there is no such rule, or no server.
        """
        if rule not in get_args(RoutingRule):
            rules = ", ".join(get_args(RoutingRule))
            raise ValueError(f"routing must be one of {rules}, found {rule!r}")
        if num_servers < 1:
            raise ValueError(f"num_servers must be >= 1, found {num_servers}")
        self._rule, self._prefill, self._costs = rule, prefill, costs
        self._block_bytes = block_bytes
        self._server_of_session: dict[int, int] = {}
        self._backlog_s = [0.0] * num_servers

    @property
    def needs_states(self) -> bool:
        """Whether ``choose`` looks at the servers' states."""
        return self._rule == "prefix_aware"

    def choose(
        self,
        number: int,
        *,
        session: int,
        prompt_tokens: int,
        draw: float,
        states: Sequence[ServerState] = (),
    ) -> int:
        """The server of a request.

        Args:
            number: Of the request, in order of arrival.
            session: Its conversation; negative: none.
            prompt_tokens: Length of its prompt.
            draw: In 0..1, its own.
            states: [num_servers], where ``needs_states``.

        Raises:
            ValueError: If states are needed and there are not as many as servers.
        """
        count = len(self._backlog_s)
        by_chance = min(int(draw * count), count - 1)
        if self._rule == "round_robin":
            return number % count
        if self._rule == "sticky" and session >= 0:
            return self._server_of_session.setdefault(session, by_chance)
        if self._rule == "prefix_aware":
            if len(states) != count:
                raise ValueError(f"{len(states)} states of {count} servers")
            # ties go to the first from the drawn one on, so that equal servers share the load
            order = [(by_chance + step) % count for step in range(count)]
            expected = [
                backlog_s + self._first_token_s(prompt_tokens, state)
                for backlog_s, state in zip(self._backlog_s, states, strict=True)
            ]
            return min(order, key=lambda server: expected[server])
        return by_chance

    def assigned(self, server: int, seconds: float) -> None:
        """So much work has been given to a server (negative: it has been done)."""
        self._backlog_s[server] = max(0.0, self._backlog_s[server] + seconds)

    def _first_token_s(self, prompt_tokens: int, state: ServerState) -> float:
        """Seconds of loading and computing, nothing waiting there."""
        costs = self._costs
        cached = max(state.device_blocks, state.pooled_blocks)
        tokens = cached * costs.block_tokens
        seconds = self._prefill.seconds(prompt_tokens - tokens, tokens)
        if state.pooled_blocks > state.device_blocks:
            loaded = state.pooled_blocks - state.device_blocks
            seconds += loaded * self._block_bytes / costs.local.bytes_per_s
            near = max(state.device_blocks, state.memory_blocks)
            away = max(0, state.pooled_blocks - near)
            seconds += costs.remote.seconds(away * self._block_bytes)
        return seconds
