"""Which model server gets a request, when some of them have its prefix."""

from __future__ import annotations

import math
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

    All servers are there until one is said to be lost; the rules then hold among the others.

    Attributes:
        rule, num_servers, prefill, costs, block_bytes, max_sessions: As given.
    """

    def __init__(
        self,
        rule: RoutingRule,
        *,
        num_servers: int,
        prefill: PrefillCost,
        costs: PrefixCosts,
        block_bytes: int,
        max_sessions: int | None = None,
    ) -> None:
        """Fix the rule.

        Args:
            rule: Its name.
            num_servers: Servers, numbered from 0.
            prefill: Seconds of computing a prompt.
            costs: Of blocks, and their size in tokens.
            block_bytes: Size of a block.
            max_sessions: Sessions whose server ``sticky`` remembers; the one not seen for longest
                is forgotten first. None: all.

        Raises:
            ValueError: If there is no such rule, no server, or no session to be remembered.
        """
        if rule not in get_args(RoutingRule):
            rules = ", ".join(get_args(RoutingRule))
            raise ValueError(f"routing must be one of {rules}, found {rule!r}")
        if num_servers < 1:
            raise ValueError(f"num_servers must be >= 1, found {num_servers}")
        if max_sessions is not None and max_sessions < 1:
            raise ValueError(f"max_sessions must be >= 1, found {max_sessions}")
        self.rule, self.prefill, self.costs = rule, prefill, costs
        self.block_bytes, self.max_sessions = block_bytes, max_sessions
        self.num_servers = num_servers
        self._server_of_session: dict[int, int] = {}  # the one seen last is the last
        self._backlog_s = [0.0] * num_servers
        self._there = list(range(num_servers))
        self._slowdown = 1.0

    @property
    def needs_states(self) -> bool:
        """Whether ``choose`` looks at the servers' states."""
        return self.rule == "prefix_aware"

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
            ValueError: If states are needed and there are not as many as servers, or if all
                servers are lost.
        """
        there = self._there
        if not there:
            raise ValueError("all servers are lost")
        by_chance = min(int(draw * len(there)), len(there) - 1)
        if self.rule == "round_robin":
            return there[number % len(there)]
        if self.rule == "sticky" and session >= 0:
            return self._stay(session, there[by_chance])
        if self.rule == "prefix_aware":
            if len(states) != self.num_servers:
                raise ValueError(f"{len(states)} states of {self.num_servers} servers")
            # ties go to the first from the drawn one on, so that equal servers share the load
            order = there[by_chance:] + there[:by_chance]
            return min(order, key=lambda server: self.expected_s(server, prompt_tokens, states))
        return there[by_chance]

    def expected_s(self, server: int, prompt_tokens: int, states: Sequence[ServerState]) -> float:
        """Seconds until the first token of a prompt at that server, with what waits there."""
        return self._backlog_s[server] + self._first_token_s(prompt_tokens, states[server])

    def assigned(self, server: int, seconds: float) -> None:
        """So much work has been given to a server (negative: it has been done)."""
        self._backlog_s[server] = max(0.0, self._backlog_s[server] + seconds)

    def lost(self, server: int) -> None:
        """It has ended, with all that waited there; it gets nothing until it returns."""
        if server in self._there:
            self._there.remove(server)
        self._backlog_s[server] = 0.0

    def returned(self, server: int) -> None:
        """A lost one is there again, empty."""
        if server not in self._there:
            self._there = sorted([*self._there, server])
        self._backlog_s[server] = 0.0

    def measured(self, slowdown: float) -> None:
        """Computing takes so many times the seconds of ``prefill``; what is given out stays.

        Raises:
            ValueError: If it is not positive.
        """
        if not 0.0 < slowdown < math.inf:
            raise ValueError(f"slowdown must be finite and > 0, found {slowdown}")
        self._slowdown = slowdown

    def work_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Seconds of computing a prompt behind what is there of it."""
        new_tokens = prompt_tokens - cached_tokens
        return self._slowdown * self.prefill.seconds(new_tokens, cached_tokens)

    def _stay(self, session: int, new: int) -> int:
        """Where the session was, if that server is there; else the new one, from now on."""
        servers = self._server_of_session
        server = servers.pop(session, new)
        if server not in self._there:
            server = new
        servers[session] = server
        if self.max_sessions is not None and len(servers) > self.max_sessions:
            del servers[next(iter(servers))]
        return server

    def _first_token_s(self, prompt_tokens: int, state: ServerState) -> float:
        """Seconds of loading and computing, nothing waiting there."""
        costs = self.costs
        cached = max(state.device_blocks, state.pooled_blocks)
        tokens = cached * costs.block_tokens
        seconds = self.work_s(prompt_tokens, tokens)
        if state.pooled_blocks > state.device_blocks:
            loaded = state.pooled_blocks - state.device_blocks
            seconds += loaded * self.block_bytes / costs.local.bytes_per_s
            near = max(state.device_blocks, state.memory_blocks)
            away = max(0, state.pooled_blocks - near)
            seconds += costs.remote.seconds(away * self.block_bytes)
        return seconds
