"""What an event of a weight page history must look like; the rules are judged elsewhere.

The events are those of policies/weight_page_history.py. Blocks, kernels and plans may be named by
any hashable value; planes, tables and pages are counted from 0, widths may be any integer (one
out of range breaks rule R6, it is not malformed). Keys that an event does not use are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral

from policies.weight_page_history import HistoryError


def check_event(event: object) -> None:
    """Refuse what is no event.

    Raises:
        HistoryError: Naming the key, what it must be and what was found.
    """
    if not isinstance(event, Mapping):
        raise HistoryError(f"an event must be a mapping, found {event!r}")
    kind = event.get("ev")
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise HistoryError(f"no such event {kind!r}")
    required = _REQUIRED[kind]
    if kind in _PART_EVENTS:
        named = tuple(key for key in ("plane", "table") if key in event)
        if len(named) > 1 or (not named and kind != "cancel"):
            raise HistoryError(f"{kind}: must name a plane or a table, found {len(named)} of them")
        required += named
    for key in required:
        if key not in event:
            raise HistoryError(f"{kind}: {key!r} is missing")
        _check(kind, key, event[key])
    for key in _OPTIONAL.get(kind, ()):
        if key in event and not (key in _MAY_BE_NONE and event[key] is None):
            _check(kind, key, event[key])


def _check(kind: str, key: str, value: object) -> None:
    fits, allowed = _FORM_BY_EVENT_KEY.get((kind, key)) or _FORM_BY_KEY[key]
    if not fits(value):
        raise HistoryError(f"{kind}: {key!r} must be {allowed}, found {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_name(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return value is not None


def _are_widths(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_integer, value.values()))


def _are_pages(value: object) -> bool:
    return isinstance(value, Sequence) and all(map(_is_count, value))


def _are_held_pages(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(held, Mapping)
        and ("plane" in held) != ("table" in held)
        and _is_count(held.get("plane", held.get("table")))
        and _are_pages(held.get("pages"))
        for held in value
    )


_Form = tuple[Callable[[object], bool], str]

_NAME: _Form = (_is_name, "a name (hashable)")
_INTEGER: _Form = (_is_integer, "an integer")
_COUNT: _Form = (_is_count, "an integer >= 0")
_WIDTHS: _Form = (_are_widths, "a mapping from blocks to integers")
_PAGES: _Form = (_are_pages, "a list of integers >= 0")

_FORM_BY_KEY: Mapping[str, _Form] = {
    "block": _NAME,
    "k": _NAME,
    "plan": _NAME,
    "q": _INTEGER,
    "qmin": _COUNT,
    "qmax": _COUNT,
    "plane": _COUNT,
    "table": _COUNT,
    "use": _WIDTHS,
    "want": _WIDTHS,
    "set": _WIDTHS,
    "pages": _PAGES,
    "tables": (lambda value: value in ("all", "active"), "'all' or 'active'"),
    "checksum": _INTEGER,
    "weights": _COUNT,
    "kv": _COUNT,
    "free": _COUNT,
    "arena": _COUNT,
}

_FORM_BY_EVENT_KEY: Mapping[tuple[str, str], _Form] = {
    ("arena", "pages"): _COUNT,
    ("init", "pages"): (_are_held_pages, "a list of a plane or a table with its pages each"),
}

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "init": ("block", "q", "qmin", "qmax"),
    "launch": ("k", "use"),
    "retire": ("k",),
    "plan": ("plan", "want"),
    "xfer": ("block",),
    "xfer_ok": ("block",),
    "xfer_fail": ("block",),
    "cancel": ("block",),
    "reraise": ("block",),
    "commit": ("plan", "set"),
    "free": ("block",),
    "close": ("plan",),
    "arena": ("pages",),
    "kv_alloc": ("pages",),
    "kv_free": ("pages",),
    "pages": ("weights", "kv", "free"),
}

_PART_EVENTS = frozenset({"xfer", "xfer_ok", "xfer_fail", "cancel", "reraise", "free"})

_MAY_BE_NONE = frozenset({"tables", "pages", "checksum"})

_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "init": ("tables", "pages"),
    "xfer": ("pages", "checksum"),
    "xfer_ok": ("checksum",),
    "xfer_fail": ("pages", "q", "set"),
    "cancel": ("pages", "q", "set"),
    "free": ("pages", "q", "set"),
    "retire": ("set",),
    "close": ("set",),
    "pages": ("arena",),
}
