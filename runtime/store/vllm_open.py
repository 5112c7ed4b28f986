"""Opens the store an engine is told to use: a server's socket, or a folder of its own.

An engine has several processes and a folder has one user. The worker that gets the folder's lock
serves it on a socket in it; the scheduler and the other workers are its clients.
"""

from __future__ import annotations

from pathlib import Path

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError, StoreSetupError, StoreUnavailableError
from runtime.store.local_link import LocalLink
from runtime.store.node import StoreNode
from runtime.store.store import PrefixStore, connect, store_config
from runtime.store.unix_server import UnixServer
from runtime.store.vllm_settings import ConnectorSettings

ENGINE_SOCKET = "engine.sock"
STOP_S = 5.0


class _ServedStore(PrefixStore):
    """A store in this process that other processes of the engine use too."""

    def __init__(self, node: StoreNode, path: Path) -> None:
        super().__init__(LocalLink(node, is_owner=True))
        try:
            self._server = UnixServer(node, path)
        except StoreError:
            super().close()
            raise
        self._server.start()

    def close(self) -> None:
        """End the other processes' use, then close the store."""
        self._server.stop(Deadline.after(STOP_S))
        super().close()


def open_for_engine(settings: ConnectorSettings, block_bytes: int | None) -> PrefixStore:
    """The engine's store.

    Args:
        settings: Of the connector.
        block_bytes: Size of the engine's store blocks; None: do not serve a folder, only use it.

    Raises:
        StoreSetupError: If the folder, memory or disk cannot be used.
        StoreUnavailableError: If no server answers.
    """
    if settings.socket:
        return _fitting(connect(settings.socket), block_bytes)
    path = Path(settings.directory) / ENGINE_SOCKET
    try:
        return _fitting(connect(path), block_bytes)
    except StoreUnavailableError:
        if block_bytes is None:
            raise
    config = store_config(
        settings.directory,
        dram=settings.dram,
        ssd=settings.ssd or 0,
        block_bytes=block_bytes,
    )
    return _ServedStore(StoreNode(config), path)


def _fitting(store: PrefixStore, block_bytes: int | None) -> PrefixStore:
    """The store, if the engine's blocks fit it."""
    if block_bytes is not None and block_bytes > store.block_bytes:
        most = store.block_bytes
        store.close()
        raise StoreSetupError(
            f"the engine's blocks have {block_bytes:,} bytes and the store takes at most "
            f"{most:,}: start it with --block-bytes {block_bytes}, or lower block_tokens"
        )
    return store
