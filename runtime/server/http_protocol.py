"""uvicorn's HTTP protocol, with its holes closed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from runtime.server.errors import ApiError

_DROPPED_BODY_BYTES = 64 << 20
_DROPPED_BODY_S = 10.0


class _PoliteTransport:
    """A transport as one request's cycle sees it.

    To close a socket with unread bytes resets the connection, and the answer may be lost: what is
    left of the body is read and dropped first.
    """

    def __init__(
        self, transport: asyncio.Transport, cycle: RequestResponseCycle, protocol: Any
    ) -> None:
        self._transport = transport
        self._cycle = cycle
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Now, or when the body has come."""
        if self._cycle.more_body:
            self._protocol.close_after_body()
        else:
            self._transport.close()


def protocol_class(
    max_header_bytes: int, header_timeout_s: float = 15.0
) -> type[HttpToolsProtocol]:
    """A protocol that refuses longer headers.

    Args:
        max_header_bytes: Of a request's line and headers; the parser itself has no limit.
        header_timeout_s: From a request's first byte to the end of its headers.
    """

    class ErrorObjectProtocol(HttpToolsProtocol):
        """Answers broken requests with an error object, too.

        * A request that is no HTTP gets the same error object as any other fault.
        * Headers without end are cut off, and so is a body that goes on after its answer.
        * When a client goes, all requests that it has sent on the connection are told, not only
          the last one.
        * Headers that do not end and connections without a request are closed in time.
        * An offer to change the protocol (Upgrade) is ignored and the request answered (RFC 9110,
          7.8); the parser alone would drop its body.
        * A request of HTTP/1.1 has one Host (RFC 9112, 3.2).
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._header_bytes = 0
            self._dropped_bytes = 0
            self._cycles: list[RequestResponseCycle] = []
            self._header_timer: asyncio.TimerHandle | None = None
            self._drop_timer: asyncio.TimerHandle | None = None
            self._is_refused = False
            self._is_body_whole = True
            self._is_closing = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_request()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._unset_keepalive_if_required()
            self._end_header_timer()
            if self._drop_timer is not None:
                self._drop_timer.cancel()
            for cycle in self._cycles:
                if not cycle.response_complete:
                    cycle.disconnected = True
                cycle.message_event.set()
            self._cycles.clear()

        def data_received(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            while not self._is_refused:
                try:
                    self.parser.feed_data(data)
                except httptools.HttpParserError:
                    self.send_400_response("")
                except httptools.HttpParserUpgrade as offer:
                    if not self._should_upgrade():
                        self.send_400_response("")  # CONNECT
                        return
                    data = self._without_upgrade() + data[offer.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    continue
                break
            self._wait_for_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._header_timer is not None:  # the next request's: it had to wait until now
                self._begin_header_timer()
            if self.cycle.response_complete and self.cycle.more_body:
                self._begin_drop_timer()

        def close_after_body(self) -> None:
            """Close when the rest of the body has been read, or does not come in time."""
            self._is_closing = True
            if self.transport.can_write_eof() and not self.transport.is_closing():
                self.transport.write_eof()
            self._begin_drop_timer()

        def _should_upgrade(self) -> bool:
            """Whether the parser is to begin anew without the offer, see ``data_received``."""
            return bool(self.parser.get_method() != b"CONNECT")

        def _without_upgrade(self) -> bytes:
            """The request's head once more."""
            version = self.parser.get_http_version().encode()
            lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
            for name, value in self.headers:
                if name == b"connection":
                    options = [option.strip() for option in value.split(b",")]
                    value = b", ".join(each for each in options if each.lower() != b"upgrade")
                if name != b"upgrade":
                    lines.append(name + b": " + value)
            return b"\r\n".join([*lines, b"", b""])

        def _wait_for_request(self) -> None:
            """Not for ever, if nothing of one has come."""
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and self._header_timer is None and self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def _begin_header_timer(self) -> None:
            self._end_header_timer()
            self._header_timer = self.loop.call_later(header_timeout_s, self._header_is_late)

        def _end_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _header_is_late(self) -> None:
            if self._is_closing:
                self.transport.close()
            elif self.cycle is not None and not self.cycle.response_complete:
                self._begin_header_timer()  # reading may stand still until that answer is done
            else:
                self._refuse(
                    ApiError(
                        408,
                        f"The headers did not arrive within {header_timeout_s:g} s.",
                        code="header_timeout",
                    )
                )

        def _begin_drop_timer(self) -> None:
            if self._drop_timer is None:
                cycle = self.cycle
                self._drop_timer = self.loop.call_later(_DROPPED_BODY_S, self._drop_is_late, cycle)

        def _drop_is_late(self, cycle: RequestResponseCycle) -> None:
            self._drop_timer = None
            if self._is_closing or (cycle is self.cycle and not self._is_body_whole):
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "This is not a valid HTTP request.", code="invalid_http"))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0
            self._begin_header_timer()

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._count_header(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._count_header(len(name) + len(value))

        def on_headers_complete(self) -> None:
            if self.parser.should_upgrade() and self._should_upgrade():
                return
            self._end_header_timer()
            if self._is_refused or self._is_closing:
                return
            if self.parser.get_http_version() == "1.1":
                hosts = sum(name == b"host" for name, _ in self.headers)
                if hosts != 1:
                    words = f"A request has one Host header, found {hosts}."
                    self._refuse(ApiError(400, words, param="host", code="invalid_http"))
                    return
            self._is_body_whole = False
            super().on_headers_complete()
            if self.cycle is not None:
                self.cycle.transport = cast(
                    asyncio.Transport, _PoliteTransport(self.transport, self.cycle, self)
                )
            self._cycles = [each for each in self._cycles if not each.response_complete]
            if self.cycle is not None:
                self._cycles.append(self.cycle)

        def on_body(self, body: bytes) -> None:
            if self._is_refused or (self.parser.should_upgrade() and self._should_upgrade()):
                return
            if self.cycle.response_complete:
                self._dropped_bytes += len(body)
                if self._dropped_bytes > _DROPPED_BODY_BYTES:
                    self.transport.close()
            super().on_body(body)

        def on_message_complete(self) -> None:
            if self._is_refused or (self.parser.should_upgrade() and self._should_upgrade()):
                return
            self._is_body_whole = True
            super().on_message_complete()
            if self._is_closing:
                self.transport.close()

        def _count_header(self, num_bytes: int) -> None:
            self._header_bytes += num_bytes
            if self._header_bytes > max_header_bytes and not self.transport.is_closing():
                self._refuse(
                    ApiError(
                        431,
                        f"Request line and headers are longer than {max_header_bytes} bytes.",
                        code="headers_too_large",
                    )
                )

        def _refuse(self, error: ApiError) -> None:
            """Answer and close; bytes that still come are not looked at."""
            self._is_refused = True
            self._end_header_timer()
            if self._is_closing:  # the last answer has been written
                self.transport.close()
            if self.transport.is_closing():
                return
            body = error.encoded()
            self.transport.write(
                STATUS_LINE[error.status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
            self.transport.close()

    return ErrorObjectProtocol
