"""Downloads public traces from their own repositories into the user's cache.

A file arrives under a name that ends in ``.partial`` and is renamed once its checksum is right, so
whatever carries the final name is whole. An interrupted download goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from twin.fetch_catalog import CatalogEntry, FetchError

OnProgress = Callable[[int, int], None]
"""Called with bytes so far and bytes in all."""

_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A trace in the cache.

    Attributes:
        path: Where it lies, its checksum verified just now.
        was_cached: It was there already; nothing was downloaded.
        resumed_from_bytes: How much an earlier, interrupted download had left.
        replaced_damaged: A file was there, but its checksum was wrong.
    """

    path: Path
    was_cached: bool = False
    resumed_from_bytes: int = 0
    replaced_damaged: bool = False


class _RangeRefusedError(Exception):
    """The server cannot go on from where the partial file ends."""


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/serving-twin/traces``, else under ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    return base / "serving-twin" / "traces"


def fetch(
    entry: CatalogEntry,
    *,
    cache: Path | None = None,
    base_url: str | None = None,
    on_progress: OnProgress | None = None,
    timeout_s: float = 30.0,
) -> Fetched:
    """The trace's file, from the cache or from its repository.

    Args:
        entry: What to fetch.
        cache: Folder to keep it in; None: ``cache_dir()``.
        base_url: Another server with the same paths; None: the entry's own address.
        on_progress: Told after every block.
        timeout_s: Longest silence of the server.

    Raises:
        FetchError: If the file cannot be had or is not the one of the catalog. What has arrived
            of an interrupted download stays for the next try.
    """
    target = (cache or cache_dir()) / entry.file_name
    partial = target.with_name(target.name + ".partial")
    url = entry.url_at(base_url)
    try:
        is_damaged = False
        if target.exists():
            if _sha256(target) == entry.sha256:
                return Fetched(path=target, was_cached=True)
            is_damaged = True
        target.parent.mkdir(parents=True, exist_ok=True)
        start = partial.stat().st_size if partial.exists() else 0
        resumed = _complete(entry, url, partial, target, start, on_progress, timeout_s)
        partial.replace(target)
    except OSError as error:
        raise FetchError(f"{target}: cannot be written ({error.strerror or error})") from error
    return Fetched(path=target, resumed_from_bytes=resumed, replaced_damaged=is_damaged)


def manual_way(entry: CatalogEntry, target: Path) -> str:
    """What to do without a network."""
    return (
        f"by hand: get {entry.url} on another machine, save it as {target}, and check that its "
        f"sha256 is {entry.sha256}"
    )


def _complete(
    entry: CatalogEntry,
    url: str,
    partial: Path,
    target: Path,
    start: int,
    on_progress: OnProgress | None,
    timeout_s: float,
) -> int:
    """Bring the partial file to its full length and right checksum; the bytes it began with.

    What an earlier try left is not trusted: if it turns out wrong, all is fetched anew, once.
    """
    for resume_from in (start, 0) if start else (0,):
        try:
            _download(entry, url, partial, target, resume_from, on_progress, timeout_s)
        except _RangeRefusedError:
            continue
        found = _sha256(partial)
        if found == entry.sha256:
            return resume_from
    partial.unlink()
    raise FetchError(
        f"{url}: not the file of the catalog: sha256 {found}, expected {entry.sha256}; "
        "it was thrown away"
    )


def _download(
    entry: CatalogEntry,
    url: str,
    partial: Path,
    target: Path,
    start: int,
    on_progress: OnProgress | None,
    timeout_s: float,
) -> None:
    """Append the rest of the file to the partial one; from the beginning where start is 0."""
    size = entry.size_bytes
    if start > size:
        raise _RangeRefusedError
    if start == size:
        return
    with _open(entry, url, target, start, timeout_s) as response:
        if start and response.status == http.client.OK:  # the server ignored the range
            start = 0
        elif start and not _continues_at(response.headers.get("Content-Range"), start):
            raise _RangeRefusedError
        if response.length is not None and start + response.length != size:
            raise FetchError(
                f"{url}: not the file of the catalog: {start + response.length:,} bytes, "
                f"expected {size:,}"
            )
        done = start
        with partial.open("ab" if start else "wb") as file:
            for block in _blocks(response):
                file.write(block)
                done += len(block)
                if done > size:
                    break
                if on_progress is not None:
                    on_progress(done, size)
            file.flush()
            os.fsync(file.fileno())
    if done > size:
        partial.unlink()
        raise FetchError(f"{url}: not the file of the catalog: longer than {size:,} bytes")
    if done < size:
        raise FetchError(
            f"{url}: the connection ended after {done:,} of {size:,} bytes; they are kept, "
            "run the same command again to go on"
        )


def _open(
    entry: CatalogEntry, url: str, target: Path, start: int, timeout_s: float
) -> http.client.HTTPResponse:
    request = urllib.request.Request(
        url, headers={"User-Agent": "serving-twin", "Accept-Encoding": "identity"}
    )
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                raise _RangeRefusedError from error
        raise FetchError(
            f"{url}: the server answered {error.code} {error.reason}; {manual_way(entry, target)}"
        ) from error
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FetchError(
            f"{url}: cannot be reached, perhaps this machine is offline ({_one_line(reason)}); "
            f"{manual_way(entry, target)}"
        ) from error
    return response


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body in blocks; a broken connection ends it like its end."""
    while True:
        try:
            block = response.read(_BLOCK_BYTES)
        except http.client.IncompleteRead as error:
            if error.partial:
                yield error.partial
            return
        except (OSError, http.client.HTTPException):
            return
        if not block:
            return
        yield block


def _continues_at(content_range: str | None, start: int) -> bool:
    return content_range is not None and content_range.strip().startswith(f"bytes {start}-")


def _one_line(reason: object) -> str:
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return str(text).splitlines()[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
