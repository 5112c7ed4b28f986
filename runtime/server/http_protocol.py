"""uvicorn's HTTP protocol, with three holes closed."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from runtime.server.errors import ApiError

_DROPPED_BODY_BYTES = 64 << 20


def protocol_class(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol that refuses longer headers.

    Args:
        max_header_bytes: Of a request's line and headers; the parser itself has no limit.
    """

    class ErrorObjectProtocol(HttpToolsProtocol):
        """Answers broken requests with an error object, too.

        * A request that is no HTTP gets the same error object as any other fault.
        * Headers without end are cut off, and so is a body that goes on after its answer.
        * When a client goes, all requests that it has sent on the connection are told, not only
          the last one.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._header_bytes = 0
            self._dropped_bytes = 0
            self._cycles: list[RequestResponseCycle] = []

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for cycle in self._cycles:
                if not cycle.response_complete:
                    cycle.disconnected = True
                cycle.message_event.set()
            self._cycles.clear()

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "This is not a valid HTTP request.", code="invalid_http"))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._count_header(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._count_header(len(name) + len(value))

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self._cycles = [each for each in self._cycles if not each.response_complete]
            if self.cycle is not None:
                self._cycles.append(self.cycle)

        def on_body(self, body: bytes) -> None:
            if self.cycle.response_complete:
                self._dropped_bytes += len(body)
                if self._dropped_bytes > _DROPPED_BODY_BYTES:
                    self.transport.close()
            super().on_body(body)

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
