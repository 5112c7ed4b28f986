"""One question to another node, one answer: retries, suspects and what is small.

A request has a connection for itself (peer_connections.py). A connection that had been closed while
it lay idle is replaced without a word; any other failure makes the node a suspect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError, StoreUnavailableError
from runtime.store.peer_connections import (
    MOST_PER_USE,
    Connection,
    NoConnectionError,
    PeerConnections,
)
from runtime.store.peer_counters import PeerCounters
from runtime.store.peer_identity import Incarnations, NodeIdentity
from runtime.store.peer_messages import (
    Announce,
    AskPage,
    Done,
    Failed,
    Page,
    Ping,
    Use,
)
from runtime.store.peer_suspects import Suspects
from runtime.store.wire import FrameError, recv_frame, send_frame

_log = structlog.get_logger(__name__)
Result = TypeVar("Result")


class FailedError(StoreError):
    """The other node answered that it cannot do what was asked; it is well otherwise."""


class StaleError(StoreUnavailableError):
    """The connection had been closed while it lay idle."""


class PeerRequests:
    """Questions to the other nodes; safe for threads.

    Args:
        identity: Who this node is.
        incarnations: Shared with the other parts of the node.
        suspects: How long to leave a failed node alone.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        *,
        incarnations: Incarnations | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self.counters = PeerCounters()
        self.suspects = suspects or Suspects()
        self.incarnations = incarnations or Incarnations()
        self.connections = PeerConnections(identity, self.incarnations, self.counters)
        self.incarnations.when_newer(lambda node, _: self.suspects.clear(node))

    def add(self, node: str, host: str, port: int) -> None:
        """Sets or changes a node's address and looks its host up, which may take seconds."""
        self.connections.add(node, host, port)

    def drop(self, node: str) -> None:
        """Forgets a node's address."""
        self.connections.drop(node)
        self.suspects.clear(node)

    def ping(self, node: str, deadline: Deadline, last: int = 0) -> int:
        """Asks for a sign of life, suspect or not.

        Args:
            node: Whom.
            deadline: When to give up.
            last: How many changes of holdings this node has announced.

        Returns:
            The node's incarnation.

        Raises:
            StoreError: If there was none.
        """
        return self.ask(node, "control", Ping(last), Done, deadline)[1]

    def send_announcement(self, node: str, announce: Announce, deadline: Deadline) -> None:
        """Tells one node of changes and waits until it has heard.

        Raises:
            StoreError: If it may not have.
        """
        self.ask(node, "control", announce, Done, deadline)

    def page(self, node: str, after: bytes, limit: int, deadline: Deadline) -> tuple[int, Page]:
        """One page of what another node holds.

        Returns:
            The node's incarnation and the page.

        Raises:
            StoreError: If the node does not answer.
        """
        reply, incarnation = self.ask(node, "control", AskPage(after, limit), Page, deadline)
        page: Page = reply
        if any(one.key <= after for one in page.held):
            raise FrameError(f"node {node!r} sends a page that does not go on")
        return incarnation, page

    def ask(
        self, node: str, use: Use, request: Any, kind: Any, deadline: Deadline
    ) -> tuple[Any, int]:
        """One question, one answer without raw bytes.

        Args:
            node: Whom to ask.
            use: Which connections to use.
            request: One of the Request messages.
            kind: Message expected.
            deadline: When to give up.

        Returns:
            The answer and the incarnation that gave it.

        Raises:
            StoreError: If there is none, or the node says why it fails.
        """
        reply, incarnation = self.exchange(
            node, use, deadline, lambda link: (first_reply(link, request, kind, deadline),
                                               link.incarnation)
        )  # fmt: skip
        if isinstance(reply, Failed):
            raise FailedError(f"node {node!r}: {reply.reason}")
        return reply, incarnation

    def exchange(
        self, node: str, use: Use, deadline: Deadline, work: Callable[[Connection], Result]
    ) -> Result:
        """Lets one request have a connection; again with another if it had been closed meanwhile.

        Raises:
            StoreError: What the connection or the request raises.
        """
        for _ in range(MOST_PER_USE[use]):
            try:
                with self.connections.lease(node, use, deadline) as connection:
                    return work(connection)
            except StaleError:
                continue
        with self.connections.lease(node, use, deadline) as connection:
            return work(connection)

    def try_node(self, node: str, deadline: Deadline, work: Callable[[], object]) -> bool:
        """Does something with a node unless it is a suspect; a failure makes it one.

        Returns:
            Whether it was done without an error.
        """
        if deadline.is_over:
            self.counters.add("requests_out_of_time")
            return False
        if not self.suspects.may_try(node, now=time.monotonic()):
            self.counters.add("suspects_skipped")
            return False
        try:
            work()
        except NoConnectionError:
            self.counters.add("connections_taken")
            return False
        except FailedError:
            self.counters.add("requests_failed_there")
            return False
        except StoreError as error:
            self.counters.add(
                "requests_late" if isinstance(error, DeadlineError) else "requests_broken"
            )
            if not self.suspects.is_suspect(node):
                _log.warning("node suspected", node=node, reason=str(error))
            self.suspects.failed(node, now=time.monotonic())
            return False
        self.suspects.clear(node)
        return True

    def close(self) -> None:
        """Ends requests under way."""
        self.connections.close()


def first_reply(connection: Connection, request: Any, kind: Any, deadline: Deadline) -> Any:
    """Sends a request and receives the first answer to it, or Failed.

    Raises:
        StaleError: If the connection had been closed while it lay idle.
        StoreError: Otherwise as send_frame and recv_frame.
    """
    try:
        send_frame(connection.sock, request, deadline)
        return recv_frame(connection.sock, kind | Failed, deadline)
    except StoreUnavailableError as error:
        if connection.is_used and not deadline.is_over:
            raise StaleError(str(error)) from error
        raise
