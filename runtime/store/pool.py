"""A node's place in a pool: what ties the node to the network of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.membership import Register, StaticRegister, parse_members
from runtime.store.node import StoreNode
from runtime.store.node_load import FetchMany
from runtime.store.node_peers import NodePeers
from runtime.store.one_sided import OneSided
from runtime.store.peer_identity import NodeIdentity
from runtime.store.peer_network import PeerNetwork
from runtime.store.pool_config import PoolConfig

_log = structlog.get_logger("store")


class Pool:
    """The pool as one node lives in it.

    Attributes:
        network: Server, connections, announcements and membership.
    """

    def __init__(self, node: StoreNode, config: PoolConfig) -> None:
        """Set the network up; nothing is heard before ``start``.

        Args:
            node: Open, configured as pooled.
            config: Of the pool.

        Raises:
            StoreSetupError: If the list of nodes or an address is wrong.
        """
        if not node.config.is_pooled:
            raise StoreSetupError("a node of a pool must be configured as pooled")
        self._node = node
        self._handler = NodePeers(node)
        register, port, weight = _register(config)
        with node.state.lock:
            node.state.weights[config.node] = weight
        identity = NodeIdentity(config.node, node.state.incarnation, config.cluster, config.secret)
        one_sided = OneSided() if config.transport == "nixl" else None
        self.network = PeerNetwork(
            identity,
            self._handler,
            register,
            listen=(config.host, port),
            advertise=config.advertise,
            weight=weight,
            joined=self._joined,
            left=self._left,
            interval_s=config.heartbeat_s,
            most_missed=config.most_missed,
            memory=one_sided,
        )
        fetch: FetchMany = self.network.peers.fetch_many
        if one_sided is not None:
            one_sided.start(identity, self.network.peers, node.arena.data)
            fetch = one_sided.fetch_many
        self._one_sided = one_sided
        node.join(fetch, self._send, self.network.announce)
        node.pool_counters = self.network.counters

    def start(self) -> None:
        """Listen, and look for the others.

        Raises:
            StoreSetupError: If the address cannot be listened on.
        """
        self.network.start()

    @property
    def port(self) -> int:
        """Where this node listens for the others."""
        return self.network.server.port

    def live(self) -> Mapping[str, float]:
        """Weights of the nodes that live, this one among them."""
        return self.network.live()

    def stop(self, deadline: Deadline) -> bool:
        """Leave the pool; whether all threads ended in time."""
        have_ended = self.network.stop(deadline)
        if self._one_sided is not None:
            self._one_sided.stop()
        return have_ended

    def _send(
        self, owner: str, infos: Sequence[BlockInfo], views: Sequence[memoryview], end: Deadline
    ) -> int:
        return self.network.peers.put(owner, infos, views, True, end)

    def _joined(self, node: str, incarnation: int) -> None:
        _log.info("node joined", node=node)
        self._handler.joined(node, incarnation, self.network.live().get(node, 1.0))

    def _left(self, node: str) -> None:
        _log.warning("node lost", node=node)
        self._handler.left(node)


def _register(config: PoolConfig) -> tuple[Register, int, float]:
    """The register, and this node's port and weight."""
    if config.etcd is not None:
        from runtime.store.membership_etcd import EtcdPlace, EtcdRegister

        urls = tuple(
            url if "://" in url else f"http://{url}" for url in config.etcd.split(",") if url
        )
        return EtcdRegister(EtcdPlace(urls), config.cluster), config.port, config.weight
    members = parse_members(config.peers or "")
    me = next((member for member in members if member.name == config.node), None)
    if me is None:
        raise StoreSetupError(
            f"--peers: this node, {config.node!r}, is not among "
            f"{', '.join(member.name for member in members) or 'them'}: set --node"
        )
    return StaticRegister(members), config.port or me.port, me.weight
