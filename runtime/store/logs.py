"""Logs of the store: one JSON object a line on standard error; no keys, no contents."""

from __future__ import annotations

import logging
import sys

import structlog


def log_as_json(level: str = "info") -> None:
    """Set the process's logs up.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
    """
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
