"""Drives a running server with the requests of a replay, over OpenAI's API.

Times are those that a client sees. What only the engine knows (pages, bits, steps) stays with the
server, and so does its decision log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from runtime.clock import RunClock
from runtime.replay_arrivals import ReplayArrivals
from runtime.replay_client import ServerAddress, ServerAnswerError
from runtime.replay_prompts import ReplayPrompts
from runtime.replay_requests import ReplayError, ReplayRequests
from runtime.replay_run import ReplayFates, ReplayRun, Series, Totals

TICK_S: Final = 0.1
LOADING_TICK_S: Final = 0.2
Show = Callable[[float, float], None]


class ServerReplay:
    """One replay on one server."""

    def __init__(
        self,
        server: ServerAddress,
        model: str,
        requests: ReplayRequests,
        prompts: ReplayPrompts,
        arrivals: ReplayArrivals,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Take the requests.

        Args:
            server: Where.
            model: Its name there.
            requests, prompts, arrivals: What is asked, and when.
            temperature: Of sampling; 0: the likeliest token.
            seed: Of sampling.
        """
        self._server, self._model = server, model
        self._requests, self._prompts, self._arrivals = requests, prompts, arrivals
        self._temperature, self._seed = temperature, seed
        self.fates = ReplayFates(len(requests))
        self.series, self.totals = Series(every_s=TICK_S), Totals()
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._num_ended = 0

    async def run(
        self,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
        show: Show = lambda done, total: None,
    ) -> ReplayRun:
        """Send everything, or until ``is_stopped`` says so; open requests are then given up."""
        total = len(self._requests)
        self._clock = clock = RunClock()
        while self._num_ended < total and not is_stopped():
            now = clock()
            for request in self._arrivals.take(now):
                task = asyncio.create_task(self._serve(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._sample(now)
            show(self._num_ended, total)
            await self._wait(now)
        end_s = clock()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ReplayRun(
            arrival_s=self._arrivals.due_s,
            fates=self.fates,
            end_s=end_s,
            series=self.series,
            totals=self.totals,
            counters={},
            was_stopped=self._num_ended < total,
        )

    async def _wait(self, now: float) -> None:
        """Until the next request, the end of an answer, or the next look at ``is_stopped``."""
        next_s = self._arrivals.next_s
        wait_s = TICK_S if next_s is None else min(TICK_S, max(0.0, next_s - now))
        self._woken.clear()
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _serve(self, request: int) -> None:
        fates = self.fates
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(self._prompts.of(request)),
            "max_tokens": int(self._requests.output_tokens[request]),
            "temperature": self._temperature,
            "seed": self._seed + request,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        fates.added_s[request] = self._clock()
        last_s = float("nan")
        try:
            async for event in self._server.events("/v1/completions", body):
                if event.get("choices"):
                    last_s = self._clock()
                    fates.spoke(request, 1, last_s)
                usage = event.get("usage")
                if usage:
                    fates.generated_tokens[request] = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    fates.cached_tokens[request] = details.get("cached_tokens") or 0
            fates.last_token_s[request] = last_s
        except (OSError, EOFError, ServerAnswerError, ValueError, LookupError) as error:
            fates.errors[request] = str(error) or type(error).__name__
        self._num_ended += 1
        self._arrivals.ended(request, self._clock())
        self._woken.set()

    def _sample(self, now: float) -> None:
        """What a client can know: requests under way."""
        if self.series.is_due(now):
            self.totals.running_peak = max(self.totals.running_peak, self._arrivals.num_under_way)
            tokens = int(self.fates.generated_tokens.sum())
            under_way = float(self._arrivals.num_under_way)
            row = [now, *([0.0] * 6), under_way, 0.0, 0.0, 0.0, 0.0, float(tokens), 0.0, 0.0]
            self.series.add(tuple(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a server tells of a model.

    Attributes:
        name: That it answers to.
        context_tokens: Most tokens of prompt and answer; None: the server does not say.
        vocabulary: Token ids are below it; None: the server does not say.
    """

    name: str
    context_tokens: int | None
    vocabulary: int | None


async def served_model(server: ServerAddress, wanted: str | None) -> ServedModel:
    """The served model; a server that is still loading it is waited for.

    Raises:
        ReplayError: If the server cannot be asked, or serves no such model.
    """
    while True:
        found = await _listed_model(server, wanted)
        # `runtime serve` lists both fields, and has no values for them before the model is there
        if found.get("max_model_len") or found.get("vocab_size", found) is not None:
            break
        await asyncio.sleep(LOADING_TICK_S)
    return ServedModel(
        name=str(found["id"]),
        context_tokens=found.get("max_model_len"),
        vocabulary=found.get("vocab_size"),
    )


async def _listed_model(server: ServerAddress, wanted: str | None) -> dict[str, Any]:
    try:
        models = (await server.get("/v1/models"))["data"]
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        where = f"{server.host}:{server.port}"
        raise ReplayError(f"--url: {where}: {error or type(error).__name__}") from error
    names = [str(model["id"]) for model in models]
    if not names or (wanted is not None and wanted not in names):
        raise ReplayError(f"--name: must be one of {', '.join(names) or 'none'}, found {wanted!r}")
    chosen: dict[str, Any] = models[0 if wanted is None else names.index(wanted)]
    return chosen
