"""Which pool a node belongs to, and how it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from runtime.store.errors import StoreSetupError

MIN_SECRET_BYTES = 16
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
    listen: str,
    advertise: str | None,
    peers: str | None,
    etcd: str | None,
    cluster: str,
    secret_file: Path | None,
    weight: float,
    transport: str = "tcp",
    heartbeat_s: float = 1.0,
) -> PoolConfig | None:
    """The pool of the command line; None without peers and etcd.

    Raises:
        StoreSetupError: If an option is wrong or does not fit the others.
    """
    if peers is None and etcd is None:
        if secret_file is not None or advertise is not None:
            raise StoreSetupError("--secret-file and --advertise need --peers or --etcd")
        return None
    if peers is not None and etcd is not None:
        raise StoreSetupError("--peers and --etcd exclude each other: remove one of them")
    if weight < 0 or weight != weight or weight == float("inf"):
        raise StoreSetupError(f"--weight: must be >= 0 and finite, found {weight}")
    if not 0.01 <= heartbeat_s <= 60.0:
        raise StoreSetupError(f"--heartbeat: must be 0.01 to 60 seconds, found {heartbeat_s}")
    if transport not in get_args(Transport):
        raise StoreSetupError(
            f"--transport: must be {' or '.join(get_args(Transport))}, found {transport!r}"
        )
    host, port = host_and_port(listen, "--listen")
    return PoolConfig(
        node=node,
        host=host,
        port=port,
        advertise=advertise,
        peers=peers,
        etcd=etcd,
        cluster=cluster,
        secret=b"" if secret_file is None else _secret(secret_file),
        weight=weight,
        transport=cast(Transport, transport),
        heartbeat_s=heartbeat_s,
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
