"""The text of a replay: tokens that depend on nothing but seed, block and request.

Equal block ids of a trace become equal tokens, on every machine and in every run, so a prefix store
finds what it found at the source.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.streams import stream
from runtime.replay_requests import NOBODY, ReplayError, ReplayRequests

KEPT_BLOCKS: Final = 20_000
"""Blocks whose tokens are kept; those asked for longest ago are drawn again when needed."""


class ReplayPrompts:
    """Prompts by request."""

    def __init__(
        self, requests: ReplayRequests, *, seed: int, vocabulary: int, never: Iterable[int] = ()
    ) -> None:
        """Fix the tokens that prompts are drawn from.

        Args:
            requests: What is asked.
            seed: Of all texts.
            vocabulary: Token ids are below it.
            never: Tokens that no prompt holds, such as those that end an answer.

        Raises:
            ReplayError: If no token is left.
        """
        left_out = np.array(sorted({t for t in never if 0 <= t < vocabulary}), dtype=np.int64)
        self._tokens = np.setdiff1d(np.arange(vocabulary), left_out)
        if not len(self._tokens):
            raise ReplayError(f"--vocabulary: must leave a token for prompts, found {vocabulary}")
        self._requests, self._seed = requests, seed
        self._kept: OrderedDict[str, NDArray[np.int64]] = OrderedDict()

    def of(self, request: int) -> tuple[int, ...]:
        """Tokens of a request's prompt."""
        requests = self._requests
        wanted = int(requests.prompt_tokens[request])
        offsets, ids = requests.block_offsets, requests.block_ids
        if offsets is None or ids is None:
            name = int(requests.session[request])
            text = f"session {name}" if name != NOBODY else f"request {request}"
            return tuple(self._draw(text, wanted).tolist())
        size = requests.block_tokens
        named = ids[int(offsets[request]) : int(offsets[request + 1])][: -(-wanted // size)]
        parts = [self._block(int(block), size) for block in named.tolist()]
        missing = wanted - size * len(parts)
        if missing > 0:  # tokens behind the last named block are this request's own
            parts.append(self._draw(f"request {request}", missing))
        return tuple(np.concatenate(parts)[:wanted].tolist())

    def _block(self, block: int, size: int) -> NDArray[np.int64]:
        name = f"block {block}"
        found = self._kept.pop(name, None)
        if found is None:
            found = self._draw(name, size)
        self._kept[name] = found
        if len(self._kept) > KEPT_BLOCKS:
            self._kept.popitem(last=False)
        return found

    def _draw(self, name: str, count: int) -> NDArray[np.int64]:
        """Longer texts of a name begin with its shorter ones."""
        drawn = stream(self._seed, f"replay prompt {name}").random(count)
        tokens: NDArray[np.int64] = self._tokens[(drawn * len(self._tokens)).astype(np.int64)]
        return tokens
