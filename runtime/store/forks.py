"""What a forked child must let go of: it inherits sockets, locks and memory that are its parent's.

A child that used them would read answers meant for its parent, and one that closed them properly
would end what the parent still uses. Held open, they would also hide the parent's death from
others: a connection or a lock ends only when its last descriptor does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Owner = TypeVar("Owner")
_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_locks: dict[int, None] = {}


def on_fork(owner: Owner, forget: Callable[[Owner], None]) -> None:
    """In every child of this process call ``forget(owner)``, if the owner still lives.

    Args:
        owner: Hashable by identity.
        forget: Must not take a lock: whoever held it does not exist in the child.
    """
    _owners[owner] = forget


def keep_lock(file: int) -> int:
    """The descriptor of a file that this process has locked with ``flock``: no child keeps it."""
    _locks[file] = None
    return file


def release_lock(file: int) -> None:
    """Give up a lock and close its file; in a forked child do nothing, for it has neither.

    Closing alone would not do while a child lives that was forked in an unusual way.
    """
    if file not in _locks:
        return
    del _locks[file]
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _forget_all() -> None:
    for file in _locks:
        with contextlib.suppress(OSError):
            os.close(file)  # of this process alone: the parent's lock holds
    _locks.clear()
    for owner, forget in list(_owners.items()):
        with contextlib.suppress(Exception):  # one must not keep the others from it
            forget(owner)


os.register_at_fork(after_in_child=_forget_all)
