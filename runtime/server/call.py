"""One HTTP request as the front end sees it."""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.server.errors import invalid

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclass(slots=True)
class Call:
    """What belongs to a request beside its body.

    Attributes:
        request_id: From X-Request-Id, or made up.
        route: Path with its parameters as names; ``other`` for unknown ones.
        method: Of HTTP.
        headers: Names in small letters; of several with one name the last.
        arrived_s: On the monotonic clock; the event loop's may be coarse.
        timeout_s: Until its answer must be done.
        notes: For the log: counts, reasons.
    """

    request_id: str
    route: str
    method: str
    headers: Mapping[bytes, bytes]
    arrived_s: float
    timeout_s: float
    path_params: Mapping[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def left_s(self) -> float:
        """Seconds until its answer must be done; never negative."""
        return max(0.0, self.arrived_s + self.timeout_s - time.monotonic())


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The client's own id, or a new one.

    Raises:
        ApiError: 400, if it is not usable as an id.
    """
    value = headers.get(b"x-request-id")
    if value is None:
        return uuid.uuid4().hex
    text = value.decode("latin-1")
    if not _REQUEST_ID.fullmatch(text):
        raise invalid(
            "X-Request-Id must be 1 to 128 letters, digits, dots, colons, dashes or underscores.",
            "x-request-id",
        )
    return text


def timeout_of(headers: Mapping[bytes, bytes], most_s: float) -> float:
    """Seconds that the client gives us, at most the operator's.

    Raises:
        ApiError: 400, if X-Request-Timeout is no number of seconds above 0.
    """
    value = headers.get(b"x-request-timeout")
    if value is None:
        return most_s
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf or b"_" in value:
        raise invalid("X-Request-Timeout must be a number of seconds above 0.", "x-request-timeout")
    return min(seconds, most_s)
