"""A register of nodes in etcd v3, over its HTTP gateway.

Each node keeps a key with a lease, ``<prefix><cluster>/<name>`` -> JSON of host, port and weight,
and reads the others' now and then. etcd is never on the path of a request, and its absence harms
nobody: the last view stays, and nodes that see each other go on. When it is back, with its data or
empty, every node enters itself again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.membership import Member
from runtime.store.peer_faults import Seldom

_log = structlog.get_logger(__name__)
REQUEST_S: Final = 2.0
MOST_MEMBERS: Final = 4096
_MOST_VALUE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """Where etcd is and how to reach it.

    Attributes:
        urls: Such as ``http://10.0.0.1:2379``, tried in turn.
        prefix: Of all keys of the store.
        ca_cert: File of the authority that signed the servers' certificates; https only.
        cert: File of this node's certificate, if etcd asks for one.
        key: File of its key.
    """

    urls: tuple[str, ...]
    prefix: str = "/ptstore/"
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        """Checks.

        Raises:
            StoreSetupError: If a URL is none.
        """
        if not self.urls:
            raise StoreSetupError("etcd: no URL, such as http://10.0.0.1:2379")
        for url in self.urls:
            try:
                parts = urlsplit(url)
                is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port
            except ValueError:
                is_right = None
            if not is_right:
                raise StoreSetupError(f"etcd: {url!r}, http://HOST:PORT or https:// is allowed")


class EtcdRegister:
    """Enters this node and follows the others.

    Args:
        place: Where etcd is.
        cluster: Only nodes of this cluster are seen.
        lease_s: A node that cannot renew its entry for so long loses it.
        poll_s: Between two looks; a third of the lease unless told.
    """

    def __init__(
        self, place: EtcdPlace, cluster: str, *, lease_s: int = 10, poll_s: float | None = None
    ) -> None:
        if lease_s < 1:
            raise StoreSetupError(f"etcd: a lease of {lease_s} s, at least 1 s is allowed")
        self._folder = f"{place.prefix}{cluster}/"
        self._lease_s = lease_s
        self._poll_s = poll_s if poll_s is not None else lease_s / 3
        self._clients = [_client(place, url) for url in place.urls]
        self._lease: Any = None
        self._members: Mapping[str, Member] | None = None
        self._me: Member | None = None
        self._is_reached = True
        self._seldom = Seldom(600.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd", daemon=True)

    @property
    def is_reached(self) -> bool:
        """Whether the last look succeeded."""
        return self._is_reached

    def start(self, me: Member) -> None:
        """Enters this node as soon as etcd answers; does not wait."""
        self._me = me
        self._thread.start()

    def members(self) -> Mapping[str, Member] | None:
        """All members as last seen, by name; None before etcd answered for the first time."""
        return self._members

    def stop(self) -> None:
        """Strikes this node out if etcd answers, and ends."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(Deadline.after(4 * REQUEST_S).left_s())

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except Exception as error:  # the client raises its own, requests' and KeyError alike
                if self._is_reached:
                    _log.warning("etcd not reached, the last view stays", kind=type(error).__name__)
                self._is_reached = False
                self._clients.append(self._clients.pop(0))
                self._lease = None
            else:
                if not self._is_reached:
                    _log.info("etcd reached again")
                self._is_reached = True
            self._stop.wait(self._poll_s)
        if self._lease is not None:
            try:
                self._lease.revoke()
            except Exception as error:
                _log.info("entry not struck out, its lease will end", kind=type(error).__name__)

    def _look(self) -> None:
        assert self._me is not None
        client = self._clients[0]
        if self._lease is None or self._lease.refresh() <= 0:
            self._enter(client, self._me)
        members = self._read(client)
        if self._me.name not in members:  # struck out by someone, or etcd lost its data
            self._enter(client, self._me)
            members = self._read(client)
        self._members = members

    def _enter(self, client: Any, me: Member) -> None:
        self._lease = client.lease(self._lease_s)
        entry = json.dumps({"host": me.host, "port": me.port, "weight": me.weight})
        client.put(self._folder + me.name, entry, lease=self._lease)

    def _read(self, client: Any) -> dict[str, Member]:
        members: dict[str, Member] = {}
        for value, about in client.get_prefix(self._folder)[:MOST_MEMBERS]:
            key = about["key"].decode("utf-8", "replace")
            try:
                if len(value) > _MOST_VALUE_BYTES:
                    raise ValueError(f"an entry of {len(value)} bytes")
                entry = json.loads(value)
                name = key.removeprefix(self._folder)
                members[name] = Member(
                    name, str(entry["host"]), int(entry["port"]), float(entry["weight"])
                )
            except (ValueError, TypeError, KeyError, StoreSetupError) as error:
                if self._seldom.may_say(key, now=time.monotonic()):
                    _log.warning("etcd entry left out", key=key[:200], reason=str(error)[:200])
        return dict(sorted(members.items()))


def _client(place: EtcdPlace, url: str) -> Any:
    try:
        import etcd3gw
        import requests
    except ImportError:
        raise StoreSetupError("etcd: the package etcd3gw is not installed") from None
    parts = urlsplit(url)
    session = requests.Session()
    session.trust_env = False  # a proxy for the internet does not lead to the cluster's etcd
    if place.ca_cert is not None:
        session.verify = place.ca_cert
    if place.cert is not None and place.key is not None:
        session.cert = (place.cert, place.key)
    return etcd3gw.client(
        host=parts.hostname or "",
        port=parts.port or 2379,
        protocol=parts.scheme,
        timeout=REQUEST_S,
        api_path="/v3/",
        session=session,
    )
