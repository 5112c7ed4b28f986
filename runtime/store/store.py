"""How a program comes to a store: one in this process, or the one that is served on this node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.store.config import DEFAULT_BLOCK_BYTES, StoreConfig
from runtime.store.errors import StoreSetupError
from runtime.store.local_link import LocalLink
from runtime.store.node import StoreNode
from runtime.store.prefix_store import DEADLINE_S, Buffer, PrefixStore, Put
from runtime.store.sizes import size_bytes
from runtime.store.socket_link import SocketLink

__all__ = [
    "DEADLINE_S",
    "Buffer",
    "PrefixStore",
    "Put",
    "connect",
    "open_store",
    "store_config",
]


def open_store(
    directory: str | Path,
    *,
    dram: str | int = "8GiB",
    ssd: str | int = 0,
    block_bytes: str | int = DEFAULT_BLOCK_BYTES,
    **settings: Any,
) -> PrefixStore:
    """A store in this process: a folder and two sizes, nothing else to start.

    Args:
        directory: Home of the store; made if absent. One process at a time uses it.
        dram: Shared memory for blocks.
        ssd: Room for blocks on the folder's disk; 0: none.
        block_bytes: Most bytes of a block.
        settings: Further fields of ``StoreConfig``.

    Raises:
        StoreSetupError: If a size is none, or the folder, memory or disk cannot be used.
    """
    config = store_config(directory, dram=dram, ssd=ssd, block_bytes=block_bytes, **settings)
    return PrefixStore(LocalLink(StoreNode(config), is_owner=True))


def connect(socket_path: str | Path) -> PrefixStore:
    """The store that ``runtime store serve`` serves on this node.

    Raises:
        StoreUnavailableError: If no server answers there.
    """
    return PrefixStore(SocketLink(socket_path))


def store_config(
    directory: str | Path,
    *,
    dram: str | int,
    ssd: str | int,
    block_bytes: str | int,
    **settings: Any,
) -> StoreConfig:
    """The configuration for sizes as people write them.

    Raises:
        StoreSetupError: If a size is none, or a setting is unknown or out of range.
    """
    try:
        return StoreConfig(
            folder=Path(directory),
            dram_bytes=size_bytes(dram, "dram"),
            ssd_bytes=size_bytes(ssd, "ssd"),
            block_bytes=size_bytes(block_bytes, "block_bytes"),
            **settings,
        )
    except TypeError as error:
        raise StoreSetupError(str(error).replace("StoreConfig.__init__()", "store")) from error
