"""The one shape of every answer that is not a success: OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

INVALID = "invalid_request_error"
TYPE_BY_STATUS = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: INVALID,
    408: "timeout_error",
    413: INVALID,
    415: INVALID,
    422: INVALID,
    429: "rate_limit_error",
    431: INVALID,
    499: "client_closed_request",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that ends with an error object.

    Attributes:
        status: Of HTTP.
        message: For the person who sent the request.
        param: Field of the body or header at fault.
        code: Short name of the fault, for programs.
        headers: Beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {
            "error": {
                "message": self.message,
                "type": TYPE_BY_STATUS.get(self.status, INVALID),
                "param": self.param,
                "code": self.code,
            }
        }

    def encoded(self) -> bytes:
        """The error object as JSON; halves of surrogate pairs in names become question marks."""
        try:
            return orjson.dumps(self.body())
        except TypeError:
            self.message = self.message.encode("utf-8", "replace").decode()
            if self.param is not None:
                self.param = self.param.encode("utf-8", "replace").decode()
            return orjson.dumps(self.body())


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request asks for what is not allowed."""
    return ApiError(400, message, param=param, code=code)
