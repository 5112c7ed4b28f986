"""The catalog of public traces: where each is, its size, its checksum and its licence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

_FIELDS = ("name", "title", "url", "sha256", "size_bytes", "licence", "attribution", "citation")
_VERSION = 1


class FetchError(ValueError):
    """A trace cannot be fetched; one line that says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One file of a public repository, at a fixed commit.

    Attributes:
        name: What the user types.
        title: What it is, in one line.
        url: Where it is.
        sha256: Of the file, 64 hexadecimal digits.
        size_bytes: Of the file.
        licence: SPDX name.
        attribution: Whom to name.
        citation: What to cite.
    """

    name: str
    title: str
    url: str
    sha256: str
    size_bytes: int
    licence: str
    attribution: str
    citation: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", self.name):
            raise FetchError(
                f"catalog name must be of a-z, 0-9, '.', '_', '-', found {self.name!r}"
            )
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise FetchError(f"{self.name}: sha256 must be 64 hex digits, found {self.sha256!r}")
        if self.size_bytes < 1:
            raise FetchError(f"{self.name}: size_bytes must be >= 1, found {self.size_bytes!r}")
        if urlsplit(self.url).scheme not in ("https", "http"):
            raise FetchError(f"{self.name}: url must be http or https, found {self.url!r}")

    @property
    def file_name(self) -> str:
        """Name in the cache: the entry's name and the endings of the origin's file."""
        return self.name + "".join(PurePosixPath(urlsplit(self.url).path).suffixes[-2:])

    def url_at(self, base_url: str | None) -> str:
        """The address; with a base, the same path on another server (a mirror)."""
        if base_url is None:
            return self.url
        return base_url.rstrip("/") + urlsplit(self.url).path


def load_catalog(path: Path | None = None) -> Mapping[str, CatalogEntry]:
    """Name -> entry, in the order of the file; None: the catalog of this package.

    Raises:
        FetchError: If the file cannot be read or breaks a rule.
    """
    where = "catalog" if path is None else str(path)
    try:
        if path is None:
            text = resources.files("twin").joinpath("fetch_catalog.json").read_text("utf-8")
        else:
            text = path.read_text("utf-8")
        document = json.loads(text)
    except OSError as error:
        raise FetchError(f"{where}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise FetchError(f"{where}: not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise FetchError(f"{where}: must be an object with version {_VERSION}")
    if not isinstance(document.get("traces"), list):
        raise FetchError(f"{where}: traces must be a list")
    entries = [_entry(where, n, row) for n, row in enumerate(document["traces"])]
    return {entry.name: entry for entry in entries}


def find_entry(catalog: Mapping[str, CatalogEntry], name: str) -> CatalogEntry:
    """The entry of that name.

    Raises:
        FetchError: With the names there are.
    """
    if name not in catalog:
        raise FetchError(f"no trace {name!r} in the catalog; there are {', '.join(catalog)}")
    return catalog[name]


def _entry(where: str, number: int, row: Any) -> CatalogEntry:
    if not isinstance(row, dict) or set(row) != set(_FIELDS):
        raise FetchError(f"{where}: trace {number} must have exactly {', '.join(_FIELDS)}")
    wrong = [f for f in _FIELDS if not isinstance(row[f], int if f == "size_bytes" else str)]
    if wrong:
        raise FetchError(f"{where}: trace {number}: {wrong[0]} has a wrong type")
    return CatalogEntry(**row)
