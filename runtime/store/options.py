"""Options of the store's commands that are checked in one place."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from runtime.store.errors import StoreSetupError
from runtime.store.sizes import size_bytes

EvictionOption = Annotated[
    str, typer.Option("--eviction", help="Policy that ranks blocks: tree_hd, gdsf, lru, ...")
]
ReplicasOption = Annotated[
    str, typer.Option("--replicas", help="Copies of others' blocks: unified, none, soft, static.")
]
OwnerOption = Annotated[
    str, typer.Option("--owner", help="Who answers for a region: rendezvous, writer, anchor.")
]
FlushOption = Annotated[
    str, typer.Option("--flush", help="When blocks go to SSD: on_commit, on_reuse, never.")
]


def quotas(file: Path | None) -> dict[bytes, int]:
    """Bytes of memory by tenant tag, from a TOML file with a table of salt and quota per tenant.

    Raises:
        StoreSetupError: If the file cannot be read, or a table is not of that form.
    """
    from policies.prefix.keys import tenant_tag

    if file is None:
        return {}
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise StoreSetupError(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StoreSetupError(f"{file}: {error}") from error
    if set(tables) != {"tenant"} or not isinstance(tables["tenant"], list):
        raise StoreSetupError(f"{file}: must hold [[tenant]] tables only")
    found: dict[bytes, int] = {}
    for number, table in enumerate(tables["tenant"], 1):
        where = f"{file}: [[tenant]] {number}"
        if not isinstance(table, dict) or set(table) != {"salt", "quota"}:
            raise StoreSetupError(f"{where}: must have salt and quota and nothing else")
        if not isinstance(table["salt"], str) or not table["salt"]:
            raise StoreSetupError(f"{where}: salt: must be a text that is not empty")
        if not isinstance(table["quota"], str | int) or isinstance(table["quota"], bool):
            raise StoreSetupError(f"{where}: quota: must be a size such as 8GiB")
        tag = tenant_tag(table["salt"])
        if tag in found:
            raise StoreSetupError(f"{where}: salt: is that of an earlier tenant")
        found[tag] = size_bytes(table["quota"], f"{where}: quota")
    return found
