"""Classic policies against libCacheSim on flat streams: chains of one block, no tree.

Three policies differ from the peer by convention, and the difference is shown to be that and no
more: S3-FIFO there fills the main queue while nothing has been evicted, and its small queue gives
way at its share, not above; ARC there bounds T1 with B1 and all four lists together, as the paper
does; GDSF there lets a newcomer enter with the L from before the eviction that made room for it.
"""

import numpy as np
import pytest

from policies.catalog import EVICTION
from policies.prefix.cache import PrefixCache
from policies.prefix.eviction.arc import Arc
from policies.prefix.eviction.base import Block, EvictionPolicy, Key
from policies.prefix.eviction.gdsf import Gdsf
from policies.prefix.eviction.s3_fifo import S3Fifo

libcachesim = pytest.importorskip("libcachesim")

PEERS = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "lfu": libcachesim.LFU,
    "sieve": libcachesim.Sieve,
    "s3_fifo": libcachesim.S3FIFO,
    "arc": libcachesim.ARC,
    "gdsf": libcachesim.GDSF,
}
REQUESTS = 20_000
WITHIN_0_1_POINTS = 0.001 * REQUESTS


def zipf(exponent: float, blocks: int, seed: int) -> list[int]:
    shares = 1 / np.arange(1, blocks + 1) ** exponent
    drawn = np.random.default_rng(seed).choice(blocks, size=REQUESTS, p=shares / shares.sum())
    return [int(x) for x in drawn]


def with_scans(seed: int) -> list[int]:
    """Three in ten requests belong to a scan over 3,000 blocks."""
    rng = np.random.default_rng(seed)
    hot = zipf(0.9, 2000, seed)
    scan = rng.random(REQUESTS) < 0.3
    return [10_000 + i % 3000 if scan[i] else hot[i] for i in range(REQUESTS)]


def drifting(seed: int) -> list[int]:
    """What is popular changes every 5,000 requests."""
    return [x + 700 * (i // 5000) for i, x in enumerate(zipf(1.0, 2000, seed))]


STREAMS = {"zipf": zipf(0.9, 4000, 3), "scans": with_scans(3), "drift": drifting(3)}

every_stream = pytest.mark.parametrize("stream", STREAMS)
every_size = pytest.mark.parametrize("blocks", [100, 1000])


def peer_hits(name: str, stream: str, blocks: int) -> list[bool]:
    peer = PEERS[name](cache_size=blocks)
    hits = []
    for i, block in enumerate(STREAMS[stream]):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = block + 1, 1, i
        hits.append(bool(peer.get(request)))
    return hits


def our_hits(policy: EvictionPolicy, stream: str, blocks: int) -> list[bool]:
    cache = PrefixCache(policy, blocks)
    return [cache.request((x,), now=float(i)).hits == 1 for i, x in enumerate(STREAMS[stream])]


@every_stream
@every_size
@pytest.mark.parametrize("name", ["lru", "fifo", "lfu", "sieve"])
def test_every_request_hits_where_the_peer_hits(name: str, stream: str, blocks: int) -> None:
    assert our_hits(EVICTION[name](blocks), stream, blocks) == peer_hits(name, stream, blocks)


@pytest.mark.parametrize("stream", ["zipf", "drift"])
@every_size
@pytest.mark.parametrize("name", ["gdsf", "arc", "s3_fifo"])
def test_policies_of_other_conventions_hit_within_a_point(
    name: str, stream: str, blocks: int
) -> None:
    ours = sum(our_hits(EVICTION[name](blocks), stream, blocks))
    assert ours == pytest.approx(sum(peer_hits(name, stream, blocks)), abs=0.01 * REQUESTS)


class PeersS3Fifo(S3Fifo):
    """Fills the main queue, once the small one has its share, until something has to go.

    The small queue gives way as soon as it reaches its share.
    """

    has_evicted = False

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._small_bytes = int(self._small_bytes) - 0.5

    def evict(self, pinned, *, now: float) -> Key | None:
        self.has_evicted = True
        return super().evict(pinned, now=now)

    def end_request(self, chain, *, now: float) -> None:
        if not self.has_evicted and self._small.used_bytes >= self._small_bytes:
            for key in self._newcomers:
                self._ghosts.add(key, 0)  # what is remembered enters the main queue
        super().end_request(chain, now=now)


class PapersArc(Arc):
    """Bounds what is remembered as the paper does."""

    def _settle(self) -> None:
        super()._settle()
        once, again = self._once.used_bytes, self._again.used_bytes
        for ghosts, room in (
            (self._went_once, self._capacity_bytes - once),
            (
                self._went_again,
                2 * self._capacity_bytes - once - again - self._went_once.used_bytes,
            ),
        ):
            while ghosts.used_bytes > max(room, 0):
                ghosts.discard(next(iter(ghosts._sizes)))


class PeersGdsf(Gdsf):
    """Lets a newcomer enter with the L from before its own eviction."""

    before = 0.0

    def begin_request(self, chain, *, now: float, category: int = 0) -> None:
        super().begin_request(chain, now=now, category=category)
        self.before = self._base

    def insert(self, block: Block, *, now: float) -> None:
        raised, self._base = self._base, self.before
        super().insert(block, now=now)
        super().end_request((block.key,), now=now)
        self._base = raised


@every_stream
@every_size
def test_gdsf_under_the_peers_convention_is_the_peers(stream: str, blocks: int) -> None:
    assert our_hits(PeersGdsf(blocks), stream, blocks) == peer_hits("gdsf", stream, blocks)


@every_stream
@every_size
@pytest.mark.parametrize(("name", "policy"), [("arc", PapersArc), ("s3_fifo", PeersS3Fifo)])
def test_arc_and_s3_fifo_under_the_peers_convention_hit_as_often(
    name: str, policy: type[Arc] | type[S3Fifo], stream: str, blocks: int
) -> None:
    ours = sum(our_hits(policy(blocks), stream, blocks))
    assert ours == pytest.approx(sum(peer_hits(name, stream, blocks)), abs=WITHIN_0_1_POINTS)
