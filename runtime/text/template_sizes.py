"""How long a text would be, told before it is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Widths of six digits, and widths that are given as arguments.
_LARGE_PERCENT = re.compile(r"%(\([^)]*\))?[-#0 +]*[0-9]*\.?(\*|[0-9]{6})")
_LARGE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\{|[0-9]{6})")


def text_size(value: Any, limit: int) -> int:
    """Characters of ``str(value)``, about; counting ends above ``limit``.

    A list that holds itself many times over (``[a, a]`` of ``[b, b]`` of ...) is small in memory
    and has a text without end.
    """
    size = 0
    waiting = [value]
    while waiting and size <= limit:
        item = waiting.pop()
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, Mapping):
            size += 2
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            size += 2
            waiting.extend(item)
        else:
            size += 2
    return size


def replaced_size(text: str, old: str, new: str) -> int:
    """Most characters of ``text.replace(old, new)``."""
    return len(text) + text.count(old) * len(new)


def percent_size(form: str, values: Any, limit: int) -> int:
    """Most characters of ``form % values``, widths of less than six digits aside."""
    if not isinstance(values, Mapping):
        return len(form) + text_size(values, limit)
    return len(form) + form.count("%") * _largest(values.values(), limit)


def braces_size(form: str, values: Iterable[Any], limit: int) -> int:
    """Most characters of ``form.format(...)``, widths of less than six digits aside."""
    return len(form) + form.count("{") * _largest(values, limit)


def has_large_width(form: str, *, braces: bool) -> bool:
    """Whether a format asks for a width of six digits and more, or takes it from an argument."""
    return (_LARGE_BRACES if braces else _LARGE_PERCENT).search(form) is not None


def _largest(values: Iterable[Any], limit: int) -> int:
    return max((text_size(value, limit) for value in values), default=0)
