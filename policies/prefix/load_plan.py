"""How a prefix is brought to a node: which block from where, and where to stop and compute.

Seconds are those of `models.prefix_costs.PrefixCosts.load_s`: requests to other nodes run in
parallel, one per node; the own SSD is read in series with them, and everything then goes from host
memory to the device. Behind the cut the rest of the common prefix is computed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from models.prefix_costs import PrefixCosts
from policies.prefix.directory import Directory, Held
from policies.prefix.eviction.base import Key

Source = Literal["memory", "replica", "remote", "remote_ssd", "ssd"]

# Without costs: other memory before the own SSD, and that before somebody else's.
_PREFERENCE: dict[Source, int] = {"memory": 0, "replica": 0, "remote": 1, "ssd": 2, "remote_ssd": 3}

_REMOTE = ("remote", "remote_ssd")


class Segment(NamedTuple):
    """A run of bytes that is contiguous where it lies and where it goes.

    Attributes:
        region: First key of the region it lies in.
        src: Byte offset in the region.
        dst: Byte offset in the destination, where the blocks lie in order without gaps.
        length: Bytes.
    """

    region: Key
    src: int
    dst: int
    length: int


class Way(NamedTuple):
    """One way to get a block: who gives it, from what, and where it lies there."""

    node: str
    source: Source
    held: Held


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load and from where.

    Attributes:
        leading: Length of the longest common prefix with what live nodes hold, in blocks.
        wanted: How many of these blocks to load; the others are cheaper to compute.
        local: From the node's own memory.
        ssd: From its own SSD.
        remote: One request per other node, nodes by name.
        ways: [wanted] how each block is got.
        expected_s: Seconds to load the wanted blocks and to compute the rest of the common prefix;
            nan without costs.
        recompute_s: Seconds to compute all of the common prefix; nan without costs.
    """

    leading: int
    wanted: int
    local: tuple[Segment, ...]
    ssd: tuple[Segment, ...]
    remote: Mapping[str, tuple[Segment, ...]]
    ways: tuple[Way, ...]
    expected_s: float
    recompute_s: float

    @property
    def source(self) -> tuple[Source, ...]:
        """[wanted] kind of place each block comes from."""
        return tuple(way.source for way in self.ways)

    def blocks_of(self, node: str) -> tuple[int, ...]:
        """Positions of the blocks that the request to that other node asks for."""
        return tuple(
            i for i, way in enumerate(self.ways) if way.node == node and way.source in _REMOTE
        )


def plan_load(
    keys: Sequence[Key],
    directory: Directory,
    *,
    local: str,
    costs: PrefixCosts | None,
    live: Container[str] | None = None,
    load_of: Mapping[str, float] | None = None,
    first: int = 0,
) -> LoadPlan:
    """Plan the load of a prompt's blocks to one node.

    A block in the node's own memory is taken from there. Of the others, each goes where it adds
    least to the time; among equal nodes the owner comes first, then the name. The cut is the one
    that minimises loading plus computing, the longer of two equal ones. Blocks that several nodes
    could give are spread so that the requests end together, in runs as long as possible.

    Args:
        keys: Of all full blocks of the prompt, first block first.
        directory: What is held where.
        local: The node that loads.
        costs: Of computing and fetching; without them all of the common prefix is loaded.
        live: Nodes to ask; None for all. The loading node itself is always one.
        load_of: By node, seconds until it starts on a new request; 0 where absent. Without costs
            the less loaded of several nodes is asked.
        first: Position of the first of these keys in its chain; what stands before it is there.
    """
    queue_s = load_of or {}
    ways = list(_ways(keys, directory, local, live))
    if costs is None:
        chosen = [
            w[0] if len(w) == 1 else min(w, key=lambda way: _preference(way, queue_s)) for w in ways
        ]
        return _plan(ways, chosen, math.nan, math.nan)
    recompute = [costs.recompute_s(first + depth) for depth in range(len(ways))]
    rest_s = list(accumulate(reversed(recompute), initial=0.0))[::-1]
    best_s, chosen = math.inf, list[Way]()
    for candidates in _narrowings(ways):
        schedule = _Schedule(costs, queue_s)
        cut, cut_s = 0, schedule.seconds + rest_s[0]
        for i, block_ways in enumerate(candidates):
            schedule.add(block_ways)
            total_s = schedule.seconds + rest_s[i + 1]
            if total_s <= cut_s:
                cut, cut_s = i + 1, total_s
        found = schedule.chosen[:cut]
        if len(dict.fromkeys(map(len, candidates[:cut]))) > 1:
            balanced, balanced_s = _balanced(candidates[:cut], _Schedule(costs, queue_s))
            if balanced_s + rest_s[cut] < cut_s:
                cut_s, found = balanced_s + rest_s[cut], balanced
        if cut_s < best_s:
            best_s, chosen = cut_s, found
    return _plan(ways, chosen, best_s, rest_s[0])


class _Schedule:
    """Blocks given to places one after the other, each where the load then ends first.

    Sums up `PrefixCosts.load_s` block by block: a request pays its fixed seconds with its first
    block, and every block pays for its bytes.
    """

    def __init__(self, costs: PrefixCosts, queue_s: Mapping[str, float]) -> None:
        self.chosen: list[Way] = []
        self.seconds = costs.load_s(0)
        self._queue_s = queue_s
        self._remote_s, self._ssd_s = costs.remote.request_s, costs.ssd.request_s
        self._remote_byte_s = 1.0 / costs.remote.bytes_per_s
        self._ssd_byte_s = 1.0 / costs.ssd.bytes_per_s
        self._local_byte_s, self._local_s = 1.0 / costs.local.bytes_per_s, costs.local.request_s
        self._last_s = self._own_ssd_s = 0.0
        # By node asked: when its request ends, and whether it has to read its SSD.
        self._asked: dict[str, tuple[float, bool]] = {}

    def add(self, ways: tuple[Way, ...]) -> None:
        way = ways[0] if len(ways) == 1 else min(ways, key=self._ends)
        if not self.chosen:
            self.seconds += self._local_s
        self.chosen.append(way)
        source = way.source
        self.seconds += way.held.length * self._local_byte_s
        if source == "ssd":
            read_s = self._read_s(way)
            self.seconds += read_s - self._own_ssd_s
            self._own_ssd_s = read_s
        elif source in _REMOTE:
            end_s = self._request_s(way)
            before = self._asked.get(way.node)
            self._asked[way.node] = end_s, source == "remote_ssd" or bool(before and before[1])
            if end_s > self._last_s:
                self.seconds += end_s - self._last_s
                self._last_s = end_s

    def _ends(self, way: Way) -> tuple[float, float]:
        """When all blocks are in memory, and when this one is."""
        if way.source == "ssd":
            read_s = self._read_s(way)
            return self._last_s + read_s, read_s
        end_s = self._request_s(way)
        return max(self._last_s, end_s) + self._own_ssd_s, end_s

    def _read_s(self, way: Way) -> float:
        """When the own SSD is read, with this block."""
        return (self._own_ssd_s or self._ssd_s) + way.held.length * self._ssd_byte_s

    def _request_s(self, way: Way) -> float:
        """When the request to that node ends, with this block in it."""
        asked = self._asked.get(way.node)
        end_s, reads_ssd = asked or (self._queue_s.get(way.node, 0.0) + self._remote_s, False)
        end_s += way.held.length * self._remote_byte_s
        if way.source == "remote_ssd":
            end_s += way.held.length * self._ssd_byte_s + (0.0 if reads_ssd else self._ssd_s)
        return end_s


def _balanced(ways: Sequence[tuple[Way, ...]], schedule: _Schedule) -> tuple[list[Way], float]:
    """The same blocks, those with the fewest ways first: what can move fills what is left."""
    order = sorted(range(len(ways)), key=lambda i: len(ways[i]))
    for i in order:
        schedule.add(ways[i])
    by_position = dict(zip(order, schedule.chosen, strict=True))
    return [by_position[i] for i in range(len(ways))], schedule.seconds


def _narrowings(ways: list[tuple[Way, ...]]) -> Iterator[list[tuple[Way, ...]]]:
    """The ways, and where the own SSD competes with other nodes, also without either of them.

    The first block of a request pays for the request, so block by block the SSD can win each time
    although asking the other node for all of them would be cheaper, and the other way round.
    """
    yield ways
    if any(len({w.source == "ssd" for w in block_ways}) == 2 for block_ways in ways):
        for is_ssd in (False, True):
            yield [tuple(w for w in ws if (w.source == "ssd") == is_ssd) or ws for ws in ways]


def _ways(
    keys: Sequence[Key], directory: Directory, local: str, live: Container[str] | None
) -> Iterator[tuple[Way, ...]]:
    """Ways to each block of the common prefix: own memory alone, else one per node, best first."""
    for key in keys:
        places = directory.places(key)
        own = next((p for p in places if p.node == local), None)
        if own is not None and own.memory is not None:
            yield (Way(local, "memory" if own.memory_is_owned else "replica", own.memory),)
            continue
        ways, ranks = list[Way](), list[tuple[bool, int]]()
        for place in places:
            node = place.node
            if live is not None and node != local and node not in live:
                continue
            if place.memory is not None:
                ways.append(Way(node, "remote", place.memory))
                ranks.append((not place.memory_is_owned, len(ranks)))
            elif place.ssd is not None:
                ways.append(Way(node, "ssd" if node == local else "remote_ssd", place.ssd))
                ranks.append((not place.ssd_is_owned, len(ranks)))
        if not ways:
            return
        if len(ways) > 1:
            ways = [ways[i] for _, i in sorted(ranks)]
        yield tuple(ways)


def _preference(way: Way, queue_s: Mapping[str, float]) -> tuple[int, float]:
    return _PREFERENCE[way.source], queue_s.get(way.node, 0.0)


def _in_runs(ways: Sequence[tuple[Way, ...]], chosen: Sequence[Way]) -> Iterator[Way]:
    """The same number of blocks from each node, but neighbours from the same one.

    Only among neighbours of equal length that the same places could give.
    """

    def kind(i: int) -> tuple[object, ...]:
        return tuple((way.node, way.source, way.held.length) for way in ways[i])

    if all(len(ways[i]) == 1 for i in range(len(chosen))):
        yield from chosen
        return
    for _, run in groupby(range(len(chosen)), key=kind):
        positions = list(run)
        places = [[way.node for way in ways[i]].index(chosen[i].node) for i in positions]
        for i, place in zip(positions, sorted(places), strict=True):
            yield ways[i][place]


def _plan(
    ways: Sequence[tuple[Way, ...]], chosen: Sequence[Way], expected_s: float, recompute_s: float
) -> LoadPlan:
    laid = tuple(_in_runs(ways, chosen))
    local, ssd, remote = list[Segment](), list[Segment](), dict[str, list[Segment]]()
    dst = 0
    for way in laid:
        if way.source in _REMOTE:
            segments = remote.setdefault(way.node, [])
        else:
            segments = ssd if way.source == "ssd" else local
        _append(segments, way.held, dst)
        dst += way.held.length
    return LoadPlan(
        leading=len(ways),
        wanted=len(laid),
        local=tuple(local),
        ssd=tuple(ssd),
        remote={node: tuple(remote[node]) for node in sorted(remote)},
        ways=laid,
        expected_s=expected_s,
        recompute_s=recompute_s,
    )


def _append(segments: list[Segment], held: Held, dst: int) -> None:
    """Add a block, to the last segment where it is contiguous at both ends."""
    src = held.index * held.length
    if segments:
        region, last_src, last_dst, length = segments[-1]
        if region == held.region and last_src + length == src and last_dst + length == dst:
            segments[-1] = Segment(region, last_src, last_dst, length + held.length)
            return
    segments.append(Segment(held.region, src, dst, held.length))
