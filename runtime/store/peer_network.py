"""All that a node has between itself and the others, put together.

network = PeerNetwork(identity, handler, register, listen=("0.0.0.0", 7421), ...)
network.start()
network.peers.fetch_many(...)         blocks of others
network.announce(added, removed)      after this node's holdings changed
network.live()                        weights of those that live
network.stop()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.store.deadline import Deadline
from runtime.store.membership import (
    DEFAULT_INTERVAL_S,
    DEFAULT_MOST_MISSED,
    Member,
    Membership,
    Register,
)
from runtime.store.membership_view import OnJoined, OnLeft
from runtime.store.peer_announcer import Announcer
from runtime.store.peer_answers import ReadableMemory
from runtime.store.peer_client import Peers
from runtime.store.peer_handler import PeerHandler
from runtime.store.peer_identity import Incarnations, NodeIdentity
from runtime.store.peer_messages import Announcement, Removal
from runtime.store.peer_server import PeerServer, ServerLimits
from runtime.store.peer_sync import DirectorySync


class PeerNetwork:
    """Server, peers, announcements and membership of one node.

    Args:
        identity: Who this node is.
        handler: The node itself.
        register: Says who belongs to the cluster.
        listen: Host and port to listen on; port 0 picks a free one.
        advertise: Host that the others find this node at; the one listened on unless told.
        weight: Share of the keys it owns, relative to the others.
        joined: Told (node, incarnation) of each node that comes to life, one after another.
        left: Told of each node that dies, before it is told to have joined anew.
        interval_s: Between two heartbeats.
        most_missed: A node is dead when this many in a row are missed.
        memory: Memory that others may read one-sided, if any.
        limits: How much the server lets happen at once.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        handler: PeerHandler,
        register: Register,
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        advertise: str | None = None,
        weight: float = 1.0,
        joined: OnJoined = lambda node, incarnation: None,
        left: OnLeft = lambda node: None,
        interval_s: float = DEFAULT_INTERVAL_S,
        most_missed: int = DEFAULT_MOST_MISSED,
        memory: ReadableMemory | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self._identity = identity
        self._register = register
        self._host = advertise or listen[0]
        self._weight = weight
        self._on_joined = joined
        self._on_left = left
        self._pace = (interval_s, most_missed)
        incarnations = Incarnations()
        self.peers = Peers(identity, incarnations=incarnations)
        self._announcer = Announcer(self.peers.send_announcement, self.peers.counters)
        self._sync = DirectorySync(handler, self.peers.page, self.peers.counters)
        self.server = PeerServer(
            listen[0],
            listen[1],
            handler,
            identity,
            incarnations=incarnations,
            receiver=self._sync,
            memory=memory,
            last_announced=lambda: self._announcer.last,
            limits=limits,
        )
        self._membership: Membership | None = None
        incarnations.when_newer(self._seen)

    def start(self) -> None:
        """Listens, enters this node and starts its heartbeats.

        Raises:
            StoreSetupError: If the address cannot be listened on.
        """
        self.server.start()
        self._sync.start()
        me = Member(self._identity.name, self._host, self.server.port, self._weight)
        self._membership = Membership(
            me,
            self._identity,
            self._register,
            self,
            joined=self._joined,
            left=self._left,
            interval_s=self._pace[0],
            most_missed=self._pace[1],
        )
        self._membership.start()

    def stop(self, deadline: Deadline | None = None) -> bool:
        """Leaves the cluster and ends all threads, within 10 s unless told.

        Returns:
            Whether all threads ended in time.
        """
        deadline = deadline or Deadline.after(10)
        # Connections first: whoever waits on one is woken.
        self.peers.close()
        have_ended = [self._membership.stop(deadline)] if self._membership is not None else []
        have_ended += [
            self._announcer.close(deadline),
            self._sync.close(deadline),
            self.server.stop(deadline),
        ]
        return all(have_ended)

    def live(self) -> Mapping[str, float]:
        """Weight by name of all nodes that live, this one among them."""
        if self._membership is None:
            return {self._identity.name: self._weight}
        return self._membership.live()

    def announce(self, added: Sequence[Announcement] = (), removed: Sequence[Removal] = ()) -> None:
        """Tells the others, best effort; the holdings given out as pages have changed before."""
        self._announcer.announce(added, removed)

    def is_in_step(self, node: str) -> bool:
        """Whether all that a node announced is known here."""
        return self._sync.is_in_step(node)

    def counters(self) -> Mapping[str, int]:
        """Counts of both directions, ``peer_`` asked here, ``served_`` asked by others."""
        counts = {f"peer_{name}": n for name, n in self.peers.counters.snapshot().items()}
        counts |= {f"served_{name}": n for name, n in self.server.counters.snapshot().items()}
        return counts

    # What membership needs of the connections:
    def add(self, node: str, host: str, port: int) -> None:
        """Sets or changes an address."""
        self.peers.add(node, host, port)

    def drop(self, node: str) -> None:
        """Forgets an address."""
        self.peers.drop(node)

    def look_up(self, node: str) -> None:
        """Looks a host name up again."""
        self.peers.connections.look_up(node)

    def ping(self, node: str, deadline: Deadline) -> int:
        """Incarnation of a node that answers.

        Raises:
            StoreError: If it does not.
        """
        return self.peers.ping(node, deadline, self._announcer.last)

    def _seen(self, node: str, incarnation: int) -> None:
        # A restart noticed on any connection; a first start is left to the heartbeat.
        if self._membership is not None and self._membership.incarnation(node) not in (
            0,
            incarnation,
        ):
            self._membership.beat_now(node)

    def _joined(self, node: str, incarnation: int) -> None:
        self._announcer.add_node(node)
        self._sync.joined(node, incarnation)
        self._on_joined(node, incarnation)

    def _left(self, node: str) -> None:
        self._announcer.drop_node(node)
        self._sync.left(node)
        self._on_left(node)
