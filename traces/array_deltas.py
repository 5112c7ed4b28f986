"""Large arrays in a decision log: a hash of the whole, and the entries that have changed.

The entries refer to the array of the same name that was written before; the first one to zeros.
An entry of a log is then as large as what has changed, and whoever reads it knows that all calls
before it were read as they were written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KINDS = {"int64": np.int64, "float64": np.float64, "bool": np.bool_}
_KEYS = {"dtype", "size", "sha256", "changed", "values"}


class ArrayDeltas:
    """Remembers the last array of each name; the writer has one, and so has the reader."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[NDArray[Any], str]] = {}

    def encode(self, name: str, array: NDArray[Any]) -> dict[str, Any]:
        """A one-dimensional array as dtype, size, hash, and changed entries.

        ``changed`` is null where more than half of the entries are new: ``values`` then has all.

        Raises:
            ValueError: If the array has more dimensions or is not of int64, float64 or bool.
        """
        if array.ndim != 1 or array.dtype.name not in _KINDS:
            raise ValueError(
                f"{name} must be one-dimensional of {', '.join(_KINDS)}, "
                f"found {array.dtype} {list(array.shape)}"
            )
        last, digest = self._last_of(name, array.dtype.name, len(array))
        changed = np.flatnonzero(array.view(_bits(array)) != last.view(_bits(array)))
        if len(changed):
            last = array.copy()
            digest = _digest(last)
        self._last[name] = (last, digest)
        is_dense = 2 * len(changed) > len(array)
        return {
            "dtype": array.dtype.name,
            "size": len(array),
            "sha256": digest,
            "changed": None if is_dense else changed.tolist(),
            "values": (array if is_dense else array[changed]).tolist(),
        }

    def decode(self, name: str, entry: Any) -> NDArray[Any]:
        """The array an entry stands for.

        Raises:
            ValueError: If the entry is damaged, or an entry before it was.
        """
        if not isinstance(entry, Mapping) or set(entry) != _KEYS:
            raise ValueError(f"{name} must be an array entry of {', '.join(sorted(_KEYS))}")
        kind, size, changed = entry["dtype"], entry["size"], entry["changed"]
        if kind not in tuple(_KINDS) or type(size) is not int or not 0 <= size < 2**31:
            raise ValueError(
                f"{name}: dtype or size is damaged, found {kind!r:.40} and {size!r:.40}"
            )
        values = _values(name, kind, entry["values"])
        if changed is None:
            array = values
        else:
            where = _values(name, "int64", changed)
            if len(where) != len(values) or ((where < 0) | (where >= size)).any():
                raise ValueError(f"{name}: changed names no entries of an array of {size:,}")
            array = self._last_of(name, kind, size)[0].copy()
            array[where] = values
        if len(array) != size or _digest(array) != entry["sha256"]:
            raise ValueError(f"{name}: its hash says that it or one before it was changed")
        self._last[name] = (array, entry["sha256"])
        return array

    def _last_of(self, name: str, kind: str, size: int) -> tuple[NDArray[Any], str]:
        if name in self._last:
            last, digest = self._last[name]
            if last.dtype.name == kind and len(last) == size:
                return last, digest
        zeros: NDArray[Any] = np.zeros(size, dtype=_KINDS[kind])
        return zeros, _digest(zeros)


def _values(name: str, kind: str, values: Any) -> NDArray[Any]:
    allowed = {"int64": (int,), "float64": (float, int), "bool": (bool,)}[kind]
    if not isinstance(values, list) or not all(type(value) in allowed for value in values):
        raise ValueError(f"{name} must be a list of {kind}")
    return np.asarray(values, dtype=_KINDS[kind])


def _bits(array: NDArray[Any]) -> Any:
    """Compare floats by their bits: a zero that changes its sign has changed."""
    return np.int64 if array.dtype == np.float64 else array.dtype


def _digest(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
