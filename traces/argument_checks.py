"""Checks of the numbers that a generator is given: field, rule and value in one line."""

from __future__ import annotations

import math


def require_positive(name: str, value: float) -> float:
    """``value`` as a float; ValueError unless it is finite and > 0."""
    if not (_is_number(value) and math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name} must be finite and > 0, found {value!r}")
    return float(value)


def require_not_negative(name: str, value: float) -> float:
    """``value`` as a float; ValueError unless it is finite and >= 0."""
    if not (_is_number(value) and math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{name} must be finite and >= 0, found {value!r}")
    return float(value)


def require_count(name: str, value: int, *, minimum: int = 1) -> int:
    """``value`` as an int; ValueError unless it is a whole number of at least ``minimum``."""
    if not _is_number(value) or int(value) != value or value < minimum:
        raise ValueError(f"{name} must be a whole number >= {minimum}, found {value!r}")
    return int(value)


def require_between(name: str, value: float, low: float, high: float) -> float:
    """``value`` as a float; ValueError unless low <= value <= high."""
    if not (_is_number(value) and low <= value <= high):
        raise ValueError(f"{name} must be within [{low:g}, {high:g}], found {value!r}")
    return float(value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return not math.isnan(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
