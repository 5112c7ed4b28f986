"""The most hits that any cache of unit blocks could have, knowing the future.

Belady's rule (IBM Systems Journal 1966) with bypass: after each request keep the blocks whose next
use is nearest, whether they were there or have just been computed. A request that reads a child
reads its parent, so next use never falls along a chain; with ties given up deepest first what is
kept is closed under prefixes, every resident block of a prompt is a leading one, and the rule,
optimal for blocks one by one, is optimal for leading blocks too.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

Chains = tuple[Sequence[Hashable], Sequence[Hashable]]

NEVER = -1


def bound_hits(requests: Sequence[Chains], capacity: int) -> list[int]:
    """Leading blocks that are resident, per request, under the optimum.

    Args:
        requests: (prompt, generated) in order of arrival, both root first; a key names one
            position of one chain, and its use is to lie in a prompt.
        capacity: Blocks that fit, >= 0.

    Raises:
        ValueError: If the capacity is negative.
    """
    if capacity < 0:
        raise ValueError(f"capacity must be >= 0 blocks, found {capacity}")
    next_uses = _next_uses(requests)
    resident: dict[Hashable, int] = {}  # key -> request that uses it next
    farthest: list[tuple[int, int, int, Hashable]] = []  # farthest next use, then deepest, on top
    number = 0
    hits: list[int] = []
    for (prompt, generated), uses in zip(requests, next_uses, strict=True):
        count = 0
        while count < len(prompt) and prompt[count] in resident:
            count += 1
        hits.append(count)
        for depth, (key, use) in enumerate(zip((*prompt, *generated), uses, strict=True)):
            if use == NEVER:
                resident.pop(key, None)
            else:
                resident[key] = use
                number += 1
                heapq.heappush(farthest, (-use, -depth, number, key))
        while len(resident) > capacity:
            use, _depth, _number, key = heapq.heappop(farthest)
            if resident.get(key) == -use:
                del resident[key]
    return hits


def _next_uses(requests: Sequence[Chains]) -> list[list[int]]:
    """For each request, for each block of its chain, the next request whose prompt has it."""
    upcoming: dict[Hashable, int] = {}
    found: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        prompt, generated = requests[index]
        found.append([upcoming.get(key, NEVER) for key in (*prompt, *generated)])
        for key in prompt:
            upcoming[key] = index
    found.reverse()
    return found
