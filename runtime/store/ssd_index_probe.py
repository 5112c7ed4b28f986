"""Walk an LMDB index in a process of its own: damaged pages may end whoever reads them.

Run as a script with the index folder as its argument. Exit status 0: every entry was read;
3: LMDB found damage; death by a signal: damage that LMDB did not notice.
"""

from __future__ import annotations

import sys

DAMAGED = 3


def walk(folder: str) -> int:
    """Exit status after reading every entry."""
    import lmdb

    try:
        with (
            lmdb.open(folder, readonly=True, lock=False, create=False) as environment,
            environment.begin() as transaction,
        ):
            counted = sum(1 for _ in transaction.cursor())
            return 0 if counted == transaction.stat()["entries"] else DAMAGED
    except (lmdb.Error, MemoryError):
        return DAMAGED


if __name__ == "__main__":
    sys.exit(walk(sys.argv[1]))
