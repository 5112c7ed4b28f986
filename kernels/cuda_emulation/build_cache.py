"""Where built kernels are kept: one folder per user, one file per content, never half written."""

from __future__ import annotations

import getpass
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path


def cache_directory() -> Path:
    """The user's folder of built kernels, made when missing, readable by nobody else.

    Libraries in it are loaded into this process, so a folder that somebody else owns or may
    write to is refused.

    Raises:
        PermissionError: The folder belongs to another user or others may write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"serving-twin-kernels-{getpass.getuser()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: kernel cache must be a folder that only its user writes")
    return folder


def content_key(parts: Iterable[bytes | str]) -> str:
    """Hex digest of the parts in order; no two different lists of parts share one."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def cached_file(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """The file of this key; built under a temporary name and renamed when it is not there yet.

    Two processes that build the same key at once both succeed; the later rename wins.

    Args:
        key: From `content_key`, over everything that the file depends on.
        suffix: Such as ".so".
        build: Writes the file at the path it is given; what it raises passes through.
    """
    folder = cache_directory()
    path = folder / f"{key}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as workplace:
            fresh = Path(workplace) / f"fresh{suffix}"
            build(fresh)
            fresh.replace(path)
    return path
