"""What the whole pool holds: one flat table, a copy of it on every node.

A prefix is looked up by its keys, one after the other; there is no tree to walk and nobody to ask.
Nodes announce what they hold and what they gave up. A node that starts anew gets a larger
incarnation, and what it said before is forgotten: its memory is empty and old addresses lie.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from policies.prefix.eviction.base import Key
from policies.prefix.owners import OwnerKey, rendezvous_order

Tier = Literal["memory", "ssd"]


class Held(NamedTuple):
    """Where in its region a block lies; all blocks of a region have the same length.

    Attributes:
        region: First key of the region, the blocks of one put.
        index: Position in the region.
        depth: Position in its chain, 0 for a first block.
        length: Bytes.
    """

    region: Key
    index: int  # type: ignore[assignment]  # hides tuple.index, which a block has no use for
    depth: int
    length: int


class Copy(NamedTuple):
    """One copy of a block.

    Attributes:
        node: Who holds it.
        tier: On what.
        is_owned: Whether the node is responsible for it; else a replica, given up first.
    """

    node: str
    tier: Tier
    is_owned: bool


class Holding(NamedTuple):
    """One copy with all that is known of it."""

    key: Key
    held: Held
    tier: Tier
    is_owned: bool


class Place:
    """A block on one node, held by at least one of its two tiers. Only the directory changes it.

    Attributes:
        node: Who holds it.
        memory, ssd: Where in its region it lies on that tier; None if the tier has no copy.
        memory_is_owned, ssd_is_owned: Whether the node is responsible for that copy.
    """

    __slots__ = ("memory", "memory_is_owned", "node", "ssd", "ssd_is_owned")

    def __init__(self, node: str) -> None:
        self.node = node
        self.memory: Held | None = None
        self.ssd: Held | None = None
        self.memory_is_owned = False
        self.ssd_is_owned = False

    def __lt__(self, other: Place) -> bool:
        return self.node < other.node

    def put(self, held: Held, tier: Tier, is_owned: bool) -> None:
        """That tier holds it from now on."""
        if tier == "memory":
            self.memory, self.memory_is_owned = held, is_owned
        else:
            self.ssd, self.ssd_is_owned = held, is_owned

    def take(self, tier: Tier) -> bool:
        """That tier holds it no longer; whether it did."""
        if tier == "memory":
            was, self.memory = self.memory, None
        else:
            was, self.ssd = self.ssd, None
        return was is not None

    def tiers(self) -> Iterator[tuple[Held, Tier, bool]]:
        """Where it lies, on what, and whether that copy is owned; memory first."""
        if self.memory is not None:
            yield self.memory, "memory", self.memory_is_owned
        if self.ssd is not None:
            yield self.ssd, "ssd", self.ssd_is_owned

    @property
    def is_empty(self) -> bool:
        """Whether neither tier holds it."""
        return self.memory is None and self.ssd is None

    @property
    def is_owned(self) -> bool:
        """Whether the node is responsible for a copy on either tier."""
        return any(is_owned for _, _, is_owned in self.tiers())


class Directory:
    """Who holds which block. Every operation takes constant time per key and copy of it."""

    def __init__(self) -> None:
        # Places of a key are in order of node names; no key is kept without places.
        self._places: dict[Key, tuple[Place, ...]] = {}
        self._by_node: dict[str, dict[Key, Place]] = {}
        self._incarnations: dict[str, int] = {}

    def leading(self, keys: Sequence[Key], live: Container[str] | None = None) -> int:
        """How many of the first keys are held by any of the live nodes; None: by anyone."""
        places_of = self._places.get
        for count, key in enumerate(keys):
            places = places_of(key)
            if places is None:
                return count
            # Nearly always the first one lives, and no further look is needed.
            if live is None or places[0].node in live:
                continue
            if not any(place.node in live for place in places):
                return count
        return len(keys)

    def held(self, key: Key) -> Held | None:
        """Where in its region the block lies, by the first of its `copies`; None if nobody has it.

        Two nodes may hold the same block as part of different regions; `held_at` tells them apart.
        """
        copies = self.copies(key)
        return self.held_at(key, copies[0].node, copies[0].tier) if copies else None

    def held_at(self, key: Key, node: str, tier: Tier) -> Held | None:
        """Where in its region that copy lies; None if there is no such copy."""
        place = self._by_node.get(node, {}).get(key)
        if place is None:
            return None
        return place.memory if tier == "memory" else place.ssd

    def places(self, key: Key) -> tuple[Place, ...]:
        """All nodes that hold the block, by name; a quicker look than `copies`."""
        return self._places.get(key, ())

    def copies(self, key: Key) -> tuple[Copy, ...]:
        """All copies: memory before SSD, owned before replicas, then by name of the node."""
        places = self._places.get(key, ())
        copies = [Copy(p.node, tier, is_owned) for p in places for _, tier, is_owned in p.tiers()]
        if len(copies) > 1:
            copies.sort(key=lambda copy: (copy.tier, not copy.is_owned))
        return tuple(copies)

    def add(
        self, node: str, incarnation: int, key: Key, held: Held, *, tier: Tier, is_owned: bool
    ) -> bool:
        """The node says that it holds a block; said again, the later word counts.

        Returns:
            False if the word is of an older incarnation than the newest seen, and thus ignored. A
            newer one first forgets all that the node said before.
        """
        if not self._is_current(node, incarnation):
            return False
        of_node = self._by_node.setdefault(node, {})
        place = of_node.get(key)
        if place is None:
            place = of_node[key] = Place(node)
            others = self._places.get(key)
            self._places[key] = (place,) if others is None else tuple(sorted((*others, place)))
        place.put(held, tier, is_owned)
        return True

    def discard(self, node: str, incarnation: int, key: Key, *, tier: Tier) -> bool:
        """The node says that it gave up a copy.

        Returns:
            Whether a copy was known and is now gone; words of older incarnations are ignored.
        """
        if not self._is_current(node, incarnation):
            return False
        place = self._by_node.get(node, {}).get(key)
        if place is None or not place.take(tier):
            return False
        if place.is_empty:
            del self._by_node[node][key]
            self._drop(key, place)
        return True

    def forget_node(self, node: str) -> None:
        """The node is gone, and its copies with it; its incarnation is remembered.

        It may come back under the same incarnation (the network was gone, not the node).
        """
        for key, place in self._by_node.pop(node, {}).items():
            self._drop(key, place)

    def incarnation(self, node: str) -> int | None:
        """The newest incarnation seen of that node, gone or not."""
        return self._incarnations.get(node)

    def promotions(self, dead: str, weights: Mapping[str, float]) -> Mapping[str, tuple[Key, ...]]:
        """Who becomes responsible for what the dead node owned; to be asked before forgetting it.

        Of the live nodes that hold a copy and may own, the first in the rendezvous order of the
        region's first key: nodes with equal directories agree without a word, and regions stay
        together.

        Args:
            dead: Who is gone.
            weights: Of the live nodes, by name.

        Returns:
            Keys by node, nodes by name, keys in order of their regions. A block of which a live
            node has an owned copy already is not among them, nor one of which no copy is left.
        """
        found: dict[str, list[tuple[Key, int, Key]]] = {}
        order_by_region: dict[Key, tuple[str, ...]] = {}
        for key, place in self._by_node.get(dead, {}).items():
            if not place.is_owned:
                continue
            others = [p for p in self._places[key] if p.node != dead and p.node in weights]
            if not others or any(p.is_owned for p in others):
                continue
            held = next(held for held, _, is_owned in place.tiers() if is_owned)
            if held.region not in order_by_region:
                order_by_region[held.region] = rendezvous_order(_owner_key(held.region), weights)
            names = [p.node for p in others]
            heir = next((n for n in order_by_region[held.region] if n in names), None)
            if heir is not None:
                found.setdefault(heir, []).append((held.region, held.index, key))
        return {
            heir: tuple(key for _, _, key in sorted(found[heir], key=_by_region))
            for heir in sorted(found)
        }

    def holdings(self, node: str) -> Iterator[Holding]:
        """All copies of one node, oldest first; the directory may change meanwhile."""
        for key, place in tuple(self._by_node.get(node, {}).items()):
            for held, tier, is_owned in place.tiers():
                yield Holding(key, held, tier, is_owned)

    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that hold anything."""
        return tuple(sorted(node for node, keys in self._by_node.items() if keys))

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        """Different blocks held by anyone."""
        return len(self._places)

    def check(self) -> None:
        """Recount.

        Raises:
            AssertionError: If the two tables disagree, or an empty place is kept.
        """
        by_key = {(key, p.node): p for key, places in self._places.items() for p in places}
        by_node = {(key, n): p for n, keys in self._by_node.items() for key, p in keys.items()}
        assert by_key == by_node, "the tables by key and by node disagree"
        assert not any(place.is_empty for place in by_key.values()), "an empty place is kept"
        assert all(self._places.values()), "a key without places is kept"

    def _is_current(self, node: str, incarnation: int) -> bool:
        newest = self._incarnations.get(node)
        if newest == incarnation:
            return True
        if newest is not None and incarnation < newest:
            return False
        self.forget_node(node)
        self._incarnations[node] = incarnation
        return True

    def _drop(self, key: Key, place: Place) -> None:
        left = tuple(p for p in self._places[key] if p is not place)
        if left:
            self._places[key] = left
        else:
            del self._places[key]


def _owner_key(region: Key) -> OwnerKey:
    if isinstance(region, bytes | int):
        return region
    raise TypeError(f"regions are named by bytes or numbers, found {type(region).__name__}")


def _by_region(entry: tuple[Key, int, Key]) -> tuple[OwnerKey, int, OwnerKey]:
    region, index, key = entry
    return _owner_key(region), index, _owner_key(key)
