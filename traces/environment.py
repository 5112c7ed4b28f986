"""Which software made a run: package versions and the commit of the source tree."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

PACKAGES = ("serving-twin", "simpy", "numpy", "scipy", "numba", "pyarrow")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Name -> version of what took part in a run; packages that are absent are left out."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that the source tree stands at, read from its ``.git`` folder; None without."""
    git = Path(__file__).resolve().parent.parent / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        reference = head.removeprefix("ref: ")
        loose = git / reference
        if loose.exists():
            return loose.read_text().strip()
        for line in (git / "packed-refs").read_text().splitlines():
            if line.endswith(f" {reference}"):
                return line.split()[0]
    except OSError:
        return None
    return None
