"""Errors that a reader of demand can raise."""

from __future__ import annotations


class TraceError(ValueError):
    """A trace cannot be used as it is.

    The message is for the person who gave the file: it names the file, the line or record, the
    column, what was found and what is allowed, in one line.
    """
