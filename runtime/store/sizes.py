"""Sizes as people write them: ``8GiB``, ``512 MB``, ``1048576``."""

from __future__ import annotations

import re

from runtime.store.errors import StoreSetupError

MOST_BYTES = 1 << 60
_UNITS = {
    "": 1,
    "b": 1,
    **{prefix + "b": 1000 ** (i + 1) for i, prefix in enumerate("kmgt")},
    **{prefix + "ib": 1024 ** (i + 1) for i, prefix in enumerate("kmgt")},
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size_bytes(text: str | int, name: str = "size") -> int:
    """Bytes of a size.

    Args:
        text: A number of bytes, or a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB.
        name: Of the setting, for the message.

    Raises:
        StoreSetupError: If it is not a size, or one beyond an exbibyte.
    """
    if isinstance(text, int):
        if text < 0:
            raise StoreSetupError(f"{name}: must be >= 0, found {text}")
        return _bounded(text, name)
    match = _FORM.fullmatch(text)
    if match is None or match.group(2).lower() not in _UNITS:
        raise StoreSetupError(f"{name}: must be a size such as 8GiB or 512MB, found {text!r}")
    unit = _UNITS[match.group(2).lower()]
    if "." not in match.group(1):
        # int() refuses texts of thousands of digits
        digits = match.group(1).lstrip("0")[:40] or "0"
        return _bounded(int(digits) * unit, name)
    number = float(match.group(1))
    return _bounded(int(number * unit) if number < MOST_BYTES else MOST_BYTES + 1, name)


def _bounded(size: int, name: str) -> int:
    if size > MOST_BYTES:
        raise StoreSetupError(f"{name}: must be at most 1,048,576 TiB (1 EiB)")
    return size
