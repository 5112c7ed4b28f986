"""Logs: one JSON object a line on standard error, never a prompt or an answer unless asked for."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import orjson
import structlog


def log() -> Any:
    """The front end's logger."""
    return structlog.get_logger("serve")


def log_as_json(level: str = "info", stream: TextIO | None = None) -> None:
    """Set the process's logs up, uvicorn's own among them.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        stream: Where they go; standard error by default.
    """
    target = stream or sys.stderr
    number = getattr(logging, level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer(serializer=_dumps)
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name == "uvicorn" else []
        logger.setLevel(max(number, logging.WARNING))
        logger.propagate = name != "uvicorn"
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate = [], False


def _dumps(value: Any, **_: Any) -> str:
    return orjson.dumps(value, default=repr).decode()
