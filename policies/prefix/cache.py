"""One memory of prefix blocks under an eviction policy: capacity, pins, hits.

A hit is a *leading* block of the prompt that is resident: a block behind a missing one is of no use
to a prefill. Then the whole chain, prompt and generated blocks, is touched: resident blocks are
accessed, missing ones are inserted root first while the request's own blocks are pinned. Of a chain
longer than the memory only the leading blocks that fit are kept, never a run with a hole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from policies.prefix.eviction.base import Block, EvictionPolicy, Key


class Outcome(NamedTuple):
    """What one request met and changed.

    Attributes:
        hits: Leading blocks of the prompt that were resident.
        stored: Blocks of the chain that became resident.
        evicted: Blocks given up for them, in order.
    """

    hits: int
    stored: int
    evicted: tuple[Key, ...]


class PrefixCache:
    """One memory of ``capacity_bytes`` whose blocks a policy ranks.

    The policy must be empty, and built for the same capacity.
    """

    def __init__(self, policy: EvictionPolicy, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be >= 0, found {capacity_bytes}")
        if len(policy):
            raise ValueError(f"the policy must be empty, found {len(policy)} blocks in it")
        self._policy = policy
        self._prices_position = getattr(policy, "prices_position", True)
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[Key, int] = {}
        self._pins: dict[Key, int] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all resident blocks."""
        return self._used_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes that resident blocks never exceed together."""
        return self._capacity_bytes

    def leading(self, keys: Sequence[Key]) -> int:
        """How many leading blocks of that chain are resident. Changes nothing."""
        sizes = self._sizes
        count = 0
        for key in keys:
            if key not in sizes:
                break
            count += 1
        return count

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep these resident blocks until ``unpin``, which is due once for every ``pin``.

        Raises:
            KeyError: If one of them is not resident; then none is pinned.
        """
        keys = tuple(keys)
        for key in keys:
            if key not in self._sizes:
                raise KeyError(key)
        self._pin(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """The blocks of one ``pin`` may go again.

        Raises:
            KeyError: If one of them is not pinned.
        """
        pins = self._pins
        for key in keys:
            count = pins[key] - 1
            if count:
                pins[key] = count
            else:
                del pins[key]

    def drop(self, key: Key) -> None:
        """A block is lost for a reason that is not the policy's choice.

        Raises:
            KeyError: If it is not resident.
        """
        self._used_bytes -= self._sizes.pop(key)
        self._policy.remove(key)

    def request(
        self,
        prompt: Sequence[Key],
        generated: Sequence[Key] = (),
        *,
        now: float,
        block_bytes: int = 1,
        cost_of_depth: Callable[[int], float] | None = None,
        category: int = 0,
    ) -> Outcome:
        """Serve one request.

        Args:
            prompt: Blocks of the prompt, root first, no key twice.
            generated: Blocks that decoding adds behind the prompt.
            now: Seconds since the run began, never decreasing.
            block_bytes: Size of the blocks that are stored now, > 0.
            cost_of_depth: Seconds to compute the block at that position again; None, or a policy
                that takes all positions to be equally dear: 1 each.
            category: Class of the request, for policies that learn by class.
        """
        if block_bytes <= 0:
            raise ValueError(f"block_bytes must be > 0, found {block_bytes}")
        hits = self.leading(prompt)
        chain = self._fitting((*prompt, *generated), block_bytes)
        policy, sizes = self._policy, self._sizes
        if not self._prices_position:
            cost_of_depth = None
        policy.begin_request(prompt, now=now, category=category)
        self._pin(chain)
        stored = 0
        evicted: list[Key] = []
        try:
            for key in chain:
                if key in sizes:
                    policy.access(key, now=now)
            parent: Key | None = None
            for depth, key in enumerate(chain):
                if key not in sizes:
                    if not self._make_room(block_bytes, evicted, now):
                        break
                    cost_s = cost_of_depth(depth) if cost_of_depth else 1.0
                    policy.insert(Block(key, parent, depth, block_bytes, cost_s), now=now)
                    sizes[key] = block_bytes
                    self._used_bytes += block_bytes
                    stored += 1
                parent = key
        finally:
            self.unpin(chain)
        policy.end_request(chain, now=now)
        return Outcome(hits, stored, tuple(evicted))

    def _fitting(self, chain: tuple[Key, ...], block_bytes: int) -> tuple[Key, ...]:
        """The leading blocks that the memory could hold together."""
        sizes = self._sizes
        room = self._capacity_bytes
        for count, key in enumerate(chain):
            room -= sizes.get(key, block_bytes)
            if room < 0:
                return chain[:count]
        return chain

    def _make_room(self, size_bytes: int, evicted: list[Key], now: float) -> bool:
        while self._used_bytes + size_bytes > self._capacity_bytes:
            victim = self._policy.evict(self._pins, now=now)
            if victim is None:
                return False
            self._used_bytes -= self._sizes.pop(victim)
            evicted.append(victim)
        return True

    def _pin(self, keys: Iterable[Key]) -> None:
        pins = self._pins
        for key in keys:
            pins[key] = pins.get(key, 0) + 1

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)
