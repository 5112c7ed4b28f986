"""What the router knows of prefixes: which blocks it has given each instance before.

The instances' stores are not asked, since the answer would be needed before every request; the
index is right as long as an instance keeps what it was given, and is as large as its store. A wrong
entry costs a computation, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from policies.prefix.keys import Namespace
from policies.prefix.request_routing import ServerState
from runtime.engine.frames import EngineInfo
from runtime.engine.prefix_keys import PrefixKeys

MOST_BLOCKS: Final = 1 << 16
"""Of one instance's index where its store does not set a smaller bound: some 15 MB."""


class InstancePrefixes:
    """Blocks by instance, those not touched for longest go first.

    Args:
        info: Of the model.
        count: Instances.
        most_blocks: Of each, >= 1.
        is_shared: All instances load from one store, so what one saved is there for all.
        is_near: The shared store's memory is on the instances' own machine.
    """

    def __init__(
        self,
        info: EngineInfo,
        count: int,
        *,
        most_blocks: int = MOST_BLOCKS,
        is_shared: bool = False,
        is_near: bool = True,
    ) -> None:
        self._namespace = Namespace(
            model=info.model,
            revision="",
            dtype=info.dtype,
            layout="router",
            layers="",
            kv_heads="",
            block=info.block_tokens,
        )
        self._blocks: list[dict[bytes, None]] = [{} for _ in range(count)]
        self._most_blocks = max(1, most_blocks)
        self._is_shared, self._is_near = is_shared, is_near

    def keys_of(self, tokens: Sequence[int], salt: str) -> PrefixKeys:
        """The chain of a sequence, with its full blocks.

        Raises:
            ValueError: If a token id or the salt is none.
        """
        keys = PrefixKeys(self._namespace, salt)
        keys.update(tokens)
        return keys

    def leading(self, instance: int, keys: Sequence[bytes]) -> int:
        """Leading blocks that the instance has been given."""
        blocks = self._blocks[instance]
        for place, key in enumerate(keys):
            if key not in blocks:
                return place
        return len(keys)

    def states(self, keys: PrefixKeys, prompt_tokens: int) -> list[ServerState]:
        """[instances] what is there of a prompt; its last token is computed anyway."""
        usable = min(len(keys), (prompt_tokens - 1) // keys.block_tokens)
        chain = keys.leading(usable)
        own = [self.leading(instance, chain) for instance in range(len(self._blocks))]
        if not self._is_shared:
            return [ServerState(0, blocks, blocks) for blocks in own]
        pooled = max(own)
        return [ServerState(0, pooled if self._is_near else blocks, pooled) for blocks in own]

    def given(self, instance: int, keys: Iterable[bytes]) -> None:
        """The instance has these blocks now, or will have them soon; root first."""
        blocks = self._blocks[instance]
        for key in reversed(tuple(keys)):  # the root is touched last, so that it stays longest
            blocks.pop(key, None)
            blocks[key] = None
        while len(blocks) > self._most_blocks:
            del blocks[next(iter(blocks))]

    def forget(self, instance: int) -> None:
        """Its store is empty."""
        self._blocks[instance].clear()

    def num_blocks(self, instance: int) -> int:
        """In the instance's index."""
        return len(self._blocks[instance])
