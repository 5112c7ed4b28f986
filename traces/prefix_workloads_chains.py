"""Requests as chains of prefix blocks, and how chains grow while a workload is drawn.

A block is a run of full tokens; its id stands for the whole prompt up to its end, so equal ids mean
equal prefixes and every id has one parent. A partly filled block has no id: it is never stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """What one request reads and adds.

    Attributes:
        time_s: Seconds since the run began, >= 0.
        category: Kind of traffic (0 question over a document, 1 chat, 2 agent, 3 one-off); 0 where
            unknown.
        session: Number of its conversation, negative where it belongs to none.
        prompt: Ids of the full blocks of the prompt, root first.
        generated: Ids of the blocks that its output fills, behind the prompt.
        prompt_tokens: Tokens of the prompt, those of a partly filled last block included.
    """

    time_s: float
    category: int
    session: int
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixWorkload:
    """Requests in order of time, and the tree of their blocks.

    Attributes:
        requests: Times never decrease.
        parent: [num_blocks + 1] int64; ``parent[i]`` is the block before block i, 0 for a first
            block. Ids count from 1 in order of first use, so ``parent[i] < i``; entry 0 is unused.
        block_tokens: Tokens per block, > 0.
    """

    requests: tuple[PrefixRequest, ...]
    parent: NDArray[np.int64]
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        """Different blocks, prompts and outputs together."""
        return len(self.parent) - 1

    def depth(self) -> NDArray[np.int64]:
        """[num_blocks + 1] position of each block in its chain, from 0; entry 0 is -1."""
        depth = np.full(len(self.parent), -1, dtype=np.int64)
        above = self.parent.tolist()
        for block in range(1, len(depth)):
            depth[block] = depth[above[block]] + 1
        return depth


class Chains:
    """Gives ids to the blocks of chains that grow by tokens."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.parent: list[int] = [0]

    def grow(self, blocks: tuple[int, ...], num: int) -> tuple[int, ...]:
        """Ids of ``num`` new blocks behind a chain."""
        last = blocks[-1] if blocks else 0
        first = len(self.parent)
        self.parent += [last, *range(first, first + num - 1)] if num else []
        return tuple(range(first, first + num))


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens read so far: full blocks and how many tokens stand behind them."""

    blocks: tuple[int, ...] = ()
    tail_tokens: int = 0

    def tokens(self, block_tokens: int) -> int:
        """All tokens of the chain."""
        return len(self.blocks) * block_tokens + self.tail_tokens

    def extended(self, num_tokens: int, chains: Chains) -> Chain:
        """The chain with so many new tokens behind it: nobody else's blocks are shared."""
        full, tail = divmod(self.tail_tokens + num_tokens, chains.block_tokens)
        return Chain(self.blocks + chains.grow(self.blocks, full), tail)


@dataclass(slots=True)
class Draft:
    """Requests drawn so far, in any order, over one set of chains."""

    chains: Chains
    requests: list[PrefixRequest] = field(default_factory=list)

    def add(
        self, time_s: float, category: int, session: int, prompt: Chain, output_tokens: int
    ) -> Chain:
        """Note a request; the chain with its output is returned."""
        after = prompt.extended(output_tokens, self.chains)
        self.requests.append(
            PrefixRequest(
                time_s,
                category,
                session,
                prompt.blocks,
                after.blocks[len(prompt.blocks) :],
                prompt.tokens(self.chains.block_tokens),
            )
        )
        return after

    def workload(self) -> PrefixWorkload:
        """The requests in order of time, blocks numbered in order of first use."""
        ordered = sorted(self.requests, key=lambda request: request.time_s)
        return numbered(ordered, self.chains.parent, self.chains.block_tokens)


def numbered(
    ordered: Iterable[PrefixRequest], parent: list[int], block_tokens: int
) -> PrefixWorkload:
    """The workload with its blocks numbered from 1 in order of first use."""
    new_by_old: dict[int, int] = {0: 0}
    above: list[int] = [0]

    def renamed(blocks: tuple[int, ...]) -> tuple[int, ...]:
        for block in blocks:
            if block not in new_by_old:
                new_by_old[block] = len(above)
                above.append(new_by_old[parent[block]])
        return tuple(new_by_old[block] for block in blocks)

    requests = [
        PrefixRequest(
            r.time_s,
            r.category,
            r.session,
            renamed(r.prompt),
            renamed(r.generated),
            r.prompt_tokens,
        )
        for r in ordered
    ]
    return PrefixWorkload(tuple(requests), np.array(above, dtype=np.int64), block_tokens)
