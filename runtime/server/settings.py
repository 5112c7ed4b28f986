"""What the operator of the front end chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


class ServerSettingsError(ValueError):
    """A setting out of its range; names it, what was found and what is allowed."""


_AT_LEAST_ONE = (
    "max_body_bytes",
    "max_bodies_bytes",
    "max_header_bytes",
    "max_queued_requests",
    "max_queued_tokens",
    "max_sequences_per_request",
    "default_max_tokens",
    "tokenizer_threads",
    "retry_after_s",
)
_POSITIVE = (
    "request_timeout_s",
    "header_timeout_s",
    "body_timeout_s",
    "stuck_after_s",
    "unready_after_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one front end; checked when made.

    Attributes:
        model_names: Names the model is served under; the first is the one that answers carry.
        api_keys: Any of them opens all routes but the admin ones; empty: no key is asked for.
        admin_key: Opens ``/admin/...``; empty: there are no such routes.
        metrics_open: ``/metrics`` needs no key.
        max_body_bytes: Of one request's body.
        max_bodies_bytes: Of all bodies being read at the same time.
        max_header_bytes: Of one request's line and headers.
        max_queued_requests: Answers (prompts times ``n``) without a first token yet.
        max_queued_tokens: Prompt tokens of those.
        max_sequences_per_request: Prompts times ``n``.
        default_max_tokens: Of ``/v1/completions``; chats may fill the context.
        context_tokens: Most tokens of prompt and answer; None: as the engine says.
        request_timeout_s: From arrival to the last byte of an answer.
        header_timeout_s: To send a request's line and headers, from the first byte.
        body_timeout_s: To send a body.
        tokenizer_threads: That tokenize and render chats beside the event loop.
        log_prompts: Prompts and answers go into the log.
        cors_origins: Origins that browsers may ask from; ``*`` for all.
        root_path: Under which a proxy serves the routes.
        drain_timeout_s: How long running requests may go on after SIGTERM.
        unready_after_s: Silence of the engine after which ``/ready`` says 503.
        stuck_after_s: Silence of the engine after which ``/health`` says 503.
        return_retry_after: Whether 429 and 503 carry Retry-After.
        retry_after_s: Its value.
        otlp_endpoint: Where spans go, if the OpenTelemetry SDK is installed; empty: nowhere.
    """

    model_names: tuple[str, ...] = ("default",)
    api_keys: tuple[str, ...] = ()
    admin_key: str = ""
    metrics_open: bool = False
    max_body_bytes: int = 32 << 20
    max_bodies_bytes: int = 256 << 20
    max_header_bytes: int = 64 << 10
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_sequences_per_request: int = 1024
    default_max_tokens: int = 16
    context_tokens: int | None = None
    request_timeout_s: float = 600.0
    header_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    tokenizer_threads: int = 2
    log_prompts: bool = False
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    drain_timeout_s: float = 30.0
    unready_after_s: float = 5.0
    stuck_after_s: float = 30.0
    return_retry_after: bool = True
    retry_after_s: int = 1
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name))
        if not self.model_names or not all(self.model_names):
            raise ServerSettingsError("model_names: at least one name, none of them empty")
        if not all(key and key.isascii() and key.isprintable() for key in self._keys()):
            raise ServerSettingsError("api_keys, admin_key: printable ASCII, none empty")
        if self.admin_key and self.admin_key in self.api_keys:
            raise ServerSettingsError("admin_key: must differ from every API key")
        if self.context_tokens is not None and self.context_tokens < 2:
            raise ServerSettingsError(f"context_tokens is {self.context_tokens}; at least 2")
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise ServerSettingsError(f"root_path is {self.root_path!r}; such as '/llm'")

    def _keys(self) -> tuple[str, ...]:
        return (*self.api_keys, self.admin_key) if self.admin_key else self.api_keys

    def _check(self, name: str, value: object) -> None:
        if name in _AT_LEAST_ONE and not (isinstance(value, int) and value >= 1):
            raise ServerSettingsError(f"{name} is {value!r}; an integer of at least 1")
        if name in _POSITIVE and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ServerSettingsError(f"{name} is {value!r}; a finite number above 0")
        if name == "drain_timeout_s" and not (isinstance(value, int | float) and value >= 0):
            raise ServerSettingsError(f"{name} is {value!r}; a number of at least 0")
