"""Which nodes live, from signs of life and their absence; told the time by nobody, since it counts.

A node lives from its first sign of life on and is dead after so many missed in a row. A sign of a
newer incarnation means that the old one died and another came. Callbacks come one after another,
in the order of what happened, and may ask for the view.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

OnJoined = Callable[[str, int], None]
OnLeft = Callable[[str], None]


class MembershipView:
    """Nodes, their weights, who lives; safe for threads.

    Args:
        me: Name of this node, which always lives.
        weight: Of this node.
        incarnation: Of this node.
        most_missed: A node is dead when this many signs of life in a row are missed.
        joined: Told (node, incarnation) of each node that comes to life.
        left: Told of each node that dies.
    """

    def __init__(
        self,
        me: str,
        weight: float,
        incarnation: int,
        *,
        most_missed: int,
        joined: OnJoined,
        left: OnLeft,
    ) -> None:
        self._me = me
        self._my_weight = weight
        self._my_incarnation = incarnation
        self._most_missed = most_missed
        self._joined = joined
        self._left = left
        self._weights: dict[str, float] = {}
        self._incarnations: dict[str, int] = {}  # of those that live, in the order they came
        self._missed: dict[str, int] = {}
        self._lock = threading.RLock()  # held in callbacks, which may ask back
        self._live: Mapping[str, float] = MappingProxyType({me: weight})

    def live(self) -> Mapping[str, float]:
        """Weight by name of all nodes that live, this one among them, by name."""
        return self._live

    def incarnation(self, node: str) -> int:
        """Of a node that lives; 0 otherwise."""
        if node == self._me:
            return self._my_incarnation
        return self._incarnations.get(node, 0)

    def set_weight(self, node: str, weight: float) -> None:
        """Sets a node's weight; it does not live for that."""
        with self._lock:
            self._weights[node] = weight
            self._renew()

    def forget(self, node: str) -> None:
        """A node belongs to the cluster no longer."""
        with self._lock:
            self._weights.pop(node, None)
            self._missed.pop(node, None)
            self._die(node)

    def heard(self, node: str, incarnation: int) -> None:
        """A sign of life; of a node that was forgotten it means nothing."""
        with self._lock:
            known = self._incarnations.get(node, 0)
            if node not in self._weights or incarnation < known:
                return
            self._missed[node] = 0
            if incarnation > known:
                self._die(node)
                self._incarnations[node] = incarnation
                self._renew()
                self._joined(node, incarnation)

    def missed(self, node: str) -> None:
        """A sign of life that was due did not come."""
        with self._lock:
            if node not in self._incarnations:
                return
            self._missed[node] = self._missed.get(node, 0) + 1
            if self._missed[node] >= self._most_missed:
                self._die(node)

    def _die(self, node: str) -> None:
        if self._incarnations.pop(node, None) is not None:
            self._renew()
            self._left(node)

    def _renew(self) -> None:
        live = {self._me: self._my_weight}
        live.update((node, self._weights[node]) for node in self._incarnations
                    if node in self._weights)  # fmt: skip
        self._live = MappingProxyType(dict(sorted(live.items())))
