"""Which pool a node belongs to, and how it is reached."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from runtime.store.errors import StoreSetupError
from runtime.store.membership import Member, parse_members

MIN_SECRET_BYTES = 16
LOOPBACK = "127.0.0.1:0"
Transport = Literal["tcp", "nixl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A node's place in a pool.

    Attributes:
        node: Its name.
        host, port: Where it listens for the others; port 0 picks a free one.
        advertise: Host that the others are told; None: the one it listens on.
        peers: A static list of all nodes, ``NAME=HOST:PORT[*WEIGHT],...``; or None.
        etcd: HOST:PORT of an etcd that lists them; or None.
        cluster: Name of the pool; nodes of another are refused.
        secret: Known to the nodes of the pool alone; empty: none is asked for.
        weight: Share of the blocks that this node is to own; with ``peers`` the list says it.
        transport: How blocks are fetched: ``tcp``, or ``nixl`` (one-sided reads over RDMA where the
            network has it; TCP for what cannot be read so).
        heartbeat_s: Seconds between two signs of life.
        most_missed: A node is lost when it misses so many in a row.
    """

    node: str
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    peers: str | None = None
    etcd: str | None = None
    cluster: str = "default"
    secret: bytes = b""
    weight: float = 1.0
    transport: Transport = "tcp"
    heartbeat_s: float = 1.0
    most_missed: int = 3


def pool_config(
    *,
    node: str,
    listen: str | None = None,
    advertise: str | None = None,
    peers: str | None = None,
    etcd: str | None = None,
    cluster: str | None = None,
    secret_file: Path | None = None,
    weight: float | None = None,
    transport: str | None = None,
    heartbeat_s: float | None = None,
) -> PoolConfig | None:
    """The pool of the command line; None without peers and etcd. None: an option not given.

    Raises:
        StoreSetupError: If an option is wrong or does not fit the others.
    """
    if peers is None and etcd is None:
        for name, value in (
            ("--secret-file", secret_file),
            ("--advertise", advertise),
            ("--listen", listen),
            ("--weight", weight),
            ("--transport", transport),
            ("--heartbeat", heartbeat_s),
            ("--cluster", cluster),
        ):
            if value is not None:
                raise StoreSetupError(f"{name}: is for a pool: give --peers or --etcd as well")
        return None
    if peers is not None and etcd is not None:
        raise StoreSetupError("--peers and --etcd exclude each other: remove one of them")
    if weight is not None and peers is not None:
        raise StoreSetupError(
            f"--weight: found {weight}, but with --peers the list says it: NAME=HOST:PORT*WEIGHT"
        )
    if weight is not None and not 0.0 < weight < float("inf"):
        raise StoreSetupError(f"--weight: must be > 0 and finite, found {weight}")
    if heartbeat_s is not None and not 0.01 <= heartbeat_s <= 60.0:
        raise StoreSetupError(f"--heartbeat: must be 0.01 to 60 seconds, found {heartbeat_s}")
    if transport is not None and transport not in get_args(Transport):
        raise StoreSetupError(
            f"--transport: must be {' or '.join(get_args(Transport))}, found {transport!r}"
        )
    if cluster is not None and not 0 < len(cluster) <= 128:
        raise StoreSetupError(
            f"--cluster: must be a name of 1 to 128 characters, found {cluster!r}"
        )
    if listen is None and peers is not None:
        _check_loopback(peers, node)
    host, port = host_and_port(listen or LOOPBACK, "--listen")
    if peers is not None:
        static_register(peers, node)
    return PoolConfig(
        node=node,
        host=host,
        port=port,
        advertise=advertise,
        peers=peers,
        etcd=etcd,
        cluster=cluster or "default",
        secret=b"" if secret_file is None else _secret(secret_file),
        weight=1.0 if weight is None else weight,
        transport=cast(Transport, transport or "tcp"),
        heartbeat_s=1.0 if heartbeat_s is None else heartbeat_s,
    )


def static_register(peers: str, node: str) -> tuple[tuple[Member, ...], Member]:
    """All nodes of a static list, and this one among them.

    Raises:
        StoreSetupError: If an entry is wrong, two have one address, or this node is not among them.
    """
    members = parse_members(peers)
    places: dict[tuple[str, int], str] = {}
    for member in members:
        other = places.setdefault((member.host, member.port), member.name)
        if other != member.name:
            raise StoreSetupError(
                f"--peers: {other!r} and {member.name!r} have one address, "
                f"{member.host}:{member.port}"
            )
    for member in members:
        if member.name == node:
            return members, member
    raise StoreSetupError(
        f"--peers: this node, {node!r}, is not among "
        f"{', '.join(member.name for member in members) or 'them'}: set --node"
    )


def _check_loopback(peers: str, node: str) -> None:
    """A node that others are told to find at an address of the network must listen there."""
    _, me = static_register(peers, node)
    with suppress(ValueError):
        if ipaddress.ip_address(me.host).is_loopback:
            return
    if me.host != "localhost":
        raise StoreSetupError(
            f"--peers: the others find this node, {node!r}, at {me.host}:{me.port}, but without "
            f"--listen it listens on loopback alone: give --listen {me.host}:{me.port}"
        )


def host_and_port(text: str, name: str) -> tuple[str, int]:
    """The parts of HOST:PORT; an IPv6 address stands in brackets.

    Raises:
        StoreSetupError: If it is not of that form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise StoreSetupError(f"{name}: must be HOST:PORT, found {text!r}")
    return host.strip("[]"), int(port)


def _secret(file: Path) -> bytes:
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise StoreSetupError(f"{file}: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise StoreSetupError(
            f"{file}: a secret must have at least {MIN_SECRET_BYTES} bytes, found {len(secret)}"
        )
    return secret
