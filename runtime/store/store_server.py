"""``runtime store serve``: one node with its socket, its place in the pool and its metrics."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import structlog

from runtime.store.config import StoreConfig
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.metrics import serve_metrics
from runtime.store.node import StoreNode
from runtime.store.node_stats import node_stats
from runtime.store.pool_config import PoolConfig
from runtime.store.unix_server import UnixServer
from traces.whole_file import write_whole

STOP_S = 10.0
_log = structlog.get_logger("store")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What one server does.

    Attributes:
        store: The node.
        socket: Where engines of this node connect.
        pool: The other nodes; None: there are none.
        metrics_host, metrics_port: Where Prometheus asks; port 0 picks a free one, None: nowhere.
        decision_log: Where to write the policy's calls at the end, for ``twin replay``.
    """

    store: StoreConfig
    socket: Path
    pool: PoolConfig | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    decision_log: Path | None = None


class StoreServer:
    """Everything that serves one node."""

    def __init__(self, config: ServerConfig) -> None:
        """Open the node and serve from now on.

        Raises:
            StoreSetupError: If the folder, memory, SSD, decision log or an address cannot be used.
        """
        if config.decision_log is not None:
            _check_writable(config.decision_log)
        self._config = config
        self._stack = contextlib.ExitStack()
        self.metrics_port: int | None = None
        try:
            self.node = StoreNode(config.store)
            self._stack.callback(self._close_node)
            if config.pool is not None:
                from runtime.store.pool import Pool

                pool = Pool(self.node, config.pool)
                self._stack.callback(lambda: pool.stop(Deadline.after(STOP_S)))
                pool.start()
            server = UnixServer(self.node, config.socket)
            self._stack.callback(lambda: server.stop(Deadline.after(STOP_S)))
            server.start()
            if config.metrics_port is not None:
                self._serve_metrics(config.metrics_host, config.metrics_port)
        except BaseException:
            self._stack.close()
            raise
        _log.info(
            "serving",
            node=config.store.node,
            socket=str(config.socket),
            dram_bytes=config.store.dram_bytes,
            ssd_bytes=config.store.ssd_bytes,
            recovered_in_memory=self.node.state.counters["blocks_recovered_in_memory"],
            recovered_on_ssd=self.node.state.counters["blocks_recovered_on_ssd"],
        )

    def _serve_metrics(self, host: str, port: int) -> None:
        try:
            self.metrics_port, stop = serve_metrics(lambda: node_stats(self.node), host, port)
        except OSError as error:
            raise StoreSetupError(f"metrics: {host}:{port}: {error.strerror or error}") from error
        self._stack.callback(stop)

    def _close_node(self) -> None:
        try:
            self.node.close(Deadline.after(STOP_S))
        finally:  # what was recorded is most wanted when something goes wrong
            if self._config.decision_log is not None:
                self._write_decisions(self._config.decision_log)

    def _write_decisions(self, file: Path) -> None:
        try:
            write_whole(file, self.node.decisions.to_bytes())
        except OSError as error:
            raise StoreSetupError(f"--decision-log: {file}: {error.strerror}") from error

    def stop(self) -> None:
        """Let the clients go, write what waits for SSD, and close everything."""
        self._stack.close()
        _log.info("stopped", node=self._config.store.node)


def _check_writable(file: Path) -> None:
    """Fail at the start, not at the end, if the decision log could not be written there."""
    if file.is_dir():
        raise StoreSetupError(f"--decision-log: {file}: is a folder; name a file")
    try:
        with tempfile.TemporaryFile(dir=file.absolute().parent):
            pass
    except OSError as error:
        raise StoreSetupError(f"--decision-log: {file}: {error.strerror}") from error
