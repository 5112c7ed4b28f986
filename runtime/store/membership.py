"""Who belongs to the cluster, and which of them live.

A register says who belongs to it and where: a fixed list, or etcd (membership_etcd.py). Whether a
node lives is decided here alone, by heartbeats between the nodes: a register that is away, empty
or late changes nothing for nodes that see each other. One thread per other node sends the
heartbeats, so that one that hangs does not delay the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError, StoreSetupError
from runtime.store.membership_view import MembershipView, OnJoined, OnLeft
from runtime.store.peer_faults import what_failed
from runtime.store.peer_identity import NodeIdentity, check_node_name

_log = structlog.get_logger(__name__)
DEFAULT_INTERVAL_S: Final = 1.0
DEFAULT_MOST_MISSED: Final = 3


@dataclass(frozen=True, slots=True)
class Member:
    """A node and where to find it.

    Attributes:
        name: Unique in the cluster.
        host: Name or address.
        port: 1 to 65535.
        weight: Share of the keys it owns, relative to the others; > 0.
    """

    name: str
    host: str
    port: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Checks.

        Raises:
            StoreSetupError: If a field is out of its range.
        """
        check_node_name(self.name)
        if not self.host or " " in self.host or len(self.host) > 255:
            raise StoreSetupError(f"node {self.name!r}: host {self.host[:40]!r} is no host name")
        if not 0 < self.port < 65536:
            raise StoreSetupError(f"node {self.name!r}: port {self.port}, 1 to 65535 is allowed")
        if not 0 < self.weight <= 1e9:
            raise StoreSetupError(
                f"node {self.name!r}: weight {self.weight}, more than 0 and at most 1e9 is allowed"
            )


def parse_members(text: str) -> tuple[Member, ...]:
    """Reads ``name=host:port*weight,...``; the weight may be left out, IPv6 stands in brackets.

    Raises:
        StoreSetupError: Naming the entry that is wrong, or the name that comes twice.
    """
    members: dict[str, Member] = {}
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        name, equals, rest = entry.partition("=")
        place, star, weight = rest.partition("*")
        host, colon, port = place.rpartition(":")
        if not (equals and colon):
            raise StoreSetupError(f"member {entry!r}: name=host:port or name=host:port*weight")
        try:
            number, share = int(port), float(weight) if star else 1.0
        except ValueError:
            raise StoreSetupError(f"member {entry!r}: port and weight have to be numbers") from None
        member = Member(name.strip(), host.strip().removeprefix("[").removesuffix("]"), number,
                        share)  # fmt: skip
        if member.name in members:
            raise StoreSetupError(f"member {member.name!r} comes twice")
        members[member.name] = member
    return tuple(members.values())


class Register(Protocol):
    """Says who belongs to the cluster."""

    def start(self, me: Member) -> None:
        """Enters this node; does not wait."""

    def members(self) -> Mapping[str, Member] | None:
        """All members known by name; None while nothing is known."""

    def stop(self) -> None:
        """Strikes this node out and ends."""


class StaticRegister:
    """A fixed list.

    Args:
        members: All nodes; this one may be among them.
    """

    def __init__(self, members: tuple[Member, ...]) -> None:
        self._members = {member.name: member for member in members}

    def start(self, me: Member) -> None:
        """Nothing to enter."""

    def members(self) -> Mapping[str, Member]:
        """The list."""
        return self._members

    def stop(self) -> None:
        """Nothing to strike out."""


class Contacts(Protocol):
    """What membership needs of the connections to other nodes."""

    def add(self, node: str, host: str, port: int) -> None:
        """Sets or changes an address."""

    def drop(self, node: str) -> None:
        """Forgets an address."""

    def look_up(self, node: str) -> None:
        """Looks a host name up again."""

    def ping(self, node: str, deadline: Deadline) -> int:
        """Incarnation of a node that answers, else StoreError."""


class _Beat:
    def __init__(self) -> None:
        self.thread = threading.Thread()
        self.wake = threading.Event()
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.wake.set()


class Membership:
    """Follows a register and sends heartbeats.

    Args:
        me: This node and where the others find it.
        identity: Who this node is.
        register: Says who belongs to the cluster.
        contacts: Reaches the others.
        joined: Told (node, incarnation) of each node that comes to life, one after another.
        left: Told of each node that dies.
        interval_s: Between two heartbeats; each has that long to be answered.
        most_missed: A node is dead when this many in a row are missed.
    """

    def __init__(
        self,
        me: Member,
        identity: NodeIdentity,
        register: Register,
        contacts: Contacts,
        *,
        joined: OnJoined = lambda node, incarnation: None,
        left: OnLeft = lambda node: None,
        interval_s: float = DEFAULT_INTERVAL_S,
        most_missed: int = DEFAULT_MOST_MISSED,
    ) -> None:
        self._me = me
        self._register = register
        self._contacts = contacts
        self._interval_s = interval_s
        self._view = MembershipView(
            me.name, me.weight, identity.incarnation, most_missed=most_missed, joined=joined,
            left=left,
        )  # fmt: skip
        self._stop = threading.Event()
        self._known: dict[str, Member] = {}
        self._beats: dict[str, _Beat] = {}
        self._follower = threading.Thread(target=self._follow, name="members", daemon=True)

    def start(self) -> None:
        """Enters this node and starts."""
        self._register.start(self._me)
        self._follower.start()

    def stop(self, deadline: Deadline | None = None) -> bool:
        """Strikes this node out and waits for the threads, 10 s unless told.

        Returns:
            Whether all threads ended in time.
        """
        deadline = deadline or Deadline.after(10)
        self._stop.set()
        for beat in list(self._beats.values()):
            beat.end()
        if self._follower.ident is not None:
            self._follower.join(deadline.left_s())
        for beat in self._beats.values():  # one may have begun meanwhile
            beat.end()
        self._register.stop()
        threads = [beat.thread for beat in self._beats.values()] + [self._follower]
        for thread in threads:
            if thread.ident is not None:
                thread.join(deadline.left_s())
        return not any(thread.is_alive() for thread in threads)

    def live(self) -> Mapping[str, float]:
        """Weight by name of all nodes that live, this one among them."""
        return self._view.live()

    def incarnation(self, node: str) -> int:
        """Of a node that lives; 0 otherwise."""
        return self._view.incarnation(node)

    def beat_now(self, node: str) -> None:
        """Does not wait with the next heartbeat to a node, of which there is news; never blocks."""
        beat = self._beats.get(node)
        if beat is not None:
            beat.wake.set()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self._compare()
            except Exception as error:
                _log.error("membership", **what_failed(error))
            self._stop.wait(self._interval_s)

    def _compare(self) -> None:
        members = self._register.members()
        if members is None:
            return
        for name, member in members.items():
            if name != self._me.name and self._known.get(name) != member:
                self._known[name] = member
                self._contacts.add(name, member.host, member.port)
                self._view.set_weight(name, member.weight)
                self._beat(name)
        for name in [name for name in self._known if name not in members]:
            # One that answers still belongs to us: the register may have lost it.
            if self._view.incarnation(name) == 0:
                del self._known[name]
                self._beats.pop(name).end()
                self._view.forget(name)
                self._contacts.drop(name)

    def _beat(self, name: str) -> None:
        if name not in self._beats and not self._stop.is_set():
            beat = self._beats[name] = _Beat()
            beat.thread = threading.Thread(
                target=self._beat_on, args=(name, beat), name="heartbeat", daemon=True
            )
            beat.thread.start()

    def _beat_on(self, name: str, beat: _Beat) -> None:
        due_s = time.monotonic()
        while not beat.is_over:
            beat.wake.clear()
            try:
                incarnation = self._contacts.ping(name, Deadline.after(self._interval_s))
                self._view.heard(name, incarnation)
            except StoreError:
                self._view.missed(name)
                self._contacts.look_up(name)
            except Exception as error:
                _log.error("heartbeat", node=name, **what_failed(error))
            due_s = max(due_s + self._interval_s, time.monotonic())
            if not beat.is_over:
                beat.wake.wait(due_s - time.monotonic())
