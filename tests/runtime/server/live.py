"""A front end behind a real uvicorn on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from runtime.server.app import App, make_app
from runtime.server.engine_client import EngineClient
from runtime.server.http_server import Address, DrainingServer, http_config
from runtime.server.settings import ServerSettings
from runtime.text.chat_template import ChatTemplate
from runtime.text.tokenizer import TextTokenizer


class LiveServer:
    """A running server.

    Attributes:
        url: Its root.
        port: Of TCP.
        app: The application; only its own thread may touch it, see ``on_loop``.
    """

    def __init__(self, app: App, server: DrainingServer) -> None:
        self.app = app
        self.server = server
        self.loop: asyncio.AbstractEventLoop
        self.port = 0
        self.url = ""

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run it in the server's event loop and wait for what it gives."""

        async def call() -> Any:
            found = work()
            return await found if isinstance(found, Awaitable) else found

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(20)


@contextlib.contextmanager
def live_server(
    make_engine: Callable[[], EngineClient],
    text: TextTokenizer,
    template: ChatTemplate,
    **settings: Any,
) -> Iterator[LiveServer]:
    """A server for one test; ended by a drain without waiting."""
    settings.setdefault("model_names", ("tiny",))
    found: list[LiveServer] = []
    started = threading.Event()

    def serve() -> None:
        async def main() -> None:
            chosen = ServerSettings(**settings)
            app = make_app(chosen, make_engine(), text, template)
            server = DrainingServer(http_config(app, chosen, Address(port=0)), app.front)
            live = LiveServer(app, server)
            live.loop = asyncio.get_running_loop()
            found.append(live)
            running = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            live.port = server.servers[0].sockets[0].getsockname()[1]
            live.url = f"http://127.0.0.1:{live.port}"
            started.set()
            await running

        asyncio.run(main())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(20)
    live = found[0]
    try:
        yield live
    finally:
        with contextlib.suppress(RuntimeError):
            live.loop.call_soon_threadsafe(live.server.begin_exit, "end of test")
            live.loop.call_soon_threadsafe(live.server.begin_exit, "end of test")
        thread.join(20)
        assert not thread.is_alive()
