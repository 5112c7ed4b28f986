"""From what the operator says to the engine's prefix cache: none, a folder, or a served store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from policies.prefix.keys import Namespace
from runtime.engine.prefix_blocks import PrefixBlocks, PrefixLimits
from runtime.model.kv_cache import KvCache
from runtime.store.errors import StoreSetupError, StoreUnavailableError
from runtime.store.prefix_store import PrefixStore
from runtime.store.store import connect, open_store

NONE: Final = "none"
SOCKET_SUFFIX: Final = ".sock"
SERVED_SOCKET: Final = "store.sock"  # of ``runtime store serve`` in its folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStoreSettings:
    """Where prefixes are kept.

    Attributes:
        place: ``none``; a folder: a store in this process; a socket (a path that is one or ends
            with ``.sock``): the store that ``runtime store serve`` serves there.
        dram: Memory for blocks, of a store in this process.
        ssd: Room on the folder's disk, of a store in this process; ``0``: none.
        limits: Of time and pages.
    """

    place: str = NONE
    dram: str | int = "4GiB"
    ssd: str | int = 0
    limits: PrefixLimits = field(default_factory=PrefixLimits)


def open_prefix_blocks(
    settings: PrefixStoreSettings,
    cache: KvCache,
    namespace: Callable[[], Namespace],
    *,
    on_done: Callable[[], None] | None = None,
) -> PrefixBlocks | None:
    """The engine's prefix cache, or None where none is wanted.

    Args:
        settings: Of the operator.
        cache: Of the engine; its blocks' size is that of a store in this process.
        namespace: Gives the namespace of its blocks; asked only if there is a store.
        on_done: See ``PrefixBlocks``.

    Raises:
        StoreSetupError: If the store cannot be used; the text says what to do.
    """
    if settings.place == NONE:
        return None
    if not settings.place:
        raise StoreSetupError("prefix store: must be none, a folder or a socket, found nothing")
    path = Path(settings.place)
    block_bytes = cache.layout.block_pages * cache.layout.page_bytes
    store = _served(path, block_bytes) if _is_socket(path) else _own(path, settings, block_bytes)
    try:
        return PrefixBlocks(store, cache, namespace(), limits=settings.limits, on_done=on_done)
    except BaseException:
        store.close()
        raise


def _served(path: Path, block_bytes: int) -> PrefixStore:
    try:
        store = connect(path)
    except StoreUnavailableError as error:
        raise StoreSetupError(
            f"prefix store: {error}; start it: {_serve_command(path, block_bytes)}"
        ) from None
    most = store.block_bytes
    if block_bytes > most:
        store.close()
        raise StoreSetupError(
            f"prefix store: {path}: takes blocks of at most {most:,} bytes and the model's have "
            f"{block_bytes:,}; serve it so: {_serve_command(path, block_bytes)}"
        )
    return store


def _own(path: Path, settings: PrefixStoreSettings, block_bytes: int) -> PrefixStore:
    try:
        return open_store(path, dram=settings.dram, ssd=settings.ssd, block_bytes=block_bytes)
    except StoreSetupError as error:
        socket = path / SERVED_SOCKET
        hint = (
            f"; to use the store that is served there, name {socket}" if socket.is_socket() else ""
        )
        raise StoreSetupError(f"prefix store: {error}{hint}") from None


def _is_socket(path: Path) -> bool:
    return path.is_socket() or (path.suffix == SOCKET_SUFFIX and not path.is_dir())


def _serve_command(path: Path, block_bytes: int) -> str:
    command = f"runtime store serve {path.parent} --block-bytes {block_bytes}"
    return command if path.name == SERVED_SOCKET else f"{command} --socket {path}"
