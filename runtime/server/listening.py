"""The sockets of a server, opened first: what is wrong with them is one clear line."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from pathlib import Path

BACKLOG = 4096
"""Connections that wait to be accepted; the kernel has a limit of its own beside it."""


class ListenError(ValueError):
    """An address that cannot be listened on, or a certificate that cannot be used."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Bound sockets, one for each address that the name stands for.

    Args:
        host: Name or address; empty: all addresses.
        port: 0: any free one, the same for all addresses.

    Raises:
        ListenError: Naming address and reason.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ListenError(f"cannot listen on {host}: {_reason(error)}") from None
    opened: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if port == 0 and opened:
                address = (address[0], opened[0].getsockname()[1], *address[2:])
            with contextlib.suppress(_AbsentError):
                opened.append(_bound(family, address))
        if not opened:
            raise ListenError(f"cannot listen on {host}:{port}: this machine has no such address")
    except BaseException:
        for each in opened:
            each.close()
        raise
    return opened


class _AbsentError(Exception):
    """The machine has not got this kind of address."""


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _AbsentError from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        # Without this a second server could bind the port as well, and only fail to listen.
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _AbsentError from error
        raise ListenError(f"cannot listen on {address[0]}:{address[1]}: {_reason(error)}") from None
    return made


def check_certificate(certificate: str, key: str) -> None:
    """Whether TLS could begin; without a certificate there is none.

    Raises:
        ListenError: Naming the file and the reason.
    """
    if key and not certificate:
        raise ListenError(f"--tls-key {key}: needs --tls-cert")
    if not certificate:
        return
    for path in filter(None, (certificate, key)):
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            option = "--tls-cert" if path == certificate else "--tls-key"
            raise ListenError(f"{option} {path}: {_reason(error)}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key or None)
    except OSError as error:
        files = f"--tls-cert {certificate}" + (f", --tls-key {key}" if key else "")
        raise ListenError(f"{files}: no certificate with its key: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
