"""The state of one front end: the engine behind it, the queue before it, what is under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import ParamSpec, TypeVar

from runtime.engine.frames import EngineStats
from runtime.server.admission import Admission, Place
from runtime.server.body_reading import BodyReader
from runtime.server.engine_client import EngineClient
from runtime.server.errors import ApiError
from runtime.server.flow import Flow, Halt
from runtime.server.limits import TokenLimit
from runtime.server.prompts import Tokenizing
from runtime.server.request_metrics import RequestMetrics
from runtime.server.settings import ServerSettings
from runtime.text.chat_template import ChatTemplate
from runtime.text.tokenizer import TextTokenizer

P = ParamSpec("P")
T = TypeVar("T")

_WATCH_INTERVAL_S = 0.1
_DRAIN_CHECK_S = 0.02


class FrontEnd:
    """Used from one event loop.

    Attributes:
        settings: Of the operator.
        admission: The queue.
        metrics: What clients saw.
        reader: Of bodies.
        is_draining: New requests are refused, running ones go on.
        created_s: Unix time of its making.
        failure: Why the engine could not be opened; empty: it could, or will be.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.admission = Admission(settings)
        self.metrics = RequestMetrics()
        self.reader = BodyReader(settings)
        self.is_draining = False
        self.failure = ""
        self.engine: EngineClient | None = None
        self.instances: Sequence[EngineClient] = ()
        self._tokenizing: Tokenizing | None = None
        self._flows: set[Flow] = set()
        self._pool = ThreadPoolExecutor(settings.tokenizer_threads, "tokenizer")
        self._watcher: asyncio.Task[None] | None = None
        self._numbers = 0
        self.created_s = int(datetime.now(UTC).timestamp())

    def open(
        self,
        engine: EngineClient,
        tokenizer: TextTokenizer | None,
        template: ChatTemplate | None,
        instances: Sequence[EngineClient] = (),
    ) -> None:
        """The engine is there: requests are served from now on.

        Args:
            engine: Gets the sequences; a router of several is one, too.
            tokenizer: None: prompts and answers are token ids only.
            template: None: chats are refused.
            instances: Those behind the router, for metrics.
        """
        info = engine.info
        self._tokenizing = Tokenizing(
            tokenizer, template, info.vocabulary, TokenLimit.of(info, self.settings)
        )
        self.instances = tuple(instances) or (engine,)
        self.engine = engine

    @property
    def tokenizing(self) -> Tokenizing:
        """Of the model that is served; only once the engine is there."""
        assert self._tokenizing is not None
        return self._tokenizing

    # --- is it well? -------------------------------------------------------------------------

    def unready(self) -> tuple[str, str] | None:
        """(short name, sentence) of why no request should be sent here; None: send them."""
        engine = self.engine
        if self.is_draining:
            return "draining", "The server is shutting down."
        if self.failure:
            return "engine_failed", f"The engine did not start: {self.failure}"
        if engine is None:
            return "loading", "The model is being loaded."
        if not engine.is_alive:
            return "engine_gone", "The engine has ended."
        if engine.silent_s > self.settings.unready_after_s:
            return "engine_silent", f"The engine has been silent for {engine.silent_s:.1f} s."
        return None

    def unhealthy(self) -> tuple[str, str] | None:
        """(short name, sentence) of why it should be started anew; None: it is alive."""
        engine = self.engine
        if self.failure:
            return "engine_failed", f"The engine did not start: {self.failure}"
        if engine is None:
            return None
        if not engine.is_alive:
            return "engine_gone", "The engine has ended."
        if engine.silent_s > self.settings.stuck_after_s:
            return "engine_stuck", f"The engine has been silent for {engine.silent_s:.1f} s."
        return None

    def require_open(self) -> EngineClient:
        """The engine, for a new request.

        A short silence refuses nothing: what is queued is answered when the step ends.

        Raises:
            ApiError: 503.
        """
        found = self.unready()
        if found is not None and found[0] == "engine_silent":
            found = self.unhealthy()
        if found is not None:
            self.admission.rejected[found[0]] += 1
            raise self.unavailable(*found)
        assert self.engine is not None
        return self.engine

    def unavailable(self, code: str, message: str) -> ApiError:
        """503."""
        return ApiError(503, message, code=code, headers=self.admission.retry_headers())

    def enter(self) -> Place:
        """A place in the queue for a new request.

        Raises:
            ApiError: 429, 503.
        """
        self.require_open()
        return self.admission.enter()

    # --- work ----------------------------------------------------------------------------------

    async def in_pool(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it in a thread, beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def next_number(self) -> int:
        """Different for every request of this front end."""
        self._numbers += 1
        return self._numbers

    @contextlib.contextmanager
    def under_way(self, flow: Flow) -> Iterator[None]:
        """A flow that a shutdown has to end."""
        self._flows.add(flow)
        try:
            yield
        finally:
            self._flows.discard(flow)

    # --- beginning and end ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the engine's reports; needs the event loop."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for those under way; then end what is left.

        Args:
            timeout_s: None: as the settings say.

        Returns:
            Whether all of them came to their own end.
        """
        self.is_draining = True
        loop = asyncio.get_running_loop()
        wait_s = self.settings.drain_timeout_s if timeout_s is None else timeout_s
        until = loop.time() + wait_s
        while self.admission.active and loop.time() < until:
            await asyncio.sleep(_DRAIN_CHECK_S)
        is_empty = self.admission.active == 0
        self.stop_all()
        return is_empty

    def stop_all(self) -> None:
        """End all that is under way now."""
        self.is_draining = True
        for flow in list(self._flows):
            flow.halt(Halt.SHUTDOWN)

    async def close(self) -> None:
        """Leave nothing running; the engine is not ours to close."""
        self.stop_all()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        """Count every report's steps once."""
        seen: dict[int, EngineStats] = {}
        while True:
            for number, engine in enumerate(self.instances):
                stats = engine.stats
                if seen.get(number) is not stats:
                    seen[number] = stats
                    self.metrics.iterations(stats.step_tokens)
            await asyncio.sleep(_WATCH_INTERVAL_S)
