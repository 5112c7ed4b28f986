"""Keys of a sequence's blocks while it grows: each call costs what is new, not what is there."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prefix.keys import Namespace, block_keys, root_key, tenant_tag


class PrefixKeys:
    """The chain of keys of one sequence.

    Attributes:
        tenant: Tag of the salt, for quotas.
        block_tokens: Tokens of a block.
    """

    def __init__(self, namespace: Namespace, salt: str = "") -> None:
        """Begin a chain.

        Args:
            namespace: Of the model's blocks.
            salt: Of the tenant; chains of different salts share no key.

        Raises:
            ValueError: If the salt is not text that UTF-8 can encode.
        """
        self._last = root_key(namespace, salt)
        self.tenant = tenant_tag(salt)
        self.block_tokens = namespace.block
        self._keys: list[bytes] = []

    def update(self, tokens: Sequence[int]) -> int:
        """Take in the tokens of the sequence, which has only grown since the last call.

        Tokens that had a key are not looked at again.

        Args:
            tokens: All tokens of the sequence, ids in 0..2^32-1.

        Returns:
            Full blocks, hence keys.

        Raises:
            ValueError: If there are fewer tokens than have keys, or an id is out of range.
        """
        keyed = len(self._keys) * self.block_tokens
        if len(tokens) < keyed:
            raise ValueError(
                f"a sequence only grows: {keyed} tokens have keys, found {len(tokens)}"
            )
        if len(tokens) - keyed >= self.block_tokens:
            # A key is a hash over the one before it, so the last key is the root of what follows.
            self._keys += block_keys(self._last, tokens[keyed:], self.block_tokens)
            self._last = self._keys[-1]
        return len(self._keys)

    def leading(self, blocks: int) -> tuple[bytes, ...]:
        """Keys of the first ``blocks`` blocks, root first.

        Raises:
            IndexError: If there are fewer.
        """
        if not 0 <= blocks <= len(self._keys):
            raise IndexError(f"the sequence has {len(self._keys)} full blocks, not {blocks}")
        return tuple(self._keys[:blocks])

    def __len__(self) -> int:
        return len(self._keys)
