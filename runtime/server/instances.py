"""Several engines behind one ``EngineClient``: every sequence goes to one of them, by a policy.

The policy is the object that the twin simulates. It is told what the router knows of prefixes, how
long prompts take, and who is there; what it was told and what it chose is in the decision log.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from policies.prefix.request_routing_log import LoggedRequestRouting
from runtime.engine.frames import EngineInfo, EngineStats, NewSequence, SequenceOutput
from runtime.engine.prefix_keys import PrefixKeys
from runtime.server.engine_client import EngineClient, EngineGoneError
from runtime.server.instances_costs import PrefillSpeed
from runtime.server.instances_prefixes import InstancePrefixes
from runtime.server.instances_sums import info_of_all, stats_of_all
from traces.decisions import DecisionLog
from traces.whole_file import write_whole

NO_SESSION: Final = -1
SILENT_S: Final = 10.0


class Instance(EngineClient, Protocol):
    """An engine that may be started anew.

    Attributes:
        starts: Counts the engines that this instance had.
    """

    starts: int


@dataclass(slots=True)
class Routing:
    """The policy and what it is asked with.

    Attributes:
        policy: Logged.
        log: Its decision log.
        prefixes: What each instance has been given.
        speed: Of prefill.
        clock: Seconds since the start of the run.
        draws: Chance of the policy.
        decision_file: Where the log goes; None: nowhere.
    """

    policy: LoggedRequestRouting
    log: DecisionLog
    prefixes: InstancePrefixes
    speed: PrefillSpeed
    clock: Callable[[], float]
    draws: np.random.Generator
    decision_file: Path | None = None


@dataclass(slots=True)
class _Given:
    """A sequence at its instance.

    ``stay`` counts how often the instance had been lost by then; ``owed_s`` is its part of the
    backlog, until its first token.
    """

    instance: int
    stay: int
    new: NewSequence
    keys: PrefixKeys | None
    owed_s: float
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)


class Instances:
    """See ``EngineClient``; gone only when all instances are.

    Attributes:
        instances: In the order of their numbers.
        routed: Sequences given to each.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        routing: Routing,
        *,
        silent_s: float = SILENT_S,
        after_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Put them behind one entrance.

        Args:
            instances: Running ones, at least one.
            routing: Says where a sequence goes.
            silent_s: An instance silent for longer gets nothing new while others speak.
            after_close: Ends what the instances ran on.

        Raises:
            InstancesDifferError: If they do not serve the same model.
        """
        self.instances = tuple(instances)
        self.routed = [0] * len(self.instances)
        self._info = info_of_all([instance.info for instance in self.instances])
        self._routing, self._silent_s = routing, silent_s
        self._after_close = after_close
        self._given: dict[str, _Given] = {}
        self._number = 0
        self._starts = [instance.starts for instance in self.instances]
        self._stays = [0] * len(self.instances)
        self._is_there = [True] * len(self.instances)

    @property
    def info(self) -> EngineInfo:
        """What holds for every instance."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Sums over the instances."""
        return stats_of_all([instance.stats for instance in self.instances])

    @property
    def silent_s(self) -> float:
        """Since any of those that are alive has said anything."""
        alive = [instance.silent_s for instance in self.instances if instance.is_alive]
        return min(alive, default=0.0)

    @property
    def is_alive(self) -> bool:
        """Whether any is."""
        return any(instance.is_alive for instance in self.instances)

    async def submit(self, sequence: NewSequence) -> AsyncIterator[SequenceOutput]:
        """See ``EngineClient.submit``; the instance is chosen when the first output is asked for.

        Raises:
            EngineGoneError: If no instance is alive, or the one that had the sequence has ended.
        """
        given = self._choose(sequence)
        self._given[sequence.sequence_id] = given
        outputs = self.instances[given.instance].submit(sequence)
        try:
            async for output in outputs:
                self._heard(given, output)
                yield output
        finally:
            self._given.pop(sequence.sequence_id, None)
            self._ended(given)
            if close := getattr(outputs, "aclose", None):
                await close()

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """See ``EngineClient.abort``."""
        for sequence_id in sequence_ids:
            if (given := self._given.get(sequence_id)) is not None:
                self.instances[given.instance].abort((sequence_id,))

    async def control(self, command: str) -> None:
        """To every instance that is alive; see ``EngineClient.control``.

        Raises:
            EngineGoneError: If none is alive.
            RuntimeError: If some could not do it; names them.
        """
        alive = [number for number, one in enumerate(self.instances) if one.is_alive]
        if not alive:
            raise EngineGoneError("all instances have ended")
        results = await asyncio.gather(
            *(self.instances[number].control(command) for number in alive), return_exceptions=True
        )
        errors = [
            f"instance {number}: {result}"
            for number, result in zip(alive, results, strict=True)
            if isinstance(result, BaseException)
        ]
        if command == "reset_prefix_cache":
            for number in range(len(self.instances)):
                self._routing.prefixes.forget(number)
        if command == "write_decisions":
            try:
                await asyncio.to_thread(self._write_decisions)
            except OSError as error:
                errors.append(f"router: {error}")
        if errors:
            raise RuntimeError("; ".join(errors))

    async def close(self) -> None:
        """End all of them and write the router's decisions."""
        await asyncio.gather(*(one.close() for one in self.instances), return_exceptions=True)
        with contextlib.suppress(OSError):
            self._write_decisions()
        if self._after_close is not None:
            await self._after_close()

    # --- what the policy is told -------------------------------------------------------------

    def _choose(self, new: NewSequence) -> _Given:
        self._look_around()
        if not any(self._is_there):
            raise EngineGoneError("all instances have ended")
        routing = self._routing
        policy, prompt_tokens = routing.policy, len(new.prompt)
        keys, states = None, []
        if self._info.has_prefix_store and policy.policy.needs_states:
            keys = self._keys_of(new)
        if policy.policy.needs_states:
            states = routing.prefixes.states(
                keys or routing.prefixes.keys_of((), ""), prompt_tokens
            )
        instance = policy.choose(
            self._number,
            session=session_number(new.session),
            prompt_tokens=prompt_tokens,
            draw=float(routing.draws.random()),
            states=states,
            now=routing.clock(),
        )
        self._number += 1
        self.routed[instance] += 1
        cached = states[instance].pooled_blocks * self._info.block_tokens if states else 0
        owed_s = policy.policy.work_s(prompt_tokens, cached)
        policy.assigned(instance, owed_s, now=routing.clock())
        if keys is not None:
            routing.prefixes.given(instance, keys.leading(len(keys)))
        return _Given(instance, self._stays[instance], new, keys, owed_s)

    def _keys_of(self, new: NewSequence) -> PrefixKeys | None:
        try:
            return self._routing.prefixes.keys_of(new.prompt, new.salt)
        except ValueError:
            return None  # the engine refuses it in words

    def _heard(self, given: _Given, output: SequenceOutput) -> None:
        self._paid(given)
        if given.keys is not None:
            given.tokens += output.tokens
        given.cached_tokens += output.cached_tokens
        if output.times is None:
            return
        routing = self._routing
        slowdown = routing.speed.answer(
            len(given.new.prompt), given.cached_tokens, output.times.prefill_s
        )
        if slowdown is not None:
            routing.policy.measured(slowdown, now=routing.clock())

    def _ended(self, given: _Given) -> None:
        """However it ended: its blocks, the answer's too, are in the store now."""
        self._paid(given)
        if given.keys is not None and given.tokens and self._is_same_stay(given):
            given.keys.update((*given.new.prompt, *given.tokens))
            keys = given.keys.leading(len(given.keys))
            self._routing.prefixes.given(given.instance, keys)

    def _is_same_stay(self, given: _Given) -> bool:
        return given.stay == self._stays[given.instance]

    def _paid(self, given: _Given) -> None:
        """Its prompt waits no more: it has its first token, or has ended."""
        owed_s, given.owed_s = given.owed_s, 0.0
        if owed_s and self._is_same_stay(given):
            self._routing.policy.assigned(given.instance, -owed_s, now=self._routing.clock())

    def _look_around(self) -> None:
        """Tell the policy who has come and who has gone since the last choice."""
        routing = self._routing
        speaks = [one.is_alive and one.silent_s <= self._silent_s for one in self.instances]
        for number, one in enumerate(self.instances):
            is_there = speaks[number] or (one.is_alive and not any(speaks))
            is_another = one.starts != self._starts[number]
            if is_another:
                routing.prefixes.forget(number)
                self._starts[number] = one.starts
            if self._is_there[number] and (is_another or not is_there):
                routing.policy.lost(number, now=routing.clock())
                self._stays[number] += 1
                self._is_there[number] = False
            if is_there and not self._is_there[number]:
                routing.policy.returned(number, now=routing.clock())
                self._is_there[number] = True

    def _write_decisions(self) -> None:
        if self._routing.decision_file is not None:
            write_whole(self._routing.decision_file, self._routing.log.to_bytes())


def session_number(session: str) -> int:
    """A session's name as the policy's number, >= 0; -1 for none."""
    if not session:
        return NO_SESSION
    digest = hashlib.sha256(session.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1
