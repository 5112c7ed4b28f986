"""uvicorn around the application: opening, signals, draining, closing, in one event loop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from runtime.server.app import App, make_app
from runtime.server.engine_client import EngineClient, EngineGoneError
from runtime.server.front_end import FrontEnd
from runtime.server.http_protocol import protocol_class
from runtime.server.listening import BACKLOG, check_certificate, listen
from runtime.server.logs import log
from runtime.server.settings import ServerSettings
from runtime.text.chat_template import ChatTemplate
from runtime.text.tokenizer import TextTokenizer

_WATCH_S = 0.5
_GRACE_S = 2.0
"""For connections to close once their requests have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What is there once the model is loaded; see ``make_app``."""

    engine: EngineClient
    text: TextTokenizer | None
    template: ChatTemplate | None
    instances: tuple[EngineClient, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen.

    Attributes:
        host, port: Of TCP; port 0: any free one.
        unix_socket: Path; then host and port say nothing.
        certificate, key: PEM files for TLS; empty: plain HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: str = ""
    certificate: str = ""
    key: str = ""


class DrainingServer(uvicorn.Server):
    """Drains at the first SIGTERM or SIGINT while it goes on listening, stops at the second."""

    def __init__(self, config: uvicorn.Config, front: FrontEnd) -> None:
        super().__init__(config)
        self._front = front
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come; called between two bytecodes, so nothing is done here."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.begin_exit, signal.Signals(sig).name)

    def begin_exit(self, why: str) -> None:
        """Drain; when called again, stop at once."""
        if self._draining is None:
            log().info("draining", reason=why, active=self._front.admission.active)
            self._draining = asyncio.get_running_loop().create_task(self._drain())
            return
        log().warning("stopping_at_once", reason=why, active=self._front.admission.active)
        self._front.stop_all()
        self.should_exit = True
        self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close; at a forced exit uvicorn would end the application with a traceback."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    async def _drain(self) -> None:
        is_empty = await self._front.drain()
        log().info("drained", all_finished=is_empty)
        self.should_exit = True


async def serve(
    settings: ServerSettings,
    open_engine: Callable[[], Awaitable[Opened]],
    address: Address,
    *,
    on_listening: Callable[[int], None] | None = None,
    on_ready: Callable[[], None] | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Serve until a signal says no; the port answers while the model is being loaded.

    Args:
        settings: Of the front end.
        open_engine: Loads the model; called once, in this event loop.
        address: Where to listen.
        on_listening: Told the port.
        on_ready: Told that requests are served.
        listener: A listening socket, instead of the address.

    Raises:
        Exception: What ``open_engine`` raised; the server has ended then.
        EngineGoneError: If the engine has ended by itself; the server has ended then.
        ListenError: If the address cannot be listened on.
    """
    check_certificate(address.certificate, address.key)
    app = make_app(settings)
    listeners = [listener] if listener is not None else _listeners(address)
    server = DrainingServer(http_config(app, settings, address), app.front)
    opened: list[Opened] = []

    async def load() -> None:
        while not server.started and not server.should_exit:
            await asyncio.sleep(0.01)
        if on_listening is not None and server.started:
            on_listening(_port_of(server))
        try:
            found = await open_engine()
        except Exception as error:
            app.front.failure = str(error)[:500] or type(error).__name__
            server.should_exit = True
            raise
        opened.append(found)
        app.front.open(found.engine, found.text, found.template, found.instances)
        if on_ready is not None:
            on_ready()

    async def watch() -> None:
        """End when the engine has: whoever runs this starts it again."""
        while not opened or opened[0].engine.is_alive:
            await asyncio.sleep(_WATCH_S)
        log().error("engine_ended")
        await asyncio.sleep(_WATCH_S)  # what was under way is told
        server.should_exit = True

    loading = asyncio.create_task(load())
    watching = asyncio.create_task(watch())
    try:
        await server.serve(listeners)
        if opened and not opened[0].engine.is_alive:
            raise EngineGoneError("the engine has ended by itself; see what it said before")
    finally:
        watching.cancel()
        if not loading.done():
            loading.cancel()
        result = (await asyncio.gather(loading, return_exceptions=True))[0]
        for each in opened:
            await each.engine.close()
        if isinstance(result, Exception) and sys.exc_info()[0] is None:
            raise result


def run_server(
    settings: ServerSettings,
    open_engine: Callable[[], Awaitable[Opened]],
    address: Address,
    *,
    on_listening: Callable[[int], None] | None = None,
    on_ready: Callable[[], None] | None = None,
    listener: socket.socket | None = None,
) -> None:
    """``serve`` in an event loop of its own (uvloop where it is installed)."""
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(
            serve(
                settings,
                open_engine,
                address,
                on_listening=on_listening,
                on_ready=on_ready,
                listener=listener,
            )
        )


def http_config(app: App, settings: ServerSettings, address: Address) -> uvicorn.Config:
    """uvicorn's configuration: our protocol, no logs of its own but errors."""
    return uvicorn.Config(
        app,
        host=address.host,
        port=address.port,
        uds=address.unix_socket or None,
        ssl_certfile=address.certificate or None,
        ssl_keyfile=address.key or None,
        http=protocol_class(settings.max_header_bytes, settings.header_timeout_s),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        server_header=False,
        root_path=settings.root_path,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(_GRACE_S),
    )


def _listeners(address: Address) -> list[socket.socket] | None:
    """None: uvicorn makes the Unix socket."""
    return None if address.unix_socket else listen(address.host, address.port)


def _port_of(server: uvicorn.Server) -> int:
    name = server.servers[0].sockets[0].getsockname()
    return int(name[1]) if isinstance(name, tuple) else 0
